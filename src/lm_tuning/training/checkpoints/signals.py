"""Let a signal finish the step and write a checkpoint before the run stops."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lm_tuning.errors import Interrupted
from lm_tuning.runtime.stopping import Echo, forget_request, is_watched, note_request, set_patient, stop_if_requested

logger = logging.getLogger(__name__)


class StopRequest:
    """Remember that a signal asked training to stop.

    Attributes:
        signal_name: ``SIGINT`` or ``SIGTERM`` once one has arrived, else ``None``.
        is_final: a second one has arrived, and nothing is finished any more.
    """

    def __init__(self) -> None:
        """Start without a request, and without a step that could be finished."""
        self.signal_name: str | None = None
        self.is_final = False
        self._echo = Echo()
        self._has_begun = False
        self._may_break_off = False
        self._is_acknowledged = False

    def begin_steps(self) -> None:
        """From now on a first request lets the step in hand finish; before, there is nothing to finish."""
        if not self._has_begun:
            self._has_begun = True
            set_patient(True)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Note the first signal; raise at once on the second, and before the first step. An echo is no second one.

        Raises:
            Interrupted: a signal arrived before, or no step has begun.
        """
        if self._echo.repeats(number):
            return
        name = signal.Signals(number).name
        # For whoever runs commands one after another: the next node must not begin.
        note_request(name)
        if not self._has_begun:
            stop_if_requested()
        if self.signal_name is not None:
            self.is_final = True
            raise Interrupted(
                name,
                "Stopped at once, on the second signal; earlier checkpoints are kept, and "
                "train.resume=true goes on from the newest, if there is one.",
            )
        self.signal_name = name
        # Nothing is lost by it: a resume measures again.
        if self._may_break_off:
            raise Interrupted(name, "What was under way is broken off.")

    @contextmanager
    def breaking_off(self) -> Iterator[None]:
        """Let the first request, also an earlier one, break off what a resume can make up for.

        Raises:
            Interrupted: a signal has asked to stop.
        """
        self._may_break_off = True
        try:
            if self.signal_name is not None:
                raise Interrupted(self.signal_name, "What comes next is left out.")
            yield
        finally:
            self._may_break_off = False

    def acknowledge(self) -> None:
        """Log once that the request has arrived, where no thread does; a signal handler must not write to a log."""
        if self.signal_name is not None and not self._is_acknowledged:
            self._is_acknowledged = True
            if not is_watched():
                logger.warning(
                    "%s: the step in hand is finished and a checkpoint written; a second signal stops at once.",
                    self.signal_name,
                )


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Collect SIGINT and SIGTERM while training; put the handlers back afterwards.

    Signals reach only the main thread; elsewhere the request simply never comes.

    Raises:
        Interrupted: a signal had asked to stop before.
    """
    request = StopRequest()
    # Python runs signal handlers in the main thread alone, and lets no other set them.
    if threading.current_thread() is not threading.main_thread():
        try:
            yield request
        finally:
            set_patient(False)
        return
    previous = {number: signal.signal(number, request.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        stop_if_requested()
        yield request
        if not is_watched():  # a request in the last step stops a command before its next node, and nothing else
            forget_request()
    except Interrupted:
        forget_request()
        raise
    finally:
        set_patient(False)
        for number, handler in previous.items():
            signal.signal(number, handler)
