"""What is monitored of the device while training runs: whether it waits, gets slower, or runs out of memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import median

from lm_tuning.runtime.busy import LoadMonitor
from lm_tuning.runtime.nvml import read_card
from lm_tuning.training.health.monitors import MIN_STEPS, Monitor, StepNumbers
from lm_tuning.training.health.records import Facts, Finding

MEMORY_FRACTION = 0.92

# Share of the card from which it counts as full: a driver keeps a little for itself.
FULL_FRACTION = 0.995

WAIT_FRACTION = 0.10
# A smaller wait in total is not worth a word.
WAIT_SECONDS = 5.0
# Steps that wait for worker processes to start, and for kernels to be chosen.
FIRST_STEPS = 5

SLOWER_FRACTION = 0.25
# Training time below which a change of speed is chance.
THROUGHPUT_SECONDS = 60.0


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


class Memory(Monitor):
    """A GPU whose memory is nearly full, or that a driver makes larger with the host's."""

    replays = False

    def __init__(self, total_bytes: int | None, card_uuid: str | None = None) -> None:
        """Keep the GPU's memory, ``None`` without one, and the driver's UUID of the card."""
        self.total_bytes = total_bytes
        self._card_uuid = card_uuid
        self.most_bytes = 0
        # Here, since the driver may take a hundredth of a second to answer; what the card has stays the same.
        self.card = None if total_bytes is None else read_card(card_uuid)

    @property
    def fraction(self) -> float:
        """Return the largest share of the memory that was held."""
        return self.most_bytes / self.total_bytes if self.total_bytes else 0.0

    @property
    def card_bytes(self) -> int:
        """Return what the card itself has, by the driver's own figures where there are any."""
        if self.card is not None and self.card.memory_total_bytes:
            return self.card.memory_total_bytes
        return self.total_bytes or 0

    @property
    def is_beyond(self) -> bool:
        """Return whether more is held than the card has, so that the rest must lie in the host's memory."""
        return bool(self.card_bytes) and self.most_bytes > self.card_bytes

    def update(self, now: StepNumbers) -> bool:
        """Keep the peak, and ask the card when it comes near the limit or beyond it."""
        if self.total_bytes is None:
            return False
        before = self.fraction > MEMORY_FRACTION, self.is_beyond
        self.most_bytes = max(self.most_bytes, now.memory_bytes)
        # A peak only rises, so neither becomes false again: the driver is asked twice at most.
        is_news = (self.fraction > MEMORY_FRACTION, self.is_beyond) != before
        if is_news:
            self.card = read_card(self._card_uuid) or self.card
        return is_news

    def findings(self, *, is_end: bool) -> Iterator[Finding]:
        """Compare the peak with the memory that there is."""
        if self.total_bytes is None:
            return
        if self.is_beyond:
            yield self._describe_beyond()
        elif self.fraction > MEMORY_FRACTION:
            yield Finding(
                code="memory-near-limit",
                measured=f"{self.fraction:.1%} of the GPU's memory is used ({self.most_bytes / 2**30:.1f} of "
                f"{self.total_bytes / 2**30:.1f} GiB)",
                expected=f"at most {MEMORY_FRACTION:.0%}",
                cause="Near the limit memory is freed and asked for again in every step: on a card at 95 % a step "
                "took 2.4 times as long.",
                change="Lower train.micro_batch_tokens or set train.gradient_checkpointing=true; the result stays "
                "the same.",
            )

    def _describe_beyond(self) -> Finding:
        # The driver counts all programs together, and says so where the card is full of others.
        used = ""
        if self.card is not None:
            is_full = self.card.memory_used_bytes >= FULL_FRACTION * self.card.memory_total_bytes
            used = (
                f"; the driver (NVML) says {self.card.memory_used_bytes / 2**30:.1f} GiB of the card are used"
                f"{', which is full' if is_full else ''}"
            )
        where = " (WSL2 lets it)" if is_wsl() else ""
        return Finding(
            code="memory-beyond-card",
            measured=f"training holds {self.most_bytes / 2**30:.1f} GiB, more than the card's "
            f"{self.card_bytes / 2**30:.1f} GiB{used}",
            expected=f"at most {MEMORY_FRACTION:.0%} of the card's memory",
            cause=f"The driver puts what does not fit into the host's memory in place of failing{where}: steps take "
            "many times as long.",
            change="Lower train.micro_batch_tokens or set train.gradient_checkpointing=true. In the NVIDIA control "
            "panel of Windows, CUDA - Sysmem Fallback Policy: Prefer No Sysmem Fallback makes it fail instead.",
        )

    def facts(self) -> Facts:
        """Return the largest share of the memory that was held."""
        return {"peak_memory_fraction": self.fraction} if self.total_bytes else {}


def is_wsl() -> bool:
    """Return whether this is Linux under Windows, whose drivers may use the host's memory for the card."""
    try:
        return "microsoft" in Path("/proc/version").read_text(encoding="utf-8").lower()
    except OSError:
        return False
