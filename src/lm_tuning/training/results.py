"""What a training leaves behind: a model folder, the step log, a summary and a picture of the loss."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from lm_tuning.models.generation_settings import complete_adapter_config, write_card
from lm_tuning.models.hub import transformers_bars_off
from lm_tuning.models.record import TuningRecord
from lm_tuning.storage.atomic import sync_folder
from lm_tuning.storage.write_failures import close_files_of, explain_full_disk
from lm_tuning.training.checkpoints import format as checkpoints
from lm_tuning.training.health.records import HealthRecord
from lm_tuning.training.job import describe_sources
from lm_tuning.training.planning.plan import BatchPlan
from lm_tuning.training.profile.flops import count_flops, flops_per_token
from lm_tuning.training.records import (
    EfficiencyFigures,
    EfficiencyRow,
    EvaluationRow,
    SpeedFigures,
    TrainingRow,
    TrainingSummary,
)
from lm_tuning.training.setup.adapters import count_parameters, save_adapter, stored_parameters
from lm_tuning.wording import count_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lm_tuning.runtime.peak import Ceiling
    from lm_tuning.training.step_log import StepLog
    from lm_tuning.training.trainer import StepPlanTrainer

logger = logging.getLogger(__name__)

PhaseColumn: TypeAlias = Literal["forward_seconds", "backward_seconds", "optimizer_seconds"]

_WARM_STEPS = 2
_WINDOWS = 10


@dataclass(frozen=True)
class TrainingResult:
    """What :func:`lm_tuning.training.run.run_training` returns.

    Attributes:
        model_folder: adapter or full weights, tokenizer and ``tuning.json``.
        steps: one row per step: loss, gradient norm, learning rate.
        evaluations: one row an evaluation while training; step 0 is the base model.
        efficiency: one row per step: seconds, tokens, padding, memory.
        health: facts and findings.
        summary: figures of the whole run.
        batch_plan: how steps are split, and why.
    """

    model_folder: Path
    steps: list[TrainingRow]
    evaluations: list[EvaluationRow]
    efficiency: list[EfficiencyRow]
    health: HealthRecord
    summary: TrainingSummary
    batch_plan: BatchPlan


def save_tuned_model(
    model: Any,
    tokenizer: Any,
    folder: Path,
    *,
    facts: TuningRecord,
    generation: Any = None,
    label_map: dict[str, int] | None = None,
) -> Path:
    """Write adapter or full weights with their tokenizer and how to use them; the folder appears whole.

    Args:
        model: a PEFT model, of which the adapter is written, or a full model.
        tokenizer: the model's.
        folder: where to; an older one is replaced.
        facts: written as ``tuning.json``.
        generation: the ``GenerationConfig`` that the model is evaluated with; ``None`` for a model without answers.
        label_map: id of each class by its name, written as ``label_map.json`` and into the config of a full model.

    Raises:
        UserError: the disk is full, or takes no files for another reason.
    """
    # It was off while training; whoever loads the model generates with it.
    model.config.use_cache = True
    if label_map is not None:
        # Without it a config names its classes LABEL_0, LABEL_1, …
        model.config.id2label = {position: name for name, position in label_map.items()}
        model.config.label2id = dict(label_map)
    run_folder = folder.parent
    with explain_full_disk(
        folder,
        what="the tuned model",
        wanted_bytes=lambda: sum(parameter.nbytes for parameter in stored_parameters(model)),
        go_on=lambda: f"All steps were trained. {checkpoints.describe_way_on(run_folder)}",
    ):
        staging = folder.with_name(f".{folder.name}-writing")
        shutil.rmtree(staging, ignore_errors=True)
        try:
            _write_model(model, tokenizer, staging, facts=facts, generation=generation, label_map=label_map)
            sync_folder(staging)
        except BaseException as error:
            close_files_of(error)
            shutil.rmtree(staging, ignore_errors=True)
            raise
        # A folder cannot be renamed onto one that is not empty.
        if folder.exists():
            shutil.rmtree(folder)
        staging.rename(folder)
    return folder


def _write_model(
    model: Any, tokenizer: Any, staging: Path, *, facts: TuningRecord, generation: Any, label_map: dict[str, int] | None
) -> None:
    """Write the files of :func:`save_tuned_model`."""
    with transformers_bars_off():
        if hasattr(model, "peft_config"):
            save_adapter(model, staging)
            complete_adapter_config(staging, facts["base"])
        else:
            model.save_pretrained(staging)
        if generation is not None:
            generation.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    write_card(staging, facts, label_map=label_map, pad_id=int(tokenizer.pad_token_id))
    if generation is not None:
        facts = {**facts, "stop_token_ids": generation.eos_token_id}
    (staging / "tuning.json").write_text(json.dumps(facts, indent=2))
    if label_map is not None:
        (staging / "label_map.json").write_text(json.dumps(label_map, indent=2, ensure_ascii=False), encoding="utf-8")


def summarize(
    trainer: StepPlanTrainer, model: Any, *, finished_step: int, seconds: float, total_seconds: float, ceiling: Ceiling
) -> TrainingSummary:
    """Gather the figures of a run, with the times from before a resume.

    Args:
        trainer: that has run.
        model: what it trained.
        finished_step: the last step; before the plan's last one if the training stopped early.
        seconds: of this run's loop.
        total_seconds: of this run, loading and checks included.
        ceiling: how fast the device can be.
    """
    job, log, health = trainer.loop.job, trainer.step_log, trainer.health
    training_seconds = trainer.seconds_before + seconds
    checked_before = health.pre_check_seconds
    losses = [row[log.loss_name] for row in log.steps]
    flops = flops_per_token(
        count_flops(model, task=job.settings.task), job.train_rows, job.plan, num_steps=finished_step
    )
    return {
        "method": job.settings.train.method,
        "num_steps": len(log.steps),
        "total_steps": finished_step,
        "epochs": job.plan.epoch_at(finished_step),
        "stopped_early": finished_step < job.plan.total_steps,
        "unit": log.unit,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        **summarize_efficiency(log, model_flops_per_token=flops, ceiling=ceiling),
        "logging_fraction": _fraction(log.own_seconds + log.phases.own_seconds, training_seconds),
        # Without the checks up to the end of step 1, which a longer run does not have more of.
        "health_fraction": _fraction(health.seconds - checked_before, training_seconds),
        "training_seconds": training_seconds,
        "health_seconds": health.seconds,
        "first_look_seconds": checked_before,
        "total_seconds": trainer.total_seconds_before + total_seconds,
        "trainable_parameters": count_parameters(model)[0],
        "best_step": trainer.best.step or None,
        "sources": describe_sources(job.plan, job.settings),
    }


def summarize_efficiency(
    log: StepLog, *, model_flops_per_token: float | None = None, ceiling: Ceiling | None = None
) -> SpeedFigures:
    """Describe how fast a training was, where its time went, and how near it came to what the device can do.

    All is taken over the steps' own time, evaluation and checkpoints left out. A sample is a row. What remains of 1
    when the four fractions are taken off is the host's work between steps, and on a GPU the time in which it had
    nothing queued.

    Args:
        log: of all steps.
        model_flops_per_token: floating-point operations that a real token takes, see
            :func:`lm_tuning.training.profile.flops.flops_per_token`; ``None`` when not known.
        ceiling: how fast the device can be; ``None`` when not known.
    """
    # The first steps carry one-time set-up; a short run has no others.
    rows = log.efficiency[_WARM_STEPS:] if len(log.efficiency) > 2 * _WARM_STEPS else log.efficiency
    durations = [row["seconds"] for row in rows]
    seconds = sum(durations)
    speed = _fraction(sum(row["num_tokens"] for row in rows), seconds)
    known = None if ceiling is None else ceiling.known_flops
    measured = None if ceiling is None else ceiling.measured_flops
    attained = None if speed is None or model_flops_per_token is None else speed * model_flops_per_token
    if measured is not None and attained is not None and attained > measured:
        logger.info(
            "The training did %.3g operations per second, the matrix product measured before it only %.3g: something "
            "else held the device then, so no share of that product is given.",
            attained,
            measured,
        )
        measured = None
    return {
        "tokens_per_second": speed,
        "samples_per_second": _fraction(sum(row["num_rows"] for row in rows), seconds),
        "steps_per_second": _fraction(len(rows), seconds),
        "step_seconds_p10": _quantile(durations, 0.10),
        "step_seconds_median": _quantile(durations, 0.50),
        "step_seconds_p90": _quantile(durations, 0.90),
        "step_seconds_p99": _quantile(durations, 0.99),
        "padding_fraction": _padding_fraction(log.efficiency),
        "loader_wait_fraction": _fraction(sum(row["loader_wait_seconds"] for row in rows), seconds),
        "forward_fraction": _phase_fraction(rows, "forward_seconds"),
        "backward_fraction": _phase_fraction(rows, "backward_seconds"),
        "optimizer_fraction": _phase_fraction(rows, "optimizer_seconds"),
        "peak_memory_bytes": max((row["peak_memory_bytes"] for row in log.efficiency), default=None),
        **log.card.summary(),
        "model_flops_per_token": model_flops_per_token,
        "model_flops_per_second": attained,
        "device_name": None if ceiling is None else ceiling.device,
        "number_format": None if ceiling is None else ceiling.dtype,
        "known_peak_flops": known,
        "measured_matmul_flops": measured,
        "mfu": _fraction(attained, known),
        "mfu_of_measured": _fraction(attained, measured),
    }


def efficiency_figures(summary: TrainingSummary) -> dict[str, EfficiencyFigures]:
    """Return what a summary says of efficiency, for a file and for tracking.

    Args:
        summary: of a :class:`TrainingResult`.
    """
    known = dict(summary)
    # A class of typed keys names those that it inherits too, in the order of their declaration.
    figures = {name: known[name] for name in EfficiencyFigures.__annotations__ if name in known}
    return {"efficiency": cast("EfficiencyFigures", figures)}


def _fraction(part: float | None, whole: float | None) -> float | None:
    """Return the part of the whole; ``None`` of nothing, and where one of them is not known."""
    return part / whole if part is not None and whole else None


def _quantile(values: list[float], fraction: float) -> float | None:
    """Return the value that this share of the values is at or below, between neighbours by a straight line."""
    return float(np.quantile(values, fraction)) if values else None


def _padding_fraction(rows: list[EfficiencyRow]) -> float | None:
    """Return the share of all computed positions that held no token."""
    # Not the mean of the steps' fractions: large steps have more positions than small ones.
    positions = sum(row["num_tokens"] / (1 - row["padding_fraction"]) for row in rows)
    return 1 - sum(row["num_tokens"] for row in rows) / positions if positions else None


def _phase_fraction(rows: list[EfficiencyRow], phase: PhaseColumn) -> float | None:
    """Return a phase's share of the time of the steps that were marked; those before an older resume are not.

    A replayed step has no backward pass of its own: that is a part of its forward pass.
    """
    timed = [row for row in rows if row.get("forward_seconds") is not None]
    return _fraction(sum(row.get(phase) or 0.0 for row in timed), sum(row["seconds"] for row in timed))


def draw_loss_curve(steps: list[TrainingRow], evaluations: list[EvaluationRow], *, unit: str = "token") -> Figure:
    """Draw training loss, held-out loss and learning rate over the steps.

    Args:
        steps: :meth:`StepLog.training_rows`.
        evaluations: :attr:`StepLog.evaluations`; step 0 is the base model.
        unit: what the losses are divided by, ``token`` or ``row``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()

    def column(name: str) -> npt.NDArray[np.float64]:
        return np.array([row[name] for row in steps], dtype=np.float64)  # (steps,)

    numbers, losses = column("step"), column(f"loss_nats_per_{unit}")
    window = max(len(losses) // _WINDOWS, 1)
    axes.plot(numbers, losses, label="training, each step", color="C0", alpha=0.35, linewidth=1)
    # Over the steps up to each one, so that the line is as long as the losses and needs nothing from ahead.
    means = [losses[max(end - window, 0) : end].mean() for end in range(1, len(losses) + 1)]
    axes.plot(numbers, means, label=f"training, mean of {count_of(window, 'step')}", color="C0", linewidth=1.5)
    if evaluations:
        points = [(row["step"], row[f"validation_nats_per_{unit}"]) for row in evaluations]
        axes.plot(*zip(*points, strict=True), marker="o", color="C1", label="held out")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per supervised token)" if unit == "token" else "loss (nats per row)")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    rate = axes.twinx()
    rate.plot(numbers, column("learning_rate"), color="gray", linestyle=":", linewidth=1)
    rate.set_ylabel("learning rate (dotted)")
    rate.set_ylim(bottom=0)
    return figure
