"""The loss of a language model's head, in chunks of positions, so that all logits never exist at once.

The logits of 16,384 positions over a vocabulary of 151,936 tokens take 5 GB in 16 bits and 10 GB in float32, several
times over in the backward pass: more than everything else of a step. Here each chunk's logits are made, turned into its
loss and, while they are there, into the gradients of the hidden states and of the head; then they are forgotten.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy, linear

from lm_tuning.text.store.table import IGNORE_INDEX

NUM_LIKELIEST = 5
"""Tokens among which a target counts as found, beside the likeliest one alone."""

CHUNK_BYTES = {"cpu": 48 * 2**20, "cuda": 640 * 2**20}
"""Most that a chunk's logits may take, in the type of the products."""

_ROUNDING = 128


def chunk_positions(vocabulary: int, *, device: str, bytes_per_logit: int) -> int:
    """Return how many positions' logits are made at once.

    Args:
        vocabulary: logits of a position.
        device: ``cpu`` or ``cuda``.
        bytes_per_logit: of the type that the product is made in.
    """
    fitting = CHUNK_BYTES.get(device, CHUNK_BYTES["cpu"]) // (vocabulary * bytes_per_logit)
    return int(max(fitting - fitting % _ROUNDING, _ROUNDING))


def linear_sum_nats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    label_smoothing: float = 0.0,
    compute_dtype: torch.dtype | None = None,
    kernel: Kernel | None = None,
    hits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum the loss of a linear head over all targets.

    Args:
        hidden: ``(positions, features)``.
        weight: of the head, ``(vocabulary, features)``.
        bias: of the head, ``(vocabulary,)``, or none.
        targets: token id of each position, ``(positions,)``, ``IGNORE_INDEX`` for none.
        label_smoothing: share of each target's probability that is spread over the vocabulary.
        compute_dtype: type of the matrix products; ``None`` is the weight's. Sums are float32 in any case.
        kernel: turns a chunk's logits into its loss and their gradient; ``None`` is :func:`plain_kernel`.
        hits: receives what :func:`count_hits` counts; only where no gradient is wanted.

    Returns:
        A scalar in nats, float32.
    """
    dtype = compute_dtype or weight.dtype
    if not torch.is_grad_enabled():
        return _sum_forward(hidden, weight, bias, targets, label_smoothing, dtype, hits)
    assert hits is None, "training counts no hits"
    return _LinearSumNats.apply(hidden, weight, bias, targets, label_smoothing, dtype, kernel or plain_kernel)  # type: ignore[no-any-return, no-untyped-call]


def _sum_forward(  # noqa: PLR0917
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    label_smoothing: float,
    dtype: torch.dtype,
    hits: torch.Tensor | None,
) -> torch.Tensor:
    """Sum the loss where no gradient is wanted."""
    nats = torch.zeros((), dtype=torch.float32, device=hidden.device)
    size = chunk_positions(weight.shape[0], device=hidden.device.type, bytes_per_logit=dtype.itemsize)
    with torch.autocast(hidden.device.type, enabled=False):
        matrix, shift = weight.to(dtype), None if bias is None else bias.to(dtype)
        for start in range(0, len(hidden), size):
            logits, wanted = (
                linear(hidden[start : start + size].to(dtype), matrix, shift),
                targets[start : start + size],
            )
            if hits is not None:
                hits += count_hits(logits, wanted)
            nats += cross_entropy(
                logits.float(),
                wanted,
                ignore_index=IGNORE_INDEX,
                reduction="sum",
                label_smoothing=label_smoothing,
            )
    return nats


def count_hits(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Count the targets that are the likeliest token, and those that are among the five likeliest.

    Args:
        logits: ``(positions, vocabulary)``.
        targets: token id of each position, ``(positions,)``, ``IGNORE_INDEX`` for none, which is never counted.

    Returns:
        Both counts, ``(2,)``, integers on the device.
    """
    likeliest = logits.topk(min(NUM_LIKELIEST, logits.shape[-1]), dim=-1).indices
    is_hit = likeliest == targets[:, None]  # (positions, 5)
    return torch.stack([is_hit[:, 0].sum(), is_hit.sum()])


def plain_kernel(
    logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn logits into their loss and its gradient, with PyTorch's functions in float32.

    Args:
        logits: ``(positions, vocabulary)``; may be overwritten.
        targets: ``(positions,)``.
        label_smoothing: as for :func:`linear_sum_nats`.

    Returns:
        The summed loss, a float32 scalar, and the gradient of the logits in their type.

    Source:
        The gradient of the cross-entropy is softmax(logits) minus the (smoothed) targets.
    """
    kept = targets != IGNORE_INDEX
    positions = targets.clamp(min=0)
    wide = logits.float()
    spread = torch.logsumexp(wide, dim=-1)
    right = wide.gather(1, positions[:, None]).squeeze(1)
    nats = spread - right
    if label_smoothing:
        nats = (1 - label_smoothing) * nats + label_smoothing * (spread - wide.mean(dim=-1))
    gradient = torch.exp(wide - spread[:, None])
    if label_smoothing:
        gradient -= label_smoothing / logits.shape[-1]
    gradient = gradient.scatter_add(
        1, positions[:, None], torch.full_like(positions, -(1 - label_smoothing), dtype=torch.float32)[:, None]
    )
    gradient = gradient * kept[:, None]
    return (nats * kept).sum(), gradient.to(logits.dtype)


def _pointwise_kernel(
    logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what :func:`plain_kernel` does without scattered writes, so that a compiler makes two passes of it."""
    vocabulary = logits.shape[-1]
    kept = targets != IGNORE_INDEX
    wide = logits.float()
    spread = torch.logsumexp(wide, dim=-1)
    right = wide.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    nats = spread - right
    if label_smoothing:
        nats = (1 - label_smoothing) * nats + label_smoothing * (spread - wide.mean(dim=-1))
    is_target = torch.arange(vocabulary, device=logits.device)[None] == targets[:, None]
    aim = torch.where(is_target, 1 - label_smoothing, 0.0) + label_smoothing / vocabulary
    gradient = (torch.exp(wide - spread[:, None]) - aim) * kept[:, None]
    return (nats * kept).sum(), gradient.to(logits.dtype)


@functools.cache
def compiled_kernel(backend: str = "inductor") -> Kernel:
    """Return the kernel compiled, for a GPU: once for all numbers of positions.

    Args:
        backend: of ``torch.compile``.
    """
    compiled: Kernel = torch.compile(_pointwise_kernel, backend=backend)

    def kernel(
        logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # A micro-batch has as many positions as its rows teach: hardly ever the same number twice.
        torch._dynamo.maybe_mark_dynamic(logits, 0)
        torch._dynamo.maybe_mark_dynamic(targets, 0)
        return compiled(logits, targets, label_smoothing)

    return kernel


Kernel = Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]


class _LinearSumNats(torch.autograd.Function):
    """Make loss and gradients in the forward pass; the backward pass only scales them."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd hands them over by position
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        label_smoothing: float,
        dtype: torch.dtype,
        kernel: Kernel,
    ) -> torch.Tensor:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        with torch.autocast(hidden.device.type, enabled=False):
            matrix = weight.to(dtype)
            size = chunk_positions(weight.shape[0], device=hidden.device.type, bytes_per_logit=dtype.itemsize)
            nats = torch.zeros((), dtype=torch.float32, device=hidden.device)
            of_hidden = torch.empty_like(hidden) if needs_hidden else None
            # Chunks are added up in float32: thousands of small numbers would be lost in 16 bits.
            of_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
            of_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs_bias else None
            for start in range(0, len(hidden), size):
                rows = hidden[start : start + size].to(dtype)
                wanted = targets[start : start + size]
                logits = rows @ matrix.t()
                if bias is not None:
                    logits += bias.to(dtype)
                chunk_nats, gradient = kernel(logits, wanted, label_smoothing)
                nats += chunk_nats
                if of_hidden is not None:
                    of_hidden[start : start + size] = gradient @ matrix
                if of_weight is not None:
                    _add_product(of_weight, gradient.t(), rows)
                if of_bias is not None:
                    of_bias += gradient.sum(dim=0, dtype=torch.float32)
                del logits, gradient
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        return nats

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        (scale,) = gradients
        of_hidden, of_weight, of_bias = ctx.saved_tensors
        return (
            None if of_hidden is None else of_hidden * scale.to(of_hidden.dtype),
            None if of_weight is None else of_weight.mul_(scale).to(ctx.weight_dtype),
            None if of_bias is None else of_bias.mul_(scale).to(ctx.bias_dtype),
            None,
            None,
            None,
            None,
        )


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add ``left @ right`` to a float32 total."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total += left @ right


def checkpointed_sum_nats(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    label_smoothing: float = 0.0,
    vocabulary: int,
    hits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum the loss of any head over all targets; each chunk's logits are made again in the backward pass.

    Args:
        head: turns hidden states into logits, such as a head with an adapter on it.
        hidden: ``(positions, features)``.
        targets: ``(positions,)``.
        label_smoothing: as for :func:`linear_sum_nats`.
        vocabulary: logits of a position.
        hits: receives what :func:`count_hits` counts; only where no gradient is wanted.

    Returns:
        A scalar in nats, float32.
    """
    from torch.utils.checkpoint import checkpoint

    def chunk(rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits = head(rows).float()
        if hits is not None:
            hits.add_(count_hits(logits, wanted))
        return cross_entropy(
            logits, wanted, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=label_smoothing
        )

    assert hits is None or not torch.is_grad_enabled(), "the backward pass would count again"
    size = chunk_positions(vocabulary, device=hidden.device.type, bytes_per_logit=4)
    nats = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for start in range(0, len(hidden), size):
        part: Any = checkpoint(chunk, hidden[start : start + size], targets[start : start + size], use_reentrant=False)
        nats = nats + part
    return nats
