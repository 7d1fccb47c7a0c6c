"""What a training is: settled before a model is loaded, and what the loop around its steps is told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_tuning.batching.losses import LossShape
from lm_tuning.batching.step_plan import StepPlan, TrainedSource
from lm_tuning.errors import UserError
from lm_tuning.parameters.conflicts import find_conflicts
from lm_tuning.parameters.groups import Parameters
from lm_tuning.parameters.train import TrainParameters
from lm_tuning.progress import OnProgress
from lm_tuning.runtime.precision import autocast
from lm_tuning.text.store.table import TokenTable, open_split
from lm_tuning.training.checkpoints import format as checkpoints
from lm_tuning.training.checkpoints.resume import check_schedule, find_checkpoint, identify_run
from lm_tuning.training.health.first_loss import ExpectedFirstLoss
from lm_tuning.training.health.pre_checks import check_rows_before_planning
from lm_tuning.training.health.records import Finding
from lm_tuning.training.health.report import HealthReport
from lm_tuning.training.kernels.compiled_layers import CompiledLayers
from lm_tuning.training.kernels.fp8 import Fp8Layers, refuse_without_device
from lm_tuning.training.kernels.fp8_trial import begin_fp8
from lm_tuning.training.kernels.recording import find_recorder
from lm_tuning.training.kernels.step_graph import StepGraphs
from lm_tuning.training.planning.out_of_memory import MemoryUse
from lm_tuning.training.planning.plan import BatchPlan
from lm_tuning.training.planning.planner import choose_batches, plans_on_device
from lm_tuning.training.planning.replanning import CompiledPlanner, Replanner
from lm_tuning.training.settings import TrainingPaths, TrainingSettings, step_plan_of
from lm_tuning.training.setup.model import choose_loss_shape
from lm_tuning.wording import count_of

if TYPE_CHECKING:
    from lm_tuning.batching.batch import StepBatch
    from lm_tuning.batching.step_loader import StepDataset
    from lm_tuning.batching.tasks.base import TrainingTask
    from lm_tuning.training.kernels.fast_path import FastPath
    from lm_tuning.training.setup.model import ReadyModel


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """What is settled before a model is loaded.

    Attributes:
        paths: as given.
        settings: as given.
        train_rows: rows to learn from.
        validation_rows: rows to measure on while training; may be none.
        plan: which rows form which step.
        identity: what a resume compares.
        checkpoint: to go on from; ``None`` starts from the beginning.
        shape: label smoothing and class weights.
        batch_plan: how steps are split, and why.
    """

    paths: TrainingPaths
    settings: TrainingSettings
    train_rows: TokenTable
    validation_rows: TokenTable
    plan: StepPlan
    identity: checkpoints.RunIdentity
    checkpoint: checkpoints.Checkpoint | None
    shape: LossShape
    batch_plan: BatchPlan

    @property
    def may_split_again(self) -> bool:
        """Return whether the size of micro-batches is ours to choose."""
        return self.settings.train.micro_batch_tokens == "auto"

    def describe_memory(self) -> MemoryUse:
        """Return what the training asks of the memory, kept up to date by the loop."""
        return MemoryUse(
            device=self.settings.device,
            method=self.settings.train.method,
            precision=f"{self.settings.weights_dtype} weights, {self.settings.compute_dtype} arithmetic",
            gradient_checkpointing=self.batch_plan.gradient_checkpointing,
            micro_batch_tokens=self.batch_plan.micro_batch_tokens,
            longest_row_tokens=int(self.train_rows.lengths.max(initial=0)),
        )


def settle(paths: TrainingPaths, settings: TrainingSettings, health: HealthReport, on_progress: OnProgress) -> Job:
    """Read the tokens, plan the steps and check all that can be checked without a model.

    Args:
        paths: where the tokens lie, and checkpoints and plans.
        settings: of the training.
        health: begins here, once nothing refuses a resume any more: a refused one leaves the report of the run that
            it would have continued.
        on_progress: receives the sizes that the batch planner tries.

    Raises:
        UserError: settings, tokens or checkpoint do not fit together.
    """
    # A resume that is refused must not replace the report of the run that it would have continued.
    if not settings.train.resume:
        health.begin()
    refuse_conflicts(settings)
    if settings.train.fp8:
        refuse_without_device(settings.device, settings.compute_dtype)
    train_rows = open_split(paths.tokens, "train")
    validation_rows = open_split(paths.tokens, "validation")
    plan = step_plan_of(settings, train_rows)
    check_schedule(settings, plan, validation_rows)
    identity = identify_run(settings, plan)
    checkpoint = find_checkpoint(paths, settings, identity, plan)
    health.begin()
    # Before the planner sends rows through the model; elsewhere these checks come once the model is loaded.
    if plans_on_device(settings):
        check_rows_before_planning(health, settings, paths.tokens, train_rows)
    shape = choose_loss_shape(settings, train_rows)
    return Job(
        paths=paths,
        settings=settings,
        train_rows=train_rows,
        validation_rows=validation_rows,
        plan=plan,
        identity=identity,
        checkpoint=checkpoint,
        shape=shape,
        batch_plan=choose_batches(paths, settings, on_progress=on_progress),
    )


def refuse_conflicts(settings: TrainingSettings) -> None:
    """Refuse parameters of training that cannot hold together, in the words in which ``kedro run`` does.

    Args:
        settings: of the training.

    Raises:
        UserError: naming every conflict.
    """
    conflicts = find_conflicts(Parameters(task=settings.task, train=settings.train))
    # A conflict with another group is none here: that group is at its defaults, and the rows are made already.
    problems = [
        conflict.problem
        for conflict in conflicts
        if all(key == "task" or key.startswith("train.") for key in conflict.keys)
    ]
    if problems:
        raise UserError(problems)


def describe_sources(plan: StepPlan, settings: TrainingSettings) -> list[TrainedSource]:
    """Return the facts of each source; none where all rows come from one file without a weight."""
    return plan.mix.describe(settings.sources, plan.rows_by_source(plan.total_steps)) if settings.sources else []


def check_sources(health: HealthReport, plan: StepPlan, settings: TrainingSettings) -> None:
    """Log what each source gives to an epoch, and add a finding for one that gives nothing.

    A single source without a weight is left out: there is nothing to say of it.
    """
    if len(settings.sources) < 2 and plan.mix.is_plain:
        return
    for source in describe_sources(plan, settings):
        logger.info(
            "Source %s: %s rows x %g = %s rows per epoch, %.1f %% of it; %s in this run",
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
                    expected=f"some of its {count_of(source['num_rows'], 'row')}",
                    cause=f"Its weight of {source['weight']:g} makes less than half a row per epoch.",
                    change="Raise its weight in data.path, or take it out.",
                )
            )


@dataclass
class LoopSettings:
    """What the loop around the optimizer steps does.

    Attributes:
        job: the settings, and what they come to.
        run_folder: where this run's checkpoints go.
        evaluate: measures figures on held-out rows, by name; ``None`` without such rows.
        best_metric: name of the figure that the best checkpoint has the best of.
        replanner: splits the steps smaller when memory runs out.
        layers: decoder layers to compile at the first step; ``None`` for none.
        fp8: frozen layers to run in 8 bits from the first step on; ``None`` for none.
        graphs: replays small steps from CUDA graphs; ``None`` runs all without.
        compiled_planner: tries larger micro-batches once they are compiled; ``None`` keeps their size.
        first_loss: what step 1 must log; ``None`` skips the check.
        memory: kept up to date, so that running out of memory can be explained.
        on_checkpoint: called when a checkpoint is complete, so that what was logged so far can be made safe too.
    """

    job: Job
    run_folder: Path
    evaluate: Callable[[], dict[str, float]] | None
    best_metric: str
    first_loss: ExpectedFirstLoss | None
    memory: MemoryUse
    replanner: Replanner
    layers: CompiledLayers | None = None
    fp8: Fp8Layers | None = None
    graphs: StepGraphs | None = None
    compiled_planner: CompiledPlanner | None = None
    on_checkpoint: Callable[[], object] = lambda: None

    @property
    def train(self) -> TrainParameters:
        """Return the group ``train``."""
        return self.job.settings.train

    def plain_passes(self) -> ExitStack:
        """Return a context in which layers run as they are, neither compiled nor in 8 bits."""
        return pause(self.layers, self.fp8)

    def begin_fp8(self, model: Any, batch: StepBatch, task: TrainingTask, health: HealthReport) -> float:
        """Let layers run in 8 bits, if the first step of this process says nothing against it; return the seconds."""
        assert self.fp8 is not None
        began, job = time.perf_counter(), self.job
        begin_fp8(self.fp8, model, batch, task=task, shape=job.shape, settings=job.settings, health=health)
        return time.perf_counter() - began

    @property
    def eval_every_steps(self) -> int | None:
        """Return the steps between evaluations; ``None`` where none is asked for, or no rows are there for it."""
        return None if self.evaluate is None else self.train.eval_every_steps


def pause(*changed: CompiledLayers | Fp8Layers | None) -> ExitStack:
    """Return a context in which layers run as they are.

    Args:
        *changed: what makes them run otherwise; ``None`` for nothing.
    """
    paused = ExitStack()
    for each in changed:
        if each is not None:
            paused.enter_context(each.paused())
    return paused


def choose_workers(settings: TrainingSettings) -> int:
    """Use worker processes beside a GPU; on a CPU they would take the cores that train."""
    if settings.train.num_loader_workers != "auto":
        return settings.train.num_loader_workers
    return 2 if settings.device == "cuda" else 0


def choose_evaluation(
    model: Any, table: TokenTable, steps: StepDataset, settings: TrainingSettings, fast: FastPath
) -> Callable[[], dict[str, float]] | None:
    """Return what measures figures on held-out rows, by name; ``None`` without such rows."""
    if len(table) == 0 or not np.any(table.num_supervised):
        if settings.train.eval_every_steps is not None:
            logger.info("No validation rows: the held-out loss is not measured while training.")
        return None
    from lm_tuning.batching.held_out_loss import choose_rows, measure_held_out

    # The same rows every time, so that evaluations can be compared.
    rows = choose_rows(len(table), settings.train.eval_max_rows, settings.seed)

    # On a CPU padded rows of like length were measured to be faster without gradients.
    batching = steps.batching if settings.device == "cuda" and steps.task.packing.by_bounds else "padded"

    def evaluate() -> dict[str, float]:
        # Evaluations have shapes of their own, for which layers would be compiled again.
        # And their figures are to be comparable with those of the base model, which are made in 16 bits.
        with pause(fast.layers, fast.fp8), autocast(settings.device, settings.compute_dtype):
            held_out = measure_held_out(
                steps.task,
                model,
                table,
                rows,
                micro_batch_tokens=steps.micro_batch_tokens,
                device=settings.device,
                batching=batching,
                counts_hits=True,
            )
        return held_out.figures

    return evaluate


def choose_graphs(job: Job, ready: ReadyModel, fast: FastPath, health: HealthReport) -> StepGraphs | None:
    """Return what replays small steps from CUDA graphs; ``None`` where it is known already that none will be.

    Args:
        job: what is settled.
        ready: model and task.
        fast: what was chosen for them.
        health: its facts are told what a step of the training decides.
    """
    from lm_tuning.training.kernels.fast_path import eager_flops

    if not fast.may_record or (recorder := find_recorder(job.settings.device)) is None:
        return None

    def tell(said: str) -> None:
        # Of the report, which knows by now what step 1 has decided.
        facts: Any = health.facts.get("fast_path", fast.facts)
        health.facts["fast_path"] = {**facts, "cuda_graphs": said}

    if job.batch_plan.gradient_checkpointing:
        tell("no, since gradient checkpointing keeps random states, which cannot be recorded")
        return None
    return StepGraphs(
        ready.model,
        ready.task,
        recorder,
        device=job.settings.device,
        total_steps=job.plan.total_steps,
        always=job.settings.train.cuda_graphs is True,
        flops=eager_flops(),
        tell=tell,
    )


def training_arguments(job: Job, run_folder: Path) -> Any:
    """Return the arguments of transformers' Trainer: ours where a loop of ours does the work, the user's otherwise."""
    from transformers import TrainingArguments

    settings, train = job.settings, job.settings.train
    return TrainingArguments(
        output_dir=str(run_folder),
        max_steps=job.plan.total_steps,
        # One item of the loader is a whole step.
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        learning_rate=train.learning_rate,
        bf16=settings.compute_dtype == "bfloat16",
        fp16=settings.compute_dtype == "float16",
        use_cpu=settings.device == "cpu",
        seed=settings.seed,
        # The library's present name; the older one is deprecated.
        activation_checkpointing=job.batch_plan.gradient_checkpointing,
        neftune_noise_alpha=train.neftune_noise_alpha,
        # Logging, evaluation and checkpoints are ours.
        logging_strategy="no",
        eval_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        # It would put the mean of the steps before in the place of a NaN.
        logging_nan_inf_filter=False,
        # Our items are no dicts of columns.
        remove_unused_columns=False,
        # The loader begins at the step to go on from by itself.
        ignore_data_skip=True,
        **train.trainer,
    )
