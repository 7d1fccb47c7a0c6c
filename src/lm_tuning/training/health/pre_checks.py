"""Checks of rows, tokenizer and trained parts that come before any row goes through the model."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_tuning.errors import UserError
from lm_tuning.text.store.table import open_split, split_path
from lm_tuning.training.health.report import Finding, HealthReport, stop_if_needed
from lm_tuning.training.health.table_checks import (
    check_held_out_rows,
    check_step_supervision,
    check_table,
    check_tokenizer,
)

if TYPE_CHECKING:
    from lm_tuning.text.store.table import TokenTable
    from lm_tuning.training.job import Job
    from lm_tuning.training.settings import TrainingSettings
    from lm_tuning.training.setup.model import ReadyModel


def check_rows_before_planning(
    health: HealthReport, settings: TrainingSettings, tokens: Path, train_rows: TokenTable
) -> None:
    """Check the rows against the model's shapes before the batch planner sends rows through it on a GPU.

    The weights are not read for it. What the shapes cannot tell is checked again with the loaded model, and a model
    whose shapes cannot be told without weights is left to that check.

    Args:
        health: receives the findings.
        settings: of the training.
        tokens: folder of the tokenized splits.
        train_rows: its training rows.

    Raises:
        UserError: a finding says stop.
    """
    from lm_tuning.models.loading import load_tokenizer
    from lm_tuning.training.health.trained_parts import check_freeze
    from lm_tuning.training.setup.model import build_skeleton_of

    began = time.perf_counter()
    base = settings.base
    try:
        model = build_skeleton_of(settings)
    except UserError:
        return
    tokenizer = load_tokenizer(
        base["name_or_path"],
        revision=base.get("revision"),
        trust_remote_code=bool(base.get("trust_remote_code")),
    )
    _, found = check_table(train_rows, model, tokenizer, task=settings.task)
    found += _check_held_out(tokens, model, tokenizer, settings.task)
    found += check_freeze(model, settings)
    # The others are said once the model is there.
    _add(health, (finding for finding in found if finding.severity == "stop"))
    health.seconds += time.perf_counter() - began
    stop_if_needed(health)


def check_before_any_row(health: HealthReport, ready: ReadyModel, job: Job) -> None:
    """Check rows, tokenizer and what is trained, before kernels are tried and rows measured.

    Args:
        health: receives facts and findings.
        ready: the model as it will be trained.
        job: rows and steps.

    Raises:
        UserError: a finding says stop.
    """
    from lm_tuning.training.health.trained_parts import check_trained_parts

    began = time.perf_counter()
    model, tokenizer, task = ready.model, ready.tokenizer, job.settings.task
    facts, found = check_table(job.train_rows, model, tokenizer, task=task)
    health.facts.update(facts)
    if job.plan.total_steps:
        found += check_step_supervision(job.train_rows, job.plan.rows_of_step(0))
    found += _check_held_out(job.paths.tokens, model, tokenizer, task)
    about_tokenizer = check_tokenizer(tokenizer, model)
    if any(finding.code == "id-beyond-vocabulary" for finding in found):
        about_tokenizer = [known for known in about_tokenizer if known.code != "more-tokens-than-embeddings"]
    _add(health, [*about_tokenizer, *found, *check_trained_parts(model, job.settings)])
    health.seconds += time.perf_counter() - began
    stop_if_needed(health)


def _check_held_out(tokens: Path, model: Any, tokenizer: Any, task: str) -> list[Finding]:
    """Check the rows that are measured on while training and after it, as far as there are any."""
    found = []
    for split in ("validation", "test"):
        if split_path(tokens, split).exists():
            found += check_held_out_rows(open_split(tokens, split), model, tokenizer, task=task, split=split)
    return found


def _add(health: HealthReport, findings: Iterable[Finding]) -> None:
    """Add findings, but none whose code an earlier check has said; several splits may have the same."""
    said = {known.code for known in health.findings}
    for finding in findings:
        if finding.code not in said:
            health.add(finding)
