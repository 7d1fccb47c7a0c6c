"""Monitor a training while it runs, from numbers that the step log has anyway.

The monitor runs one step behind the device and sees plain numbers, so it never makes the device wait. Each thing is
said once, when it is seen; at the end the finding is put in terms of the whole run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from lm_tuning.training.health.device_monitors import LoaderWait, Memory, Throughput
from lm_tuning.training.health.monitors import GradientSize, LearningRates, LossCourse, Monitor, StepNumbers
from lm_tuning.training.health.records import Facts, Finding
from lm_tuning.training.health.report import HealthReport, stop_if_needed
from lm_tuning.wording import count_of, name_first

# Skipped updates after which a run is not worth its time; float16 starts with some, searching for its loss scale.
FAILURES_IN_A_ROW = {False: 10, True: 25}

# Overflows that the search for float16's loss scale explains: it starts at 2^16, and about twenty halvings at most make
# it fit.
OVERFLOWS_AT_START = 20
# Later a larger scale is tried after 2000 steps without an overflow, which may cost one. Four times as many are
# allowed, since the scale that fits can fall too.
STEPS_PER_OVERFLOW = 500

SKIPPED_FRACTION = 0.5
# Most updates skipped means that most of the run is lost; before so many steps it may be chance, until the end.
MIN_STEPS_SKIPPED = 20

SHOWN_ROWS = 8

# Steps that are saved to be run again; more of them say the same.
KEPT_STEPS = 3

# Writes what a step (from 1) was made of and returns the file.
Reproduce = Callable[[int], Path]


class NotFinite(Monitor):
    """Losses and gradients that are NaN or infinite."""

    def __init__(self, report: HealthReport, *, has_scaler: bool, reproduce: Reproduce | None) -> None:
        """Keep the report, which lists the steps, and what saves one."""
        self.report = report
        self.has_scaler = has_scaler
        self.reproduce = reproduce
        self.num_steps = self.num_overflows = self.streak = self.longest_streak = 0
        self.counts = {"loss-not-finite": 0, "gradient-not-finite": 0}
        self.first: dict[str, str] = {}
        self._has_lost = False

    @property
    def allowed_overflows(self) -> float:
        """Return how many overflows the search for a loss scale explains."""
        return OVERFLOWS_AT_START + self.num_steps / STEPS_PER_OVERFLOW

    def update(self, now: StepNumbers) -> bool:
        """Count the step if it is not finite, and save the first ones."""
        self.num_steps += 1
        if now.is_finite:
            self.streak = 0
            return False
        return self._see_failure(now) or self._begins_to_lose()

    def replay(self, now: StepNumbers) -> None:
        """Count a step made before a resume; its rows and its file are in the report already."""
        self.num_steps += 1
        if not now.is_finite:
            self._count(now)

    def _count(self, now: StepNumbers) -> str | None:
        """Count a failure and return its code; ``None`` for an overflow, with which a loss scale is searched for."""
        # A finite loss with a gradient that is not is how float16 shows that its loss scale is too large.
        if self.has_scaler and math.isfinite(now.loss):
            self.num_overflows += 1
            return None
        code = "gradient-not-finite" if math.isfinite(now.loss) else "loss-not-finite"
        self.counts[code] += 1
        return code

    def _see_failure(self, now: StepNumbers) -> bool:
        self.streak += 1
        self.longest_streak = max(self.longest_streak, self.streak)
        code = self._count(now)
        if code is None:
            return self._fails_too_often() or self.num_overflows > self.allowed_overflows
        path = self._keep(now)
        if code not in self.first:
            what = "its update was made" if math.isfinite(now.gradient_norm) else "its update was skipped"
            saved = "" if path is None else f"; saved in {path}"
            self.first[code] = (
                f"step {now.step} has a loss of {now.loss:.4g} and a gradient norm of {now.gradient_norm:.4g}: {what}; "
                f"rows {name_first(now.row_ids, SHOWN_ROWS) if now.row_ids else 'unknown'}{saved}"
            )
            return True
        return self._fails_too_often()

    def findings(self, *, is_end: bool) -> Iterator[Finding]:
        """Name the first step of each kind, and how many there were."""
        causes = {
            "loss-not-finite": "A row that the model cannot take, an overflow in the forward pass, or weights that "
            "have diverged.",
            "gradient-not-finite": "An overflow in the backward pass, or weights that have diverged.",
        }
        for code, first in self.first.items():
            further = self.counts[code] - 1
            yield Finding(
                code=code,
                measured=first + (f" (and {further} further of {count_of(self.num_steps, 'step')})" if further else ""),
                expected="numbers",
                cause=causes[code],
                change="Look at its rows, lower train.learning_rate, or set train.precision=bfloat16 or float32.",
            )
        if self.num_overflows > self.allowed_overflows:
            yield Finding(
                code="fp16-overflows",
                measured=f"{self.num_overflows} of {count_of(self.num_steps, 'update')} were skipped for "
                "overflows in float16",
                expected=f"at most {self.allowed_overflows:.0f}, while the loss scale is searched for",
                cause="The model's activations or gradients do not fit into float16.",
                change="Set train.precision=bfloat16 or float32.",
            )
        if self.longest_streak >= FAILURES_IN_A_ROW[self.has_scaler]:
            yield Finding(
                code="updates-keep-failing",
                measured=f"{self.longest_streak} updates in a row were NaN or infinite",
                expected="a single one now and then",
                cause="The weights are broken, or the model overflows on every step: nothing is learned any more.",
                change="Start again from a checkpoint before it with a lower train.learning_rate, or with "
                "train.precision=bfloat16 or float32.",
            )
        elif self.loses_most and (self.num_failures < self.num_steps if is_end else self._has_lost):
            yield Finding(
                code="most-updates-skipped",
                measured=f"{self.num_failures} of {self.num_steps} updates were NaN or infinite",
                expected=f"a single one now and then, at most {SKIPPED_FRACTION:.0%}",
                cause="Most rows were not learned from. This is often caused by one row that repeats, or by an "
                "overflow.",
                change="Look at the rows of the steps in the health report, lower train.learning_rate, or set "
                "train.precision=bfloat16 or float32. train.health.severity={most-updates-skipped: warn} keeps the "
                "model all the same.",
            )

    @property
    def num_failures(self) -> int:
        """Return the steps that were not finite, without what the search for a loss scale explains."""
        return sum(self.counts.values()) + max(math.ceil(self.num_overflows - self.allowed_overflows), 0)

    @property
    def loses_most(self) -> bool:
        """Return whether most updates were skipped."""
        return self.num_failures > SKIPPED_FRACTION * self.num_steps

    def _begins_to_lose(self) -> bool:
        # Once: a run that recovers and loses again is told at its end.
        is_time = not self._has_lost and self.num_steps >= MIN_STEPS_SKIPPED and self.loses_most
        self._has_lost |= is_time
        return is_time

    def facts(self) -> Facts:
        """Return the counts, where there are any."""
        facts: Facts = {"num_steps_not_finite": sum(self.counts.values())}
        return facts | {"num_overflows": self.num_overflows} if self.has_scaler else facts

    def _fails_too_often(self) -> bool:
        return self.streak == FAILURES_IN_A_ROW[self.has_scaler]

    def _keep(self, now: StepNumbers) -> Path | None:
        listed = self.report.facts.setdefault("steps_not_finite", [])
        assert isinstance(listed, list), "a checkpoint with another value is refused"
        if len(listed) >= KEPT_STEPS:
            return None
        path = None if self.reproduce is None else self.reproduce(now.step)
        listed.append(
            {
                "step": now.step,
                "row_ids": list(now.row_ids),
                "loss": repr(now.loss),  # JSON knows neither NaN nor infinity
                "gradient_norm": repr(now.gradient_norm),
                "saved": None if path is None else str(path),
            }
        )
        return path


class TrainingMonitor:
    """Read the numbers of each step and report what is wrong.

    Attributes:
        report: receives findings, and facts at the end.
    """

    def __init__(
        self,
        report: HealthReport,
        *,
        total_steps: int,
        max_grad_norm: float,
        learning_rate: float,
        device: str,
        memory_total_bytes: int | None = None,
        card_uuid: str | None = None,
        has_scaler: bool = False,
        reproduce: Reproduce | None = None,
    ) -> None:
        """Start watching.

        Args:
            report: receives findings and facts.
            total_steps: optimizer steps of the run.
            max_grad_norm: clipping limit; 0 for none.
            learning_rate: the schedule's peak, as the user asked for it.
            device: ``cpu`` or ``cuda``.
            memory_total_bytes: memory of the GPU; ``None`` asks the device.
            card_uuid: by which the driver knows it; ``None`` takes the driver's first card.
            has_scaler: whether float16's gradient scaler is at work, which overflows on purpose.
            reproduce: saves a step that was not finite; ``None`` saves none.
        """
        self.report = report
        if memory_total_bytes is None or device != "cuda":
            memory_total_bytes = card_memory_bytes(device)
        # In the order in which findings of one step are told: what is not a number explains most of the rest.
        self._monitors: list[Monitor] = [
            NotFinite(report, has_scaler=has_scaler, reproduce=reproduce),
            GradientSize(max_grad_norm),
            LearningRates(learning_rate),
            LossCourse(total_steps),
            LoaderWait(),
            Memory(memory_total_bytes, card_uuid),
            Throughput(total_steps),
        ]
        self._raised: set[str] = set()

    def step(self, now: StepNumbers) -> None:
        """Add a finished step.

        Args:
            now: its numbers, which are read and not kept.

        Raises:
            UserError: a finding says stop.
        """
        says_something = False
        with self.report.timing():
            for monitor in self._monitors:
                # Hot path: each takes constant time, and findings are put into words only where one has news.
                if monitor.update(now):
                    says_something |= self._raise(monitor.findings(is_end=False))
        if says_something:
            stop_if_needed(self.report)

    def replay(self, steps: Iterable[Mapping[str, float]]) -> None:
        """Add the steps that were made before a resume, without saying anything.

        Args:
            steps: rows of the step log: ``step``, ``loss_nats_per_…``, ``gradient_norm``, ``learning_rate``.
        """
        for row in steps:
            # The column is named by the unit of the task's loss, token or row.
            loss = next(value for name, value in row.items() if name.startswith("loss_nats_per_"))
            now = StepNumbers(int(row["step"]), loss, row["gradient_norm"], row["learning_rate"], 0.0, 0.0, 0, 0, ())
            for monitor in self._monitors:
                monitor.replay(now)

    def finish(self) -> None:
        """State the findings in terms of the whole run, and add its facts.

        Raises:
            UserError: a finding says stop.
        """
        with self.report.timing():
            final = [finding for monitor in self._monitors for finding in monitor.findings(is_end=True)]
            for finding in final:
                self.report.revise(finding)
            # What looked bad for a while and is not so over the whole run.
            withdrawn = self._raised - {finding.code for finding in final}
            self.report.findings = [known for known in self.report.findings if known.code not in withdrawn]
            for monitor in self._monitors:
                self.report.facts.update(monitor.facts())
        stop_if_needed(self.report)

    def _raise(self, findings: Iterable[Finding]) -> bool:
        """Add findings that were not said before; return whether there were any."""
        # A code that the user switched off is never in the report.
        fresh = [each for each in findings if each.code not in self._raised and not self.report.has(each.code)]
        for finding in fresh:
            self._raised.add(finding.code)
            self.report.add(finding)
        return bool(fresh)


def card_memory_bytes(device: str) -> int | None:
    """Return the memory of the GPU that is trained on; ``None`` without one.

    Args:
        device: ``cpu``, ``cuda`` or ``mps``.
    """
    if device != "cuda":
        return None
    import torch

    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
