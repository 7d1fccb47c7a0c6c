"""Node of the profile pipeline."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lm_tuning.parameters import ModelParameters, TrainParameters
from lm_tuning.pipelines.train.run_settings import gather_settings
from lm_tuning.progress import show_progress

logger = logging.getLogger(__name__)


def profile_steps(
    tokenized_examples: Path,
    base_model: dict[str, Any],
    *,
    profile_work: Path,
    batch_plans: Path,
    train: TrainParameters,
    model: ModelParameters,
    seed: int,
    task: str,
    output: str,
) -> tuple[dict[str, Any], str, Path]:
    """Profile a few steps of the training; return the figures, a Markdown report and the trace."""
    from rich.console import Console

    from lm_tuning.runtime.device import describe_device
    from lm_tuning.training.profile.profiling import profile_training
    from lm_tuning.training.profile.report import build_summary, profile_figures, write_profile
    from lm_tuning.training.settings import TrainingPaths

    settings = gather_settings(tokenized_examples, base_model, train=train, model=model, seed=seed, task=task)
    with show_progress() as on_progress:
        profile = profile_training(
            TrainingPaths(tokens=tokenized_examples, checkpoints=profile_work, plans=batch_plans),
            settings,
            folder=profile_work,
            on_progress=on_progress,
        )
    facts = {
        "model": base_model["name_or_path"],
        "method": f"{settings.method}, {settings.weights_dtype} weights, {settings.compute_dtype} arithmetic",
        "device": describe_device().name,
    }
    Console().print(build_summary(profile.table))
    logger.info(
        "The longest operations are in data/08_reporting/%s/profile/profile.md; trace.json.gz beside it opens in "
        "https://ui.perfetto.dev.",
        output,
    )
    return profile_figures(profile), write_profile(profile, facts), profile.trace
