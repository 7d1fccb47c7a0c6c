"""Describe what was asked of the memory when it runs out, what would have fit, and how to go on."""

from __future__ import annotations

import re
import resource
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lm_tuning.batching.batch import MicroBatch
from lm_tuning.errors import UserError
from lm_tuning.runtime.device import read_processor
from lm_tuning.runtime.memory_errors import is_out_of_memory
from lm_tuning.training.checkpoints import format as checkpoints
from lm_tuning.wording import count_of

SAFE_FRACTION = 0.9
"""Share of the free memory that an estimate fills: what is left over serves fragments and longer rows."""

_ROUNDING_POSITIONS = 64
_ASKED = re.compile(r"(?:[Tt]ried|Unable) to allocate ([\d.]+) (bytes|[KMGTP]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}


@dataclass(frozen=True)
class MemoryReading:
    """A device's memory at one moment, in bytes; 0 where it is not known.

    Attributes:
        name: of the device.
        total: all there is.
        used: held by tensors of this process, or by the whole process on a CPU.
        peak: the most of that so far.
        others: held by other programs.
    """

    name: str
    total: int
    used: int
    peak: int
    others: int = 0


@dataclass
class MemoryUse:
    """What a training asks of the memory, kept up to date by the loop.

    Attributes:
        device: ``cpu``, ``cuda`` or ``mps``.
        method: ``full``, ``lora`` or ``qlora``.
        precision: how weights and products are held, in words.
        gradient_checkpointing: whether gradient checkpointing is on.
        micro_batch_tokens: most positions of a micro-batch.
        longest_row_tokens: of the training rows.
        run_folder: where the run's checkpoints lie; ``None`` before there is one.
        doing: what goes on now, as the end of "ran out of memory …".
        micro_batch: the micro-batch in the model, as it lies on the host; ``None`` between two.
        before_bytes: memory in use before the present step, without activations.
        peak_bytes: the most in use before the present step.
        largest_done_positions: positions of the largest micro-batch that went through; 0 before the first.
    """

    device: str
    method: str
    precision: str
    gradient_checkpointing: bool
    micro_batch_tokens: int
    longest_row_tokens: int
    run_folder: Path | None = None
    doing: str = "while the model was loaded"
    micro_batch: MicroBatch | None = None
    before_bytes: int = 0
    peak_bytes: int = 0
    largest_done_positions: int = 0
    _largest_of_step: int = field(default=0, repr=False)

    def begin_step(self, step: int) -> None:
        """Note the memory in use before a step, which does not wait for the device.

        Args:
            step: optimizer step, from 1.
        """
        self.before_bytes, self.peak_bytes = read_usage(self.device)
        self.doing = f"in step {step}"

    def begin_micro_batch(self, batch: MicroBatch) -> None:
        """Note what goes through the model next.

        Args:
            batch: before it is copied to the device.
        """
        self.micro_batch = batch
        self._largest_of_step = max(self._largest_of_step, batch.num_positions)

    def end_step(self) -> None:
        """Note that the step's micro-batches went through, so that what follows is something else."""
        self.largest_done_positions = max(self.largest_done_positions, self._largest_of_step)
        self.micro_batch = None
        self.doing = self.doing.replace("in step", "after the backward pass of step")


@contextmanager
def explain_out_of_memory(use: MemoryUse) -> Iterator[None]:
    """Turn an error for lack of memory inside the block into one that says what would fit.

    Args:
        use: what the training asks of the memory; the block keeps it up to date.

    Raises:
        UserError: the block ran out of memory, on the device or on the host.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reading = read_memory(use.device)
        # The traceback holds the tensors of the failed step; a notebook that goes on would never get them back.
        traceback.clear_frames(error.__traceback__)
        raise UserError(describe(use, reading, asked_bytes=read_asked_bytes(error))) from error


def read_asked_bytes(error: BaseException) -> int | None:
    """Read off a message how much memory was asked for in vain; ``None`` when it does not say."""
    asked = _ASKED.search(str(error))
    return round(float(asked[1]) * _UNITS[asked[2]]) if asked else None


def read_memory(device: str) -> MemoryReading:
    """Ask the device for its memory as it stands.

    Args:
        device: ``cpu``, ``cuda`` or ``mps``.
    """
    used, peak = read_usage(device)
    if device == "cuda":
        cuda: Any = torch.cuda
        free, total = cuda.mem_get_info()
        # Neither free nor held by torch's allocator here: other programs, and CUDA's own context.
        others = max(total - free - cuda.memory_reserved(), 0)
        return MemoryReading(cuda.get_device_name(), total, used, peak, others)
    processor = read_processor()
    return MemoryReading(processor.name, processor.memory_bytes, used, peak)


def read_usage(device: str) -> tuple[int, int]:
    """Return the bytes that this process holds now, and the most that it has held.

    Args:
        device: ``cpu``, ``cuda`` or ``mps``.
    """
    if device == "cuda":
        statistics = torch.cuda.memory_stats()
        return statistics.get("allocated_bytes.all.current", 0), statistics.get("allocated_bytes.all.peak", 0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    # Where /proc does not say, the peak stands in, which is never too little.
    used = _resident_bytes() or peak
    return used, max(used, peak)


def estimate_fitting_positions(use: MemoryUse, reading: MemoryReading, *, asked_bytes: int | None) -> int | None:
    """Estimate the positions of a micro-batch that fits, as if memory grew with positions alone.

    What a position takes is at least what the failed micro-batch had taken when it failed; a larger one that went
    through before knows it better.

    Args:
        use: what the training asked for.
        reading: the memory when it failed.
        asked_bytes: what was asked for in vain.

    Returns:
        Positions, less than those that failed; ``None`` when nothing is known to go by.
    """
    if use.micro_batch is None or not reading.total:
        return None
    positions = use.micro_batch.num_positions
    needs = [(max(reading.used, reading.peak) - use.before_bytes + (asked_bytes or 0)) / positions]
    if use.largest_done_positions:
        needs.append((use.peak_bytes - use.before_bytes) / use.largest_done_positions)
    room = (reading.total - reading.others - use.before_bytes) * SAFE_FRACTION
    if max(needs) <= 0 or room <= 0:
        return None
    # Without a micro-batch that went through, nobody knows how far this one was from its end.
    most = positions - 1 if use.largest_done_positions else positions // 4
    fitting = min(int(room / max(needs)), most)
    return fitting - fitting % _ROUNDING_POSITIONS if fitting >= _ROUNDING_POSITIONS else fitting


def describe(use: MemoryUse, reading: MemoryReading, *, asked_bytes: int | None) -> list[str]:
    """Write the problem, how to fix it and how to go on, one sentence or two each.

    Args:
        use: what the training asked for.
        reading: the memory when it failed.
        asked_bytes: what was asked for in vain; ``None`` when the error does not say.
    """
    kind = "graphics card" if use.device == "cuda" else "machine"
    what = f"The {kind} ran out of memory {use.doing}"
    if use.micro_batch is not None:
        batch = use.micro_batch
        what += (
            f", with a micro-batch of {count_of(batch.num_rows, 'row')} in {batch.num_positions:,} positions, the "
            f"longest row of {count_of(_longest_row(batch), 'token')} "
            f"(train.micro_batch_tokens = {use.micro_batch_tokens:,})"
        )
    checkpointing = "with" if use.gradient_checkpointing else "without"
    lines = [
        f"{what}; method {use.method}, {use.precision}, {checkpointing} gradient checkpointing.",
        _describe_reading(use, reading, asked_bytes),
    ]
    fitting = estimate_fitting_positions(use, reading, asked_bytes=asked_bytes)
    if fitting is not None and fitting >= use.longest_row_tokens:
        guess = (
            "" if use.largest_done_positions else " Nothing went through before, so it may have to be lowered again."
        )
        lines.append(
            f"What would fit: train.micro_batch_tokens={fitting}. This is an estimate that takes memory to grow with "
            f"the positions of a micro-batch.{guess} It changes memory and speed, not what is learned."
        )
    elif use.micro_batch is not None:
        fitting = None
        lines.append(
            f"By estimate not even one row of full length ({use.longest_row_tokens:,} tokens) fits beside what is "
            "there already, so smaller micro-batches do not help alone."
        )
    lines += _other_ways(use)
    lines.append(_describe_checkpoint(use, fitting))
    return lines


def _describe_reading(use: MemoryUse, reading: MemoryReading, asked_bytes: int | None) -> str:
    asked = f"{_size(asked_bytes)} more were asked for. " if asked_bytes else ""
    total = f"has {_size(reading.total)}" if reading.total else "does not say how much it has"
    before = f", {_size(use.before_bytes)} of it before the step" if use.before_bytes else ""
    others = f"; other programs hold {_size(reading.others)}" if reading.others else ""
    return f"{asked}{reading.name} {total}: this run had {_size(reading.used)} in use{before}{others}."


def _other_ways(use: MemoryUse) -> list[str]:
    ways = []
    if not use.gradient_checkpointing:
        ways.append("train.gradient_checkpointing=true (a fraction of the activations, for about a third more time)")
    if use.method == "full":
        ways.append("train.method=lora (no optimizer states of frozen weights; a new run)")
        ways.append("train.trainer.optim=adamw_8bit (a quarter of the optimizer states; a new run)")
    if use.method in {"full", "lora"}:
        ways.append("train.method=qlora (frozen weights in a quarter of 16 bits' memory; a new run)")
    ways.append("a smaller tokenize.max_length_tokens (shorter rows; a new run)")
    return [f"Other ways: {'; '.join(ways)}."]


def _describe_checkpoint(use: MemoryUse, fitting: int | None) -> str:
    # Asked of the disk and not of the loop: a checkpoint that was being written does not count.
    complete = checkpoints.list_complete(use.run_folder) if use.run_folder is not None else []
    if not complete:
        return (
            "No checkpoint was written yet, so the run starts from the beginning; train.save_every_steps says how "
            "often one is."
        )
    change = f",train.micro_batch_tokens={fitting}" if fitting is not None else " and what you change"
    newest = complete[-1]
    return (
        f"No checkpoint is lost: step {newest.step} is kept in {newest.path}. Go on with the same command and "
        f"train.resume=true{change} among its --params; gradient checkpointing may change on the way too."
    )


def _longest_row(batch: MicroBatch) -> int:
    """Return the tokens of a micro-batch's longest row, padding of a target included."""
    if batch.position_ids is not None:
        return int(batch.position_ids.max()) + 1
    targets = 0 if batch.decoder_input_ids is None else batch.decoder_input_ids.shape[1]
    return batch.input_ids.shape[1] + targets


def _resident_bytes() -> int:
    """Return what this process holds now, 0 where the system does not say."""
    try:
        # size resident shared …, in pages
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * resource.getpagesize()


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**27 else f"{num_bytes / 2**20:.1f} MiB"
