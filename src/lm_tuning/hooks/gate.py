"""End a run whose model does not reach ``evaluate.gate``, or a score of which failed, after everything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kedro.framework.hooks import hook_impl

from lm_tuning.errors import GateNotReached, UserError

EVALUATION = "evaluation"


class GateHook:
    """Remember what an evaluation missed, and say so once all results are saved and the MLflow run is closed.

    A node that raised would end the run in the middle: pipelines that come after it would not run, and MLflow would
    call the run failed, although every step of it did what it should.
    """

    def __init__(self) -> None:
        """Begin without an evaluation."""
        self._missed: list[str] = []
        self._failed: list[str] = []

    @hook_impl
    def before_pipeline_run(self) -> None:
        """Forget the evaluation of an earlier run in the same process."""
        self._missed, self._failed = [], []

    @hook_impl
    def after_dataset_saved(self, dataset_name: str, data: Any) -> None:
        """Look at the bounds of an evaluation that was just saved."""
        if dataset_name == EVALUATION and isinstance(data, Mapping):
            self._missed = [bound["message"] for bound in data.get("gate", []) if not bound["is_reached"]]
            self._failed = [
                f"evaluate.scores.own_metrics: {reason} Its score is missing; all other results are stored."
                for reason in data.get("failed_scores", {}).values()
            ]

    # Behind the tracking hook, which closes the MLflow run as finished.
    @hook_impl(trylast=True)
    def after_pipeline_run(self) -> None:
        """End the run with exit code 3 where a bound was missed, and with 2 where a score failed.

        Raises:
            GateNotReached: with every bound that was missed.
            UserError: with every score that failed, and with the missed bounds, which may be missed for it.
        """
        if self._failed:
            raise UserError([*self._failed, *self._missed])
        if self._missed:
            raise GateNotReached(self._missed)
