"""Run a classifier over tokenized rows, some thousand at a time, and give each row the probability of every class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lm_tuning.batching.held_out_loss import evaluating
from lm_tuning.batching.tasks.registry import task_of
from lm_tuning.evaluation.forward import forward_passes
from lm_tuning.evaluation.settings import EvaluationSettings
from lm_tuning.text.store.table import Int64Array, TokenTable

Float32Array = npt.NDArray[np.float32]

# Micro-batches between two writes: enough to sort rows of one length together, few enough that little work is lost when
# a run is stopped.
_BATCHES_PER_CHUNK = 8


def score_rows(
    model: Any, table: TokenTable, rows: Int64Array, settings: EvaluationSettings, *, pad_id: int, num_classes: int
) -> Iterator[tuple[Int64Array, Float32Array]]:
    """Yield the probabilities of all classes, chunk by chunk, in the order of the rows.

    The forward pass is that of an evaluation. Memory grows with a chunk, never with the rows.

    Args:
        model: a classifier on its device, wrapped or not.
        table: where the rows lie.
        rows: row indices, ``(rows,)``.
        settings: device, dtypes and the size of a micro-batch.
        pad_id: fills the end of shorter padded rows.
        num_classes: classes of the model.

    Yields:
        Row indices, ``(chunk,)``, and their probabilities, ``(chunk, classes)``, 0 to 1.
    """
    task = task_of(model, "sequence_classification", pad_id=pad_id)
    budget = settings.micro_batch_tokens(table, num_classes=num_classes)
    with forward_passes(task, model, table, settings) as batching, evaluating(model):
        for chunk in _chunks(table, rows, _BATCHES_PER_CHUNK * budget):
            # Longest first, so that memory runs out at once or never.
            by_length = chunk[np.argsort(-table.lengths[chunk], kind="stable")]
            parts: list[torch.Tensor] = []
            came: list[int] = []
            for group in task.split(table, by_length, budget_tokens=budget, batching=batching):
                logits = task.logits(model, task.lay_out(table, group, batching=batching).to(settings.device))
                parts.append(torch.softmax(logits.float(), dim=-1))  # (rows, classes)
                came += group
            # One copy to the host for all of the chunk.
            probabilities = torch.cat(parts).cpu().numpy()
            # Chunks are ascending, so the order of the rows is that of their indices.
            yield chunk, probabilities[np.argsort(came, kind="stable")]


def _chunks(table: TokenTable, rows: Sequence[int] | Int64Array, most_tokens: int) -> Iterator[Int64Array]:
    """Cut rows into runs of about so many tokens, of one row at least."""
    indices = np.asarray(rows, dtype=np.int64)
    reached = np.cumsum(table.lengths[indices], dtype=np.int64)
    start = 0
    while start < len(indices):
        before = int(reached[start - 1]) if start else 0
        end = max(int(np.searchsorted(reached, before + most_tokens, side="right")), start + 1)
        yield indices[start:end]
        start = end
