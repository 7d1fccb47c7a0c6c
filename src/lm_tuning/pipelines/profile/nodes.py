"""Node of the profile pipeline."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from lm_tuning.models.record import BaseModelRecord
from lm_tuning.parameters import ModelParameters, TrainParameters
from lm_tuning.parameters.base import TaskName
from lm_tuning.pipelines.train.run_settings import TrainingGroups, gather_settings
from lm_tuning.progress import show_progress
from lm_tuning.training.records import ProfileFigures

if TYPE_CHECKING:
    from lm_tuning.training.profile.profiling import TrainingProfile

logger = logging.getLogger(__name__)


def profile_steps(
    tokenized_examples: Path,
    base_model: BaseModelRecord,
    *,
    profile_work: Path,
    batch_plans: Path,
    train: TrainParameters,
    model: ModelParameters,
    seed: int,
    task: TaskName,
    output: str,
) -> tuple[ProfileFigures, str, Path]:
    """Profile a few steps of the training; return the figures, a Markdown report and the trace."""
    from lm_tuning.training.profile.profiling import profile_figures, profile_training, run_facts
    from lm_tuning.training.settings import TrainingPaths

    settings = gather_settings(tokenized_examples, base_model, TrainingGroups(train, model, seed, task))
    # A folder of its own for checkpoints: what is profiled must never touch those of a training.
    paths = TrainingPaths(tokens=tokenized_examples, checkpoints=profile_work, plans=batch_plans)
    with show_progress() as on_progress:
        profile = profile_training(paths, settings, folder=profile_work, on_progress=on_progress)
    return profile_figures(profile), _show(profile, run_facts(settings), output=output), profile.trace


def _show(profile: TrainingProfile, facts: dict[str, str], *, output: str) -> str:
    """Show the table, log where the rest lies, and return the report as Markdown."""
    from lm_tuning.reporting.markdown import write_markdown
    from lm_tuning.reporting.terminal import build_blocks
    from lm_tuning.training.profile.profiling import compose_report, tabulate_groups

    # The table alone: what else the report says is too long for a terminal.
    Console().print(build_blocks([tabulate_groups(profile.table)]))
    logger.info(
        "The longest operations are in data/08_reporting/%s/profile/profile.md; trace.json.gz beside it opens in "
        "https://ui.perfetto.dev.",
        output,
    )
    return write_markdown(compose_report(profile, facts))
