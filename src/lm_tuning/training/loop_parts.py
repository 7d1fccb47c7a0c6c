"""Parts of the loop that follow from the settings: loader workers, held-out evaluation, transformers' arguments."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_tuning.runtime.precision_context import autocast

if TYPE_CHECKING:
    from lm_tuning.batching.batch import StepDataset
    from lm_tuning.batching.step_plan import StepPlan
    from lm_tuning.text.store.table import TokenTable
    from lm_tuning.training.kernels.fast_path import FastPath
    from lm_tuning.training.settings import TrainingSettings

logger = logging.getLogger(__name__)


def choose_workers(settings: TrainingSettings) -> int:
    """Use worker processes beside a GPU; on a CPU they would take the cores that train."""
    if settings.num_loader_workers is not None:
        return settings.num_loader_workers
    return 2 if settings.device == "cuda" else 0


def choose_evaluation(
    model: Any, table: TokenTable, steps: StepDataset, settings: TrainingSettings, fast: FastPath
) -> Callable[[], dict[str, float]] | None:
    """Return what measures figures on held-out rows, by name; ``None`` without such rows."""
    if len(table) == 0 or not np.any(table.num_supervised):
        if settings.eval_every_steps is not None:
            logger.info("No validation rows: the held-out loss is not measured while training.")
        return None
    from lm_tuning.batching.held_out_loss import choose_rows, measure_held_out

    rows = choose_rows(len(table), settings.eval_max_rows, settings.seed)

    def evaluate() -> dict[str, float]:
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


def training_arguments(settings: TrainingSettings, plan: StepPlan, run_folder: Path) -> Any:
    """Return the arguments of transformers' Trainer: ours where a loop of ours does the work, the user's otherwise."""
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
        neftune_noise_alpha=settings.neftune_noise_alpha,
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
