"""The other side of ``throughput.py``: the same work with the Trainer, Liger's kernels, TRL and Unsloth at their best.

A peer's best is found in its own process: rows of a batch are doubled until memory runs out or a batch is slower than
the one before, each measured over a few steps.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from throughput_works import SHAPES, Work, device, draw_classes, draw_rows, make_model

# Enough that rows grouped by length have company of theirs.
NUM_ROWS = 4000
# What a size may be slower by, and larger ones are still tried: steps of a kind differ by this much.
SAME_SPEED = 0.98
MIN_STEPS = 2
# Nothing is compiled layer by layer here, so steps are alike from the fourth on.
MAX_SKIP, MAX_STEPS = 3, 11
SLOW_ROWS, SLOW_WIDTH = 16, 320


class Peer(NamedTuple):
    """How a peer trains.

    Attributes:
        name: of the framework.
        work: what is trained.
        folder: where a model that must be loaded lies, and what trainers write.
    """

    name: str
    work: Work
    folder: Path

    @property
    def is_slow(self) -> bool:
        """Return whether this is the slow setting of the report."""
        return self.name == "slow"

    @property
    def uses_trl(self) -> bool:
        """Return whether TRL's trainer runs it."""
        return self.name in {"trl", "unsloth"}


class Clock:
    """Counts real tokens, and looks at the time at the first and the last step that count.

    The device is waited for there alone: a wait at every step would slow down steps that are short.
    """

    def __init__(self, *, skip: int, steps: int, seconds: float) -> None:
        """Begin.

        Args:
            skip: first steps that do not count.
            steps: the last step.
            seconds: after which a step is the last one, once two have counted.
        """
        self.skip, self.steps, self.seconds = skip, steps, seconds
        self.began = self.ended = 0.0
        self.num_steps = self.first_batch = 0
        self.tokens: list[Any] = []
        self.positions: list[int] = []

    def see(self, batch: Any) -> None:
        """Count a batch."""
        mask, ids = batch.get("attention_mask"), batch["input_ids"]
        self.tokens.append((mask if mask is not None else ids != 0).sum())
        self.positions.append(ids.numel())

    def callback(self) -> Any:
        """Return what notes the ends of steps and stops the training."""
        import torch
        from transformers import TrainerCallback

        clock = self

        def now() -> float:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return time.perf_counter()

        class Ends(TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                step = state.global_step
                if step == clock.skip:
                    clock.began, clock.first_batch = now(), len(clock.tokens)
                is_late = step >= clock.skip + MIN_STEPS and time.perf_counter() - clock.began > clock.seconds
                if step >= clock.steps or is_late:
                    clock.ended, clock.num_steps = now(), step
                    control.should_training_stop = True

        return Ends()

    def tokens_per_second(self) -> float:
        """Return real tokens per second of the steps that count, however many batches a step has."""
        return float(sum(map(int, self.tokens[self.first_batch :]))) / (self.ended - self.began)

    def padding(self) -> float:
        """Return the share of positions without a token."""
        return 1 - sum(map(int, self.tokens)) / sum(self.positions)


def run_peer(name: str, work: Work, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a peer in batches of more and more rows, and return its fastest with all that was tried.

    Args:
        name: of the framework.
        work: what is trained.
        options: of the command.

    Raises:
        RuntimeError: not even the first batch fits.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        peer = Peer(name, work, Path(scratch))
        return find_best(peer, options)


def find_best(peer: Peer, options: argparse.Namespace) -> dict[str, Any]:
    """Double the rows of a batch as long as it pays; see :func:`run_peer`."""
    from lm_tuning.runtime.memory_errors import is_out_of_memory

    examples = draw_examples(peer.work, options.lengths)
    began = time.perf_counter()
    rows = options.batch or (SLOW_ROWS if peer.is_slow else peer.work.rows)
    is_fixed = options.batch is not None or peer.is_slow
    tried: list[dict[str, Any]] = []
    best: dict[str, Any] | None = None
    while True:
        size_began = time.perf_counter()
        try:
            found = measure(peer, examples, rows, options, seconds=options.seconds / 4)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # The error holds the frames of the step, and they hold its tensors, until this block has ended.
            found = None
        _free_memory()
        if found is None:
            tried.append({"rows": rows, "outcome": "out of memory"})
            if best is not None or is_fixed or rows == 1:
                break
            rows //= 2
            continue
        tried.append({"rows": rows, "tokens_per_second": found["tokens_per_second"], "memory_gb": found["memory_gb"]})
        is_slower = best is not None and found["tokens_per_second"] < SAME_SPEED * best["tokens_per_second"]
        if best is None or found["tokens_per_second"] > best["tokens_per_second"]:
            best = found
        ran_out = any("outcome" in entry for entry in tried)  # then this size came from halving
        now = time.perf_counter()
        # The next batch takes twice as long a step; its model and its warm-up take as long as before.
        is_late = now - began + 1.5 * (now - size_began) > options.seconds
        if is_slower or is_fixed or ran_out or is_late or 2 * rows > NUM_ROWS // MAX_STEPS:
            if is_late and not is_slower and not is_fixed:
                tried.append({"rows": 2 * rows, "outcome": f"not tried: {options.seconds:.0f} s had passed"})
            break
        rows *= 2
    if best is None:
        raise RuntimeError(f"not even a batch of {rows} rows fits")
    return best | {"tried": tried}


def _free_memory() -> None:
    """Hand back what a trainer that has ended, or failed, still holds."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure(
    peer: Peer, examples: list[dict[str, Any]], rows: int, options: argparse.Namespace, *, seconds: float
) -> dict[str, Any]:
    """Train some steps with so many rows each, on a model of its own.

    Args:
        peer: who.
        examples: as :func:`draw_examples` returns them.
        rows: of a batch; each step has one.
        options: of the command.
        seconds: after which the steps end.

    Raises:
        RuntimeError: the batch does not fit, or something else is wrong.
    """
    import torch

    cuda = device() == "cuda"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not peer.is_slow
    skip, steps = min(options.skip, MAX_SKIP), min(options.steps, MAX_STEPS)
    clock = Clock(skip=skip, steps=steps, seconds=seconds)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    model = load_model(peer)
    settings = arguments_of(peer, rows, steps, cuda=cuda)
    make = make_trl_trainer if peer.uses_trl else make_trainer
    trainer = make(peer, model, settings, clock, examples)
    began = time.time()
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "tokens_per_second": clock.tokens_per_second(),
        "padding": clock.padding(),
        "memory_gb": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "losses": [round(loss, 4) for loss in losses],
        "batch": rows,
        "num_steps": clock.num_steps,
        "whole_run_seconds": time.time() - began,
    }


def draw_examples(work: Work, lengths: str) -> list[dict[str, Any]]:
    """Draw rows as trainers take them, with a class each where the work has some."""
    rows = draw_rows(lengths, NUM_ROWS, SHAPES[work.shape].vocabulary)
    if not work.num_classes:
        return [{"input_ids": row} for row in rows]
    classes = draw_classes(len(rows), work.num_classes)
    return [{"input_ids": row, "labels": int(label)} for row, label in zip(rows, classes, strict=True)]


def arguments_of(peer: Peer, rows: int, steps: int, *, cuda: bool) -> dict[str, Any]:
    """Return the Trainer's arguments: those of somebody who knows them, and for ``slow`` those of the report."""
    slow = peer.is_slow
    workers = 4 if cuda and not slow else 0
    settings: dict[str, Any] = {
        "output_dir": str(peer.folder / "out"), "per_device_train_batch_size": rows, "max_steps": steps,
        "gradient_accumulation_steps": 1, "logging_steps": 4, "logging_first_step": True,
        "save_strategy": "no", "report_to": "none", "learning_rate": 1e-4, "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused", "dataloader_num_workers": workers, "dataloader_pin_memory": cuda and not slow,
        "bf16": cuda and not slow, "gradient_checkpointing": slow, "disable_tqdm": True, "use_cpu": not cuda,
        "remove_unused_columns": False, "use_liger_kernel": peer.name in {"liger", "trl"} and cuda,
    }  # fmt: skip
    if peer.work.num_classes and settings["use_liger_kernel"]:
        # Else the forward pass of a language model takes the place of the classifier's.
        settings["liger_kernel_config"] = {"fused_linear_cross_entropy": False}
    if workers:
        settings |= {"dataloader_persistent_workers": True, "dataloader_prefetch_factor": 2}
    if peer.name in {"trainer", "liger", "trl"}:  # Unsloth lays rows end to end
        settings["train_sampling_strategy"] = "group_by_length"
    return settings


def make_trainer(peer: Peer, model: Any, settings: dict[str, Any], clock: Clock, examples: Any) -> Any:
    """Return the Trainer of transformers, with rows padded to the longest of a batch."""
    import torch
    from transformers import Trainer, TrainingArguments

    def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
        lengths = [len(item["input_ids"]) for item in items]
        width = SLOW_WIDTH if peer.is_slow else -(-max(lengths) // 8) * 8
        ids = torch.zeros(len(items), width, dtype=torch.long)  # (batch, sequence), as the mask
        mask = torch.zeros_like(ids)
        for index, (item, length) in enumerate(zip(items, lengths, strict=True)):
            ids[index, :length], mask[index, :length] = torch.from_numpy(np.asarray(item["input_ids"])), 1
        if peer.work.num_classes:
            labels = torch.tensor([item["labels"] for item in items])  # (batch,)
        else:
            labels = ids.masked_fill(mask == 0, -100)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    class Counting(Trainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *given: Any, **more: Any) -> Any:
            clock.see(inputs)
            return super().training_step(model, inputs, *given, **more)

    return Counting(
        model=model, args=TrainingArguments(**settings), train_dataset=examples, data_collator=collate,
        callbacks=[clock.callback()],
    )  # fmt: skip


def make_trl_trainer(peer: Peer, model: Any, settings: dict[str, Any], clock: Clock, examples: Any) -> Any:
    """Return TRL's SFTTrainer, for itself and for Unsloth."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from tests.support.tiny import make_tokenizer

    data = Dataset.from_dict({"input_ids": [example["input_ids"].tolist() for example in examples]})
    settings.pop("remove_unused_columns")
    trainer = SFTTrainer(
        model=model, args=SFTConfig(**settings, max_length=2048), train_dataset=data,
        processing_class=make_tokenizer(), callbacks=[clock.callback()],
    )  # fmt: skip
    plain = trainer.training_step

    def step(model: Any, inputs: Any, *given: Any, **more: Any) -> Any:
        clock.see(inputs)
        return plain(model, inputs, *given, **more)

    trainer.training_step = step
    return trainer


def load_model(peer: Peer) -> Any:
    """Return the model that a peer trains, with its adapter."""
    work = peer.work
    if peer.name == "unsloth":
        return load_with_unsloth(peer)
    dtype = "float32" if peer.is_slow or work.method == "full" or device() == "cpu" else "bfloat16"
    model = make_model(work.shape, dtype, "eager" if peer.is_slow else "sdpa", num_classes=work.num_classes)
    model = model if work.method == "full" else add_lora(model, work)
    if peer.is_slow:
        model.enable_input_require_grads()
    return model


def add_lora(model: Any, work: Work) -> Any:
    """Return a model with the same adapter as ours; TRL was a tenth slower with one that it adds itself."""
    from peft import LoraConfig, get_peft_model

    task = "SEQ_CLS" if work.num_classes else "CAUSAL_LM"
    model = get_peft_model(
        model, LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type=task)
    )
    for parameter in filter(lambda weights: weights.requires_grad, model.parameters()):
        parameter.data = parameter.data.float()  # a classifier's head too, which 16 bits are too coarse for
    return model


def load_with_unsloth(peer: Peer) -> Any:
    """Let Unsloth load the same random model from a folder and add its adapter, as its guide says."""
    import torch
    from unsloth import FastLanguageModel

    from tests.support.tiny import make_tokenizer

    work, folder = peer.work, peer.folder / "model"
    if not folder.exists():
        make_model(work.shape, "bfloat16", "sdpa").save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        _free_memory()
    model, _ = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=2048, dtype=torch.bfloat16, load_in_4bit=False,
        full_finetuning=work.method == "full", local_files_only=True,
    )  # fmt: skip
    if work.method == "full":
        return model
    return FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=32, lora_dropout=0.0, bias="none", use_gradient_checkpointing=False,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    )  # fmt: skip
