"""Choose the rows that a probe measures: micro-batches as heavy as any in the run, and ordinary ones for the speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lm_tuning.batching.micro_batches import Batching
from lm_tuning.batching.step_plan import StepPlan
from lm_tuning.text.store.table import TokenTable

if TYPE_CHECKING:
    from lm_tuning.batching.tasks.base import TrainingTask

IntArray = npt.NDArray[np.int64]

SAMPLED_STEPS = 8
_NEARLY_FULL = 0.98
_FILLING_ROWS = 64


def sample_steps(plan: StepPlan, num_steps: int = SAMPLED_STEPS) -> list[IntArray]:
    """Return the rows of some steps, spread over the first epoch.

    Args:
        plan: of the run.
        num_steps: most steps.
    """
    last = min(plan.steps_per_epoch, plan.total_steps) - 1
    # (num_steps,) at most: in a short run several fall on the same step
    positions = np.unique(np.linspace(0, last, num_steps).round().astype(np.int64))
    return [plan.rows_of_step(int(step)) for step in positions]


def heaviest_groups(
    groups: list[list[int]], table: TokenTable, task: TrainingTask, batching: Batching
) -> list[list[int]]:
    """Choose the micro-batches that take the most memory: by positions, and by positions that carry loss.

    Args:
        groups: rows of each micro-batch.
        table: where the rows lie.
        task: what is supervised of them.
        batching: ``packed`` or ``padded``.

    Returns:
        One micro-batch, or two different ones.
    """
    positions = [count_group_positions(group, table, task, batching) for group in groups]
    full = [position for position, count in enumerate(positions) if count >= _NEARLY_FULL * max(positions)]
    # Of the fullest the one with the longest row: attention without a flash kernel keeps something for every pair of
    # positions of a row.
    by_positions = max(full, key=lambda position: (int(table.lengths[groups[position]].max()), positions[position]))
    # A head that makes all logits at once keeps a whole vocabulary for every supervised position.
    losses = [_count_losses(group, table, batching) for group in groups]
    by_loss = max(range(len(groups)), key=lambda position: (losses[position], position == by_positions))
    return [groups[position] for position in dict.fromkeys((by_positions, by_loss))]


def evenly_by_size(groups: list[list[int]], lengths: Any, *, most: int) -> list[list[int]]:
    """Choose micro-batches of all sizes in proportion, the small last ones of a step included.

    Args:
        groups: rows of each micro-batch.
        lengths: tokens of each row of the table.
        most: how many to choose.
    """
    ordered = sorted(groups, key=lambda group: int(lengths[group].sum()))
    if len(ordered) <= most:
        return ordered
    return [ordered[int((position + 0.5) * len(ordered) / most)] for position in range(most)]


def full_group(rows: IntArray, table: TokenTable, task: TrainingTask, batching: Batching, *, budget: int) -> list[int]:
    """Fill one micro-batch to its budget, as any step may do by chance; the steps of a sample are split more evenly.

    Args:
        rows: to take from, those wanted most first; the first one is taken in any case.
        table: where the rows lie.
        task: what is supervised of them.
        batching: ``packed`` or ``padded``.
        budget: most positions.
    """
    group: list[int] = []
    total = widest = widest_target = 0
    lengths, targets = table.lengths[rows].tolist(), table.num_supervised[rows].tolist()
    for row, length, target in zip(rows.tolist(), lengths, targets, strict=True):
        source = length if task.can_pack else length - target
        wider, wider_target = max(widest, source), max(widest_target, 0 if task.can_pack else target)
        positions = total + length if batching == "packed" else (len(group) + 1) * (wider + wider_target)
        if positions > budget and group:
            continue
        group.append(row)
        total, widest, widest_target = total + length, wider, wider_target
    return group


def extreme_rows(plan: StepPlan, table: TokenTable, rows_of_step: int) -> list[IntArray]:
    """Return the longest rows, and those with the most supervised tokens, each with short ones to fill gaps with.

    Args:
        plan: of the run; rows that never come up are left out.
        table: where the rows lie.
        rows_of_step: how many of each kind.

    Returns:
        Row indices of each kind, those of the most tokens first.
    """
    lengths, losses = table.lengths.astype(np.int64), table.num_supervised.astype(np.int64)
    # (rows,)
    met = np.ones(len(lengths), dtype=bool)
    if not plan.mix.is_plain:
        met = plan.mix.rows_per_epoch[table.sources] > 0
    rows = np.flatnonzero(met)
    shortest = rows[np.argsort(-lengths[rows], kind="stable")][-_FILLING_ROWS:]
    # Short rows behind the extreme ones fill the gaps that those leave in a micro-batch.
    kinds = [rows[np.argsort(-values[rows], kind="stable")[:rows_of_step]] for values in (lengths, losses)]
    return [np.concatenate([most, shortest[~np.isin(shortest, most)]]) for most in kinds]


def count_group_positions(group: list[int], table: TokenTable, task: TrainingTask, batching: Batching) -> int:
    """Count the positions of one micro-batch, padding included."""
    lengths = table.lengths[group]
    if batching == "packed":
        return int(lengths.sum())
    if task.can_pack:
        return len(group) * int(lengths.max())
    targets = table.num_supervised[group]
    return len(group) * int((lengths - targets).max() + targets.max())


def _count_losses(group: list[int], table: TokenTable, batching: Batching) -> int:
    losses = table.num_supervised[group]
    return int(losses.sum()) if batching == "packed" else len(group) * int(losses.max())
