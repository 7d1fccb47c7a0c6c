"""Lay out the optimizer steps of the run, and the share of their positions that would be padding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lm_tuning.batching.micro_batches import Batching, split_pairs, split_rows
from lm_tuning.batching.step_plan import StepPlan
from lm_tuning.data.split.records import DividedSource
from lm_tuning.parameters import TrainParameters
from lm_tuning.preflight import records
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.text.records import NO_LABEL
from lm_tuning.text.store.table import Int32Array, Int64Array, TokenTable

SAMPLE_ROWS = 200_000
"""Rows looked at in the steps; their share of padding is that of all rows to a small fraction."""

# A run that ends within an epoch is added up step by step as long as that takes no time worth speaking of.
_MAX_STEPS_ADDED = 20_000


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


def describe_steps(plan: StepPlan, steps: Sequence[int]) -> records.MeasuredSteps:
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
) -> records.PaddingFigures:
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


def chosen_way(padding: records.PaddingFigures) -> records.PaddingChoice:
    """Return the way to bring rows together that training takes.

    Args:
        padding: see ``measure_padding``.
    """
    return next(choice for choice in padding["choices"] if choice["name"] == padding["batching"])


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


def _choice(name: str, padding_fraction: float, micro_batches_per_step: float | None = None) -> records.PaddingChoice:
    return {"name": name, "padding_fraction": padding_fraction, "micro_batches_per_step": micro_batches_per_step}


def describe_schedule(
    plan: StepPlan, table: TokenTable, steps: Sequence[int], *, sources: Sequence[DividedSource], train: TrainParameters
) -> records.ScheduleFigures:
    """Count steps, rows and tokens of the run.

    Args:
        plan: which rows form each step.
        table: tokenized training rows.
        steps: steps of the first epoch (or of a shorter run) that are looked at, the first and the last among them.
        sources: of the training rows: ``path`` and ``weight``.
        train: the ``train`` parameters.

    Returns:
        Steps and tokens of an epoch and of the run, rows and tokens of a step, the last step of the epoch, the warm-up,
        rows of an epoch by source, and what the parameters say. Least, mean and most of a step are all of ``steps``;
        ``steps_measured`` says how many these are (``num_steps``), of what (``of``), and whether that has more
        (``is_sample``).
    """
    lengths = table.lengths
    # A row with a class is supervised as one; its tokens are not.
    supervised_per_row = np.where(table.labels == NO_LABEL, table.num_supervised, 0)  # (rows,)
    mixed = _describe_sources(plan, table, sources)
    per_step = [plan.rows_of_step(step) for step in steps]
    rows = np.array([len(step) for step in per_step])  # (steps,)
    tokens = np.array([int(lengths[step].sum(dtype=np.int64)) for step in per_step])
    supervised = np.array([int(supervised_per_row[step].sum(dtype=np.int64)) for step in per_step])
    tokens_per_epoch = sum(source["tokens_per_epoch"] for source in mixed)
    rows_of_run, tokens_of_run = _rows_and_tokens_of_run(plan, table, tokens_per_epoch)
    # Every epoch has as many steps, so the last one is as short in each of them.
    last = plan.rows_of_step(plan.steps_per_epoch - 1)
    return {
        "effective_batch_rows": train.effective_batch_rows,
        "effective_batch_tokens": train.effective_batch_tokens,
        "num_epochs": train.num_epochs,
        "max_steps": train.max_steps,
        "warmup_steps": train.trainer.get("warmup_steps", 0),
        "eval_every_steps": train.eval_every_steps,
        "save_every_steps": train.save_every_steps,
        "load_best": train.load_best,
        "seed": plan.seed,
        "steps_per_epoch": plan.steps_per_epoch,
        "total_steps": plan.total_steps,
        "epochs": plan.epoch_at(plan.total_steps),
        "rows_per_epoch": plan.rows_per_epoch,
        "tokens_per_epoch": tokens_per_epoch,
        "rows_of_run": rows_of_run,
        "tokens_of_run": tokens_of_run,
        "warmup_steps_of_run": train.count_warmup_steps(plan.total_steps),
        "rows_per_step": _spread(rows),
        "tokens_per_step": _spread(tokens),
        "supervised_tokens_per_step": _spread(supervised),
        "steps_measured": describe_steps(plan, steps),
        "last_step_rows": len(last),
        "last_step_tokens": int(lengths[last].sum(dtype=np.int64)),
        "sources": mixed,
    }


def _describe_sources(
    plan: StepPlan, table: TokenTable, sources: Sequence[DividedSource]
) -> list[records.ScheduledSource]:
    """Count, for each source, its rows and those that come up in an epoch."""
    counts = np.bincount(table.sources, minlength=len(sources))  # (sources,)
    # Sums of float64, which are exact up to 2**53 tokens.
    tokens = np.bincount(table.sources, weights=table.lengths, minlength=len(sources))  # (sources,)
    described: list[records.ScheduledSource] = []
    for index, source in enumerate(sources):
        num_rows, num_tokens = int(counts[index]), int(tokens[index])
        rows_per_epoch = int(plan.mix.rows_per_epoch[index])
        # A weight of 2.5 is every row twice and half of them, drawn again each epoch, once more.
        whole = math.floor(source["weight"])
        described.append(
            {
                "path": source["path"],
                "weight": float(source["weight"]),
                "num_rows": num_rows,
                "num_tokens": num_tokens,
                "times_each": whole,
                "rows_drawn": rows_per_epoch - whole * num_rows,
                "rows_per_epoch": rows_per_epoch,
                # The rows drawn once more differ by epoch, so this is what they come to on average.
                "tokens_per_epoch": round(num_tokens * rows_per_epoch / max(num_rows, 1)),
            }
        )
    return described


def _rows_and_tokens_of_run(plan: StepPlan, table: TokenTable, tokens_per_epoch: int) -> tuple[int, int]:
    """Add up rows and tokens of all steps; a part of a very long epoch counts in proportion."""
    num_epochs, rest = divmod(plan.total_steps, plan.steps_per_epoch)
    if rest > _MAX_STEPS_ADDED:
        share = num_epochs + rest / plan.steps_per_epoch
        return round(plan.rows_per_epoch * share), round(tokens_per_epoch * share)
    # Whole epochs have the same rows, only the part of one that is left has to be looked at.
    first = num_epochs * plan.steps_per_epoch
    steps = [plan.rows_of_step(step) for step in range(first, first + rest)]
    num_tokens = sum(int(table.lengths[rows].sum(dtype=np.int64)) for rows in steps)
    return num_epochs * plan.rows_per_epoch + sum(map(len, steps)), num_epochs * tokens_per_epoch + num_tokens


def _spread(values: Int64Array) -> records.Spread:
    return {"mean": float(values.mean()), "min": int(values.min()), "max": int(values.max())}
