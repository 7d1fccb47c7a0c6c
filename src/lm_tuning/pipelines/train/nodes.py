"""Nodes of the training pipeline."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lm_tuning.datasets.metric_stream import MetricStream
from lm_tuning.errors import UserError
from lm_tuning.parameters import ModelParameters, TrainParameters
from lm_tuning.progress import show_progress

logger = logging.getLogger(__name__)


def train_model(
    tokenized_examples: Path,
    base_model: dict[str, Any],
    *,
    checkpoints: Path,
    metric_stream: MetricStream,
    train: TrainParameters,
    model: ModelParameters,
    seed: int,
    task: str,
) -> tuple[Path, list[dict[str, Any]], list[dict[str, Any]], dict[str, Any], Any]:
    """Train and return the tuned model's folder, the step log, the efficiency log, the health report and a curve."""
    from lm_tuning.runtime.device import describe_device
    from lm_tuning.runtime.optimizer import describe_optimizer_limit
    from lm_tuning.runtime.precision import choose_precision
    from lm_tuning.storage.folders import read_manifest
    from lm_tuning.text.tokenization import read_token_summary
    from lm_tuning.training.result import draw_loss_curve
    from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training

    device = describe_device()
    precision = choose_precision(device, requested=train.precision, method=train.method, weights_dtype=model.dtype)
    tokens = read_token_summary(tokenized_examples)
    if tokens["task"] != task:
        raise UserError(
            f"The stored tokens in {tokenized_examples} were made for task = {tokens['task']}, and task = {task}: make "
            "them again with kedro run --pipelines=train (the same --env and --params)."
        )
    settings = TrainingSettings(
        base=base_model,
        tokens_key=read_manifest(tokenized_examples)["key"],
        sources=tokens["sources"],
        task=task,  # type: ignore[arg-type]
        label_map=tokens["label_map"],
        weights_dtype=precision.weights,
        compute_dtype=precision.compute,
        device=device.kind,
        attention=model.attention,
        method=train.method,
        lora=train.lora.model_dump(),
        qlora=train.qlora.model_dump(),
        freeze=train.freeze,
        neftune_noise_alpha=train.neftune_noise_alpha,
        label_smoothing=train.label_smoothing,
        class_weights=train.class_weights,
        best_metric=train.best_metric,
        early_stopping_evals=train.early_stopping_evals,
        severities=dict(train.health.severity),
        seed=seed,
        learning_rate=train.learning_rate,
        effective_batch_rows=train.effective_batch_rows,
        effective_batch_tokens=train.effective_batch_tokens,
        num_epochs=train.num_epochs,
        max_steps=train.max_steps,
        micro_batch_tokens=None if train.micro_batch_tokens == "auto" else train.micro_batch_tokens,
        batching=train.batching,
        compile=None if train.compile == "auto" else train.compile,
        activation_checkpointing=None if train.gradient_checkpointing == "auto" else train.gradient_checkpointing,
        memory_fraction=train.memory_fraction,
        num_loader_workers=None if train.num_loader_workers == "auto" else train.num_loader_workers,
        save_every_steps=train.save_every_steps,
        keep_checkpoints=train.keep_checkpoints,
        eval_every_steps=train.eval_every_steps,
        eval_max_rows=train.eval_max_rows,
        load_best=train.load_best,
        resume=train.resume,
        probe_first_step=train.health.probe,
        first_loss_tolerance=train.health.tolerance_fraction,
        first_loss_severity=train.health.on_mismatch,
        trainer=dict(train.trainer),
        run_id=metric_stream.run_id,
    )
    logger.info("Precision: %s", precision.reason)
    if precision.warning:
        logger.warning("%s", precision.warning)
    limit = describe_optimizer_limit(train.trainer.get("optim"), device=device.kind)
    if limit is not None:
        logger.warning("%s", limit)
    try:
        with show_progress() as on_progress:
            result = run_training(
                TrainingPaths(tokens=tokenized_examples, checkpoints=checkpoints),
                settings,
                on_progress=on_progress,
                on_metrics=metric_stream.log,
                on_checkpoint=metric_stream.flush,
            )
    finally:
        metric_stream.close()
    logger.info("%s", describe_result(result.summary))
    curve = draw_loss_curve(result.steps, result.evaluations, unit=result.summary["unit"])
    return result.model_folder, result.steps, result.efficiency, result.health, curve


def describe_result(summary: dict[str, Any]) -> str:
    """Say in one paragraph what the training did and what it cost."""
    if not summary["num_steps"]:
        return "No step was made."
    unit = summary["unit"]
    first, last = summary[f"first_loss_nats_per_{unit}"], summary[f"last_loss_nats_per_{unit}"]
    early = ", ended early" if summary["stopped_early"] else ""
    phases = ["forward", "backward", "optimizer"]
    shares = [f"loader wait {summary['loader_wait_fraction']:.2%}"]
    shares += [f"{phase} {share:.0%}" for phase in phases if (share := summary[f"{phase}_fraction"]) is not None]
    return (
        f"Trained {summary['total_steps']} steps ({summary['epochs']:.2f} epochs{early}): "
        f"loss {first:.4f} -> {last:.4f} nats/{unit}; "
        f"{summary['tokens_per_second']:,.0f} tokens/s{_describe_mfu(summary)}, "
        f"median step {summary['step_seconds_median']:.2f} s "
        f"(90 % within {summary['step_seconds_p90']:.2f} s, 99 % within {summary['step_seconds_p99']:.2f} s), "
        f"padding {summary['padding_fraction']:.1%}; of the step time "
        f"{', '.join(shares)}, "
        f"logging {summary['logging_fraction']:.3%}; health check {summary['health_seconds']:.1f} s, "
        f"peak memory {summary['peak_memory_bytes'] / 2**30:.1f} GiB."
    )


def _describe_mfu(summary: dict[str, Any]) -> str:
    """Compare the speed with that of the device, as far as it is known."""
    parts = []
    if summary["mfu"] is not None:
        peak = _write_rate(summary["known_peak_flops"])
        parts.append(f"{summary['mfu']:.1%} of the {peak} that {summary['device_name']} has at most")
    if summary["mfu_of_measured"] is not None:
        measured = _write_rate(summary["measured_matmul_flops"])
        parts.append(f"{summary['mfu_of_measured']:.1%} of the {measured} of a {summary['number_format']} product")
    return f" ({', '.join(parts)})" if parts else ""


def _write_rate(flops: float) -> str:
    """Write operations a second in the unit that suits them."""
    return f"{flops / 1e12:,.0f} TFLOP/s" if flops >= 1e13 else f"{flops / 1e9:,.0f} GFLOP/s"
