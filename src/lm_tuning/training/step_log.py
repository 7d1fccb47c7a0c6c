"""Numbers of every step, appended to lists while training runs and written once at its end.

Values that live on the device are copied without waiting and read one step later, so logging never makes the host wait
for the device. That also holds for the times of forward, backward and optimizer.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, cast

import torch

from lm_tuning.batching.batch import StepBatch
from lm_tuning.batching.tasks.base import Unit
from lm_tuning.runtime.nvml import CardFigures, CardSampler
from lm_tuning.training.health.monitors import StepNumbers
from lm_tuning.training.records import EfficiencyRow, EvaluationRow, StepRow, StoredStepLog, TrainingRow
from lm_tuning.wording import write_speed

Phase = Literal["forward", "backward", "optimizer"]

PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")


@dataclass
class StepPhases:
    """The marks of one step, whose times may still be on their way.

    Attributes:
        names: the phase that each mark began, in order, ``None`` for none; the mark after the last one ended it.
        marks: one more than ``names``: seconds on a CPU, events on a GPU.
        spare: takes the events back once they are read.
    """

    names: list[Phase | None]
    marks: list[Any]
    spare: list[Any]

    def seconds(self) -> dict[Phase, float]:
        """Read the times, in seconds by phase; nothing where the step was not marked.

        Call it when the device has passed the step's last mark. Otherwise this waits for it.
        """
        if not self.names:
            return {}
        # Without the backward pass where it was replayed together with the forward pass: no mark tells them apart.
        total: dict[Phase, float] = {phase: 0.0 for phase in PHASES if phase in self.names}
        on_gpu = not isinstance(self.marks[-1], float)
        if on_gpu:
            self.marks[-1].synchronize()
        for name, (begin, end) in zip(self.names, pairwise(self.marks), strict=True):
            if name is not None:
                total[name] += begin.elapsed_time(end) / 1000 if on_gpu else end - begin
        if on_gpu:
            self.spare.extend(self.marks)
        self.names, self.marks = [], []
        return total


@dataclass
class PhaseClock:
    """Split every step into phases.

    A phase lasts from its own mark to the next one. Time before a step's first mark, such as that of the loader, of an
    evaluation or a checkpoint, belongs to none.

    Under a profiler each phase is a named range as well, so that a trace shows it.

    Attributes:
        device: ``cuda`` measures on the current stream of the GPU; anything else measures the host.
        own_seconds: time spent in here, in seconds; the cost of measuring.
    """

    device: str = "cpu"
    own_seconds: float = 0.0
    _names: list[Phase | None] = field(default_factory=list)
    _marks: list[Any] = field(default_factory=list)
    _spare: list[Any] = field(default_factory=list)
    _range: Any = None

    def enter(self, phase: Phase) -> None:
        """End the phase before, if there is one in this step, and begin another."""
        self._begin(phase)

    def leave(self) -> None:
        """End the phase before; what follows belongs to none."""
        self._begin(None)

    def _begin(self, phase: Phase | None) -> None:
        began = time.perf_counter()
        self._name_range(phase)
        self._names.append(phase)
        self._mark(began)
        self.own_seconds += time.perf_counter() - began

    def end_step(self) -> StepPhases:
        """End the last phase of the step and hand its marks over."""
        began = time.perf_counter()
        if self._names:
            self._mark(began)
        phases = StepPhases(self._names, self._marks, self._spare)
        self._names, self._marks = [], []
        self._name_range(None)
        self.own_seconds += time.perf_counter() - began
        return phases

    def _mark(self, now: float) -> None:
        if self.device != "cuda":
            self._marks.append(now)
            return
        # On a GPU the host runs ahead, and what it measures itself is how long work takes to queue. So a mark is an
        # event in the device's own queue, whose time is read once a later one is known to have passed.
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def _name_range(self, phase: Phase | None) -> None:
        """Close the range before and open one of the phase's name, while a profiler records."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        # A range costs time where nobody records it too.
        if phase is not None and torch.autograd.profiler._is_profiler_enabled:
            self._range = torch.profiler.record_function(phase)
            self._range.__enter__()


OnMetrics = Callable[[int, dict[str, float]], None]
"""Receives (optimizer step from 1, metrics) as training goes on."""


def ignore_metrics(step: int, metrics: dict[str, float]) -> None:
    """Drop the metrics of a step."""


@dataclass
class _Pending:
    """A step whose loss and gradient norm are still on their way; ``numbers`` has NaN instead."""

    numbers: StepNumbers
    batch: StepBatch
    epoch: float
    values: torch.Tensor  # (2,): loss and gradient norm
    ready: torch.cuda.Event | None
    phases: StepPhases


@dataclass
class StepLog:
    """Collect the numbers of each step.

    Attributes:
        on_metrics: receives loss, gradient norm, learning rate and speed of each step, one step late.
        unit: what the loss is divided by, ``token`` or ``row``.
        on_step: receives the same and what the step cost, for the checks that watch the training.
        phases: splits each step into forward, backward and optimizer; the training loop says when each begins.
        card: reads the graphics card from a thread of its own, where there is one.
        steps: one row per step: what was learned.
        efficiency: one row per step: what it cost.
        evaluations: one row per evaluation.
        own_seconds: time spent in here, in seconds, without that of ``phases`` and of ``on_step``.
    """

    on_metrics: OnMetrics = ignore_metrics
    unit: Unit = "token"
    on_step: Callable[[StepNumbers], object] = lambda numbers: None
    phases: PhaseClock = field(default_factory=PhaseClock)
    card: CardSampler = field(default_factory=lambda: CardSampler(None))
    steps: list[StepRow] = field(default_factory=list)
    efficiency: list[EfficiencyRow] = field(default_factory=list)
    evaluations: list[EvaluationRow] = field(default_factory=list)
    own_seconds: float = 0.0
    _pending: _Pending | None = None
    _clock: float = 0.0
    _paused: float = 0.0
    _waited: float = 0.0

    def start(self) -> None:
        """Start the clock of the first step."""
        self._clock = time.perf_counter()
        self._paused = 0.0

    def waited(self, seconds: float) -> None:
        """Add time that the device had to wait for the loader."""
        self._waited += seconds

    def paused(self, seconds: float) -> None:
        """Leave time of an evaluation or a checkpoint out of the running step."""
        self._paused += seconds

    def record(
        self,
        batch: StepBatch,
        *,
        epoch: float,
        loss: torch.Tensor,
        gradient_norm: torch.Tensor | float | None,
        learning_rate: float,
    ) -> None:
        """Note a finished step and hand out the one before it.

        Args:
            batch: what the step trained on.
            epoch: passes over the data so far.
            loss: nats per supervised token, a scalar on the device.
            gradient_norm: before clipping; a scalar on the device or a number.
            learning_rate: of the update just made.
        """
        phases = self.phases.end_step()
        now = time.perf_counter()
        seconds = now - self._clock - self._paused
        self._clock, self._paused = now, 0.0
        norm = torch.as_tensor(float("nan") if gradient_norm is None else gradient_norm, device=loss.device)
        values = torch.stack([loss.detach().float(), norm.detach().float()])
        ready = None
        if values.is_cuda:
            # Pinned memory alone is copied to without the host waiting for the copy.
            host = torch.empty(2, pin_memory=True)
            host.copy_(values, non_blocking=True)
            # Recorded behind the copy in the stream: once it has passed, the host may read.
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
            values = host
        before = self._pending
        numbers = StepNumbers(
            step=batch.step + 1,
            loss=math.nan,
            gradient_norm=math.nan,
            learning_rate=learning_rate,
            seconds=seconds,
            wait_seconds=self._waited,
            num_tokens=batch.num_tokens,
            memory_bytes=_peak_memory_bytes(on_gpu=ready is not None),
            row_ids=batch.row_ids,
        )
        self._pending = _Pending(numbers, batch, epoch, values, ready, phases)
        self._waited = 0.0
        self.own_seconds += time.perf_counter() - now
        if before is not None:
            self._hand_out(before)

    def flush(self) -> None:
        """Hand out the last step."""
        if self._pending is not None:
            self._hand_out(self._pending)
            self._pending = None

    def describe_last(self, total: int) -> str:
        """Write the last step that was handed out as a line.

        Args:
            total: steps of the run.
        """
        row, speed = self.steps[-1], self.efficiency[-1]
        return (
            f"step {row['step']}/{total}  loss {row[self.loss_name]:.4f} nats/{self.unit}  gradient norm "
            f"{row['gradient_norm']:.2f}  learning rate {row['learning_rate']:.2e}  "
            f"{speed['tokens_per_second']:,.0f} tokens/s, "
            f"{write_speed(speed['samples_per_second'])} samples/s, {write_speed(speed['steps_per_second'])} steps/s"
        )

    @property
    def loss_name(self) -> str:
        """Name the column of the training loss."""
        return f"loss_nats_per_{self.unit}"

    def record_evaluation(self, step: int, epoch: float, figures: dict[str, float], seconds: float) -> None:
        """Note what was measured on held-out rows after a step, by its name."""
        named = {f"validation_{name}": value for name, value in figures.items()}
        # A request to stop may come between this and its end; a resume then measures once more.
        self.evaluations[:] = [row for row in self.evaluations if row["step"] != step]
        self.evaluations.append({"step": step, "epoch": epoch, **named, "seconds": seconds})
        self.on_metrics(step, named)

    def to_json(self) -> StoredStepLog:
        """Return everything noted so far, for a checkpoint."""
        self.flush()
        return {
            "steps": self.steps,
            "efficiency": self.efficiency,
            "evaluations": self.evaluations,
            "own_seconds": self.own_seconds + self.phases.own_seconds,
        }

    def restore(self, content: StoredStepLog, *, num_steps: int) -> None:
        """Restore the steps noted before a resume, up to the checkpoint's step."""
        self.steps = [row for row in content["steps"] if row["step"] <= num_steps]
        self.efficiency = [row for row in content["efficiency"] if row["step"] <= num_steps]
        self.evaluations = [row for row in content["evaluations"] if row["step"] <= num_steps]
        self.own_seconds += content.get("own_seconds", 0.0)

    def training_rows(self) -> list[TrainingRow]:
        """Return one row per step, with the held-out figures where they were measured."""
        names = [f"validation_nats_per_{self.unit}"]
        for row in self.evaluations:
            names += [name for name in row if name.startswith("validation_") and name not in names]
        held_out = {row["step"]: row for row in self.evaluations}
        return [{**row, **{name: held_out.get(row["step"], {}).get(name) for name in names}} for row in self.steps]

    def _hand_out(self, pending: _Pending) -> None:
        if pending.ready is not None:
            # Passed already, unless the host is a step ahead, as where steps are replayed. Then it waits while the
            # device makes the step after, which costs nothing and is none of our own time.
            pending.ready.synchronize()
        began = time.perf_counter()
        now, batch = pending.numbers, pending.batch
        now.loss, now.gradient_norm = pending.values.tolist()
        learning = {self.loss_name: now.loss, "gradient_norm": now.gradient_norm, "learning_rate": now.learning_rate}
        self.steps.append(
            {
                "step": now.step,
                "epoch": round(pending.epoch, 6),
                **learning,
                f"num_supervised_{self.unit}s": batch.num_supervised,
            }
        )
        speed, row_speed, step_speed = (
            count / now.seconds if now.seconds > 0 else math.nan for count in (now.num_tokens, len(now.row_ids), 1)
        )
        phases = {phase: round(seconds, 6) for phase, seconds in pending.phases.seconds().items()}
        card = CardFigures() if self.card.latest is None else self.card.latest.figures()
        self.efficiency.append(
            {
                "step": now.step,
                "seconds": round(now.seconds, 6),
                "tokens_per_second": round(speed, 2),
                "samples_per_second": round(row_speed, 4),
                "steps_per_second": round(step_speed, 6),
                "num_tokens": now.num_tokens,
                "num_rows": len(now.row_ids),
                "num_micro_batches": len(batch.micro_batches),
                "padding_fraction": round(1 - now.num_tokens / batch.num_positions, 6),
                "loader_wait_seconds": round(now.wait_seconds, 6),
                "forward_seconds": phases.get("forward"),
                "backward_seconds": phases.get("backward"),
                "optimizer_seconds": phases.get("optimizer"),
                "peak_memory_bytes": now.memory_bytes,
                **card,
            }
        )
        self.on_metrics(
            now.step,
            {
                **learning,
                "tokens_per_second": speed,
                "samples_per_second": row_speed,
                "steps_per_second": step_speed,
                "epoch": pending.epoch,
                **cast("dict[str, float]", card),
            },
        )
        self.own_seconds += time.perf_counter() - began
        # Outside of our own time: the checks count theirs.
        self.on_step(now)


def _peak_memory_bytes(on_gpu: bool) -> int:
    """Return the most memory held so far: the GPU's allocator, or the process on a CPU."""
    if on_gpu:
        return torch.cuda.max_memory_allocated()
    # Linux counts it in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
