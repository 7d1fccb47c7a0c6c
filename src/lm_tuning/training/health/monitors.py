"""What is monitored while training runs: one small check for each thing that goes wrong.

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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

from lm_tuning.runtime.busy import LoadMonitor
from lm_tuning.training.health.records import Facts, Finding
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

WAIT_FRACTION = 0.10
# A smaller wait in total is not worth a word.
WAIT_SECONDS = 5.0
# Steps that wait for worker processes to start, and for kernels to be chosen.
FIRST_STEPS = 5

SLOWER_FRACTION = 0.25
# Training time below which a change of speed is chance.
THROUGHPUT_SECONDS = 60.0


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

    @abstractmethod
    def facts(self) -> Facts:
        """Return what was measured, right or wrong."""


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


class LoaderWait(Monitor):
    """A device that waits for batches."""

    replays = False

    def __init__(self) -> None:
        """Start without steps."""
        self.num_seen = self.num_counted = 0
        self.seconds = self.waited = 0.0

    @property
    def fraction(self) -> float:
        """Return the share of the time that was waited."""
        return self.waited / self.seconds if self.seconds else 0.0

    def update(self, now: StepNumbers) -> bool:
        """Add the step's time, but not that of the first ones."""
        # After a resume too: the workers of the new process start again.
        self.num_seen += 1
        if self.num_seen <= FIRST_STEPS:
            return False
        self.num_counted += 1
        self.seconds += now.seconds
        self.waited += now.wait_seconds
        return self.num_counted in (5 * MIN_STEPS, 50 * MIN_STEPS)

    def findings(self, *, is_end: bool) -> Iterator[Finding]:
        """Compare the wait with the time of the steps."""
        if self.num_counted < MIN_STEPS or self.waited < WAIT_SECONDS or self.fraction <= WAIT_FRACTION:
            return
        yield Finding(
            code="loader-starves-device",
            measured=f"{self.fraction:.0%} of the training time went into waiting for batches "
            f"({self.waited:.0f} of {self.seconds:.0f} s)",
            expected=f"at most {WAIT_FRACTION:.0%}",
            cause="Batches are prepared more slowly than they are trained on.",
            change="Raise train.num_loader_workers, or put data/05_model_input on a faster disk.",
        )

    def facts(self) -> Facts:
        """Return the share of the time that was waited."""
        return {"loader_wait_fraction": self.fraction} if self.num_counted else {}


class Throughput(Monitor):
    """Training that gets slower.

    Medians of a quarter of the steps are compared, so single slow steps (after an evaluation, a checkpoint, at the
    start) do not count.
    """

    replays = False

    def __init__(self, total_steps: int, load: LoadMonitor | None = None) -> None:
        """Keep the steps of the run, to look at half of it and at three quarters.

        Args:
            total_steps: of the run.
            load: tells what else keeps the processors busy; by default from this machine.
        """
        self.quarter_steps = {total_steps // 4, total_steps // 2, 3 * total_steps // 4}
        self.looks_at = {total_steps // 2, 3 * total_steps // 4}
        self.speeds = array("d")
        self.seconds = 0.0
        self.load = load or LoadMonitor()
        # A thread of its own, since looking through the files of all threads and workers takes milliseconds. With
        # something to do it starts now: starting a thread takes time too, which no step should spend.
        self._reader = ThreadPoolExecutor(1, "load-reader")
        self._reader.submit(self.load.restart)
        self._last_quarter: Future[str | None] | None = None

    def update(self, now: StepNumbers) -> bool:
        """Keep the step's speed, and after each quarter of the steps what kept the processors busy in it."""
        if now.seconds > 0:
            self.speeds.append(now.num_tokens / now.seconds)
            self.seconds += now.seconds
        if now.step in self.quarter_steps:
            self._last_quarter = self._reader.submit(self._end_quarter)
        return now.step in self.looks_at

    def _end_quarter(self) -> str | None:
        load = self.load.describe()
        self.load.restart()
        return load

    def quarters(self) -> tuple[float, float] | None:
        """Return tokens per second of an early and of the last quarter; ``None`` when there are too few steps."""
        # Compilation, the first kernels and the filling of queues fall into the first steps.
        warm = self.speeds[min(10, len(self.speeds) // 10) :]
        size = len(warm) // 4
        if size < MIN_STEPS // 2 or self.seconds < THROUGHPUT_SECONDS:
            return None
        return median(warm[:size]), median(warm[-size:])

    def findings(self, *, is_end: bool) -> Iterator[Finding]:
        """Compare the quarters."""
        quarters = self.quarters()
        if quarters is None or quarters[1] >= (1 - SLOWER_FRACTION) * quarters[0]:
            return
        early, late = quarters
        load = None if self._last_quarter is None else self._last_quarter.result()
        if is_end:
            # The steps since the last quarter's end may have been too few to say anything; then that quarter holds.
            load = self.load.describe() or load
        yield Finding(
            code="throughput-falls",
            measured=f"the last quarter of the steps ran at {late:,.0f} tokens per second, an early one at "
            f"{early:,.0f} ({1 - late / early:.0%} slower)",
            expected=f"at most {SLOWER_FRACTION:.0%} slower",
            cause="The device is throttled by heat, shared with another program, or runs out of memory slowly."
            if load is None
            else f"Lately, {load}.",
            change="Look at the device's clock and at other programs; compare memory in the step table.",
        )

    def facts(self) -> Facts:
        """Return the speed of both quarters."""
        quarters = self.quarters()
        if quarters is None:
            return {}
        early, late = quarters
        return {"early_tokens_per_second": early, "late_tokens_per_second": late}


def _so_often(count: int) -> str:
    return "" if count == 1 else f" (and at {count_of(count - 1, 'further step')})"


def _times(value: float, usual: float) -> str:
    return f"{value / usual:.3g} times" if usual else "far above"
