"""What a progress bar knows and how it is put into a line."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from lm_tuning.wording import unit_for

LINE_EVERY_SECONDS = 30.0
# A rate over the last minute follows a run that warms up or slows down; a few changes must lie in it all the same,
# however slow the steps are.
_RATE_WINDOW_SECONDS = 60.0
_RATE_MIN_SAMPLES = 4


@dataclass(slots=True)
class Bar:
    """One kind of work, how far it has come and since when; times are those of the display's clock, in seconds."""

    what: str
    unit: str
    total: int | None
    done: int
    first_done: int
    opened_at: float
    changed_at: float
    next_line_at: float
    samples: deque[tuple[float, int]] = field(default_factory=deque)
    is_load_told: bool = False

    def take_sample(self) -> None:
        """Keep when the count last changed, for the rate of the last minute."""
        # The display looks several times a second, and most looks see the same count.
        if self.samples and self.samples[-1][1] == self.done:
            return
        self.samples.append((self.changed_at, self.done))
        # Measured from the last change, not from now: while a slow step is under way its predecessors still tell the
        # rate.
        oldest = self.changed_at - _RATE_WINDOW_SECONDS
        while len(self.samples) > _RATE_MIN_SAMPLES and self.samples[0][0] < oldest:
            self.samples.popleft()

    def units_per_second(self) -> float | None:
        """Return the rate of the last minute, None before anything moved."""
        if len(self.samples) < 2:
            return None
        (first_at, first_done), (last_at, last_done) = self.samples[0], self.samples[-1]
        seconds = last_at - first_at
        return (last_done - first_done) / seconds if seconds > 0 and last_done > first_done else None

    def seconds_left(self, now: float) -> float | None:
        """Return the expected time to the end, None when it cannot be known or what was expected has passed."""
        rate = self.units_per_second()
        if rate is None or self.total is None:
            return None
        # What was left at the last change, less the time that has passed since.
        left = (self.total - self.done) / rate - (now - self.changed_at)
        return left if left > 0 else None

    def is_idle(self, now: float) -> bool:
        """Return whether nothing has changed for as long as there is between two lines."""
        return now - self.changed_at >= LINE_EVERY_SECONDS

    def count(self) -> str:
        """Write how far it has come, ``512/4,000 rows``."""
        total = "" if self.total is None else f"/{self.total:,}"
        return f"{self.done:,}{total} {unit_for(self.done if self.total is None else self.total, self.unit)}"

    def running_line(self, now: float, load: str | None = None) -> str:
        """Write the line of work that goes on.

        Args:
            now: by the display's clock.
            load: what keeps the processors from it, if that is to be said.
        """
        parts = [f"{self.what}: {self.count()}"]
        if self.total:
            parts[0] += f" ({self.done / self.total:.0%})"
        rate, left, idle = self.units_per_second(), self.seconds_left(now), now - self.changed_at
        if rate is not None:
            parts.append(write_rate(rate, self.unit))
        if left is not None:
            parts.append(f"{write_seconds(left)} left")
        if self.is_idle(now):
            parts.append(f"no change for {write_seconds(idle)}")
        line = ", ".join(parts)
        return f"{line}: {load}" if load else line

    def last_line(self, now: float) -> str:
        """Write the line of work that has ended or was stopped."""
        seconds = now - self.opened_at
        if self.total is not None and self.done < self.total:
            return f"{self.what}: stopped at {self.count()} after {write_seconds(seconds)}"
        # What an earlier run has done counts for the total, not for the rate.
        since = self.done - self.first_done
        if self.first_done and not since:
            return f"{self.what}: {self.done:,} {unit_for(self.done, self.unit)}, all done before"
        line = f"{self.what}: {since:,} {unit_for(since, self.unit)} in {write_seconds(seconds)}"
        if since > 0 and seconds > 0:
            line += f", {write_rate(since / seconds, self.unit)}"
        return f"{line}; {self.done:,} with those before" if self.first_done else line


def write_rate(per_second: float, unit: str) -> str:
    """Write units per second, ``3.25 steps/s``."""
    number = f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"
    return f"{number} {unit}/s"


def write_seconds(seconds: float) -> str:
    """Write a time, ``4.2 s``, ``2:05 min`` or ``1:00:00 h``."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"
