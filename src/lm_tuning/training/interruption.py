"""Let a signal finish the step and write a checkpoint before the run stops."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lm_tuning.errors import Interrupted
from lm_tuning.runtime.stopping import stop_if_requested

logger = logging.getLogger(__name__)


class StopRequest:
    """Remember that a signal asked training to stop.

    Attributes:
        signal_name: ``SIGINT`` or ``SIGTERM`` once one has arrived, else ``None``.
    """

    def __init__(self) -> None:
        """Start without a request."""
        self.signal_name: str | None = None
        self._is_acknowledged = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Note the first signal; raise at once on the second.

        Raises:
            Interrupted: a signal arrived before.
        """
        name = signal.Signals(number).name
        if self.signal_name is not None:
            raise Interrupted(
                name,
                "Stopped at once, on the second signal; earlier checkpoints are kept, and "
                "train.resume=true goes on from the newest, if there is one.",
            )
        self.signal_name = name

    def acknowledge(self) -> None:
        """Say once that the request has arrived; a signal handler itself must not write to a log."""
        if self.signal_name is not None and not self._is_acknowledged:
            self._is_acknowledged = True
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
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.signal(number, request.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        stop_if_requested()
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
