"""Make a run MLflow's active one, or leave it, without asking the tracking store: ``mlflow.start_run`` would wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow.entities import Run


def enter_run(run: Run) -> None:
    """Make a run the active one of this thread, and its experiment that of the process.

    Args:
        run: as the store gave it.
    """
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
    while stack and stack[-1].info.run_id == run_id:
        stack.pop()
        fluent._last_active_run_id.set(run_id)


def _fluent() -> Any:
    """Return the module that keeps these things; none of it is MLflow's public interface."""
    from mlflow.tracking import fluent

    return fluent
