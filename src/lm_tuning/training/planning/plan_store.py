"""Keep plans of micro-batches for the next training on the same device."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from lm_tuning.errors import UserError
from lm_tuning.storage.atomic import write_json_atomic
from lm_tuning.training.planning.out_of_memory import MemoryReading
from lm_tuning.training.planning.plan import BatchPlan

logger = logging.getLogger(__name__)

_CHANGED_MEMORY_FRACTION = 0.02


def keep_plan(file: Path, plan: BatchPlan) -> None:
    """Write a plan for the next training; without it that one plans again.

    Args:
        file: to write.
        plan: to keep.
    """
    try:
        write_json_atomic(file, plan.to_json())
    except (OSError, UserError) as error:
        logger.warning("The plan of micro-batches could not be kept in %s: %s", file, error)


def read_plan(file: Path, reading: MemoryReading) -> BatchPlan | None:
    """Return a plan of before, unless other programs hold much more of the device than then.

    Args:
        file: that it may lie in.
        reading: the device's memory now.
    """
    try:
        plan = BatchPlan.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    more = reading.others - int(plan.facts.get("other_programs_bytes", 0))
    if more > _CHANGED_MEMORY_FRACTION * reading.total:
        logger.info("Other programs hold %.1f GiB more of the device than when %s was made.", more / 2**30, file)
        return None
    return plan
