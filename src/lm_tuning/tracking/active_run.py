"""The run that this process tracks now, made MLflow's active one without asking the store, which would wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lm_tuning.tracking.journal import Journal

if TYPE_CHECKING:
    from mlflow.entities import Run


def enter_run(run: Run) -> None:
    """Make a run the active one of this thread, and its experiment that of the process.

    Args:
        run: as the store gave it.
    """
    # What mlflow.start_run() does, but for its requests, with which it would wait for a store that is away.
    fluent = _fluent()
    fluent._active_experiment_id = run.info.experiment_id
    fluent._active_run_stack.get().append(fluent.ActiveRun(run))


def leave_run(run_id: str) -> None:
    """Leave a run, if it is the active one of this thread.

    Args:
        run_id: its id.
    """
    fluent = _fluent()
    stack = fluent._active_run_stack.get()
    # mlflow.end_run() would tell the store that the run has ended; the sender does that, in its turn.
    while stack and stack[-1].info.run_id == run_id:
        stack.pop()
        fluent._last_active_run_id.set(run_id)


def _fluent() -> Any:
    """Return the module that keeps these things; none of it is MLflow's public interface."""
    from mlflow.tracking import fluent

    return fluent


# A list to be filled and emptied, so that no function needs ``global``.
_journals: list[Journal] = []


def set_current(journal: Journal | None) -> None:
    """Set the journal that takes what is logged from now on.

    Args:
        journal: of the run, or None when it has ended.
    """
    _journals[:] = [] if journal is None else [journal]


def current_journal() -> Journal | None:
    """Return the journal of the run of now, or None where nothing is tracked."""
    return _journals[0] if _journals else None
