"""Measure the held-out loss: the sum of nats over the sum of supervised tokens, divided once.

A mean of batch means would weigh a token by how its batch was cut; this number depends on the rows alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.training.batches import Batching, cut_rows, lay_out
from lm_tuning.training.losses import keeps_logits, sum_nats

if TYPE_CHECKING:
    from lm_tuning.text.token_table import TokenTable

Int64Array = npt.NDArray[np.int64]

PACKED_CHUNK_ROWS = 2048
LOGIT_BYTES = 4 + 4 + 2
"""Bytes for one logit: in float32, its log-softmax, and the half-precision value that it came from."""
CPU_LOGITS_BYTES = 192 * 2**20
GPU_LOGITS_FRACTION = 1 / 16
MICRO_BATCH_TOKENS_LIMITS = {"cpu": (256, 1024), "gpu": (1024, 32768)}


@dataclass(frozen=True)
class HeldOutLoss:
    """A loss as the two sums it is made of, so that parts can be added without bias.

    Attributes:
        nats: negative log-likelihood of all supervised tokens, in nats.
        num_tokens: supervised tokens.
        num_rows: rows with at least one supervised token.
    """

    nats: float
    num_tokens: int
    num_rows: int

    @property
    def nats_per_token(self) -> float:
        """Mean negative log-likelihood of a supervised token; NaN when there is none."""
        return self.nats / self.num_tokens if self.num_tokens else math.nan

    @property
    def perplexity(self) -> float:
        """Exponential of the nats per token; infinite where a float cannot hold it."""
        try:
            return math.exp(self.nats_per_token)
        except OverflowError:
            return math.inf


def sum_held_out_nats(
    model: Any,
    table: TokenTable,
    rows: Sequence[int] | Int64Array,
    *,
    micro_batch_tokens: int,
    batching: Batching,
    pad_id: int,
    device: torch.device | str,
    on_progress: OnProgress = ignore_progress,
    label: str = "Held-out loss",
) -> HeldOutLoss:
    """Sum the loss of rows without training on them.

    The model comes back in the mode, training or not, in which it was given. Only one micro-batch's logits exist
    at a time, and the device is waited for once, at the end.

    Args:
        model: a causal language model on ``device``, wrapped or not.
        table: where the rows lie.
        rows: row indices; rows without supervised tokens are left out.
        micro_batch_tokens: most slots of a forward pass; it changes speed and memory, never the result.
        batching: ``packed`` or ``padded``, see :func:`lm_tuning.training.batches.cut_rows`.
        pad_id: fills the end of shorter padded rows.
        device: where the model lies.
        on_progress: told the rows done.
        label: what the progress is called.

    Returns:
        The sums over all rows.
    """
    scored = np.asarray(rows, dtype=np.int64)
    scored = scored[table.num_supervised[scored] > 0]
    groups = _cut_all(table, scored, micro_batch_tokens=micro_batch_tokens, batching=batching)
    select_logits = keeps_logits(model)
    # One tensor for all sums: small ones kept between the freed logits would fragment the heap until it holds them all.
    nats = torch.zeros(len(groups), dtype=torch.float32, device=device)
    num_tokens = done = 0
    on_progress(label, 0, len(scored), "rows")
    with evaluating(model):
        for index, group in enumerate(groups):
            batch = lay_out(table, group, batching=batching, pad_id=pad_id)
            nats[index] = sum_nats(model, batch.to(device), select_logits=select_logits)
            num_tokens += batch.num_supervised
            done += batch.num_rows
            on_progress(label, done, len(scored), "rows")
    # One copy to the host for all batches; doubles there, since some devices have none.
    return HeldOutLoss(nats=float(nats.cpu().double().sum()), num_tokens=num_tokens, num_rows=len(scored))


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Switch dropout and gradients off, and afterwards back to what each module had."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def choose_rows(num_rows: int, max_rows: int | None, seed: int) -> Int64Array:
    """Choose rows spread over a split: one from each of equally long stretches.

    Neighbouring rows are often alike (one file, one author), so a spread subset says more than a run of rows.

    Args:
        num_rows: rows of the split.
        max_rows: rows wanted; ``None`` means all.
        seed: decides which row of each stretch is taken.

    Returns:
        Ascending row indices, ``(min(num_rows, max_rows),)``.
    """
    if max_rows is None or max_rows >= num_rows:
        return np.arange(num_rows, dtype=np.int64)
    bounds = np.linspace(0, num_rows, max_rows + 1).astype(np.int64)
    return np.random.default_rng(seed).integers(bounds[:-1], bounds[1:])


def choose_micro_batch_tokens(table: TokenTable, *, vocab_size: int, on_gpu: bool, memory_bytes: int | None) -> int:
    """Choose how many token slots an evaluation batch may have, by what its logits take.

    Logits are by far the largest tensor of a forward pass without gradients, and only supervised positions have
    them, so a table that trains on short answers gets larger batches.

    Args:
        table: the rows to evaluate.
        vocab_size: logits of one position.
        on_gpu: whether the model lies on an accelerator.
        memory_bytes: memory of that accelerator; ``None`` when unknown.

    Returns:
        Token slots of a micro-batch.
    """
    supervised_fraction = float(table.num_supervised.sum()) / max(float(table.lengths.sum()), 1.0)
    room = memory_bytes * GPU_LOGITS_FRACTION if on_gpu and memory_bytes else CPU_LOGITS_BYTES
    smallest, largest = MICRO_BATCH_TOKENS_LIMITS["gpu" if on_gpu else "cpu"]
    tokens = room / (vocab_size * LOGIT_BYTES * max(supervised_fraction, 0.05))
    return int(min(max(tokens, smallest), largest))


def _cut_all(table: TokenTable, rows: Int64Array, *, micro_batch_tokens: int, batching: Batching) -> list[list[int]]:
    """Cut all rows, sorted by length, into micro-batches.

    Packing compares each row with every open micro-batch, so many rows are packed in parts, each with rows of
    every length.
    """
    rows = rows[np.argsort(-table.lengths[rows], kind="stable")]
    lengths = table.lengths.astype(np.int64)
    num_parts = max(1, -(-len(rows) // PACKED_CHUNK_ROWS)) if batching == "packed" else 1
    groups: list[list[int]] = []
    for part in range(num_parts):
        chosen = rows[part::num_parts]
        groups += cut_rows(chosen, lengths[chosen], budget_tokens=micro_batch_tokens, batching=batching)
    return groups
