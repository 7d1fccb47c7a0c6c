"""Floating-point operations that training asks of a model, to compare its speed with that of the device.

Counted is what the mathematics needs, not what the device happens to run: padding, activations that are computed a
second time to save memory, and logits of positions without loss are no use to anyone. So a share of a device's speed
that rests on these counts is the model FLOPs utilization (MFU), which is at most the hardware's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_tuning.models.structure import HEAD, inner_model
from lm_tuning.training.setup.adapters import count_weights

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from lm_tuning.batching.step_plan import StepPlan
    from lm_tuning.text.store.table import TokenTable

# Operations per weight and position: a multiplication and an addition each.
_FORWARD = 2
_INPUT_GRADIENT = 2
_WEIGHT_GRADIENT = 2
_SAMPLED_STEPS = 200
# Names in BART and its kin, T5, and models with cross-attention added, such as GPT-2.
_CROSS_ATTENTION = ("encoder_attn", "EncDecAttention", "crossattention", "cross_attention")
_OF_SOURCE = ("k_proj", "v_proj", "k", "v", "key", "value")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations of one forward and backward pass, by what they grow with.

    Attributes:
        per_token: of each real token; in an encoder-decoder, of each target token.
        per_source_token: of each source token of an encoder-decoder; 0 without.
        per_prediction: of each position that the output head looks at: a supervised token, or a classifier's row.
        per_pair: of each pair of tokens of which one attends to the other, see :meth:`of_rows`.
        per_source_pair: the same in an encoder.
        per_cross_pair: the same between a target token and a source token.
        predicts_rows: whether the head looks at one position of a row, as a classifier's does.
    """

    per_token: float
    per_prediction: float
    per_pair: float
    per_source_token: float = 0.0
    per_source_pair: float = 0.0
    per_cross_pair: float = 0.0
    predicts_rows: bool = False

    def of_rows(self, lengths: ArrayLike, num_supervised: ArrayLike) -> float:
        """Count the operations of training on rows once.

        Attention is counted from the lengths: in a causal stack, token i of a row attends to i tokens, which makes
        n (n + 1) / 2 pairs of a row of n tokens, about half of all. An encoder looks both ways, and makes n * n. A
        layer that looks back only so far is counted as if it saw the whole row.

        Args:
            lengths: tokens of each row, ``(rows,)``; source and target together.
            num_supervised: supervised tokens of each row, ``(rows,)``; those of an encoder-decoder are its target.
        """
        # Squares of lengths of millions of rows pass what 32 bits hold.
        lengths = np.asarray(lengths, dtype=np.float64)  # (rows,)
        supervised = np.asarray(num_supervised, dtype=np.float64)
        predictions = float(len(lengths)) if self.predicts_rows else supervised.sum()
        sources = lengths - supervised if self.per_source_token else np.zeros_like(lengths)
        read = lengths - sources  # by the decoder, (rows,)
        return float(
            self.per_token * read.sum()
            + self.per_source_token * sources.sum()
            + self.per_prediction * predictions
            + self.per_pair * (read * (read + 1) / 2).sum()
            + self.per_source_pair * (sources**2).sum()
            + self.per_cross_pair * (read * sources).sum()
        )


def count_flops(model: Any, *, task: str) -> ModelFlops | None:
    """Count the operations that training a model takes, as it stands: with its adapters and frozen parts.

    A linear layer of P weights takes 2 P operations per position forward, 2 P for the gradient of what goes in, and 2 P
    for the gradient of its weights: 6 P where it is trained, 4 P where it is frozen but something before it is trained,
    as under adapters, and 2 P before everything that is trained. Quantized weights count as the numbers that they stand
    for. Embeddings are looked up, not multiplied; norms, activations and adapter sums are left out, as is customary.

    Attention multiplies queries by keys, and its weights by values: 4 operations for each pair of tokens, layer and
    channel of the heads forward, and twice that backward.

    Args:
        model: as it will be trained, on any device.
        task: ``causal_lm``, ``sequence_classification`` or ``seq2seq_lm``.

    Returns:
        ``None`` for a model with experts, of which a token passes only some.

    Source:
        Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B, whose 6 N + 12 L H Q T is
        this for full training, but for its attention, which it counts as if every token saw all others.
    """
    inner = inner_model(model)
    config = inner.config.get_text_config()
    if any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS):
        return None
    head = getattr(inner, HEAD) if task == "sequence_classification" else inner.get_output_embeddings()
    decoder = source = prediction = 0.0
    supervised = {"encoder": 0.0, "decoder": 0.0}
    sizes = {"encoder": 0, "decoder": 0}
    for name, module, size, flops in _linear_layers(model):
        # The head may be tied to the embedding: looked up for every token, multiplied only where there is a prediction.
        if _belongs_to(module, head):
            prediction += flops
            continue
        in_encoder = task == "seq2seq_lm" and "encoder" in name.split(".")
        stack = "encoder" if in_encoder else "decoder"
        sizes[stack] += size
        # Weights that a gradient passes: attention between layers without one needs no backward pass either.
        supervised[stack] += size if flops > _FORWARD * size else 0
        if in_encoder or _reads_source(name):
            source += flops
        else:
            decoder += flops
    pairs = {
        stack: 4 * width * (1 + 2 * (supervised[stack] / sizes[stack] if sizes[stack] else 0.0))
        for stack, width in _attention_channels(config, task).items()
    }
    return ModelFlops(
        per_token=decoder,
        per_prediction=prediction,
        per_pair=pairs["decoder"],
        per_source_token=source,
        per_source_pair=pairs.get("encoder", 0.0),
        per_cross_pair=pairs["decoder"] if task == "seq2seq_lm" else 0.0,
        predicts_rows=task == "sequence_classification",
    )


def flops_per_token(flops: ModelFlops | None, table: TokenTable, plan: StepPlan, *, num_steps: int) -> float | None:
    """Return the operations a real token, over the rows of a run.

    Args:
        flops: of the model; ``None`` when they cannot be counted.
        table: its training rows.
        plan: which rows form each step.
        num_steps: steps that were made, from the first one on. Of many, some are looked at, evenly spread.

    Returns:
        ``None`` without a step or a count.
    """
    if flops is None or not num_steps:
        return None
    steps = np.unique(np.linspace(0, num_steps - 1, min(num_steps, _SAMPLED_STEPS)).astype(np.int64))
    rows = np.concatenate([plan.rows_of_step(int(step)) for step in steps])
    lengths = table.lengths[rows]
    return flops.of_rows(lengths, table.num_supervised[rows]) / float(lengths.sum())


def _linear_layers(model: Any) -> Iterator[tuple[str, Any, int, float]]:
    """Yield name, module, weights and operations per position of each linear layer, in the order of the model.

    A layer and the adapters on it are one position in that order: the adapters' input is the layer's own.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    # A head that is trained beside adapters has a copy of what it was, which takes no part.
    modules = [(name, module) for name, module in model.named_modules() if "original_module" not in name.split(".")]
    adapted = {name for name, module in modules if hasattr(module, "base_layer")}

    def stack_of(name: str) -> str:
        outer = name
        while outer and outer not in adapted:
            outer = outer.rpartition(".")[0]
        return outer or name

    first = next(
        (
            stack_of(name)
            for name, module in modules
            if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        ),
        None,
    )
    # named_modules() goes in the order of definition, which in transformers is that of the forward pass.
    is_behind_trained = False
    for name, module in modules:
        is_behind_trained = is_behind_trained or (first is not None and stack_of(name) == first)
        # GPT-2 and its kin have Conv1D: a linear layer whose weight lies transposed.
        if isinstance(module, torch.nn.Linear | Conv1D):
            size = count_weights(module.weight)
            backward = _INPUT_GRADIENT * is_behind_trained + _WEIGHT_GRADIENT * module.weight.requires_grad
            yield name, module, size, float((_FORWARD + backward) * size)


def _belongs_to(module: Any, head: Any) -> bool:
    """Return whether a module is the head, or a part of it, such as its trained copy beside an adapter."""
    return head is not None and any(module is part for part in head.modules())


def _reads_source(name: str) -> bool:
    """Return whether a layer of a decoder multiplies what the encoder made: keys and values of cross-attention."""
    parts = name.removesuffix(".base_layer").split(".")
    return any(part in _CROSS_ATTENTION for part in parts) and any(part in _OF_SOURCE for part in parts)


def _attention_channels(config: Any, task: str) -> dict[str, int]:
    """Return layers times heads times channels of a head, by stack."""

    def first_of(*names: str) -> int | None:
        return next((int(value) for name in names if (value := getattr(config, name, None))), None)

    layers = first_of("decoder_layers", "num_decoder_layers") if task == "seq2seq_lm" else None
    layers = layers or first_of("num_hidden_layers", "num_layers") or 0
    width = first_of("hidden_size", "d_model") or 0
    heads = first_of("num_attention_heads", "decoder_attention_heads", "num_heads") or 1
    # Heads need not divide the width: Qwen3 and Gemma name the channels of a head.
    size = first_of("head_dim", "d_kv") or width // heads
    channels = {"decoder": layers * heads * size}
    if task == "seq2seq_lm":
        encoder_heads = first_of("encoder_attention_heads", "num_heads") or heads
        encoder_layers = first_of("encoder_layers", "num_layers", "num_hidden_layers") or 0
        encoder_size = first_of("head_dim", "d_kv") or width // encoder_heads
        channels["encoder"] = encoder_layers * encoder_heads * encoder_size
    return channels
