"""Lay out the optimizer steps of the run, and say what is odd about them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lm_tuning.batching.step_plan import StepPlan
from lm_tuning.data.split.records import DividedSource
from lm_tuning.parameters import TrainParameters
from lm_tuning.preflight.padding import describe_steps
from lm_tuning.preflight.records import ScheduledSource, ScheduleFigures, Spread
from lm_tuning.text.records import NO_LABEL
from lm_tuning.text.store.table import Int64Array, TokenTable

# A run that ends within an epoch is added up step by step as long as that takes no time worth speaking of.
_MAX_STEPS_ADDED = 20_000


def plan_steps(table: TokenTable, *, sources: Sequence[DividedSource], seed: int, train: TrainParameters) -> StepPlan:
    """Make the plan that training will make.

    Args:
        table: tokenized training rows.
        sources: of the training rows, with ``weight``; numbered as ``table.sources`` says.
        seed: see ``StepPlan``.
        train: the ``train`` parameters.
    """
    weights = [float(source["weight"]) for source in sources]
    return StepPlan(
        table.lengths,
        seed=seed,
        effective_batch_rows=train.effective_batch_rows,
        effective_batch_tokens=train.effective_batch_tokens,
        num_epochs=train.num_epochs,
        max_steps=train.max_steps,
        sources=table.sources,
        weights=weights,
    )


def describe_schedule(
    plan: StepPlan,
    table: TokenTable,
    steps: Sequence[int],
    *,
    sources: Sequence[DividedSource],
    train: TrainParameters,
) -> ScheduleFigures:
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


def _describe_sources(plan: StepPlan, table: TokenTable, sources: Sequence[DividedSource]) -> list[ScheduledSource]:
    """Count, for each source, its rows and those that come up in an epoch."""
    counts = np.bincount(table.sources, minlength=len(sources))  # (sources,)
    # Sums of float64, which are exact up to 2**53 tokens.
    tokens = np.bincount(table.sources, weights=table.lengths, minlength=len(sources))  # (sources,)
    described: list[ScheduledSource] = []
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


def _spread(values: Int64Array) -> Spread:
    return {"mean": float(values.mean()), "min": int(values.min()), "max": int(values.max())}
