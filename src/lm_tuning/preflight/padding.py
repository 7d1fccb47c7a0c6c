"""Compute what share of the positions would be padding, by the code that training splits its steps with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lm_tuning.batching.micro_batches import Batching, split_pairs, split_rows
from lm_tuning.batching.step_plan import StepPlan
from lm_tuning.preflight.records import MeasuredSteps, PaddingChoice, PaddingFigures
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.text.store.table import Int32Array

SAMPLE_ROWS = 200_000
"""Rows looked at in the steps; their share of padding is that of all rows to a small fraction."""


def choose_steps(plan: StepPlan, *, sample_rows: int = SAMPLE_ROWS) -> list[int]:
    """Choose steps of the first epoch, evenly spaced: all of them, or as many as hold a number of rows.

    Args:
        plan: which rows form each step.
        sample_rows: rows that are enough.

    Returns:
        0-based steps, ascending, among them the first and the last one of the epoch (or of a shorter run).
    """
    num_steps = min(plan.steps_per_epoch, plan.total_steps)
    rows_per_step = plan.rows_per_epoch / plan.steps_per_epoch
    num_chosen = min(num_steps, max(2, round(sample_rows / rows_per_step)))  # the first and the last at least
    # The last step of an epoch is the one that may be short, so it must be among them.
    return np.unique(np.linspace(0, num_steps - 1, num_chosen).round().astype(np.int64)).tolist()  # type: ignore[no-any-return]


def describe_steps(plan: StepPlan, steps: Sequence[int]) -> MeasuredSteps:
    """Describe which steps the figures are of.

    Args:
        plan: which rows form each step.
        steps: see ``choose_steps``.
    """
    return {
        "num_steps": len(steps),
        "of": "run" if plan.total_steps <= plan.steps_per_epoch else "first epoch",
        "is_sample": len(steps) < min(plan.steps_per_epoch, plan.total_steps),
    }


def measure_padding(
    plan: StepPlan,
    lengths: Int32Array,
    steps: Sequence[int],
    *,
    micro_batch_tokens: int,
    batching: Batching,
    max_length_tokens: int,
    targets: Int32Array | None = None,
    max_target_tokens: int = 0,
    on_progress: OnProgress = ignore_progress,
) -> PaddingFigures:
    """Compare ways to bring rows of different lengths together.

    Args:
        plan: which rows form each step.
        lengths: tokens of each row, ``(rows,)``.
        steps: the steps to cut, see ``choose_steps``.
        micro_batch_tokens: most positions of a micro-batch.
        batching: what training will do.
        max_length_tokens: length that every row would be padded to in the simplest of ways.
        targets: tokens of each row that are its target, ``(rows,)``, where source and target are padded each by itself
            and never packed; ``None`` for rows of one text.
        max_target_tokens: length that every target would be padded to in the simplest of ways.
        on_progress: receives the steps cut.

    Returns:
        ``choices``: for each way its ``name``, ``padding_fraction`` (padding positions / all positions), and
        ``micro_batches_per_step`` where it is one of training's own. Also the budget, the choice made, and how many
        steps and rows this rests on.
    """
    pair = np.zeros_like(lengths) if targets is None else targets
    # A row of one text is a pair whose second part is empty, so that both kinds are added up alike.
    parts = np.stack([lengths - pair, pair])  # (2, rows)
    split: dict[Batching, list[int]] = {"padded": [0, 0], "packed": [0, 0]}  # positions, micro-batches
    if targets is not None:
        del split["packed"]
    num_tokens = as_they_come = num_rows = 0
    on_progress("Splitting steps", 0, len(steps), "steps")
    # The step plan decides which rows meet, so the share is that of the run, not of an estimate from lengths.
    for done, step in enumerate(steps, start=1):
        rows = plan.rows_of_step(step)
        of_step = parts[:, rows]  # (2, rows of the step)
        num_rows += len(rows)
        num_tokens += int(of_step.sum(dtype=np.int64))
        # Source and target are padded each to its own longest, so the two maxima may be of different rows.
        as_they_come += len(rows) * int(of_step.max(axis=1).sum())
        for way, sums in split.items():
            if targets is None:
                positions, num_groups = _split(of_step[0], micro_batch_tokens, way)
            else:
                positions, num_groups = _split_pairs(of_step, micro_batch_tokens)
            sums[0] += positions
            sums[1] += num_groups
        on_progress("Splitting steps", done, len(steps), "steps")
    longest = max(int(parts.max(axis=1, initial=0).sum()), 1)
    choices = [
        _choice("fixed", 1 - num_tokens / (num_rows * (max_length_tokens + max_target_tokens))),
        _choice("longest_row", 1 - num_tokens / (num_rows * longest)),
        _choice("random", 1 - num_tokens / as_they_come),
        *(_choice(way, 1 - num_tokens / positions, groups / len(steps)) for way, (positions, groups) in split.items()),
    ]
    return {
        "batching": batching,
        "micro_batch_tokens": micro_batch_tokens,
        "max_length_tokens": max_length_tokens + max_target_tokens,
        "longest_row_tokens": longest,
        "num_rows_over_budget": int((lengths > micro_batch_tokens).sum()),
        "num_rows": num_rows,
        **describe_steps(plan, steps),
        "choices": choices,
    }


def _split(lengths: npt.NDArray[np.int32], budget_tokens: int, batching: Batching) -> tuple[int, int]:
    """Return the positions and the micro-batches of one step."""
    as_list = lengths.tolist()
    groups = split_rows(range(len(as_list)), as_list, budget_tokens=budget_tokens, batching=batching)
    # Packed rows lie end to end: the micro-batch is as long as its tokens, and nothing is padding.
    if batching == "packed":
        return sum(as_list), len(groups)
    return sum(len(group) * max(as_list[row] for row in group) for group in groups), len(groups)


def _split_pairs(parts: npt.NDArray[np.int32], budget_tokens: int) -> tuple[int, int]:
    """Return the positions and the micro-batches of one step whose rows, ``(2, rows)``, have a source and a target."""
    sources, targets = parts.tolist()
    groups = split_pairs(range(len(sources)), sources, targets, budget_tokens=budget_tokens)
    widths = (max(sources[row] for row in group) + max(targets[row] for row in group) for group in groups)
    return sum(len(group) * width for group, width in zip(groups, widths, strict=True)), len(groups)


def _choice(name: str, padding_fraction: float, micro_batches_per_step: float | None = None) -> PaddingChoice:
    return {"name": name, "padding_fraction": padding_fraction, "micro_batches_per_step": micro_batches_per_step}
