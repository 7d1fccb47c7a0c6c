"""Nodes of the training pipeline."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from lm_tuning.datasets.metric_stream import MetricStream
from lm_tuning.datasets.report_sections import LiveReport
from lm_tuning.models.record import BaseModelRecord
from lm_tuning.parameters import EvaluateParameters, ModelParameters, TrainParameters
from lm_tuning.parameters.base import TaskName
from lm_tuning.pipelines.train.run_settings import TrainingGroups, gather_settings
from lm_tuning.progress import show_progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lm_tuning.json_types import JsonObject
    from lm_tuning.training.health.records import HealthRecord
    from lm_tuning.training.records import EfficiencyFigures, EfficiencyRow, TrainingRow
    from lm_tuning.training.results import TrainingResult
    from lm_tuning.training.settings import TrainingPaths, TrainingSettings

logger = logging.getLogger(__name__)


class TrainingOutputs(TypedDict):
    """What the node returns, by catalog entry."""

    tuned_model: Path
    training_summary: list[TrainingRow]
    efficiency_summary: list[EfficiencyRow]
    efficiency: dict[str, EfficiencyFigures]
    health_report: HealthRecord
    loss_curve: Figure
    batch_plan: JsonObject
    batch_plan_curve: Figure


def train_model(
    tokenized_examples: Path,
    base_model: BaseModelRecord,
    *,
    checkpoints: Path,
    batch_plans: Path,
    metric_stream: MetricStream,
    live_health: LiveReport,
    train: TrainParameters,
    model: ModelParameters,
    evaluate: EvaluateParameters,
    seed: int,
    task: TaskName,
) -> TrainingOutputs:
    """Train; return the tuned model's folder, the logs of steps, and what they and the planning come to, by name."""
    from lm_tuning.training.settings import TrainingPaths

    groups = TrainingGroups(train, model, seed, task, evaluate.generation)
    settings = _settle(tokenized_examples, base_model, groups, live_health, run_id=metric_stream.run_id)
    paths = TrainingPaths(tokens=tokenized_examples, checkpoints=checkpoints, plans=batch_plans)
    return _name_outputs(_train(paths, settings, metric_stream, live_health))


def _settle(
    tokens: Path, base_model: BaseModelRecord, groups: TrainingGroups, live_health: LiveReport, *, run_id: str | None
) -> TrainingSettings:
    """Gather the settings; a run that is refused while they are gathered leaves a health report too."""
    from lm_tuning.training.health.report import telling_refusals

    with telling_refusals(live_health.write, run_id=run_id, is_resume=groups.train.resume):
        return gather_settings(tokens, base_model, groups, run_id=run_id)


def _train(
    paths: TrainingPaths, settings: TrainingSettings, metric_stream: MetricStream, live_health: LiveReport
) -> TrainingResult:
    """Train, with metrics and findings told as they come, and log what it came to."""
    from lm_tuning.training.records import describe_result
    from lm_tuning.training.run import run_training

    try:
        with show_progress() as on_progress:
            result = run_training(
                paths,
                settings,
                on_progress=on_progress,
                on_metrics=metric_stream.log_step,
                on_checkpoint=metric_stream.flush,
                on_health=live_health.write,
            )
    finally:
        # Also where the training failed: what it measured until then is worth most then.
        metric_stream.close()
    logger.info("%s", describe_result(result.summary))
    return result


def _name_outputs(result: TrainingResult) -> TrainingOutputs:
    """Return what the training leaves, by catalog entry."""
    from lm_tuning.training.planning.report import draw_plan
    from lm_tuning.training.results import draw_loss_curve, efficiency_figures

    return {
        "tuned_model": result.model_folder,
        "training_summary": result.steps,
        "efficiency_summary": result.efficiency,
        "efficiency": efficiency_figures(result.summary),
        "health_report": result.health,
        "loss_curve": draw_loss_curve(result.steps, result.evaluations, unit=result.summary["unit"]),
        "batch_plan": result.batch_plan.to_json(),
        "batch_plan_curve": draw_plan(result.batch_plan),
    }
