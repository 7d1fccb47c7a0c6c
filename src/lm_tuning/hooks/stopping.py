"""Turn the first SIGINT or SIGTERM into an exception that Kedro reports to its hooks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeAlias

from lm_tuning.errors import Interrupted
from lm_tuning.runtime.stopping import Echo, forget_request, is_watched, note_request, stop_if_requested, watch_signals

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
            if not is_watched():  # a command line has heard nothing before this run, and forgets nothing
                forget_request()
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, _raise_interrupted)

    def restore(self) -> None:
        """Restore the previous handlers."""
        if threading.current_thread() is threading.main_thread():
            while self._previous:
                number, handler = self._previous.popitem()
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            if not is_watched():
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
