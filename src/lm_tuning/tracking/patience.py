"""Wait for another thread for as long as it shows signs of life: what it is doing may take long, and hang as well."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

#: What counts as a sign of life of a thread inside of a call: its processor time, in hundredths of a second, and bytes
#: that the process has read. Where the system does not tell (other than Linux), there is none.
_LIFE_TICKS = 2
_LIFE_BYTES = 2**18
_LOOK_SECONDS = 0.05


def wait_patiently(
    condition: Callable[[], bool], life: Callable[[], object], patience_seconds: float, at_most_seconds: float | None
) -> tuple[bool, float]:
    """Wait for a condition while something changes.

    Args:
        condition: what is waited for.
        life: returns another value whenever whoever brings the condition about has got on.
        patience_seconds: how long it may return the same.
        at_most_seconds: the longest wait all the same; None waits on.

    Returns:
        Whether the condition came true, and the seconds that were waited.
    """
    last, began = life(), time.monotonic()
    now = since = began
    while not condition():
        time.sleep(_LOOK_SECONDS)
        # Looked at after the pause, not before: a process that was stopped in between, as on a busy machine, gets a
        # look at what has happened meanwhile before it counts the time as silence.
        now, new = time.monotonic(), life()
        if new != last:
            last, since = new, now
        if now - since >= patience_seconds or (at_most_seconds is not None and now - began >= at_most_seconds):
            return condition(), now - began
    return True, now - began


def work_of(thread: threading.Thread) -> tuple[int, int]:
    """Return what grows while a thread works: its processor time, and what the process has read, in coarse units."""
    return (_ticks_of(thread) // _LIFE_TICKS, _bytes_read() // _LIFE_BYTES)


def _ticks_of(thread: threading.Thread) -> int:
    """Return how much processor time a thread has taken, in ticks of the system, or 0 where it does not say."""
    try:
        with open(f"/proc/self/task/{thread.native_id}/stat", encoding="utf-8", errors="replace") as file:
            # The name in parentheses may hold spaces and parentheses itself.
            fields = file.read().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])  # in user and in system mode
    except (OSError, ValueError, IndexError):
        return 0


def _bytes_read() -> int:
    """Return how many bytes this process has read so far, or 0 where the system does not say."""
    try:
        with open("/proc/self/io", "rb") as file:
            return int(file.readline().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
