"""What a training leaves behind: a model folder, the step log, a summary and a picture of the loss."""

from __future__ import annotations

import json
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_tuning.models.loading import transformers_bars_off
from lm_tuning.storage.atomic import sync_folder
from lm_tuning.training.adapters import save_adapter

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lm_tuning.training.step_log import StepLog
    from lm_tuning.training.step_plan import StepPlan

_WARM_STEPS = 2
_WINDOWS = 10


@dataclass(frozen=True)
class TrainingResult:
    """What :func:`lm_tuning.training.run.run_training` returns.

    Attributes:
        model_folder: adapter or full weights, tokenizer and ``tuning.json``.
        steps: one row a step: loss, gradient norm, learning rate.
        evaluations: one row an evaluation while training; step 0 is the base model.
        efficiency: one row a step: seconds, tokens, padding, memory.
        health: facts and findings.
        summary: figures of the whole run.
    """

    model_folder: Path
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    efficiency: list[dict[str, Any]]
    health: dict[str, Any]
    summary: dict[str, Any]


def save_tuned_model(
    model: Any, tokenizer: Any, folder: Path, *, facts: dict[str, Any], label_map: dict[str, int] | None = None
) -> Path:
    """Write adapter or full weights with their tokenizer; the folder appears whole.

    Args:
        model: a PEFT model, of which the adapter is written, or a full model.
        tokenizer: the model's.
        folder: where to; an older one is replaced.
        facts: written as ``tuning.json``.
        label_map: id of each class by its name, written as ``label_map.json`` and into the config of a full model.
    """
    staging = folder.with_name(f".{folder.name}-writing")
    shutil.rmtree(staging, ignore_errors=True)
    model.config.use_cache = True
    if label_map is not None:
        model.config.id2label = {place: name for name, place in label_map.items()}
        model.config.label2id = dict(label_map)
    with transformers_bars_off():
        if hasattr(model, "peft_config"):
            save_adapter(model, staging)
        else:
            model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    (staging / "tuning.json").write_text(json.dumps(facts, indent=2))
    if label_map is not None:
        (staging / "label_map.json").write_text(json.dumps(label_map, indent=2, ensure_ascii=False), encoding="utf-8")
    sync_folder(staging)
    if folder.exists():
        shutil.rmtree(folder)
    staging.rename(folder)
    return folder


def summarize(
    log: StepLog,
    *,
    plan: StepPlan,
    finished_step: int,
    settings_method: str,
    training_seconds: float,
    total_seconds: float,
    health_seconds: float,
    trainable_parameters: int,
    best_step: int | None,
    sources: list[dict[str, Any]],
) -> dict[str, Any]:
    """Put the figures of a run together.

    The speed is taken over the steps' own time, evaluation and checkpoints left out, without the first steps
    when there are enough (they carry one-time set-up).

    Args:
        log: of all steps, those before a resume included.
        plan: which rows form them.
        finished_step: the last step; before the plan's last one if the training stopped early.
        settings_method: ``full``, ``lora`` or ``qlora``.
        training_seconds: of this run's loop.
        total_seconds: of this run's whole training, loading and checks included.
        health_seconds: of the health check.
        trainable_parameters: how many numbers were trained.
        best_step: step of the best held-out figure; ``None`` without one.
        sources: what :meth:`SourceMix.describe` says.
    """
    rows = log.efficiency[_WARM_STEPS:] if len(log.efficiency) > 2 * _WARM_STEPS else log.efficiency
    seconds = sum(row["seconds"] for row in rows)
    tokens = sum(row["num_tokens"] for row in rows)
    all_seconds = sum(row["seconds"] for row in log.efficiency)
    return {
        "method": settings_method,
        "num_steps": len(log.steps),
        "total_steps": finished_step,
        "epochs": plan.epoch_at(finished_step),
        "stopped_early": finished_step < plan.total_steps,
        "unit": log.unit,
        f"first_{log.loss_name}": log.steps[0][log.loss_name] if log.steps else None,
        f"last_{log.loss_name}": log.steps[-1][log.loss_name] if log.steps else None,
        "tokens_per_second": tokens / seconds if seconds else None,
        "step_seconds_median": statistics.median(row["seconds"] for row in rows) if rows else None,
        "padding_fraction": (
            statistics.fmean(row["padding_fraction"] for row in log.efficiency) if log.efficiency else None
        ),
        "loader_wait_fraction": (sum(row["loader_wait_seconds"] for row in rows) / seconds if seconds else None),
        "logging_fraction": log.own_seconds / all_seconds if all_seconds else None,
        "peak_memory_bytes": max((row["peak_memory_bytes"] for row in log.efficiency), default=None),
        "training_seconds": training_seconds,
        "health_seconds": health_seconds,
        "total_seconds": total_seconds,
        "trainable_parameters": trainable_parameters,
        "best_step": best_step,
        "sources": sources,
    }


def draw_loss_curve(steps: list[dict[str, Any]], evaluations: list[dict[str, Any]], *, unit: str = "token") -> Figure:
    """Draw training loss, held-out loss and learning rate over the steps.

    Args:
        steps: :meth:`StepLog.training_rows`.
        evaluations: :attr:`StepLog.evaluations`; step 0 is the base model.
        unit: what the losses are divided by, ``token`` or ``row``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    numbers = [row["step"] for row in steps]
    losses = [row[f"loss_nats_per_{unit}"] for row in steps]
    window = max(len(losses) // _WINDOWS, 1)
    axes.plot(numbers, losses, label="training, each step", color="C0", alpha=0.35, linewidth=1)
    means = [statistics.fmean(losses[max(end - window, 0) : end]) for end in range(1, len(losses) + 1)]
    axes.plot(numbers, means, label=f"training, mean of {window} steps", color="C0", linewidth=1.5)
    if evaluations:
        points = [(row["step"], row[f"validation_nats_per_{unit}"]) for row in evaluations]
        axes.plot(*zip(*points, strict=True), marker="o", color="C1", label="held out")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per supervised token)" if unit == "token" else "loss (nats per row)")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    rate = axes.twinx()
    rate.plot(numbers, [row["learning_rate"] for row in steps], color="gray", linestyle=":", linewidth=1)
    rate.set_ylabel("learning rate (dotted)")
    rate.set_ylim(bottom=0)
    return figure
