"""Nodes of the evaluation pipeline."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lm_tuning.evaluation.records import EvaluationRecord
from lm_tuning.parameters import EnvironmentParameters, EvaluateParameters, ModelParameters
from lm_tuning.progress import show_progress
from lm_tuning.storage.folders import FolderStore

if TYPE_CHECKING:
    from lm_tuning.evaluation.base import Comparison

logger = logging.getLogger(__name__)


def evaluate_models(
    tuned_model: Path,
    tokenized_examples: Path,
    base_evaluation_cache: FolderStore,
    evaluation_history: Path,
    *,
    evaluate: EvaluateParameters,
    model: ModelParameters,
    environment: EnvironmentParameters,
    seed: int,
    output: str,
) -> dict[str, Any]:
    """Measure base and tuned model; return everything that is known of them, by catalog entry."""
    from lm_tuning.evaluation import results, settings

    chosen = settings.choose_settings(tuned_model, evaluate, model, environment, seed=seed)
    with show_progress() as on_progress:
        compared = results.evaluate_models(
            tuned_model, tokenized_examples, base_evaluation_cache, chosen, on_progress=on_progress,
            history=evaluation_history, output=output,
        )  # fmt: skip
    return _name_outputs(compared, tuned_model)


def _name_outputs(compared: Comparison, tuned_model: Path) -> dict[str, Any]:
    """Return what the evaluation leaves, by catalog entry."""
    return {
        "base_evaluation": compared.base_evaluation,
        "evaluation": compared.result,
        "evaluation_samples": compared.table(),
        "evaluation_row_scores": compared.row_scores(),
        "evaluation_figures": compared.figures,
        **_show_result(compared.result, tuned_model),
    }


def _show_result(result: EvaluationRecord, tuned_model: Path) -> dict[str, str]:
    """Log the outcome, show its summary, and return the report as Markdown and as a page, by catalog entry."""
    from lm_tuning.evaluation.report import compose_report, describe_outcome
    from lm_tuning.evaluation.settings import training_facts
    from lm_tuning.reporting.html import write_page
    from lm_tuning.reporting.markdown import write_markdown
    from lm_tuning.reporting.terminal import build_summary

    report = compose_report(result, training_facts(tuned_model))
    logger.info("%s", describe_outcome(result))
    Console().print(build_summary(report))
    return {"evaluation_report": write_markdown(report), "evaluation_page": write_page(report)}
