"""Measure a model on held-out rows: the sum of nats over the count of what is supervised, divided once.

A mean of batch means would weigh a token by how its batch was cut; these numbers depend on the rows alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from lm_tuning.batching.batch import MicroBatch
from lm_tuning.batching.class_predictions import ClassLog, Predictions
from lm_tuning.batching.losses import PLAIN, judge_targets
from lm_tuning.batching.micro_batches import Batching
from lm_tuning.batching.row_sums import RowSummer, RowSums, positions_of
from lm_tuning.batching.tasks.base import TrainingTask
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.text.store.table import Int64Array, TokenTable

IntArray = npt.NDArray[np.integer[Any]]

PACKED_CHUNK_ROWS = 2048
LOGIT_BYTES = 4 + 4 + 2
"""Bytes for one logit: in float32, its log-softmax, and the half-precision value that it came from."""
CPU_LOGITS_BYTES = 192 * 2**20
GPU_LOGITS_FRACTION = 1 / 16
MICRO_BATCH_TOKENS_LIMITS = {"cpu": (256, 1024), "gpu": (1024, 32768)}


@dataclass(frozen=True)
class ClassCounts:
    """What every score of a classifier is made of.

    Attributes:
        rows: evaluated rows of each class, ``(classes,)``.
        predicted: rows that each class was predicted for, ``(classes,)``.
        right: rows of each class that were predicted to be of it, ``(classes,)``.
    """

    rows: Int64Array
    predicted: Int64Array
    right: Int64Array

    @property
    def accuracy(self) -> float:
        """Share of the rows whose class was predicted, 0 to 1; NaN without rows."""
        num_rows = int(self.rows.sum())
        # A micro average over classes is the accuracy, so none is kept beside it.
        return int(self.right.sum()) / num_rows if num_rows else math.nan

    @property
    def macro_f1(self) -> float:
        """Mean F1 of the classes that occur among the rows or the predictions, 0 to 1; NaN without rows.

        Each class weighs the same, however rare it is.
        """
        occurring = self.rows + self.predicted > 0
        return float(self.f1[occurring].mean()) if occurring.any() else math.nan

    @property
    def f1(self) -> npt.NDArray[np.float64]:
        """Harmonic mean of precision and recall of each class, ``(classes,)``; 0 for one that does not occur."""
        # 2PR / (P + R) with P = right / predicted and R = right / rows, without a division by zero for either.
        f1: npt.NDArray[np.float64] = 2 * self.right / np.maximum(self.rows + self.predicted, 1)
        return f1


def count_classes(references: IntArray, predictions: IntArray, *, num_classes: int) -> ClassCounts:
    """Count rows, predictions and agreements by class.

    Args:
        references: class of each row, ``(rows,)``.
        predictions: predicted class of each row, ``(rows,)``.
        num_classes: classes of the label map.
    """
    return ClassCounts(
        rows=np.bincount(references, minlength=num_classes),
        predicted=np.bincount(predictions, minlength=num_classes),
        # A row that was predicted right is counted under its class alone; (rows,) to (classes,).
        right=np.bincount(references[references == predictions], minlength=num_classes),
    )


@dataclass(frozen=True)
class HeldOutLoss:
    """A loss as the two sums it is made of, so that parts can be added without bias.

    Attributes:
        nats: negative log-likelihood of everything supervised, in nats.
        num_supervised: supervised tokens; for a classifier rows.
        num_rows: rows with something supervised.
        unit: what is counted, ``token`` or ``row``.
    """

    nats: float
    num_supervised: int
    num_rows: int
    unit: Literal["token", "row"] = "token"

    @property
    def mean_nats(self) -> float:
        """Mean negative log-likelihood of a supervised token, or of a row; NaN when there is none."""
        return self.nats / self.num_supervised if self.num_supervised else math.nan

    @property
    def perplexity(self) -> float:
        """Exponential of the mean nats; infinite where a float cannot hold it."""
        try:
            return math.exp(self.mean_nats)
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class HeldOut:
    """What a model does on held-out rows.

    Attributes:
        loss: summed nats and what they are divided by.
        metrics: ``accuracy`` and ``macro_f1`` of a classifier; of another task, where hits were counted,
            ``token_accuracy`` and ``top_5_accuracy``: shares of the supervised tokens that were the likeliest ones, and
            among the five likeliest.
        predictions: the classes chosen; ``None`` for other tasks.
        by_row: what each row adds to the loss; ``None`` where it was not asked for.
    """

    loss: HeldOutLoss
    metrics: dict[str, float] = field(default_factory=dict)
    predictions: Predictions | None = None
    by_row: RowSums | None = None

    @property
    def figures(self) -> dict[str, float]:
        """The mean loss under its name, ``nats_per_token`` or ``nats_per_row``, and the metrics."""
        return {f"nats_per_{self.loss.unit}": self.loss.mean_nats, **self.metrics}


def measure_held_out(
    task: TrainingTask,
    model: Any,
    table: TokenTable,
    rows: Sequence[int] | Int64Array,
    *,
    micro_batch_tokens: int,
    device: torch.device | str,
    batching: Batching = "padded",
    counts_hits: bool = False,
    keeps_rows: bool = False,
    on_progress: OnProgress = ignore_progress,
    label: str = "Held-out loss",
) -> HeldOut:
    """Measure rows without training on them, by the plain loss: no label smoothing and no class weights.

    The model comes back in the mode, training or not, in which it was given. Only one micro-batch's logits exist
    at a time; of a classifier the chosen class of each row is kept. The device is waited for once, at the end.

    Args:
        task: how rows become tensors, and which logits carry loss.
        model: a model of that task on ``device``, wrapped or not.
        table: where the rows lie.
        rows: row indices; rows with nothing supervised are left out.
        micro_batch_tokens: most positions of a forward pass; it changes speed and memory, never the result.
        device: where the model lies.
        batching: ``packed`` or ``padded``, see :func:`lm_tuning.batching.micro_batches.split_rows`.
        counts_hits: whether it is counted how often a supervised token was among the likeliest; a classifier counts
            its classes in any case.
        keeps_rows: whether the sums of each row are kept; the loss is their sum then, in float64.
        on_progress: told the rows done.
        label: what the progress is called.

    Returns:
        The sums over all rows, and what was predicted for them.
    """
    # (rows,)
    scored = np.asarray(rows, dtype=np.int64)
    scored = scored[table.num_supervised[scored] > 0]
    groups = _split_all(task, table, scored, micro_batch_tokens=micro_batch_tokens, batching=batching)
    # One tensor for all sums: small ones kept between the freed logits would fragment the heap until it holds them all.
    nats = torch.zeros(len(groups), dtype=torch.float32, device=device)
    chosen = ClassLog(len(scored), device) if task.unit == "row" else None
    hits = torch.zeros(2, dtype=torch.int64, device=device) if counts_hits and chosen is None else None
    by_row = RowSummer(len(scored), device) if keeps_rows else None
    num_supervised = done = 0
    on_progress(label, 0, len(scored), "rows")
    with evaluating(model):
        for index, group in enumerate(groups):
            batch = task.lay_out(table, group, batching=batching).to(device)
            each = torch.empty((batch.targets.numel(), 2), device=device) if by_row is not None else None
            nats[index] = _measure_batch(task, model, batch, chosen, hits, each)
            if by_row is not None and each is not None:
                by_row.add(done, batch, table.num_supervised[group], each)
            num_supervised += batch.num_supervised
            done += batch.num_rows
            on_progress(label, done, len(scored), "rows")
    positions = positions_of(scored, groups)
    row_sums = None if by_row is None else by_row.finish(scored, positions, table.num_supervised[scored])
    # One copy to the host for all batches; doubles there, since some devices have none.
    total = float(nats.cpu().double().sum() if row_sums is None else row_sums.nats.sum())
    loss = HeldOutLoss(nats=total, num_supervised=num_supervised, num_rows=len(scored), unit=task.unit)
    if hits is not None and num_supervised:
        # The only wait for the device: .tolist() copies.
        likeliest, among_five = (count / num_supervised for count in hits.tolist())
        return HeldOut(loss, {"token_accuracy": likeliest, "top_5_accuracy": among_five}, by_row=row_sums)
    if chosen is None:
        return HeldOut(loss, by_row=row_sums)
    predictions = chosen.in_order(scored, [row for group in groups for row in group])
    # (scored rows,), in the order asked for, as are the predictions
    references = table.labels[scored]
    # A class may occur among the predictions alone, or among the references alone.
    num_classes = 1 + max(int(references.max(initial=0)), int(predictions.classes.max(initial=0)))
    counts = count_classes(references, predictions.classes, num_classes=num_classes)
    return HeldOut(loss, {"accuracy": counts.accuracy, "macro_f1": counts.macro_f1}, predictions, row_sums)


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Switch dropout and gradients off, and afterwards back to what each module had.

    `eval` goes down a tree of thousands of modules by recursion, those that train nothing included: for one row beside
    a small model on a fast card that takes nearly as long as the forward pass.
    """
    training = [module for module in model.modules() if module.training]
    _set_training(training, False)
    try:
        with torch.no_grad():
            yield
    finally:
        _set_training(training, True)


def _set_training(modules: list[torch.nn.Module], value: bool) -> None:
    for module in modules:
        # A module's own `__setattr__` looks first whether the value is a parameter, a buffer or a module. For the 2,500
        # modules of 30 layers with adapters that took 20 ms, two thirds of a forward pass of one row beside it.
        if "training" in module.__dict__:
            module.__dict__["training"] = value
        else:
            module.training = value  # a module that keeps it elsewhere, as compiled and scripted ones do


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
    # (max_rows + 1,): stretches differ by a row at most
    bounds = np.linspace(0, num_rows, max_rows + 1).astype(np.int64)
    return np.random.default_rng(seed).integers(bounds[:-1], bounds[1:])


def choose_micro_batch_tokens(table: TokenTable, *, num_classes: int, on_gpu: bool, memory_bytes: int | None) -> int:
    """Choose how many positions an evaluation batch may have, by what its logits take.

    Logits are by far the largest tensor of a forward pass without gradients, and only supervised positions have
    them, so a table that trains on short answers gets larger batches.

    Args:
        table: the rows to evaluate.
        num_classes: logits of one position: the vocabulary of a language model, classes of a classifier.
        on_gpu: whether the model lies on an accelerator.
        memory_bytes: memory of that accelerator; ``None`` when unknown.

    Returns:
        Positions of a micro-batch.
    """
    supervised_fraction = float(table.num_supervised.sum()) / max(float(table.lengths.sum()), 1.0)
    room = memory_bytes * GPU_LOGITS_FRACTION if on_gpu and memory_bytes else CPU_LOGITS_BYTES
    smallest, largest = MICRO_BATCH_TOKENS_LIMITS["gpu" if on_gpu else "cpu"]
    # The floor keeps a table with hardly anything supervised from batches that the hidden states alone would not fit.
    tokens = room / (num_classes * LOGIT_BYTES * max(supervised_fraction, 0.05))
    return int(min(max(tokens, smallest), largest))


def _measure_batch(  # noqa: PLR0917
    task: TrainingTask,
    model: Any,
    batch: MicroBatch,
    chosen: ClassLog | None,
    hits: torch.Tensor | None,
    each: torch.Tensor | None,
) -> torch.Tensor:
    """Sum a micro-batch's nats; of a classifier keep what it chose. The logits are gone when this returns."""
    if chosen is None:
        return task.sum_nats(model, batch, PLAIN, hits=hits, each=each)
    logits = task.logits(model, batch)
    chosen.add(logits, batch.targets)
    if each is not None:
        each.copy_(judge_targets(logits, batch.targets))
    return PLAIN.sum_nats(logits, batch.targets)


def _split_all(
    task: TrainingTask, table: TokenTable, rows: Int64Array, *, micro_batch_tokens: int, batching: Batching
) -> list[list[int]]:
    """Cut all rows, sorted by length, into micro-batches.

    Packing compares each row with every open micro-batch, so many rows are packed in parts, each with rows of
    every length.
    """
    # Longest first: memory runs out at once or never, and not after an hour.
    rows = rows[np.argsort(-table.lengths[rows], kind="stable")]
    num_parts = max(1, -(-len(rows) // PACKED_CHUNK_ROWS)) if batching == "packed" else 1
    groups: list[list[int]] = []
    for part in range(num_parts):
        # Every num_parts-th row, so that each part has rows of every length to pack with.
        groups += task.split(table, rows[part::num_parts], budget_tokens=micro_batch_tokens, batching=batching)
    return groups
