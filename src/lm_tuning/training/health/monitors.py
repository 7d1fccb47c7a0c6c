"""What is monitored of the learning while training runs: one small check for each thing that goes wrong.

Every check takes a step's numbers in constant time, says when it has seen enough, and describes what it found, with the
counts of that moment.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lm_tuning.training.health.records import Facts, Finding
from lm_tuning.training.health.report import HealthReport, stop_if_needed
from lm_tuning.wording import count_of

# Steps over which the usual gradient norm is taken.
WINDOW_STEPS = 101

# Steps before anything is said of shares and medians.
MIN_STEPS = 20

# A norm this many times the usual one is no ordinary hard batch.
EXPLODED_FACTOR = 30.0

# Usual norm over the clipping limit from which the limit decides the update's size at every step.
FAR_ABOVE_LIMIT = 10.0

# Below this loss nothing is left to learn, and a gradient of zero is right.
NO_LOSS_NATS = 1e-6

# Steps before anything is said of a rise.
MIN_STEPS_RISE = 40

# One in so many runs that change nothing would have its losses in such an order by chance.
ORDERS = 100_000

RISE_FRACTION = 0.10
# A smaller rise, as of a share and in nats, may be what dropout or a new schedule does to a finished model.
RISE_NATS = 0.1

# Share of the peak under which next to nothing is learned.
TINY_FRACTION = 0.01

# No optimizer in use learns anything at such a rate: weights of 0.01 would move by a hundred-thousandth of a percent a
# step, which is less than their rounding.
TINY_RATE = 1e-9

# Share of the peak that counts as reached.
PEAK_FRACTION = 0.99


@dataclass(slots=True)
class StepNumbers:
    """What is known of a finished step, on the host.

    Attributes:
        step: optimizer step from 1.
        loss: nats per supervised token or row.
        gradient_norm: before clipping.
        learning_rate: of its update.
        seconds: it took, without pauses.
        wait_seconds: of them, waiting for the loader.
        num_tokens: real tokens.
        memory_bytes: most memory held so far.
        row_ids: its rows.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    seconds: float
    wait_seconds: float
    num_tokens: int
    memory_bytes: int
    row_ids: Sequence[int]

    @property
    def is_finite(self) -> bool:
        """Return whether loss and gradient are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


class Monitor(ABC):
    """One thing that can go wrong while training, followed from step to step."""

    # Whether steps made before a resume count; speed and memory are those of the process that measured them.
    replays = True

    @abstractmethod
    def update(self, now: StepNumbers) -> bool:
        """Add a step; return whether it is time to look at :meth:`findings`."""

    def replay(self, now: StepNumbers) -> None:
        """Add a step that was made before a resume."""
        if self.replays:
            self.update(now)

    @abstractmethod
    def findings(self, *, is_end: bool) -> Iterator[Finding]:
        """Describe what is wrong by now.

        Args:
            is_end: whether training is over.
        """

    def facts(self) -> Facts:
        """Return what was measured, right or wrong, and is not in the step log."""
        return {}


class GradientSize(Monitor):
    """Gradients that are clipped, explode or vanish."""

    def __init__(self, max_grad_norm: float) -> None:
        """Keep the clipping limit; 0 for none."""
        self.limit = max_grad_norm
        self.num_steps = self.num_clipped = self.num_exploded = self.num_zero = 0
        self.first_zero = 0
        self.largest, self.largest_step = 0.0, 0
        self.exploded_step, self.exploded_norm, self.exploded_usual = 0, 0.0, 0.0
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    @property
    def usual(self) -> float:
        """Return the median norm of the last steps; 0 before the first."""
        return self._sorted[len(self._sorted) // 2] if self._sorted else 0.0

    def update(self, now: StepNumbers) -> bool:
        """Count the step; NaN and infinity are another check's."""
        if not now.is_finite:
            return False
        norm, usual, known = now.gradient_norm, self.usual, len(self._sorted)
        self.num_steps += 1
        news = False
        if self.limit and norm > self.limit:
            self.num_clipped += 1
        if norm == 0.0 and abs(now.loss) > NO_LOSS_NATS:
            news = not self.num_zero
            self.num_zero += 1
            self.first_zero = self.first_zero or now.step
        if known >= MIN_STEPS and norm > EXPLODED_FACTOR * usual and norm > (self.limit or 1.0):
            news = news or not self.num_exploded
            self.num_exploded += 1
            if norm > self.exploded_norm:
                self.exploded_step, self.exploded_norm, self.exploded_usual = now.step, norm, usual
        if norm > self.largest:
            self.largest, self.largest_step = norm, now.step
        # A sorted list beside the queue gives the median of the window without sorting at every step.
        if len(self._recent) == WINDOW_STEPS:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(norm)
        insort(self._sorted, norm)
        return news or self.num_steps in (5 * MIN_STEPS, 50 * MIN_STEPS)

    def findings(self, *, is_end: bool) -> Iterator[Finding]:
        """Describe gradients that are clipped too often, explode or vanish."""
        share = self.num_clipped / max(self.num_steps, 1)
        enough = self.num_steps >= (MIN_STEPS if is_end else 5 * MIN_STEPS)
        if enough and share >= 0.9 and self.usual > FAR_ABOVE_LIMIT * self.limit:
            yield Finding(
                code="gradients-far-above-limit",
                measured=f"{share:.0%} of {self.num_steps} updates were clipped, and the usual gradient norm is "
                f"{self.usual:.3g}, {self.usual / self.limit:.3g} times the limit of {self.limit:g}",
                expected=f"norms around the limit, which cuts off outliers (at most {FAR_ABOVE_LIMIT:g} times it)",
                cause="The loss is scaled up (a sum where a mean is expected), or the learning rate is too high.",
                change="Look at first_step_logged in the health report, then lower train.learning_rate or raise "
                "train.trainer.max_grad_norm.",
            )
        elif enough and share > 0.5 and self.usual > FAR_ABOVE_LIMIT * self.limit:
            # Norms a few times the limit are what most sound runs have, and nothing to tell a user.
            yield Finding(
                code="gradients-often-clipped",
                measured=f"{share:.0%} of {self.num_steps} updates were clipped at {self.limit:g}; the usual "
                f"gradient norm is {self.usual:.3g}",
                expected=f"less than half of them, or norms of at most {FAR_ABOVE_LIMIT:g} times the limit",
                cause="The limit sets the size of most updates, while others are far smaller.",
                change="Raise train.trainer.max_grad_norm or the rows of a step if the loss is unsteady.",
            )
        if self.num_exploded:
            yield Finding(
                code="gradient-exploded",
                measured=f"the gradient norm was {self.exploded_norm:.3g} at step {self.exploded_step}, "
                f"{_times(self.exploded_norm, self.exploded_usual)} the usual {self.exploded_usual:.3g}"
                + _so_often(self.num_exploded),
                expected=f"at most {EXPLODED_FACTOR:g} times it",
                cause="The learning rate is too high, or the step has rows unlike all others.",
                change="Lower train.learning_rate, lengthen train.trainer.warmup_steps, or look at the step's rows.",
            )
        if self.num_zero:
            yield Finding(
                code="gradient-zero",
                measured=f"the gradient of step {self.first_zero} is exactly 0 although its loss is not"
                + _so_often(self.num_zero),
                expected="a gradient wherever there is a loss",
                cause="Nothing that is trained takes part in the loss, or small gradients vanish in float16.",
                change="Look at train.freeze and train.lora.target_modules, and set train.precision=bfloat16 or "
                "float32.",
            )

    def facts(self) -> Facts:
        """Return the share of clipped updates and the norms."""
        if not self.num_steps:
            return {}
        return {
            "clipped_fraction": self.num_clipped / self.num_steps,
            "gradient_norm_recent_median": self.usual,
            "gradient_norm_max": self.largest,
            "gradient_norm_max_step": self.largest_step,
        }


class LossCourse(Monitor):
    """A training loss that ends above where it began: the run made the model worse on the rows that it learns from.

    Whether a loss that neither falls nor rises is a fault cannot be told from its steps: a finished model, a low rate
    and a short run look the same. A rise can. Steps are drawn at random, so in a run that changes nothing every order
    of their losses is equally likely, whatever the spread of single steps. That all of the last quarter lie above the
    first few has a probability that is known exactly; as many first ones are compared as make it next to none.
    """

    def __init__(self, total_steps: int) -> None:
        """Keep the steps of the run, to look at half of it and at three quarters."""
        self.looks_at = {total_steps // 2, 3 * total_steps // 4}
        self.losses = array("d")

    def update(self, now: StepNumbers) -> bool:
        """Keep the loss; NaN and infinity are another check's."""
        if now.is_finite:
            self.losses.append(now.loss)
        return now.step in self.looks_at

    def findings(self, *, is_end: bool) -> Iterator[Finding]:
        """Compare the last quarter of the steps with the first ones."""
        num_last = len(self.losses) // 4
        if len(self.losses) < MIN_STEPS_RISE:
            return
        # In a run that changes nothing any num_last of these losses may be the highest ones, all choices alike: the
        # chance that the last are it is 1 / comb(num_last + count, count).
        num_first = next(count for count in range(1, num_last + 1) if math.comb(num_last + count, count) >= ORDERS)
        first, last = max(self.losses[:num_first]), min(self.losses[-num_last:])
        if last - first <= max(RISE_NATS, RISE_FRACTION * first):
            return
        yield Finding(
            code="loss-rises",
            measured=f"each of the last {num_last} steps has a loss of at least {last:.4f} nats, and none of the "
            f"first {num_first} more than {first:.4f}",
            expected="a loss that falls, or stays where it is",
            cause="The learning rate is too high, or updates go against the gradient: the model gets worse on the "
            "rows that it is trained on.",
            change="Lower train.learning_rate or lengthen train.trainer.warmup_steps, and start again from a "
            "checkpoint before the rise, or from the base model.",
        )


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


def _so_often(count: int) -> str:
    return "" if count == 1 else f" (and at {count_of(count - 1, 'further step')})"


def _times(value: float, usual: float) -> str:
    return f"{value / usual:.3g} times" if usual else "far above"
