"""Attention over packed rows: each row attends to itself alone, and nothing is computed between rows.

Where rows lie end to end in one sequence, an ordinary attention needs a mask of all positions by all positions, which
keeps it from its flash kernel. These functions are told where rows begin instead. On a GPU PyTorch's variable-length
flash kernel runs all rows in one launch; elsewhere, and for types that the kernel does not take, each row goes through
PyTorch's causal attention, which computes the same. While answers are generated, the same kernel reads of each row's
cache no more than it holds.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypedDict

import torch
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

from lm_tuning.batching.held_out_loss import evaluating
from lm_tuning.models.structure import inner_model
from lm_tuning.runtime.ranges import ATTENTION, work_range
from lm_tuning.wording import count_of

# How transformers' models ask for it.
NAME = "lm_tuning_packed"
_TRY_NAME = "lm_tuning_packed_try"

_KERNEL_TYPES = (torch.bfloat16, torch.float16)
_MAX_KERNEL_HEAD = 256
# Settings of layers that change the scores; a model that passes one must not be run without it.
_UNREADABLE = ("softcap", "s_aux", "attn_logit_softcapping", "position_bias")
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")
# Parts of names of layer types that have a state, which would run on from row to row.
_LINEAR_LAYERS = ("linear_attention", "mamba", "conv", "recurrent", "chunked_attention")


def register() -> None:
    """Make the attention known to transformers under :data:`NAME`; it has no mask function, so no mask is made."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


def why_not(model: Any, *, device: str, longest_row_tokens: int) -> str | None:
    """Describe why rows cannot be packed for a model without an explicit mask.

    Args:
        model: a causal model, with adapters or not.
        device: ``cpu``, ``cuda`` or ``mps``.
        longest_row_tokens: of all rows that it will see.

    Returns:
        The end of a sentence that begins with "since"; ``None`` where they can.
    """
    inner = inner_model(model)
    kind = type(inner).__name__
    if not getattr(inner, "_supports_attention_backend", False) or not _takes_kwargs(inner):
        return f"{kind} does not hand attention over to a function of ours"
    # Of a model that sees images too, the part that reads text.
    config = inner.config.get_text_config()
    layers = getattr(config, "layer_types", None) or []
    linear = sorted({layer for layer in layers if any(part in layer for part in _LINEAR_LAYERS)})
    if linear:
        return f"{kind} has layers of the kind {', '.join(linear)}, which carry a state from row to row"
    window = getattr(config, "sliding_window", None)
    # Without a list of layer types, older configurations have a switch for all layers.
    slides = "sliding_attention" in layers or (not layers and getattr(config, "use_sliding_window", True))
    if window is not None and slides and longest_row_tokens > window:
        return f"{kind} looks back {count_of(window, 'token')} at most and the longest row has {longest_row_tokens}"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return f"{kind} caps its attention logits (soft-capping), which the kernel for packed rows does not"
    # By name, since each family of models has one of its own.
    dropped = max(getattr(config, name, None) or 0.0 for name in _DROPOUTS)
    if device == "cuda" and dropped:
        return f"{kind} drops {dropped:.0%} of its attention weights, which the kernel for packed rows does not"
    if getattr(config, "alibi", False):
        return f"{kind} adds a bias to its attention scores, which the kernel for packed rows does not"
    # A skeleton without weights computes nothing.
    return None if inner.device.type == "meta" else _why_not_by_trying(inner, device=device)


def _why_not_by_trying(inner: Any, *, device: str) -> str | None:
    """Describe what its attention layers are given when two rows of a token each go through a model.

    Signatures do not tell it: some layers take what is passed on to attention, and keep it to themselves. Rows would
    see each other then, and nothing but the loss would show it.
    """
    from transformers import AttentionInterface

    kind = type(inner).__name__
    reasons: list[str | None] = []

    def look(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **given: Any
    ) -> tuple[torch.Tensor, None]:
        unknown = [name for name in _UNREADABLE if given.get(name) is not None]
        if given.get("cu_seq_lens_q") is None:
            reasons.append(f"{kind} does not tell its attention where rows begin")
        elif unknown:
            reasons.append(f"{kind} has attention with {', '.join(unknown)}, which the kernel for packed rows has not")
        elif device == "cuda" and query.shape[-1] != value.shape[-1]:
            sizes = f"queries of {query.shape[-1]} and values of {value.shape[-1]} numbers"
            reasons.append(f"{kind} has {sizes}, which the kernel for packed rows does not take")
        else:
            reasons.append(None)
        grouped = query.shape[1] != key.shape[1]
        out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return out.transpose(1, 2), None  # (1, tokens, heads, head)

    AttentionInterface.register(_TRY_NAME, look)
    before = inner.config._attn_implementation
    zeros = torch.zeros(1, 2, dtype=torch.int64, device=inner.device)  # (1, tokens)
    bounds = torch.arange(3, dtype=torch.int32, device=inner.device)  # (rows + 1,)
    backbone = getattr(inner, inner.base_model_prefix, inner)
    inner.set_attn_implementation(_TRY_NAME)
    try:
        with torch.no_grad(), evaluating(inner):
            backbone(input_ids=zeros, position_ids=zeros, cu_seq_lens_q=bounds, max_length_q=1, use_cache=False)
    finally:
        inner.set_attn_implementation(before)
    if not reasons:
        return f"{kind} does not hand attention over to a function of ours"
    return next((reason for reason in reasons if reason is not None), None)


def runs_in_kernel(model: Any, *, device: str, dtype: torch.dtype, longest_row_tokens: int) -> bool:
    """Return whether rows can be packed for a model without a mask, all of them in one launch.

    Args:
        model: a causal model, with adapters or not; one whose user asked for another attention keeps it.
        device: ``cpu``, ``cuda`` or ``mps``.
        dtype: of its products.
        longest_row_tokens: of all rows that it will see.
    """
    config = inner_model(model).config
    if not reads_caches(device, dtype, head_size_of(config)) or config._attn_implementation not in ("sdpa", NAME):
        return False
    return why_not(model, device=device, longest_row_tokens=longest_row_tokens) is None


def head_size_of(config: Any) -> int:
    """Return the size of a model's queries, 0 where its config does not say it.

    Args:
        config: of a model.
    """
    text = config.get_text_config()
    stated = getattr(text, "head_dim", None)
    if stated:
        return int(stated)
    width, heads = getattr(text, "hidden_size", 0), getattr(text, "num_attention_heads", 0)
    return int(width // heads) if heads else 0


@contextmanager
def attending_to_packed(model: Any) -> Iterator[None]:
    """Let a model attend within packed rows in the block.

    Args:
        model: one for which :func:`why_not` says nothing; changed in place, and back at the end.
    """
    register()
    inner = inner_model(model)
    before = inner.config._attn_implementation
    inner.set_attn_implementation(NAME)
    try:
        yield
    finally:
        inner.set_attn_implementation(before)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    num_keys: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within rows.

    Args:
        module: the attention layer, asked for nothing but whether it is causal.
        query: ``(1, heads, tokens, head)``.
        key: ``(1, key_heads, tokens, head)``; several query heads may share one.
        value: as ``key``.
        attention_mask: none; transformers makes no mask for a function that it has no mask function of.
        scaling: multiplies the scores; ``None`` is one over the root of the head's size.
        dropout: share of attention weights that are dropped.
        cu_seq_lens_q: where rows begin, and at its end the number of tokens, ``(rows + 1,)``, int32; ``None`` for
            ordinary batches, which may be ``(batch, heads, tokens, head)`` and are padded at their ends.
        max_length_q: tokens of the longest row, or any larger number.
        cu_seq_lens_k: where the caches of rows begin, as ``cu_seq_lens_q``; read along with ``num_keys`` alone.
        num_keys: of a query per row and its cache, ``(rows, heads, 1, head)`` and ``(rows, key_heads, room, head)``,
            how many keys of each row count, ``(rows,)``, int32, at least one; ``None`` for whole rows.
        **others: settings of the layer; those that would change the result are refused.

    Returns:
        ``(batch, tokens, heads, head)``, and no weights.

    Raises:
        ValueError: for a setting that this attention does not know how to follow.
    """
    unknown = [name for name in _UNREADABLE if others.get(name) is not None]
    if unknown or attention_mask is not None:
        raise ValueError(f"attention over packed rows knows no {', '.join(unknown) or 'mask'}")
    with work_range(ATTENTION):
        grouped = query.shape[1] != key.shape[1]  # several query heads share a key head
        if num_keys is not None:
            bounds = (cu_seq_lens_q, cu_seq_lens_k)
            return _attend_to_cache(query, key, value, num_keys, bounds, scaling=scaling, grouped=grouped), None
        if cu_seq_lens_q is None:
            # A causal mask begins at the first key: a single query, as while answers are generated, would see it alone.
            is_causal = query.shape[2] > 1
            out = scaled_dot_product_attention(
                query, key, value, dropout_p=dropout, is_causal=is_causal, scale=scaling, enable_gqa=grouped
            )
            return out.transpose(1, 2), None  # (batch, tokens, heads, head)
        if torch.is_autocast_enabled(query.device.type):
            # What autocast does before PyTorch's own attention: norms of float32 weights leave queries in float32.
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if query.is_cuda and query.dtype in _KERNEL_TYPES and query.shape[-1] <= _MAX_KERNEL_HEAD and not dropout:
            longest = max_length_q
            assert longest is not None
            # The kernel takes (tokens, heads, head): heads come second, and the batch of 1 is left out.
            flat = [part.transpose(1, 2).squeeze(0) for part in (query, key, value)]
            out = _KERNEL(*flat, cu_seq_lens_q, cu_seq_lens_q, longest, longest, scale=scaling, **_KERNEL_OPTIONS)
            return out.unsqueeze(0), None
        rows = [
            scaled_dot_product_attention(
                query[:, :, a:b],  # (1, heads, tokens of the row, head)
                key[:, :, a:b],
                value[:, :, a:b],
                dropout_p=dropout,
                is_causal=True,
                scale=scaling,
                enable_gqa=grouped,
            )
            for a, b in pairwise(cu_seq_lens_q.tolist())  # which waits for a GPU; 16 bits seldom come here
            if b > a
        ]
        return torch.cat(rows, dim=2).transpose(1, 2), None


def _attend_to_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    num_keys: torch.Tensor,
    bounds: tuple[torch.Tensor | None, torch.Tensor | None],
    *,
    scaling: float | None,
    grouped: bool,
) -> torch.Tensor:
    """Return ``(rows, 1, heads, head)`` of one query per row over the first keys of its cache."""
    room = key.shape[2]
    query = query.to(key.dtype)
    if reads_caches(query.device.type, key.dtype, query.shape[-1]):
        # Rows of the cache lie one after another, each with room for ``room`` keys, of which the kernel reads a part.
        flat = [part.transpose(1, 2).flatten(0, 1) for part in (query, key, value)]
        # Both directions are open: a query is its row's last token. Only then do query heads that share keys read them
        # together.
        if _TAKES_NUM_KEYS:
            out = _KERNEL(*flat, *bounds, 1, room, scale=scaling, seqused_k=num_keys, enable_gqa=grouped)
        else:
            # What that function of later versions calls: no dropout, not causal, no mask to debug with.
            flash = torch.ops.aten._flash_attention_forward
            out, *_ = flash(*flat, *bounds, 1, room, 0.0, False, False, scale=scaling, seqused_k=num_keys)
        attended: torch.Tensor = out.unsqueeze(1)
        return attended
    mask = torch.arange(room, device=query.device) < num_keys[:, None]  # (rows, room)
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=mask[:, None, None], scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2)


def reads_caches(device_type: str, dtype: torch.dtype, head_size: int) -> bool:
    """Return whether the kernel can be told how much of each row's cache counts.

    Args:
        device_type: ``cuda`` or another.
        dtype: of the cache.
        head_size: of queries and keys.
    """
    return device_type == "cuda" and dtype in _KERNEL_TYPES and 0 < head_size <= _MAX_KERNEL_HEAD


class _Options(TypedDict, total=False):
    window_size: tuple[int, int]
    is_causal: bool
    enable_gqa: bool


def _read_options(known: Container[str]) -> _Options:
    """Return how this PyTorch is told to look back only, and that query heads share keys; both changed over time."""
    options: _Options = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    return options


# Read once, since a compiled layer cannot read signatures.
_KERNEL: Any = varlen.varlen_attn
_KERNEL_OPTIONS = _read_options(inspect.signature(_KERNEL).parameters)
# PyTorch 2.11 has the kernel, and no public function that hands this over.
_TAKES_NUM_KEYS = "seqused_k" in inspect.signature(_KERNEL).parameters


def _takes_kwargs(model: Any) -> bool:
    """Return whether what is passed to the model reaches its attention layers."""
    # The head passes everything on; what counts is whether the layers below it do.
    backbone = getattr(model, model.base_model_prefix, model)
    parameters = inspect.signature(type(backbone).forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
