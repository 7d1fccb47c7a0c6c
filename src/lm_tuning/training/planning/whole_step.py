"""Plan by arithmetic where a whole step goes through the model at once and leaves most of the memory free.

There is nothing to choose then: a smaller micro-batch would only keep the device less busy. Measuring loads the model a
second time, which takes longer than many a small run.
"""

from __future__ import annotations

import logging

from lm_tuning.batching.step_plan import StepPlan
from lm_tuning.errors import UserError
from lm_tuning.text.store.table import TokenTable
from lm_tuning.training.planning.memory import estimate_training
from lm_tuning.training.planning.out_of_memory import MemoryReading
from lm_tuning.training.planning.plan import START_TOKENS, BatchPlan, round_up
from lm_tuning.training.planning.probe_rows import sample_steps
from lm_tuning.training.planning.records import PlanFacts
from lm_tuning.training.settings import TrainingSettings

logger = logging.getLogger(__name__)

_MEMORY_SHARE = 0.5
"""Of what a training may take: the estimate counts linear layers, and a nearly full memory is slow."""
_MOST_STEPS = 2048
"""Steps whose rows are counted, spread over the first epoch."""
_MOST_PADDING = 2
"""Positions per token of a padded step that is small enough to keep a device hardly busy."""


def plan_whole_step(
    settings: TrainingSettings, table: TokenTable, steps: StepPlan, reading: MemoryReading
) -> BatchPlan | None:
    """Return the plan of one micro-batch per step, ``None`` where sizes have to be measured.

    Args:
        settings: of the training; of both ``micro_batch_tokens`` and ``gradient_checkpointing`` what is not ``auto``
            is kept.
        table: of the training rows.
        steps: which rows form each step.
        reading: the device's memory.
    """
    from lm_tuning.training.setup.model import build_skeleton_of

    try:
        skeleton = build_skeleton_of(settings)
        estimate = estimate_training(skeleton, settings)
    # As with a plan that cannot be measured: a model of unknown parts has no estimate.
    except (UserError, AttributeError, KeyError, TypeError, ValueError) as error:
        logger.debug("No estimate of memory: %s", error)
        return None
    asked = settings.train.micro_batch_tokens
    positions = _largest_step(settings, table, steps, skeleton) if asked == "auto" else asked
    if positions is None:
        return None
    checkpointing = settings.train.gradient_checkpointing is True
    # A row that is longer than the user's number passes alone.
    most = max(positions, int(table.lengths.max()))
    total = estimate.total(most, gradient_checkpointing=checkpointing)
    room = settings.train.memory_fraction * reading.total - reading.others
    if total > _MEMORY_SHARE * room:
        return None
    what = "a whole step at once" if asked == "auto" else "as train.micro_batch_tokens says"
    plan = BatchPlan(
        micro_batch_tokens=positions,
        gradient_checkpointing=checkpointing,
        curve=[],
        reason=f"{positions:,} tokens, {what}; by arithmetic it takes {total / 2**30:.1f} of "
        f"{reading.total / 2**30:.0f} GiB",
        seconds=0.0,
        cached=False,
        facts=PlanFacts(device=reading.name, total_bytes=reading.total, memory_fraction=settings.train.memory_fraction),
    )
    logger.info("Micro-batches: %s, so no sizes were measured.", plan.reason)
    return plan


def _largest_step(settings: TrainingSettings, table: TokenTable, steps: StepPlan, skeleton: object) -> int | None:
    """Return the positions of the largest step, rounded up; ``None`` where its rows had better be divided."""
    lengths = [table.lengths[rows] for rows in sample_steps(steps, _MOST_STEPS)]  # (rows,) for each step
    # Some row may be longer than those of the sampled steps, and no row is ever divided.
    tokens = max(int(table.lengths.max()), *(int(of_step.sum()) for of_step in lengths))
    if _will_pack(settings, table, skeleton):
        return round_up(tokens)
    # Padded, rows of like length are better kept together, unless all of them are few.
    positions = max(tokens, *(len(of_step) * int(of_step.max()) for of_step in lengths))
    few = START_TOKENS["cuda"]
    return round_up(positions) if tokens <= few and positions <= _MOST_PADDING * few else None


def _will_pack(settings: TrainingSettings, table: TokenTable, skeleton: object) -> bool:
    """Return whether rows will share a micro-batch without padding, as the training decides once it has the model."""
    from lm_tuning.batching.packed_attention import why_not

    # With an attention of the user's choice packing takes a mask for every pair of positions, so sizes are measured.
    if settings.train.batching == "padded" or settings.task == "seq2seq_lm" or settings.attention != "auto":
        return False
    longest = int(table.lengths.max(initial=0))
    return why_not(skeleton, device=settings.device, longest_row_tokens=longest) is None
