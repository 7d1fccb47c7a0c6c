"""How long forward, backward and optimizer take of each step, measured without making the host wait for the device.

On a GPU the host runs ahead: what it measures itself is how long work takes to queue. So a mark is an event in the
device's own queue there, and the times are read once a later event of the same queue is known to have passed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch

Phase = Literal["forward", "backward", "optimizer"]

PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")


@dataclass
class StepPhases:
    """The marks of one step, whose times may still be on their way.

    Attributes:
        names: the phase that each mark began, in order; the mark after the last one ended it.
        marks: one more than ``names``: seconds on a CPU, events on a GPU.
        spare: takes the events back once they are read.
    """

    names: list[Phase]
    marks: list[Any]
    spare: list[Any]

    def seconds(self) -> dict[Phase, float]:
        """Read the times, in seconds by phase; nothing where the step was not marked.

        Call it when the device has passed the step's last mark. Otherwise this waits for it.
        """
        if not self.names:
            return {}
        total: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        on_gpu = not isinstance(self.marks[-1], float)
        if on_gpu:
            self.marks[-1].synchronize()
        for name, (begin, end) in zip(self.names, pairwise(self.marks), strict=True):
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
    _names: list[Phase] = field(default_factory=list)
    _marks: list[Any] = field(default_factory=list)
    _spare: list[Any] = field(default_factory=list)
    _range: Any = None

    def enter(self, phase: Phase) -> None:
        """End the phase before, if there is one in this step, and begin another."""
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
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def _name_range(self, phase: Phase | None) -> None:
        """Close the range before and open one of the phase's name, while a profiler records."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if phase is not None and torch.autograd.profiler._is_profiler_enabled:
            self._range = torch.profiler.record_function(phase)
            self._range.__enter__()
