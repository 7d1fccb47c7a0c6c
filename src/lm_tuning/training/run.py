"""Run a training from stored tokens to a stored model, in one picklable call that needs no Kedro."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_tuning.errors import UserError
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.runtime.collection import restore_collection
from lm_tuning.text.token_table import TokenTable, open_split
from lm_tuning.training import checkpoints
from lm_tuning.training.adapters import add_lora, check_targets, count_parameters
from lm_tuning.training.batches import StepDataset
from lm_tuning.training.cutting import choose_batching, choose_micro_batch_tokens
from lm_tuning.training.first_look import look_before_training
from lm_tuning.training.health import Finding, HealthReport
from lm_tuning.training.interruption import stop_on_signal
from lm_tuning.training.losses import keeps_logits
from lm_tuning.training.precision_context import autocast
from lm_tuning.training.result import TrainingResult, save_tuned_model, summarize
from lm_tuning.training.settings import TrainingPaths, TrainingSettings
from lm_tuning.training.step_log import OnMetrics, StepLog, ignore_metrics
from lm_tuning.training.step_plan import StepPlan

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
) -> TrainingResult:
    """Train a causal language model by the step plan.

    Args:
        paths: tokens to read, folder to keep checkpoints in.
        settings: everything that decides the training.
        on_progress: receives the steps done.
        on_metrics: receives the numbers of each step as training goes on.
        on_checkpoint: called when a checkpoint is complete, to make safe what was received so far.

    Returns:
        The folder of the tuned model (adapter or full weights, with its tokenizer), the rows of the step log and
        the health report.

    Raises:
        UserError: the tokens, model or settings do not fit together, or the health check stopped the run.
        Interrupted: a signal asked to stop; a checkpoint was written before.
    """
    from lm_tuning.models.loading import build_skeleton, load_model, load_tokenizer

    began = time.perf_counter()
    train_rows = open_split(paths.tokens, "train")
    validation_rows = open_split(paths.tokens, "validation")
    plan = StepPlan(
        train_rows.lengths,
        seed=settings.seed,
        effective_batch_rows=settings.effective_batch_rows,
        effective_batch_tokens=settings.effective_batch_tokens,
        num_epochs=settings.num_epochs,
        max_steps=settings.max_steps,
        sources=train_rows.sources,
        weights=[float(source["weight"]) for source in settings.sources] or None,
    )
    _check_schedule(settings, plan, validation_rows)
    identity = _identity(settings, plan)
    checkpoint = _find_checkpoint(paths, settings, identity, plan)

    base = settings.base
    batching = choose_batching(settings.batching, device=settings.device, attention=settings.attention)
    hub: dict[str, Any] = {"revision": base.get("revision"), "trust_remote_code": bool(base.get("trust_remote_code"))}
    if settings.method == "lora" and settings.lora["target_modules"] != "all-linear":
        # A mistyped name should not cost the time that loading the weights takes.
        check_targets(build_skeleton(base["name_or_path"], **hub), settings.lora["target_modules"])
    # Importing it takes seconds, which a run that is refused above should not wait for.
    from transformers import set_seed

    from lm_tuning.training.trainer import LoopSettings, StepPlanTrainer

    tokenizer = load_tokenizer(base["name_or_path"], **hub)
    set_seed(settings.seed)
    model = load_model(
        base["name_or_path"],
        dtype=settings.weights_dtype,
        attention=settings.attention,
        device=settings.device,
        pad_token_id=tokenizer.pad_token_id,
        **hub,
    )
    if settings.method == "lora":
        model = add_lora(model, **settings.lora)
    model.config.use_cache = False
    steps = StepDataset(
        train_rows,
        plan,
        micro_batch_tokens=choose_micro_batch_tokens(settings.micro_batch_tokens, device=settings.device),
        batching=batching,
        pad_id=tokenizer.pad_token_id,
    )
    trainable, parameters = count_parameters(model)
    logger.info(
        "%s of %s: %d rows, %d steps (%d an epoch) of %s, %s micro-batches of at most %d tokens; "
        "%s of %s parameters trained; %s weights, %s compute on %s",
        "LoRA" if settings.method == "lora" else "Full fine-tuning",
        base["name_or_path"],
        plan.num_rows,
        plan.total_steps,
        plan.steps_per_epoch,
        identity.effective_batch,
        batching,
        steps.micro_batch_tokens,
        f"{trainable:,}",
        f"{parameters:,}",
        settings.weights_dtype,
        settings.compute_dtype,
        settings.device,
    )
    health = HealthReport()
    _say_sources(health, plan, settings)
    first_loss = None
    if checkpoint is None and settings.probe_first_step:
        first_loss = look_before_training(
            health,
            model,
            tokenizer,
            steps,
            device=settings.device,
            compute_dtype=settings.compute_dtype,
            weights_dtype=settings.weights_dtype,
            tolerance=settings.first_loss_tolerance,
            severity=settings.first_loss_severity,
        )
    restore_collection()
    # Not before all checks have passed: a refused run leaves no empty folder.
    run_folder = checkpoint.path.parent if checkpoint else checkpoints.new_run_folder(paths.checkpoints)
    log = StepLog(on_metrics)
    with stop_on_signal() as stop:
        trainer = StepPlanTrainer(
            model=model,
            args=_training_arguments(settings, plan, run_folder),
            steps=steps,
            loop=LoopSettings(
                run_folder=run_folder,
                identity=identity,
                run_id=settings.run_id,
                select_logits=keeps_logits(model),
                save_every_steps=settings.save_every_steps,
                keep_checkpoints=settings.keep_checkpoints,
                eval_every_steps=settings.eval_every_steps,
                evaluate=_evaluation(model, validation_rows, steps, settings),
                protect_best=settings.load_best,
                first_loss=first_loss,
                on_checkpoint=on_checkpoint,
            ),
            log=log,
            health=health,
            stop=stop,
            num_loader_workers=_choose_workers(settings),
            on_progress=on_progress,
        )
        seconds = _train(trainer, checkpoint)
    log.flush()
    if settings.load_best and trainer.best.step not in (0, plan.total_steps):
        best = run_folder / f"checkpoint-{trainer.best.step}"
        trainer._load_from_checkpoint(str(best))
        logger.info("Took the weights of step %d, the lowest held-out loss.", trainer.best.step)
    sources = health.facts["sources"] = _describe_sources(plan, settings)
    summary = summarize(
        log,
        plan=plan,
        settings_method=settings.method,
        training_seconds=seconds,
        total_seconds=time.perf_counter() - began,
        health_seconds=health.seconds,
        trainable_parameters=trainable,
        best_step=trainer.best.step or None,
        sources=sources,
    )
    folder = save_tuned_model(
        trainer.accelerator.unwrap_model(trainer.model),
        tokenizer,
        run_folder / "finished",
        facts={
            "method": settings.method,
            "base": base,
            "tokens_key": settings.tokens_key,
            "finished_step": plan.total_steps,
            "tokens_per_second": summary["tokens_per_second"],
            "run_folder": str(run_folder),
            "mlflow_run_id": settings.run_id,
        },
        label_map=settings.label_map,
    )
    return TrainingResult(
        model_folder=folder,
        steps=log.training_rows(),
        evaluations=log.evaluations,
        efficiency=log.efficiency,
        health=health.to_json(),
        summary=summary,
    )


def _train(trainer: StepPlanTrainer, checkpoint: checkpoints.Checkpoint | None) -> float:
    """Run the loop; return the seconds it took, 0 when the checkpoint was the last step already."""
    if checkpoint is not None:
        trainer.continue_from(checkpoint)
        logger.info("Going on from %s, step %d of %d.", checkpoint.path, checkpoint.step, len(trainer.steps))
    trainer.step_log.start()
    began = time.perf_counter()
    if checkpoint is not None and checkpoint.step >= len(trainer.steps):
        logger.info("All %d steps were done before; the model is taken from the checkpoint.", checkpoint.step)
        trainer._load_from_checkpoint(str(checkpoint.path))
        return 0.0
    if checkpoint is None and trainer.loop.evaluate is not None and trainer.loop.eval_every_steps is not None:
        trainer.run_evaluation(0)
        trainer.step_log.start()
        began = time.perf_counter()
    trainer.on_progress("Training", trainer.start_step, len(trainer.steps), "steps")
    trainer.train(resume_from_checkpoint=str(checkpoint.path) if checkpoint else None)
    return time.perf_counter() - began


def _identity(settings: TrainingSettings, plan: StepPlan) -> checkpoints.RunIdentity:
    rows, tokens = settings.effective_batch_rows, settings.effective_batch_tokens
    shape = (
        ", ".join(f"{key}={settings.lora[key]}" for key in sorted(settings.lora)) if settings.method == "lora" else ""
    )
    return checkpoints.RunIdentity(
        tokens_key=settings.tokens_key,
        base_digest=settings.base["digest"],
        plan_digest=plan.digest(),
        effective_batch=f"{rows} rows" if rows is not None else f"at most {tokens} tokens",
        method=f"{settings.method} {shape}".strip(),
        **({} if plan.mix.is_plain else {"weights": ", ".join(f"{source['weight']:g}" for source in settings.sources)}),
    )


def _describe_sources(plan: StepPlan, settings: TrainingSettings) -> list[dict[str, Any]]:
    return plan.mix.describe(settings.sources, plan.rows_by_source(plan.total_steps)) if settings.sources else []


def _say_sources(health: HealthReport, plan: StepPlan, settings: TrainingSettings) -> None:
    """State what each source gives to an epoch, where there is something to state."""
    if len(settings.sources) < 2 and plan.mix.is_plain:
        return
    for source in _describe_sources(plan, settings):
        logger.info(
            "Source %s: %s rows x %g = %s rows an epoch, %.1f %% of it; %s in this run",
            source["path"],
            f"{source['num_rows']:,}",
            source["weight"],
            f"{source['rows_per_epoch']:,}",
            100 * source["rows_per_epoch"] / plan.rows_per_epoch,
            f"{source['num_rows_trained']:,}",
        )
        if source["num_rows"] and not source["rows_per_epoch"]:
            health.add(
                Finding(
                    code="source-left-out",
                    severity="warn",
                    measured=f"no row of {source['path']} is trained on",
                    expected=f"some of its {source['num_rows']} rows",
                    cause=f"Its weight of {source['weight']:g} makes less than half a row an epoch.",
                    change="Raise its weight in data.path, or take it out.",
                )
            )


def _find_checkpoint(
    paths: TrainingPaths, settings: TrainingSettings, identity: checkpoints.RunIdentity, plan: StepPlan
) -> checkpoints.Checkpoint | None:
    if not settings.resume:
        return None
    checkpoint = checkpoints.find_latest(paths.checkpoints)
    if checkpoint is None:
        raise UserError(
            f"train.resume is true, but {paths.checkpoints} holds no complete checkpoint. "
            "Start with train.resume=false and set train.save_every_steps."
        )
    checkpoints.check_resumable(checkpoint, identity)
    if checkpoint.step > plan.total_steps:
        raise UserError(
            f"train.resume: {checkpoint.path} is at step {checkpoint.step}, beyond the end of this run "
            f"(step {plan.total_steps}). Raise train.max_steps or train.num_epochs."
        )
    return checkpoint


def _check_schedule(settings: TrainingSettings, plan: StepPlan, validation_rows: TokenTable) -> None:
    """Refuse settings that only show as useless once the number of steps is known."""
    problems = []
    warmup = float(settings.trainer.get("warmup_steps") or 0)
    warmup_steps = math.ceil(warmup * plan.total_steps) if warmup < 1 else int(warmup)
    if warmup_steps and warmup_steps >= plan.total_steps:
        problems.append(
            f"train.trainer.warmup_steps={settings.trainer['warmup_steps']} means {warmup_steps} warm-up steps, but "
            f"the run has {plan.total_steps} steps in total: the learning rate would never reach its peak."
        )
    if settings.load_best and len(validation_rows) == 0:
        problems.append("train.load_best needs validation rows, but the validation split is empty (split.validation).")
    if problems:
        raise UserError(problems)


def _choose_workers(settings: TrainingSettings) -> int:
    """Use worker processes beside a GPU; on a CPU they would take the cores that train."""
    if settings.num_loader_workers is not None:
        return settings.num_loader_workers
    return 2 if settings.device == "cuda" else 0


def _evaluation(
    model: Any, table: TokenTable, steps: StepDataset, settings: TrainingSettings
) -> Callable[[], float] | None:
    if len(table) == 0 or not np.any(table.num_supervised):
        if settings.eval_every_steps is not None:
            logger.info("No validation rows: the held-out loss is not measured while training.")
        return None
    from lm_tuning.evaluation.held_out_loss import choose_rows, sum_held_out_nats

    rows = choose_rows(len(table), settings.eval_max_rows, settings.seed)

    def evaluate() -> float:
        with autocast(settings.device, settings.compute_dtype, settings.weights_dtype):
            return sum_held_out_nats(
                model,
                table,
                rows,
                micro_batch_tokens=steps.micro_batch_tokens,
                batching="padded",  # sorted over the whole split, so that there is little padding
                pad_id=steps.pad_id,
                device=settings.device,
            ).nats_per_token

    return evaluate


def _training_arguments(settings: TrainingSettings, plan: StepPlan, run_folder: Path) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(run_folder),
        max_steps=plan.total_steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        learning_rate=settings.learning_rate,
        bf16=settings.compute_dtype == "bfloat16",
        fp16=settings.compute_dtype == "float16",
        use_cpu=settings.device == "cpu",
        seed=settings.seed,
        activation_checkpointing=settings.activation_checkpointing,
        logging_strategy="no",
        eval_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_nan_inf_filter=False,
        remove_unused_columns=False,
        ignore_data_skip=True,
        **settings.trainer,
    )
