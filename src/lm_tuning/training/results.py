"""What a training leaves behind: a model folder, the step log, a summary and a picture of the loss."""

from __future__ import annotations

import json
import logging
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_tuning.models.generation_settings import complete_adapter_config, write_card
from lm_tuning.models.loading import transformers_bars_off
from lm_tuning.storage.atomic import sync_folder
from lm_tuning.storage.write_failures import close_files_of, explain_full_disk
from lm_tuning.training.checkpoints import format as checkpoints
from lm_tuning.training.health.records import HealthRecord
from lm_tuning.training.setup.adapters import save_adapter
from lm_tuning.training.step_log import PHASES
from lm_tuning.wording import count_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lm_tuning.batching.step_plan import StepPlan
    from lm_tuning.runtime.peak import Ceiling
    from lm_tuning.training.planning.plan import BatchPlan
    from lm_tuning.training.step_log import StepLog

logger = logging.getLogger(__name__)

_WARM_STEPS = 2
_WINDOWS = 10
_EFFICIENCY = (
    "tokens_per_second",
    "samples_per_second",
    "steps_per_second",
    "step_seconds_p10",
    "step_seconds_median",
    "step_seconds_p90",
    "step_seconds_p99",
    "padding_fraction",
    "loader_wait_fraction",
    *(f"{phase}_fraction" for phase in PHASES),
    "logging_fraction",
    "health_fraction",
    "peak_memory_bytes",
    "gpu_utilization_fraction",
    "gpu_power_watts",
    "gpu_memory_used_bytes",
    "gpu_memory_total_bytes",
    "model_flops_per_token",
    "model_flops_per_second",
    "device_name",
    "number_format",
    "known_peak_flops",
    "measured_matmul_flops",
    "mfu",
    "mfu_of_measured",
    "training_seconds",
    "health_seconds",
    "first_look_seconds",
    "total_seconds",
)


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
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    efficiency: list[dict[str, Any]]
    health: HealthRecord
    summary: dict[str, Any]
    batch_plan: BatchPlan


def save_tuned_model(
    model: Any,
    tokenizer: Any,
    folder: Path,
    *,
    facts: dict[str, Any],
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
    model.config.use_cache = True
    if label_map is not None:
        model.config.id2label = {position: name for name, position in label_map.items()}
        model.config.label2id = dict(label_map)
    run_folder = folder.parent
    with explain_full_disk(
        folder,
        what="the tuned model",
        wanted_bytes=lambda: sum(
            weight.numel() * weight.element_size()
            for weight in model.parameters()
            if weight.requires_grad or not hasattr(model, "peft_config")
        ),
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
        if folder.exists():
            shutil.rmtree(folder)
        staging.rename(folder)
    return folder


def _write_model(
    model: Any,
    tokenizer: Any,
    staging: Path,
    *,
    facts: dict[str, Any],
    generation: Any,
    label_map: dict[str, int] | None,
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
    log: StepLog,
    *,
    plan: StepPlan,
    finished_step: int,
    settings_method: str,
    training_seconds: float,
    total_seconds: float,
    health_seconds: float,
    pre_check_seconds: float,
    trainable_parameters: int,
    best_step: int | None,
    sources: list[dict[str, Any]],
    model_flops_per_token: float | None = None,
    ceiling: Ceiling | None = None,
) -> dict[str, Any]:
    """Gather the figures of a run.

    Args:
        log: of all steps, those before a resume included.
        plan: which rows form them.
        finished_step: the last step; before the plan's last one if the training stopped early.
        settings_method: ``full``, ``lora`` or ``qlora``.
        training_seconds: of this run's loop, with those before a resume.
        total_seconds: of the whole training, loading and checks included, with those before a resume.
        health_seconds: of all health checks, with those before a resume.
        pre_check_seconds: of them, those up to the end of step 1, which a longer run does not have more of. The share
            of the checks in the training's time leaves them out.
        trainable_parameters: how many numbers were trained.
        best_step: step of the best held-out figure; ``None`` without one.
        sources: what :meth:`SourceMix.describe` says.
        model_flops_per_token: see :func:`lm_tuning.training.profile.flops.flops_per_token`; ``None`` when it
            cannot be counted.
        ceiling: how fast the device can be; ``None`` when it was not asked.
    """
    return {
        "method": settings_method,
        "num_steps": len(log.steps),
        "total_steps": finished_step,
        "epochs": plan.epoch_at(finished_step),
        "stopped_early": finished_step < plan.total_steps,
        "unit": log.unit,
        f"first_{log.loss_name}": log.steps[0][log.loss_name] if log.steps else None,
        f"last_{log.loss_name}": log.steps[-1][log.loss_name] if log.steps else None,
        **summarize_efficiency(log, model_flops_per_token=model_flops_per_token, ceiling=ceiling),
        "logging_fraction": _fraction(log.own_seconds + log.phases.own_seconds, training_seconds),
        "health_fraction": _fraction(health_seconds - pre_check_seconds, training_seconds),
        "training_seconds": training_seconds,
        "health_seconds": health_seconds,
        "first_look_seconds": pre_check_seconds,
        "total_seconds": total_seconds,
        "trainable_parameters": trainable_parameters,
        "best_step": best_step,
        "sources": sources,
    }


def summarize_efficiency(
    log: StepLog, *, model_flops_per_token: float | None = None, ceiling: Ceiling | None = None
) -> dict[str, Any]:
    """Describe how fast a training was, where its time went, and how near it came to what the device can do.

    All is taken over the steps' own time, evaluation and checkpoints left out, without the first steps when there are
    enough (they carry one-time set-up). A sample is a row. What remains of 1 when the four fractions are taken off is
    the host's work between steps, and on a GPU the time in which it had nothing queued.

    Args:
        log: of all steps.
        model_flops_per_token: floating-point operations that a real token takes; ``None`` when not known.
        ceiling: how fast the device can be; ``None`` when not known.

    Returns:
        Figures by name; ``None`` for each one that could not be had. Those that a card's driver tells, whose names
        begin with ``gpu``, are there only with one.
    """
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
        "step_seconds_median": statistics.median(durations) if rows else None,
        "step_seconds_p90": _quantile(durations, 0.90),
        "step_seconds_p99": _quantile(durations, 0.99),
        "padding_fraction": _padding_fraction(log.efficiency),
        "loader_wait_fraction": _fraction(sum(row["loader_wait_seconds"] for row in rows), seconds),
        **{f"{phase}_fraction": _phase_fraction(rows, phase) for phase in PHASES},
        "peak_memory_bytes": max((row["peak_memory_bytes"] for row in log.efficiency), default=None),
        **log.card.summary(),
        "model_flops_per_token": model_flops_per_token,
        "model_flops_per_second": attained,
        "device_name": None if ceiling is None else ceiling.device,
        "number_format": None if ceiling is None else ceiling.dtype,
        "known_peak_flops": known,
        "measured_matmul_flops": measured,
        "mfu": attained / known if attained is not None and known else None,
        "mfu_of_measured": attained / measured if attained is not None and measured else None,
    }


def efficiency_figures(summary: dict[str, Any]) -> dict[str, Any]:
    """Return what a summary says of efficiency, for a file and for tracking.

    Args:
        summary: see :func:`summarize`.
    """
    return {"efficiency": {name: summary[name] for name in _EFFICIENCY if name in summary}}


def _fraction(part: float, whole: float) -> float | None:
    """Divide; ``None`` by nothing."""
    return part / whole if whole else None


def _quantile(values: list[float], fraction: float) -> float | None:
    """Return the value that this share of the values is at or below, between neighbours by a straight line."""
    return float(np.quantile(values, fraction)) if values else None


def _padding_fraction(rows: list[dict[str, Any]]) -> float | None:
    """Return the share of all computed positions that held no token."""
    positions = sum(row["num_tokens"] / (1 - row["padding_fraction"]) for row in rows)
    return 1 - sum(row["num_tokens"] for row in rows) / positions if positions else None


def _phase_fraction(rows: list[dict[str, Any]], phase: str) -> float | None:
    """Return a phase's share of the time of the steps that it was measured in; those before an older resume lack it."""
    timed = [row for row in rows if row.get(f"{phase}_seconds") is not None]
    seconds = sum(row["seconds"] for row in timed)
    return sum(row[f"{phase}_seconds"] for row in timed) / seconds if seconds else None


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
    axes.plot(numbers, means, label=f"training, mean of {count_of(window, 'step')}", color="C0", linewidth=1.5)
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
