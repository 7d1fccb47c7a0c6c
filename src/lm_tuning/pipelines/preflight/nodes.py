"""Node of the preflight pipeline."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rich.console import Console

from lm_tuning.data.split.records import SplitsSummary
from lm_tuning.models.record import BaseModelRecord
from lm_tuning.parameters import ModelParameters, PreflightParameters, TokenizeParameters, TrainParameters
from lm_tuning.preflight.records import EarlierReports, PreflightParameterGroups
from lm_tuning.progress import show_progress
from lm_tuning.reporting.records import ReportSection
from lm_tuning.text.records import TokenSummary

logger = logging.getLogger(__name__)


def inspect_examples(
    tokenized_examples: Path,
    example_splits: Path,
    base_model: BaseModelRecord,
    *,
    token_summary: TokenSummary,
    split_summary: SplitsSummary,
    data_report: ReportSection,
    split_report: ReportSection,
    token_report: ReportSection,
    model: ModelParameters,
    tokenize: TokenizeParameters,
    train: TrainParameters,
    preflight: PreflightParameters,
    seed: int,
) -> tuple[dict[str, Any], str, str]:
    """Look at the rows as training will see them; return the figures, a Markdown report and an HTML page."""
    # The two other sections are inputs so that the pipelines which write them come first; nothing is read from them.
    reports = EarlierReports(token_summary=token_summary, split_summary=split_summary, data_report=data_report)
    groups = PreflightParameterGroups(model=model, tokenize=tokenize, train=train, preflight=preflight, seed=seed)
    figures = _inspect(tokenized_examples, example_splits, base_model, reports, groups)
    return figures, *_show(figures)


def _inspect(
    tokens: Path, splits: Path, base_model: BaseModelRecord, reports: EarlierReports, groups: PreflightParameterGroups
) -> dict[str, Any]:
    """Gather the figures, with the progress on show."""
    from lm_tuning.preflight.inspection import inspect_run

    with show_progress() as on_progress:
        return inspect_run(tokens, splits, base_model, reports=reports, **groups, on_progress=on_progress)


def _show(figures: dict[str, Any]) -> tuple[str, str]:
    """Log the outcome, show a summary, and return the report as Markdown and as an HTML page."""
    from lm_tuning.preflight.figures import describe_preflight
    from lm_tuning.preflight.report import compose_report
    from lm_tuning.reporting.html import write_page
    from lm_tuning.reporting.markdown import write_markdown
    from lm_tuning.reporting.terminal import build_summary

    # Composed once and written three times, so that terminal, Markdown and page say the same.
    report = compose_report(figures)
    for line in describe_preflight(figures):
        logger.info("%s", line)
    # A console of its own, on standard output: what a user asked for goes through a pipe, and the log does not.
    Console().print(build_summary(report))
    return write_markdown(report), write_page(report)
