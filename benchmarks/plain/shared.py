"""What both plain scripts share: a clock for the parts, rows, the adapter, and the largest batch that fits."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

say = sys.stdout.write


class Clock:
    """Seconds of each part, told as soon as a part ends."""

    def __init__(self) -> None:
        """Begin before the imports."""
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the block to a part."""
        began = time.perf_counter()
        try:
            yield
        finally:
            taken = time.perf_counter() - began
            self.seconds[name] = self.seconds.get(name, 0.0) + taken
            say(f"PART {json.dumps({name: taken})}\n")
            sys.stdout.flush()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def add_adapter(model: Any, settings: dict[str, Any], task_type: str) -> Any:
    """Return a model with a LoRA adapter on all linear layers."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model,
        LoraConfig(
            r=settings["lora_r"], lora_alpha=settings["lora_alpha"], lora_dropout=settings["lora_dropout"],
            target_modules="all-linear", task_type=task_type,
        ),
    )  # fmt: skip


def trainer_settings(settings: dict[str, Any], *, device_rows: int, is_language: bool) -> dict[str, Any]:
    """Return arguments of the Trainer: what somebody sets who knows them, and the job's own numbers.

    Args:
        settings: of the job.
        device_rows: rows of a batch on the device.
        is_language: whether a language model is trained.
    """
    import torch

    cuda = torch.cuda.is_available()
    num_batches = -(-settings["rows_per_step"] // device_rows)
    workers = 4 if cuda else 0
    arguments: dict[str, Any] = {
        "output_dir": settings["output_dir"],
        # A step has the job's rows; its batches are of equal size.
        "per_device_train_batch_size": -(-settings["rows_per_step"] // num_batches),
        "gradient_accumulation_steps": num_batches,
        "per_device_eval_batch_size": 32,
        "learning_rate": settings["learning_rate"],
        "lr_scheduler_type": settings["lr_scheduler_type"],
        "warmup_steps": settings["warmup_steps"],
        "seed": settings["seed"],
        "optim": "adamw_torch_fused",
        "bf16": cuda, "tf32": True if cuda else None, "use_cpu": not cuda,
        "train_sampling_strategy": "group_by_length",
        "dataloader_num_workers": workers, "dataloader_pin_memory": cuda,
        "dataloader_persistent_workers": bool(workers),
        "logging_steps": settings["logging_steps"], "logging_first_step": True,
        "report_to": "none", "disable_tqdm": True,
        "remove_unused_columns": False,
        "save_strategy": "no", "eval_strategy": "no",
    }  # fmt: skip
    if settings["use_liger"] and cuda:
        # Of a classifier, the fused loss would replace the whole forward pass by that of a language model.
        arguments |= {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": is_language}}
    arguments |= {name: settings[name] for name in ("max_steps", "num_train_epochs") if settings[name] is not None}
    if settings["save_every_steps"]:
        arguments |= {"save_strategy": "steps", "save_steps": settings["save_every_steps"], "save_total_limit": 2}
    if settings["eval_every_steps"]:
        arguments |= {"eval_strategy": "steps", "eval_steps": settings["eval_every_steps"], "eval_on_start": True}
    return arguments


def evaluate_last_step() -> Any:
    """Return what asks for an evaluation of the last step, which the Trainer leaves out where none is due."""
    from transformers import TrainerCallback

    class Last(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step >= state.max_steps and args.eval_strategy != "no":
                control.should_evaluate = True

    return Last()


def find_device_rows(settings: dict[str, Any], step: Callable[[int], None]) -> int:
    """Double the rows of a batch until a step runs out of memory, or holds all rows of an optimizer step.

    Args:
        settings: of the job.
        step: runs forward and backward on so many of the longest rows.

    Returns:
        The largest number that fits.
    """
    import torch

    wanted: int = settings["rows_per_step"]
    if not torch.cuda.is_available():
        return wanted
    sizes = [size for size in (2**power for power in range(12)) if size < wanted]
    largest = 1
    for rows in [*sizes, wanted]:
        try:
            step(rows)
        except torch.OutOfMemoryError:
            break
        largest = rows
        gc.collect()
        torch.cuda.empty_cache()
    return largest


def read_settings() -> tuple[dict[str, Any], bool]:
    """Read the settings that the command line names, and whether only the batch is to be found."""
    import argparse

    parser = argparse.ArgumentParser(description="Fine-tune, answer and measure with transformers and peft alone.")
    parser.add_argument("settings", type=Path, help="JSON file, as whole_job.py writes it")
    parser.add_argument("--find-batch", action="store_true", help="print the rows of the largest batch, and end")
    options = parser.parse_args()
    return json.loads(options.settings.read_text(encoding="utf-8")), options.find_batch


def describe_training(trainer: Any, seconds: float, num_tokens: int) -> dict[str, Any]:
    """Return speed, memory and losses of a training.

    Args:
        trainer: after the training.
        seconds: that the loop took, with its evaluations and checkpoints.
        num_tokens: real tokens that it saw.
    """
    import torch

    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "num_steps": trainer.state.global_step,
        "num_tokens": num_tokens,
        "tokens_per_second": num_tokens / seconds,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "device_rows": trainer.args.per_device_train_batch_size,
        "num_batches": trainer.args.gradient_accumulation_steps,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
    }
