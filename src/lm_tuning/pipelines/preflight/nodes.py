"""Node of the preflight pipeline."""

from __future__ import annotations

import logging
from pathlib import Path

from rich.console import Console

from lm_tuning.data.records import RowsFacts
from lm_tuning.data.split.records import SplitsFacts, SplitsSummary
from lm_tuning.models.record import BaseModelRecord
from lm_tuning.parameters import ModelParameters, PreflightParameters, TokenizeParameters, TrainParameters
from lm_tuning.preflight.records import PreflightFigures, StoredRows
from lm_tuning.progress import show_progress
from lm_tuning.reporting.document import ReportSection
from lm_tuning.text.records import TokensFacts, TokenSummary

logger = logging.getLogger(__name__)


def inspect_examples(
    tokenized_examples: Path,
    example_splits: Path,
    base_model: BaseModelRecord,
    *,
    token_summary: TokenSummary,
    split_summary: SplitsSummary,
    data_report: ReportSection[RowsFacts],
    split_report: ReportSection[SplitsFacts],
    token_report: ReportSection[TokensFacts],
    model: ModelParameters,
    tokenize: TokenizeParameters,
    train: TrainParameters,
    preflight: PreflightParameters,
    seed: int,
) -> tuple[PreflightFigures, str, str]:
    """Look at the rows as training will see them; return the figures, a Markdown report and an HTML page."""
    findings = data_report["facts"]["findings"]
    rows = StoredRows(tokenized_examples, example_splits, base_model, token_summary, split_summary, findings)
    figures = _inspect(rows, model=model, tokenize=tokenize, train=train, preflight=preflight, seed=seed)
    return figures, *_show(figures)


def _inspect(
    rows: StoredRows,
    *,
    model: ModelParameters,
    tokenize: TokenizeParameters,
    train: TrainParameters,
    preflight: PreflightParameters,
    seed: int,
) -> PreflightFigures:
    """Gather the figures, with the progress on show."""
    from lm_tuning.preflight.figures import inspect_run

    with show_progress() as shown:
        return inspect_run(
            rows, model=model, tokenize=tokenize, train=train, preflight=preflight, seed=seed, on_progress=shown
        )


def _show(figures: PreflightFigures) -> tuple[str, str]:
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
