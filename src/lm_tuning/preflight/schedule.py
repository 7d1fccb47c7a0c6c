"""Lay out the optimizer steps of the run, and say what is odd about them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lm_tuning.batching.step_plan import StepPlan
from lm_tuning.text.records import NO_LABEL
from lm_tuning.text.store.table import TokenTable

# A run that ends within an epoch is added up step by step as long as that takes no time worth speaking of.
_MAX_STEPS_ADDED = 20_000


def plan_steps(
    table: TokenTable,
    *,
    sources: Sequence[Mapping[str, Any]],
    seed: int,
    effective_batch_rows: int | None,
    effective_batch_tokens: int | None,
    num_epochs: int | None,
    max_steps: int | None,
) -> StepPlan:
    """Make the plan that training will make.

    Args:
        table: tokenized training rows.
        sources: of the training rows, with ``weight``; numbered as ``table.sources`` says.
        seed: see ``StepPlan``, as are the others.
        effective_batch_rows: rows of a step.
        effective_batch_tokens: most tokens of a step.
        num_epochs: passes over the rows.
        max_steps: cap on the steps.
    """
    weights = [float(source["weight"]) for source in sources]
    return StepPlan(
        table.lengths,
        seed=seed,
        effective_batch_rows=effective_batch_rows,
        effective_batch_tokens=effective_batch_tokens,
        num_epochs=num_epochs,
        max_steps=max_steps,
        sources=table.sources,
        weights=weights,
    )


def describe_schedule(
    plan: StepPlan, table: TokenTable, steps: Sequence[int], *, sources: Sequence[Mapping[str, Any]], **asked: Any
) -> dict[str, Any]:
    """Count steps, rows and tokens of the run.

    Args:
        plan: which rows form each step.
        table: tokenized training rows.
        steps: steps of the first epoch (or of a shorter run) that are looked at, the first and the last among them.
        sources: of the training rows: ``path`` and ``weight``.
        asked: what the parameters say: ``effective_batch_rows``, ``effective_batch_tokens``, ``num_epochs``,
            ``max_steps``, ``warmup_steps``, ``eval_every_steps``, ``save_every_steps`` and ``load_best``.

    Returns:
        Steps and tokens of an epoch and of the run, rows and tokens of a step, the last step of the epoch, the warm-up,
        rows of an epoch by source, and ``asked``. Least, mean and most of a step are all of ``steps``;
        ``steps_measured`` says how many these are (``num_steps``), of what (``of``), and whether that has more
        (``is_sample``).
    """
    lengths = table.lengths
    # A row with a class is supervised as one; its tokens are not.
    supervised_per_row = np.where(table.labels == NO_LABEL, table.num_supervised, 0)
    mixed = _describe_sources(plan, table, sources)
    per_step = [plan.rows_of_step(step) for step in steps]
    rows = np.array([len(step) for step in per_step])
    tokens = np.array([int(lengths[step].sum(dtype=np.int64)) for step in per_step])
    supervised = np.array([int(supervised_per_row[step].sum(dtype=np.int64)) for step in per_step])
    tokens_per_epoch = sum(source["tokens_per_epoch"] for source in mixed)
    rows_of_run, tokens_of_run = _rows_and_tokens_of_run(plan, table, tokens_per_epoch)
    last = plan.rows_of_step(plan.steps_per_epoch - 1)
    warmup = float(asked["warmup_steps"] or 0)
    return {
        **asked,
        "seed": plan.seed,
        "steps_per_epoch": plan.steps_per_epoch,
        "total_steps": plan.total_steps,
        "epochs": plan.epoch_at(plan.total_steps),
        "rows_per_epoch": plan.rows_per_epoch,
        "tokens_per_epoch": tokens_per_epoch,
        "rows_of_run": rows_of_run,
        "tokens_of_run": tokens_of_run,
        "warmup_steps_of_run": math.ceil(warmup * plan.total_steps) if warmup < 1 else int(warmup),
        "rows_per_step": _spread(rows),
        "tokens_per_step": _spread(tokens),
        "supervised_tokens_per_step": _spread(supervised),
        "steps_measured": {
            "num_steps": len(steps),
            "of": "run" if plan.total_steps <= plan.steps_per_epoch else "first epoch",
            "is_sample": len(steps) < min(plan.steps_per_epoch, plan.total_steps),
        },
        "last_step_rows": len(last),
        "last_step_tokens": int(lengths[last].sum(dtype=np.int64)),
        "sources": mixed,
    }


def _describe_sources(plan: StepPlan, table: TokenTable, sources: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Count, for each source, its rows and those that come up in an epoch."""
    counts = np.bincount(table.sources, minlength=len(sources))
    tokens = np.bincount(table.sources, weights=table.lengths, minlength=len(sources))
    described = []
    for index, source in enumerate(sources):
        num_rows, num_tokens = int(counts[index]), int(tokens[index])
        rows_per_epoch = int(plan.mix.rows_per_epoch[index])
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
    first = num_epochs * plan.steps_per_epoch
    steps = [plan.rows_of_step(step) for step in range(first, first + rest)]
    num_tokens = sum(int(table.lengths[rows].sum(dtype=np.int64)) for rows in steps)
    return num_epochs * plan.rows_per_epoch + sum(map(len, steps)), num_epochs * tokens_per_epoch + num_tokens


def _spread(values: Any) -> dict[str, float]:
    return {"mean": float(values.mean()), "min": int(values.min()), "max": int(values.max())}
