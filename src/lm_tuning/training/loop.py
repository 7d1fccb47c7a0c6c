"""What the loop around the optimizer steps is told, and its parts: loader, held-out evaluation, Trainer arguments."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_tuning.parameters.train import TrainParameters
from lm_tuning.runtime.precision import autocast
from lm_tuning.training.health.first_loss import ExpectedFirstLoss
from lm_tuning.training.job import Job
from lm_tuning.training.kernels.compiled_layers import CompiledLayers
from lm_tuning.training.planning.compiled import CompiledPlanner
from lm_tuning.training.planning.out_of_memory import MemoryUse
from lm_tuning.training.planning.replanning import Replanner

if TYPE_CHECKING:
    from lm_tuning.batching.step_loader import StepDataset
    from lm_tuning.text.store.table import TokenTable
    from lm_tuning.training.kernels.fast_path import FastPath
    from lm_tuning.training.settings import TrainingSettings

logger = logging.getLogger(__name__)


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
    compiled_planner: CompiledPlanner | None = None
    on_checkpoint: Callable[[], object] = lambda: None

    @property
    def train(self) -> TrainParameters:
        """Return the group ``train``."""
        return self.job.settings.train

    @property
    def eval_every_steps(self) -> int | None:
        """Return the steps between evaluations; ``None`` where none is asked for, or no rows are there for it."""
        return None if self.evaluate is None else self.train.eval_every_steps


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

    def evaluate() -> dict[str, float]:
        # Evaluations have shapes of their own, for which layers would be compiled again.
        paused = fast.layers.paused() if fast.layers is not None else nullcontext()
        with paused, autocast(settings.device, settings.compute_dtype):
            held_out = measure_held_out(
                steps.task,
                model,
                table,
                rows,
                micro_batch_tokens=steps.micro_batch_tokens,
                device=settings.device,
                counts_hits=True,
            )
        return held_out.figures

    return evaluate


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
