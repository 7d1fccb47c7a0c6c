"""Losses as sums of nats, divided once by what a step supervises: tokens, or rows for a classifier.

That of a language model's head can be made in chunks of positions, so that all logits never exist at once. The logits
of 16,384 positions over a vocabulary of 151,936 tokens take 5 GB in 16 bits and 10 GB in float32, several times over in
the backward pass: more than everything else of a step. Here each chunk's logits are made, turned into its loss and,
while they are there, into the gradients of the hidden states and of the head; then they are forgotten.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from lm_tuning.text.store.table import IGNORE_INDEX

NUM_LIKELIEST = 5
"""Tokens among which a target counts as found, beside the likeliest one alone."""

CHUNK_BYTES = {"cpu": 48 * 2**20, "cuda": 640 * 2**20}
"""Most that a chunk's logits may take, in the type of the products."""

# Matrix products are fastest at multiples of their tiles.
_ROUNDING = 128
# A GPU computes as many tiles at a time as it has processors, some 130 of 128 by 256. What a chunk's gradient makes of
# 2,048 positions and features fills them; with 2,176 a few tiles are left over, which take as long as all the others.
_LARGE_ROUNDING = 2048


@dataclass(frozen=True)
class LossShape:
    """What is made of the negative log-likelihood while training; held-out losses are always plain.

    Attributes:
        label_smoothing: share of each target's probability that is spread over all classes.
        class_weights: weight of each class, mean 1 over the training rows, so that the loss of an uninformed model
            stays where it is; ``None`` for equal ones.

    Source:
        Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2016 (label smoothing).
    """

    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None

    @property
    def fits_chunks(self) -> bool:
        """Whether a head's loss in chunks computes it: nothing but label smoothing differs from the plain loss."""
        # By what is allowed, not by what is not: a new field goes through all logits until the chunks know it too.
        return self == type(self)(label_smoothing=self.label_smoothing)

    def sum_nats(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum the loss of targets.

        Args:
            logits: ``(*targets.shape, classes)``, any float type; computed with in float32.
            targets: class of each, ``IGNORE_INDEX`` for none.

        Returns:
            A scalar in nats, float32.
        """
        # (classes,), on the logits' device
        weights = None if self.class_weights is None else _tensor_of(self.class_weights, logits.device)
        # Summed, not averaged: cross_entropy would divide by this micro-batch's weights, and the step divides once.
        return cross_entropy(
            logits.flatten(0, -2).float(),
            targets.flatten(),
            weight=weights,
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )


# Copied to the device once: at each step the copy would wait for the device, and could not be recorded.
@functools.lru_cache(maxsize=8)
def _tensor_of(weights: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Return class weights as a tensor, ``(classes,)``, float32; nobody may write into it."""
    with torch.inference_mode(False):
        return torch.tensor(weights, dtype=torch.float32, device=device)


PLAIN = LossShape()


def balance_classes(counts: Any) -> tuple[float, ...]:
    """Weigh classes by how rare they are.

    Args:
        counts: training rows of each class, ``(classes,)``.

    Returns:
        Rows over classes with rows over the class's rows, so their mean over the rows is 1; 0 for a class without rows.
    """
    # Classes without rows must not pull the mean of the others down.
    total, num_used = sum(counts), sum(1 for count in counts if count)
    return tuple(total / (num_used * count) if count else 0.0 for count in counts)


def chunk_positions(vocabulary: int, *, device: str, bytes_per_logit: int, num_chunk_sizes: int = 1) -> int:
    """Return how many positions' logits are made at once.

    Args:
        vocabulary: logits of a position.
        device: ``cpu`` or ``cuda``.
        bytes_per_logit: of the type that the product is made in.
        num_chunk_sizes: how many times as much as usual a chunk may take.
    """
    # At least one multiple, however large a row of logits is: a chunk of no positions is none.
    fitting = num_chunk_sizes * CHUNK_BYTES.get(device, CHUNK_BYTES["cpu"]) // (vocabulary * bytes_per_logit)
    rounding = _ROUNDING if fitting < _LARGE_ROUNDING else _LARGE_ROUNDING
    return int(max(fitting - fitting % rounding, _ROUNDING))


def count_hits(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Count the targets that are the likeliest token, and those that are among the five likeliest.

    Args:
        logits: ``(positions, vocabulary)``.
        targets: token id of each position, ``(positions,)``, ``IGNORE_INDEX`` for none, which is never counted.

    Returns:
        Both counts, ``(2,)``, integers on the device.
    """
    # (positions, 5), best first; a tiny vocabulary has fewer tokens than five
    likeliest = logits.topk(min(NUM_LIKELIEST, logits.shape[-1]), dim=-1).indices
    is_hit = likeliest == targets[:, None]  # (positions, 5)
    return torch.stack([is_hit[:, 0].sum(), is_hit.sum()])


def judge_targets(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return of each target how surprising it was, and whether it was the likeliest.

    Args:
        logits: ``(positions, classes)``, any float type; computed with in float32.
        targets: class of each position, ``(positions,)``, ``IGNORE_INDEX`` for none, which gives 0 and 0.

    Returns:
        Nats, and 1 or 0, ``(positions, 2)``, float32.
    """
    nats = cross_entropy(logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="none")
    return torch.stack([nats, (logits.argmax(dim=-1) == targets).float()], dim=1)


def plain_kernel(
    logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn logits into their loss and its gradient, with PyTorch's functions in float32.

    Args:
        logits: ``(positions, vocabulary)``; may be overwritten.
        targets: token id of each position, ``(positions,)``, ``IGNORE_INDEX`` for none.
        label_smoothing: share of each target's probability that is spread over the vocabulary.

    Returns:
        The summed loss, a float32 scalar, and the gradient of the logits in their type.

    Source:
        The gradient of the cross-entropy is softmax(logits) minus the (smoothed) targets.
    """
    wide = logits.float()  # (positions, vocabulary)
    spread = torch.logsumexp(wide, dim=-1)  # (positions,)
    nats, token_ids = _nats_of_each(wide, spread, targets, label_smoothing)
    # (positions, vocabulary): the softmax, without a second pass to find the maximum. From here on in place: each copy
    # would be as large as all logits of the chunk.
    gradient = torch.exp(wide - spread[:, None])
    if label_smoothing:
        gradient -= label_smoothing / logits.shape[-1]
    gradient.scatter_add_(1, token_ids, torch.full_like(token_ids, -(1 - label_smoothing), dtype=torch.float32))
    kept = targets != IGNORE_INDEX  # (positions,)
    gradient *= kept[:, None]
    return (nats * kept).sum(), gradient.to(logits.dtype)


def _nats_of_each(
    wide: torch.Tensor, spread: torch.Tensor, targets: torch.Tensor, label_smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each position, ignored ones too, and the token ids looked up for it.

    Shapes: ``(positions,)`` and ``(positions, 1)``.
    """
    # IGNORE_INDEX is no index: those positions look up token 0, and their loss is thrown away afterwards.
    token_ids = targets.clamp(min=0)[:, None]  # (positions, 1)
    nats = spread - wide.gather(1, token_ids).squeeze(1)
    if label_smoothing:
        nats = (1 - label_smoothing) * nats + label_smoothing * (spread - wide.mean(dim=-1))
    return nats, token_ids


def _pointwise_kernel(
    logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what :func:`plain_kernel` does without scattered writes, so that a compiler makes two passes of it."""
    vocabulary = logits.shape[-1]
    wide = logits.float()  # (positions, vocabulary)
    spread = torch.logsumexp(wide, dim=-1)  # (positions,)
    nats, _ = _nats_of_each(wide, spread, targets, label_smoothing)
    # Comparing each column with the target fuses into the pass over the logits; a scatter would be a kernel of its own.
    is_target = torch.arange(vocabulary, device=logits.device)[None] == targets[:, None]  # (positions, vocabulary)
    aim = torch.where(is_target, 1 - label_smoothing, 0.0) + label_smoothing / vocabulary
    kept = targets != IGNORE_INDEX  # (positions,)
    return (nats * kept).sum(), ((torch.exp(wide - spread[:, None]) - aim) * kept[:, None]).to(logits.dtype)


@functools.cache
def _compiled(backend: str) -> Kernel:
    kernel: Kernel = torch.compile(_pointwise_kernel, backend=backend)
    return kernel


def compiled_kernel(
    logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float, *, backend: str = "inductor"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what :func:`plain_kernel` does, compiled for a GPU: once for all numbers of positions.

    Args:
        logits: see :func:`plain_kernel`.
        targets: see :func:`plain_kernel`.
        label_smoothing: see :func:`plain_kernel`.
        backend: of ``torch.compile``.

    Returns:
        See :func:`plain_kernel`.
    """
    # A micro-batch has as many positions as its rows teach: hardly ever the same number twice.
    torch._dynamo.maybe_mark_dynamic(logits, 0)
    torch._dynamo.maybe_mark_dynamic(targets, 0)
    return _compiled(backend)(logits, targets, label_smoothing)


Kernel = Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]

Implementation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, float], torch.Tensor]
"""Sum the loss, in nats, of hidden states under a head: its weight and bias, the targets and label smoothing."""


@dataclass(frozen=True)
class _Chunks:
    """How chunks are made, see :func:`linear_sum_nats`."""

    dtype: torch.dtype
    kernel: Kernel
    is_in_place: bool


def linear_sum_nats(dtype: torch.dtype, kernel: Kernel = plain_kernel, *, is_in_place: bool = False) -> Implementation:
    """Return what sums the loss of a linear head over all targets, for training.

    Its result is a scalar in nats, float32: sums are made in that type, whatever that of the products.

    Args:
        dtype: type of the matrix products.
        kernel: turns a chunk's logits into its loss and their gradient.
        is_in_place: whether the kernel writes the gradient over the logits, as on a GPU: chunks are twice as large in
            the memory of others then, and their weight gradients are added up inside of the product.
    """
    # A partial is no frame of its own between the head and the kernel.
    return functools.partial(_LinearSumNats.apply, _Chunks(dtype, kernel, is_in_place))


class _LinearSumNats(torch.autograd.Function):
    """Make loss and gradients in the forward pass; the backward pass only scales them."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd hands them over by position
        ctx: Any,
        chunks: _Chunks,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        label_smoothing: float,
    ) -> torch.Tensor:
        # (positions, features), (vocabulary, features), (vocabulary,), (positions,)
        _, needs_hidden, needs_weight, needs_bias, _, _ = ctx.needs_input_grad
        dtype = chunks.dtype
        # Autocast would choose the types of the products once more, and keep casts of the weight.
        with torch.autocast(hidden.device.type, enabled=False):
            matrix = weight.to(dtype)
            size = chunk_positions(
                weight.shape[0],
                device=hidden.device.type,
                bytes_per_logit=dtype.itemsize,
                num_chunk_sizes=1 + chunks.is_in_place,
            )
            nats = torch.zeros((), dtype=torch.float32, device=hidden.device)
            of_hidden = torch.empty_like(hidden) if needs_hidden else None
            # Chunks are added up in float32: thousands of small numbers would be lost in 16 bits.
            of_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
            of_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs_bias else None
            for start in range(0, len(hidden), size):
                rows = hidden[start : start + size].to(dtype)  # (chunk, features)
                logits = rows @ matrix.t()  # (chunk, vocabulary)
                if bias is not None:
                    logits += bias.to(dtype)
                chunk_nats, gradient = chunks.kernel(logits, targets[start : start + size], label_smoothing)
                nats += chunk_nats
                if of_hidden is not None:
                    of_hidden[start : start + size] = gradient @ matrix
                if of_weight is not None:
                    _add_product(of_weight, gradient.t(), rows, in_product=chunks.is_in_place)
                if of_bias is not None:
                    # (chunk, vocabulary) to (vocabulary,)
                    of_bias += gradient.sum(dim=0, dtype=torch.float32)
                # Else two chunks' logits would be there at once, while the next ones are made.
                del logits, gradient
        # The gradients are the size of hidden states and head; saving the logits instead would defeat all this.
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        return nats

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        (scale,) = gradients  # a scalar: what the sum is multiplied by, such as one over the step's tokens
        of_hidden, of_weight, of_bias = ctx.saved_tensors
        return (
            None,
            None if of_hidden is None else of_hidden * scale.to(of_hidden.dtype),
            # In place: nobody needs the unscaled sum, and it is as large as the head.
            None if of_weight is None else of_weight.mul_(scale).to(ctx.weight_dtype),
            None if of_bias is None else of_bias.mul_(scale).to(ctx.bias_dtype),
            None,
            None,
        )


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, in_product: bool) -> None:
    """Add ``left @ right`` to a float32 total."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif in_product:
        # A GPU adds 16-bit products up in float32 anyway: without rounding, and without writing the product itself.
        torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)
    else:
        # Elsewhere addmm wants one type for all three; the product is rounded to 16 bits once, the sum never.
        total += left @ right


def sum_nats_in_chunks(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    label_smoothing: float = 0.0,
    vocabulary: int,
    bytes_per_logit: int = 4,
    hits: torch.Tensor | None = None,
    each: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum the loss of any head over all targets; each chunk's logits are made again in the backward pass, if any.

    Args:
        head: turns hidden states into logits, such as a head with an adapter on it.
        hidden: ``(positions, features)``.
        targets: ``(positions,)``.
        label_smoothing: see :func:`plain_kernel`.
        vocabulary: logits of a position.
        bytes_per_logit: of the type that the head makes.
        hits: receives what :func:`count_hits` counts; only where no gradient is wanted.
        each: receives what :func:`judge_targets` says, ``(positions, 2)``; likewise, and without label smoothing.

    Returns:
        A scalar in nats, float32.
    """
    from torch.utils.checkpoint import checkpoint

    # (chunk, features), (chunk,) and perhaps (chunk, 2) to a scalar
    def chunk(rows: torch.Tensor, wanted: torch.Tensor, judged: torch.Tensor | None) -> torch.Tensor:
        logits = head(rows)  # (chunk, vocabulary)
        if hits is not None:
            hits.add_(count_hits(logits, wanted))
        if judged is not None:
            return judged.copy_(judge_targets(logits, wanted))[:, 0].sum()
        return cross_entropy(
            logits.float(), wanted, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=label_smoothing
        )

    # Without gradients there is nothing to make again, and checkpointing would wait for the device's random state.
    run: Any = functools.partial(checkpoint, chunk, use_reentrant=False) if torch.is_grad_enabled() else chunk
    assert (hits is None and each is None) or run is chunk, "the backward pass would count again"
    assert each is None or not label_smoothing, "the loss of a target is the plain one"
    size = chunk_positions(vocabulary, device=hidden.device.type, bytes_per_logit=bytes_per_logit)
    nats = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for start in range(0, len(hidden), size):
        part = slice(start, start + size)
        nats = nats + run(hidden[part], targets[part], None if each is None else each[part])
    return nats
