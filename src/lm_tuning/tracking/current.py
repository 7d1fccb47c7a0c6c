"""The run that this process tracks now, for whoever logs to it."""

from __future__ import annotations

from lm_tuning.tracking.journal import Journal

_journals: list[Journal] = []


def set_current(journal: Journal | None) -> None:
    """Say which journal takes what is logged from now on.

    Args:
        journal: of the run, or None when it has ended.
    """
    _journals[:] = [] if journal is None else [journal]


def current_journal() -> Journal | None:
    """Return the journal of the run of now, or None where nothing is tracked."""
    return _journals[0] if _journals else None
