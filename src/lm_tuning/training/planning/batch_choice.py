"""Settle how steps are cut before the model is loaded: by the planner on a GPU, by a fixed size on a CPU."""

from __future__ import annotations

import logging
from dataclasses import replace

from lm_tuning.batching.micro_batches import choose_micro_batch_tokens
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.training.planning.plan import BatchPlan
from lm_tuning.training.settings import TrainingPaths, TrainingSettings

logger = logging.getLogger(__name__)


def plans_on_device(settings: TrainingSettings) -> bool:
    """Say whether sizes are chosen by sending rows through the model, before the training itself loads it."""
    is_open = settings.micro_batch_tokens is None or settings.activation_checkpointing is None
    return settings.device == "cuda" and is_open


def choose_batches(
    paths: TrainingPaths, settings: TrainingSettings, *, on_progress: OnProgress = ignore_progress
) -> tuple[TrainingSettings, BatchPlan]:
    """Settle the tokens of a micro-batch and activation checkpointing where the settings leave them open.

    Args:
        paths: where the tokens lie, and where plans are kept.
        settings: of the training.
        on_progress: receives the sizes tried.

    Returns:
        Settings with both settled, and the plan that they come from.
    """
    tokens, checkpointing = settings.micro_batch_tokens, settings.activation_checkpointing
    if plans_on_device(settings):
        from lm_tuning.training.planning.planner import plan_batches

        plan = plan_batches(
            paths,
            settings,
            cache_folder=paths.plans or paths.checkpoints / "batch_plans",
            memory_fraction=settings.memory_fraction,
            on_progress=on_progress,
        )
    else:
        settled = choose_micro_batch_tokens(tokens, device=settings.device)
        why = f"the usual size on a {settings.device.upper()}" if tokens is None else "as train.micro_batch_tokens says"
        plan = BatchPlan(
            micro_batch_tokens=settled,
            activation_checkpointing=bool(checkpointing),
            curve=[],
            reason=f"{settled:,} tokens, {why}",
            seconds=0.0,
            cached=False,
        )
    chosen = replace(
        settings,
        micro_batch_tokens=plan.micro_batch_tokens,
        activation_checkpointing=plan.activation_checkpointing,
    )
    return chosen, plan
