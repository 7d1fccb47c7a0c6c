"""Run a training from stored tokens to a stored model, in one picklable call that needs no Kedro."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from lm_tuning.batching.step_loader import StepDataset, explain_lost_worker
from lm_tuning.models.generation_settings import settings_of_answers
from lm_tuning.models.record import QuantizationRecord, TuningRecord
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.runtime.nvml import CardSampler, find_card
from lm_tuning.runtime.peak import find_ceiling
from lm_tuning.runtime.threads import heap_set_aside, restore_collection
from lm_tuning.text.decoding import supervised_ends
from lm_tuning.training.checkpoints import format as checkpoints
from lm_tuning.training.checkpoints.signals import stop_on_signal
from lm_tuning.training.health.batch_checks import check_rows
from lm_tuning.training.health.first_loss import ExpectedFirstLoss
from lm_tuning.training.health.first_step import measure_first_step
from lm_tuning.training.health.monitor import TrainingMonitor
from lm_tuning.training.health.nonfinite import save_reproduction
from lm_tuning.training.health.pre_checks import check_before_any_row
from lm_tuning.training.health.records import Fact
from lm_tuning.training.health.report import HealthReport, OnHealth, RunState, ignore_health, stop_if_needed
from lm_tuning.training.job import (
    Job,
    LoopSettings,
    check_sources,
    choose_evaluation,
    choose_graphs,
    describe_sources,
    settle,
    training_arguments,
)
from lm_tuning.training.kernels.fast_path import FastPath, prepare_fast_path
from lm_tuning.training.planning.memory import count_memory, log_memory
from lm_tuning.training.planning.out_of_memory import MemoryUse, explain_out_of_memory
from lm_tuning.training.planning.replanning import CompiledPlanner, Replanner
from lm_tuning.training.records import TrainingSummary
from lm_tuning.training.replayed_steps import quick_zero_grad
from lm_tuning.training.results import TrainingResult, save_tuned_model, summarize
from lm_tuning.training.settings import TrainingPaths, TrainingSettings
from lm_tuning.training.setup.adapters import count_parameters
from lm_tuning.training.setup.model import ReadyModel, scale_head, set_up_model
from lm_tuning.training.step_log import OnMetrics, PhaseClock, StepLog, ignore_metrics
from lm_tuning.wording import count_of

if TYPE_CHECKING:
    from lm_tuning.training.trainer import StepPlanTrainer

__all__ = ["TrainingPaths", "TrainingSettings", "run_training"]

logger = logging.getLogger(__name__)


def run_training(
    paths: TrainingPaths,
    settings: TrainingSettings,
    *,
    on_progress: OnProgress = ignore_progress,
    on_metrics: OnMetrics = ignore_metrics,
    on_checkpoint: Callable[[], object] = lambda: None,
    on_health: OnHealth = ignore_health,
) -> TrainingResult:
    """Train a model by the step plan.

    Args:
        paths: tokens to read, folder to keep checkpoints in.
        settings: the parameters, and what was settled for this run.
        on_progress: receives the steps done.
        on_metrics: receives the numbers of each step as training goes on.
        on_checkpoint: called when a checkpoint is complete, to make safe what was received so far.
        on_health: receives the health report when the training begins, with each finding and when it ends, whatever
            ends it; nothing for a resume that is refused.

    Returns:
        The folder of the tuned model (adapter or full weights, with its tokenizer), the rows of the step log and
        the health report.

    Raises:
        UserError: the tokens, model or settings do not fit together, or the health check stopped the run.
        Interrupted: a signal asked to stop; a checkpoint was written before.
    """
    health = HealthReport(
        severities=settings.train.health.severity, run=RunState(mlflow_run_id=settings.run_id), on_change=on_health
    )
    if torch.cuda.memory_allocated():  # 0 without a card, and before one is used
        gc.collect()  # an earlier model, as in a notebook, would stay as long as this training
    with health.closing(), heap_set_aside():
        result = _train_job(
            paths, settings, health, on_progress=on_progress, on_metrics=on_metrics, on_checkpoint=on_checkpoint
        )
        gc.collect()  # the Trainer and its callbacks hold each other, and with them the model
    return replace(result, health=health.to_json())


@dataclass
class _Run:
    """What one training is made of, once its model is there.

    Attributes:
        job: what was settled before.
        ready: model and task.
        fast: what makes the steps fast.
        steps: one item per optimizer step.
        memory: what is asked of the memory, kept up to date.
        health: collects facts and findings.
    """

    job: Job
    ready: ReadyModel
    fast: FastPath
    steps: StepDataset
    memory: MemoryUse
    health: HealthReport


def _train_job(
    paths: TrainingPaths,
    settings: TrainingSettings,
    health: HealthReport,
    *,
    on_progress: OnProgress,
    on_metrics: OnMetrics,
    on_checkpoint: Callable[[], object],
) -> TrainingResult:
    """Settle the job, load and check the model, train, and store the result."""
    began = time.perf_counter()
    job = settle(paths, settings, health, on_progress)
    checkpoint, memory = job.checkpoint, job.describe_memory()
    with explain_out_of_memory(memory):
        ceiling = find_ceiling(settings.device, settings.compute_dtype)  # before the model takes the memory
        ready = set_up_model(settings)
        check_before_any_row(health, ready, settings, rows=job.train_rows, plan=job.plan, tokens=paths.tokens)
        fast = prepare_fast_path(
            ready,
            settings,
            job.train_rows,
            job.plan,
            held_out_rows=None if settings.train.eval_every_steps is None else job.validation_rows,
            tokens_per_second=job.batch_plan.tokens_per_second,
        )
        steps = StepDataset(
            job.train_rows,
            job.plan,
            ready.task,
            micro_batch_tokens=job.batch_plan.micro_batch_tokens,
            batching=fast.batching,
        )
        run = _Run(job, ready, fast, steps, memory, health)
        _log_what_is_trained(run)
        parts = count_memory(ready.model, settings, job.batch_plan)
        log_memory(parts.table(job.batch_plan))
        health.facts["fast_path"] = fast.facts
        check_sources(health, job.plan, settings)
        memory.doing = "before step 1"
        first_loss = None if checkpoint is not None else _check_first_step(run)
        # Not before all checks have passed: a refused run leaves no empty folder.
        run_folder = checkpoint.path.parent if checkpoint else checkpoints.new_run_folder(paths.checkpoints)
        memory.run_folder = run_folder
        monitor = _set_up_monitor(run, run_folder)
        log = StepLog(
            on_metrics,
            unit=ready.task.unit,
            on_step=monitor.step,
            phases=PhaseClock(settings.device),
            card=CardSampler(find_card(settings.device)),
        )
        with stop_on_signal() as stop:
            # Importing it takes seconds, which a run that was refused before should not wait for.
            from lm_tuning.training.trainer import StepPlanTrainer

            compiled_planner = _plan_compiled(run)
            trainer = StepPlanTrainer(
                model=ready.model,
                args=training_arguments(job, run_folder),
                steps=steps,
                loop=LoopSettings(
                    job=job,
                    run_folder=run_folder,
                    evaluate=choose_evaluation(ready.model, job.validation_rows, steps, settings, fast),
                    best_metric=_name_best_metric(run),
                    first_loss=first_loss,
                    memory=memory,
                    replanner=Replanner(steps, memory, health, may_lower=job.may_split_again),
                    layers=fast.layers,
                    fp8=fast.fp8,
                    graphs=choose_graphs(job, ready, fast, health),
                    compiled_planner=compiled_planner,
                    on_checkpoint=on_checkpoint,
                ),
                log=log,
                health=health,
                stop=stop,
                on_progress=on_progress,
            )
            # Garbage collection was rare while packages loaded; from here on a cycle may hold tensors, and should be
            # freed soon.
            restore_collection()
            trainer.run_began = began
            if checkpoint is not None:
                trainer.continue_from(checkpoint)
                monitor.replay(log.steps)
                health.tell()  # with the earlier findings
            with log.card:
                seconds = _train(trainer, checkpoint)
            if trainer.loop.graphs is not None:
                trainer.loop.graphs.close()
    log.flush()
    monitor.finish()
    fast.undo(ready.model)
    finished_step = trainer.state.global_step or job.plan.total_steps
    _take_best(trainer, settings, finished_step)
    health.facts["sources"] = cast("Fact", describe_sources(job.plan, settings))
    summary = summarize(
        trainer,
        ready.model,
        finished_step=finished_step,
        seconds=seconds,
        total_seconds=time.perf_counter() - began,
        # A run that was finished before has its speed from then; what a product takes now says nothing of it.
        ceiling=ceiling if seconds else replace(ceiling, measured_flops=None),
    )
    return TrainingResult(
        model_folder=save_tuned_model(
            trainer.accelerator.unwrap_model(trainer.model),
            ready.tokenizer,
            run_folder / "finished",
            facts=_describe_tuning(run, summary, run_folder),
            generation=_settings_of_answers(job, ready),
            label_map=settings.label_map,
        ),
        steps=log.training_rows(),
        evaluations=log.evaluations,
        efficiency=log.efficiency,
        health=health.to_json(),
        summary=summary,
        batch_plan=parts.complete(compiled_planner.plan if compiled_planner is not None else job.batch_plan),
    )


def _describe_tuning(run: _Run, summary: TrainingSummary, run_folder: Path) -> TuningRecord:
    """Return what a tuned model's folder says of how it was made."""
    settings = run.job.settings
    train = settings.train
    return {
        "method": train.method,
        "task": settings.task,
        "quantization": cast("QuantizationRecord", train.qlora.model_dump()) if train.method == "qlora" else None,
        "base": settings.base,
        "tokens_key": settings.tokens_key,
        "rendering": settings.rendering,
        "compute_dtype": settings.compute_dtype,
        "finished_step": summary["total_steps"],
        "tokens_per_second": summary["tokens_per_second"],
        "samples_per_second": summary["samples_per_second"],
        "steps_per_second": summary["steps_per_second"],
        "run_folder": str(run_folder),
        "mlflow_run_id": settings.run_id,
    }


def _settings_of_answers(job: Job, ready: ReadyModel) -> Any:
    """Return how the tuned model is to generate, as its rows end; ``None`` for a classifier."""
    if job.settings.task == "sequence_classification":
        return None
    ends = supervised_ends(job.train_rows, ready.tokenizer)
    return settings_of_answers(
        ready.model,
        ready.tokenizer,
        supervised_stop_ids=ends.stop_ids,
        first_id=ends.first_id,
        pad_id=int(ready.tokenizer.pad_token_id),
        generation=job.settings.generation,
    )


def _log_what_is_trained(run: _Run) -> None:
    job, settings = run.job, run.job.settings
    trainable, parameters = count_parameters(run.ready.model)
    logger.info(
        "%s of %s: %s, %s (%d per epoch) of %s, %s micro-batches of at most %s; "
        "%s of %s parameters trained; %s weights, %s compute on %s",
        {"lora": "LoRA", "qlora": "QLoRA", "full": "Full fine-tuning"}[settings.train.method],
        settings.base["name_or_path"],
        count_of(job.plan.num_rows, "row"),
        count_of(job.plan.total_steps, "step"),
        job.plan.steps_per_epoch,
        job.identity.describe_batch(),
        run.steps.batching,
        count_of(run.steps.micro_batch_tokens, "token"),
        f"{trainable:,}",
        f"{parameters:,}",
        settings.weights_dtype,
        settings.compute_dtype,
        settings.device,
    )
    if job.batch_plan.gradient_checkpointing:
        logger.info("Gradient checkpointing is on, which takes less memory and more time.")


def _check_first_step(run: _Run) -> ExpectedFirstLoss | None:
    """Scale a fresh head, and look at the first rows before step 1; return what that step must log."""
    ready, settings, health = run.ready, run.job.settings, run.health
    check_rows(health, ready.model, ready.tokenizer, run.steps)
    stop_if_needed(health)
    if ready.has_fresh_head:
        scale_head(ready, run.steps, settings, health)
    if not settings.train.health.probe:
        return None
    return measure_first_step(health, ready, run.steps, settings, run.job.shape)


def _plan_compiled(run: _Run) -> CompiledPlanner | None:
    """Look for larger micro-batches once layers are compiled, where their size is ours to choose and was measured."""
    job = run.job
    if run.fast.layers is None or not job.may_split_again or job.settings.device != "cuda":
        return None
    return CompiledPlanner(run.ready, job.settings, run.steps, run.memory, run.health, job.batch_plan)


def _name_best_metric(run: _Run) -> str:
    """Name the held-out figure that the best checkpoint has the best of."""
    metric = run.job.settings.train.best_metric
    return f"nats_per_{run.ready.task.unit}" if metric == "loss" else metric


def _set_up_monitor(run: _Run, run_folder: Path) -> TrainingMonitor:
    settings, steps = run.job.settings, run.steps
    return TrainingMonitor(
        run.health,
        total_steps=run.job.plan.total_steps,
        max_grad_norm=settings.train.trainer.get("max_grad_norm", 1.0),
        learning_rate=settings.train.learning_rate,
        device=settings.device,
        card_uuid=find_card(settings.device),
        has_scaler=settings.compute_dtype == "float16",
        reproduce=lambda step: save_reproduction(run_folder / "not_finite", step, steps[step - 1], seed=settings.seed),
    )


def _take_best(trainer: StepPlanTrainer, settings: TrainingSettings, finished_step: int) -> None:
    """Load the weights of the best checkpoint where they are wanted and are not the last ones."""
    best = trainer.best
    if settings.train.load_best and best.step not in (0, finished_step):
        trainer._load_from_checkpoint(str(trainer.loop.run_folder / f"checkpoint-{best.step}"))
        logger.info("Took the weights of step %d, which have the best %s.", best.step, best.metric)


def _train(trainer: StepPlanTrainer, checkpoint: checkpoints.Checkpoint | None) -> float:
    """Run the loop; return the seconds it took, 0 when the checkpoint was the last step already."""
    if checkpoint is not None:
        logger.info("Going on from %s, step %d of %d.", checkpoint.path, checkpoint.step, len(trainer.steps))
    trainer.step_log.start()
    trainer.began = time.perf_counter()
    if checkpoint is not None and (checkpoint.step >= len(trainer.steps) or trainer.is_stopped_early()):
        logger.info("%s, all done before: the checkpoint has the model.", count_of(checkpoint.step, "step"))
        trainer._load_from_checkpoint(str(checkpoint.path))
        trainer.state.global_step = checkpoint.step
        trainer.make_up_for_evaluation()
        return 0.0
    if checkpoint is None and trainer.loop.eval_every_steps is not None:
        trainer.run_evaluation(0)
        trainer.step_log.start()
        trainer.began = time.perf_counter()
    trainer.on_progress("Training", trainer.start_step, len(trainer.steps), "steps")
    with explain_lost_worker(lambda: _describe_state(trainer), num_workers=trainer.num_loader_workers):
        try:
            with quick_zero_grad(trainer.model):
                trainer.train(resume_from_checkpoint=str(checkpoint.path) if checkpoint else None)
        finally:
            trainer.close_loader()
    return time.perf_counter() - trainer.began


def _describe_state(trainer: StepPlanTrainer) -> str:
    """Describe how far a training has come and how to go on, after a fault."""
    done = count_of(trainer.state.global_step, "step")
    return f"{done} of {len(trainer.steps)} were done. {checkpoints.describe_way_on(trainer.loop.run_folder)}"
