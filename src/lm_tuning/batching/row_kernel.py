"""Turn the logits of a head into their gradient in place, on a GPU: each row is read twice and written once.

Only for where Triton is installed, as it is beside PyTorch for NVIDIA cards: import it nowhere else.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Columns that are read at once. The second pass finds in the cache what the first has read.
_BLOCK = 4096
_NUM_WARPS = 8


def row_kernel(
    logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what :func:`lm_tuning.batching.losses.plain_kernel` does, over the logits themselves.

    Args:
        logits: ``(positions, vocabulary)`` on a GPU; overwritten by their gradient.
        targets: token id of each position, ``(positions,)``, negative for none.
        label_smoothing: share of each target's probability that is spread over the vocabulary.

    Returns:
        The summed loss, a float32 scalar, and the gradient of the logits, in their type and memory.
    """
    assert logits.stride(1) == 1, "a product's result has its columns side by side"
    nats = torch.empty(len(logits), device=logits.device, dtype=torch.float32)  # (positions,)
    if len(logits):
        _write_gradient[(len(logits),)](
            logits,
            targets,
            nats,
            logits.shape[1],
            logits.stride(0),
            label_smoothing,
            block=_BLOCK,
            num_warps=_NUM_WARPS,
        )
    return nats.sum(), logits


@triton.jit  # type: ignore[untyped-decorator]
def _write_gradient(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    logits, targets, nats, vocabulary, row_stride, smoothing, block: tl.constexpr
):
    # 64 bits: 4,096 rows of 151,936 are near what 32 can count.
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    start = logits + row * row_stride
    lanes = tl.arange(0, block)
    # Each lane keeps a maximum and a sum of its own; they are joined once at the end.
    highest = tl.full((block,), -1e30, dtype=tl.float32)
    total = tl.zeros((block,), dtype=tl.float32)
    plain = tl.zeros((block,), dtype=tl.float32)
    for at in range(0, vocabulary, block):
        inside = at + lanes < vocabulary
        x = tl.load(start + at + lanes, mask=inside, other=-float("inf")).to(tl.float32)
        above = tl.maximum(highest, x)
        total = total * tl.exp(highest - above) + tl.exp(x - above)
        plain += tl.where(inside, x, 0.0)
        highest = above
    top = tl.max(highest, 0)
    spread = top + tl.log(tl.sum(total * tl.exp(highest - top), 0))
    own = tl.load(start + tl.maximum(target, 0)).to(tl.float32)
    kept = target >= 0
    loss = (1 - smoothing) * (spread - own) + smoothing * (spread - tl.sum(plain, 0) / vocabulary)
    tl.store(nats + row, tl.where(kept, loss, 0.0))
    # The target's logit has been read by all lanes before one of them writes over it.
    tl.debug_barrier()
    for at in range(0, vocabulary, block):
        columns = at + lanes
        inside = columns < vocabulary
        x = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
        aim = tl.where(columns == target, 1 - smoothing, 0.0) + smoothing / vocabulary
        slope = tl.where(kept, tl.exp(x - spread) - aim, 0.0)
        tl.store(start + columns, slope.to(logits.dtype.element_ty), mask=inside)
