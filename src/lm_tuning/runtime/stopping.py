"""A request to stop, kept until it is heard: the error that says so may be swallowed on its way, or come late.

A signal raises an error wherever the program stands. Libraries that try an import, and go on without it when it fails,
take that error for a failed import. So the request is noted as well, and work that goes on asks for it. While the main
thread is inside of a library that does not return, no error can be raised at all. So a thread of its own hears signals
too, says so, and ends the process when the main thread cannot.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from lm_tuning.errors import Interrupted

logger = logging.getLogger(__name__)

#: A run that is asked to stop ends by itself within this time, or is ended; seconds. In a training step the first
#: request starts no clock.
MAX_STOP_SECONDS = 4.3
#: Of that, what is left to those who have something to keep.
LAST_WORDS_SECONDS = 0.7

#: The same signal again within this time is an echo and no second request: ``timeout`` and batch schedulers signal a
#: process by itself and once more with its group; seconds.
ECHO_SECONDS = 0.3

_asked: list[str] = []
_last_words: list[Callable[[], None]] = []


class _Phase:
    """Whether a step is under way, which a first request lets finish."""

    is_patient = False
    is_watched = False


def note_request(signal_name: str) -> None:
    """Note that a signal asked to stop.

    Args:
        signal_name: ``SIGINT`` or ``SIGTERM``.
    """
    _asked.append(signal_name)


def forget_request() -> None:
    """Forget what was asked: the run has ended, or another one begins."""
    _asked.clear()


def stop_if_requested() -> None:
    """End the run if that was asked for.

    Raises:
        Interrupted: a signal asked to stop.
    """
    if _asked and not _Phase.is_patient:
        raise Interrupted(_asked[-1], "What earlier nodes stored is kept.")


def is_watched() -> bool:
    """Return whether a thread acknowledges signals."""
    return _Phase.is_watched


def set_patient(is_patient: bool) -> None:
    """Set whether a first request lets the step in hand finish."""
    _Phase.is_patient = is_patient


@contextmanager
def last_words(action: Callable[[], None]) -> Iterator[None]:
    """Have something done before the process is ended from outside the main thread.

    Args:
        action: keeps what must not be lost; it has about half a second.
    """
    _last_words.append(action)
    try:
        yield
    finally:
        _last_words.remove(action)


@contextmanager
def watch_signals() -> Iterator[None]:
    """Acknowledge SIGINT and SIGTERM from a thread, and end the process when the main thread does not come to it.

    For a command line alone: in a notebook, ending the process would end more than the run. Outside the main thread it
    does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Python's own handler runs between two instructions of the main thread, which a call into a library never reaches.
    # The descriptor is written to by the C handler at once; it must not block, and the reading end waits.
    hears, tells = os.pipe()
    for end in (hears, tells):
        os.set_blocking(end, end == hears)
    before = signal.set_wakeup_fd(tells, warn_on_full_buffer=False)
    watcher = _Watcher(hears)
    watcher.start()
    _Phase.is_watched = True
    try:
        yield
    finally:
        _Phase.is_watched = False
        signal.set_wakeup_fd(before)
        watcher.over.set()
        os.close(tells)  # which ends the thread


class Echo:
    """Tell a signal that is sent twice at once from two requests."""

    def __init__(self) -> None:
        """Begin without a signal."""
        self._last = (0, 0.0)

    def repeats(self, number: int) -> bool:
        """Return whether a signal only repeats the one before."""
        now = time.monotonic()
        before, at = self._last
        if number == before and now - at < ECHO_SECONDS:
            return True
        self._last = (number, now)  # an echo does not move the clock, so no row of them hides a request
        return False


class _Watcher(threading.Thread):
    """Hear signals as bytes in a pipe; the interpreter writes them there whatever the main thread does."""

    def __init__(self, hears: int) -> None:
        super().__init__(name="signal-watcher", daemon=True)
        self.over = threading.Event()
        self._hears = hears

    def run(self) -> None:
        num_asked = 0
        echo = Echo()
        while numbers := os.read(self._hears, 64):  # one byte a signal; nothing once the other end is closed
            for number in numbers:
                if number in (signal.SIGINT, signal.SIGTERM) and not echo.repeats(number):
                    num_asked += 1
                    self._hear(signal.Signals(number), num_asked)
        os.close(self._hears)

    def _hear(self, number: signal.Signals, num_asked: int) -> None:
        is_patient = num_asked == 1 and _Phase.is_patient
        if not is_patient:
            # Whoever asks a third time does not want to wait for anything that is kept.
            seconds = 0.0 if num_asked > 2 else MAX_STOP_SECONDS - LAST_WORDS_SECONDS
            threading.Thread(target=self._end, args=(number, seconds), name="signal-end", daemon=True).start()
        if num_asked == 1:
            patient = "%s: the step in hand is finished and a checkpoint written; a second signal stops at once."
            text = patient if is_patient else "%s: the run stops."
            # In a thread of its own, since the main one may hold the lock of the log.
            threading.Thread(target=logger.warning, args=(text, number.name), name="signal-words", daemon=True).start()

    def _end(self, number: signal.Signals, seconds: float) -> None:
        """End the process, with what can be kept, unless it has ended by itself until then."""
        if self.over.wait(seconds):
            return
        speaker = threading.Thread(target=_say_last_words, name="last-words", daemon=True)
        speaker.start()
        speaker.join(LAST_WORDS_SECONDS)
        if self.over.is_set():
            return
        with suppress(OSError):
            os.write(2, f"Stopped by {number.name}, in the midst of something that could not be ended.\n".encode())
        kill_children()  # which a hard exit would leave behind, for one a loader's workers on a GPU
        os._exit(128 + number)


def _hear_nothing_in_child() -> None:
    """Let a forked process, such as a loader's worker, not write its signals into the pipe that it has inherited."""
    if _Phase.is_watched:
        _Phase.is_watched = False
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_hear_nothing_in_child)


def _say_last_words() -> None:
    for action in reversed(_last_words):
        try:
            action()
        except Exception as error:
            logger.warning("Not kept: %s", error)


def kill_children() -> None:
    """End every process that this one has started, and theirs."""
    for pid in _children_of(os.getpid()):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _children_of(parent: int) -> list[int]:
    """Return the ids of all processes below one, where the system lists them (Linux)."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    found = [parent]
    for pid in found:  # grows as it is walked
        found += [child for child, above in parents.items() if above == pid]
    return found[1:]


# As signal.signal() returns and takes it; None stands for a handler that was not set from Python.
_Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | signal.Handlers | None


class StopSignals:
    """Raise ``Interrupted`` in the main thread at once. Training puts its own, patient handlers in front meanwhile.

    Left to Python, Ctrl-C raises an error that Kedro does not pass to hooks, and SIGTERM ends the process without a
    word: the run would show as finished or run for ever.
    """

    def __init__(self) -> None:
        """Begin without handlers."""
        self._previous: dict[signal.Signals, _Handler] = {}

    def install(self) -> None:
        """Install both signals; outside the main thread, where that is impossible, do nothing."""
        if threading.current_thread() is threading.main_thread() and not self._previous:
            if not _Phase.is_watched:  # a command line has heard nothing before this run, and forgets nothing
                forget_request()
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, _raise_interrupted)

    def restore(self) -> None:
        """Restore the previous handlers."""
        if threading.current_thread() is threading.main_thread():
            while self._previous:
                number, handler = self._previous.popitem()
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            if not _Phase.is_watched:
                forget_request()


@contextmanager
def signals_of_a_command() -> Iterator[None]:
    """Stop a command at the first SIGINT or SIGTERM, from its first moment to its last, and say so on the terminal."""
    signals = StopSignals()
    forget_request()
    with watch_signals():
        signals.install()
        try:
            yield
        finally:
            signals.restore()
            forget_request()


def was_interrupted(error: BaseException | None) -> bool:
    """Return whether an error, or what it was raised from, is a request to stop."""
    # As a traceback is printed: the cause, or else the context unless it was suppressed with "from None".
    while error is not None:
        if isinstance(error, Interrupted | KeyboardInterrupt):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


_echo = Echo()


def _raise_interrupted(number: int, frame: FrameType | None) -> None:
    """Stop the run where it stands, or at the next node or sign of progress where that is swallowed."""
    if _echo.repeats(number):
        return
    note_request(signal.Signals(number).name)  # first, so that it is not lost where the error is swallowed
    stop_if_requested()
