"""Say what each training source gives to a run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lm_tuning.training.health.report import Finding, HealthReport
from lm_tuning.wording import count_of

if TYPE_CHECKING:
    from lm_tuning.batching.step_plan import StepPlan
    from lm_tuning.training.settings import TrainingSettings

logger = logging.getLogger(__name__)


def describe_sources(plan: StepPlan, settings: TrainingSettings) -> list[dict[str, Any]]:
    """Return the facts of each source; none where all rows come from one file without a weight."""
    return plan.mix.describe(settings.sources, plan.rows_by_source(plan.total_steps)) if settings.sources else []


def say_sources(health: HealthReport, plan: StepPlan, settings: TrainingSettings) -> None:
    """State what each source gives to an epoch, where there is something to state."""
    if len(settings.sources) < 2 and plan.mix.is_plain:
        return
    for source in describe_sources(plan, settings):
        logger.info(
            "Source %s: %s rows x %g = %s rows an epoch, %.1f %% of it; %s in this run",
            source["path"],
            f"{source['num_rows']:,}",
            source["weight"],
            f"{source['rows_per_epoch']:,}",
            100 * source["rows_per_epoch"] / plan.rows_per_epoch,
            f"{source['num_rows_trained']:,}",
        )
        if source["num_rows"] and not source["rows_per_epoch"]:
            health.add(
                Finding(
                    code="source-left-out",
                    severity="warn",
                    measured=f"no row of {source['path']} is trained on",
                    expected=f"some of its {count_of(source['num_rows'], 'row')}",
                    cause=f"Its weight of {source['weight']:g} makes less than half a row an epoch.",
                    change="Raise its weight in data.path, or take it out.",
                )
            )
