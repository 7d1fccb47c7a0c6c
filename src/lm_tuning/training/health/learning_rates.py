"""Look at a learning rate's course, before the run where the schedule tells it in advance, and at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lm_tuning.training.health.monitors import Monitor, StepNumbers
from lm_tuning.training.health.records import Facts, Finding
from lm_tuning.training.health.report import HealthReport, stop_if_needed
from lm_tuning.wording import count_of

# Share of the peak under which next to nothing is learned.
TINY_FRACTION = 0.01

# No optimizer in use learns anything at such a rate: weights of 0.01 would move by a hundred-thousandth of a percent a
# step, which is less than their rounding.
TINY_RATE = 1e-9

# Share of the peak that counts as reached.
PEAK_FRACTION = 0.99


class LearningRates(Monitor):
    """A schedule that never does what was asked of it."""

    def __init__(self, peak: float) -> None:
        """Keep the peak that the user asked for."""
        self.peak = peak
        self.num_steps = self.num_updates = 0
        self.highest = self.last = 0.0
        self.rises = self.from_start = False

    def update(self, now: StepNumbers) -> bool:
        """Follow the rate; only the end of the run says what it amounted to."""
        self.count(now.step, now.learning_rate, is_made=now.is_finite)
        return False

    def count(self, step: int, rate: float, *, is_made: bool = True) -> None:
        """Add the rate of a step (from 1), and whether its update was made."""
        # Steps made before a resume are replayed, so only a log that lacks them begins later.
        if self.num_steps == 0:
            self.from_start = step == 1
        self.num_steps += 1
        self.num_updates += rate > 0 and is_made
        self.rises = rate > self.last
        self.last = rate
        self.highest = max(self.highest, rate)

    def findings(self, *, is_end: bool) -> Iterator[Finding]:
        """Describe what the schedule came to; a run seen from its middle has had its peak before."""
        if not is_end or not self.num_steps or not self.from_start:
            return
        steps = count_of(self.num_steps, "step")
        highest = (
            f"the highest learning rate of {steps} is {self.highest:.3g}, {self.highest / self.peak:.3g} of the peak "
            f"of {self.peak:.3g}"
        )
        shorter = (
            f"Shorten train.trainer.warmup_steps or raise train.num_epochs or train.max_steps, which are {steps} here."
        )
        if not self.num_updates:
            is_zero = self.highest == 0
            yield Finding(
                code="no-update-made",
                measured=f"none of {steps} changed the weights",
                expected="an update per step",
                cause="The learning rate is 0 at every step: the warm-up starts from 0 and the run ends with it."
                if is_zero
                else "Every update was skipped for NaN or infinite numbers.",
                change=shorter
                if is_zero
                else "Look at the rows of the steps in the report, or set train.precision=bfloat16 or float32.",
            )
        elif self.peak < TINY_RATE:
            yield describe_tiny_peak(self.peak)
        elif self.highest < TINY_FRACTION * self.peak:
            yield Finding(
                code="learning-rate-tiny",
                measured=highest,
                expected="the peak itself",
                cause="The run is far shorter than its schedule, so that hardly anything is learned.",
                change=shorter,
            )
        elif self.highest < PEAK_FRACTION * self.peak and self.rises:
            yield Finding(
                code="warm-up-not-finished",
                measured=f"the run ends in its warm-up: {highest}",
                expected="a warm-up that ends well before the run",
                cause="The warm-up has more steps than the run.",
                change=shorter,
            )
        elif self.highest < PEAK_FRACTION * self.peak:
            yield Finding(
                code="peak-rate-not-reached",
                measured=highest,
                expected="the peak itself at one step at least",
                cause="The schedule does not start from, or rise to, the rate that was asked for.",
                change="Look at train.trainer.lr_scheduler_type and its keyword arguments, or set "
                "train.learning_rate to what is wanted.",
            )

    def facts(self) -> Facts:
        """Return the highest rate and the updates made."""
        return {"learning_rate_max": self.highest, "num_updates": self.num_updates} if self.num_steps else {}


def describe_tiny_peak(peak: float) -> Finding:
    """Describe a learning rate with which nothing is learned.

    Args:
        peak: that the user asked for.
    """
    return Finding(
        code="learning-rate-tiny",
        measured=f"train.learning_rate = {peak:.3g}",
        expected="about 1e-4 to 1e-3 for LoRA, 1e-5 to 5e-5 for all weights",
        cause="The updates are smaller than the rounding of the weights, so that nothing is learned.",
        change="Raise train.learning_rate.",
    )


def check_planned_rates(report: HealthReport, scheduler: Any, *, total_steps: int, peak: float) -> None:
    """Look at the learning rates of a run before its first step, where the schedule tells them in advance.

    Args:
        report: receives the finding.
        scheduler: of PyTorch; others than ``LambdaLR`` depend on what training brings and are not judged here.
        total_steps: optimizer steps of the run.
        peak: learning rate that the user asked for.

    Raises:
        UserError: no step would change the weights, or another finding says stop.
    """
    lambdas = getattr(scheduler, "lr_lambdas", None)
    if lambdas:
        rates = LearningRates(peak)
        for step in range(total_steps):
            # Group 0: the Trainer's second group, without decay, has the same rate.
            rates.count(step + 1, float(scheduler.base_lrs[0]) * float(lambdas[0](step)))
        found = list(rates.findings(is_end=True))
    else:
        found = [describe_tiny_peak(peak)] if peak < TINY_RATE else []
    for finding in found:
        report.revise(finding)
    # Not without a new finding: what a resumed run was told before may say stop, and was let pass since.
    if found:
        stop_if_needed(report)
