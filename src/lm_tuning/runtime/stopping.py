"""A request to stop, kept until it is heard: the error that says so may be swallowed on its way.

A signal raises an error wherever the program stands. Libraries that try an import, and go on without it when it fails,
take that error for a failed import. So the request is noted as well, and work that goes on asks for it.
"""

from __future__ import annotations

from lm_tuning.errors import Interrupted

_asked: list[str] = []


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
    if _asked:
        raise Interrupted(_asked[-1], "What earlier nodes stored is kept.")
