"""A choice of how steps are split, how it is made of a curve of speed and memory, and how it is kept for the device."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lm_tuning.batching.step_plan import StepPlan
from lm_tuning.errors import UserError
from lm_tuning.json_types import JsonObject
from lm_tuning.storage.atomic import write_json_atomic
from lm_tuning.text.store.table import TokenTable
from lm_tuning.training.planning.out_of_memory import MemoryReading
from lm_tuning.training.planning.probe_rows import sample_steps
from lm_tuning.training.planning.records import MemoryRow, PlanFacts, ProbeAnswer, ProbePoint
from lm_tuning.training.settings import TrainingSettings

START_TOKENS = {"cpu": 128, "cuda": 2048}
"""The smallest budget that is tried as long as it fits: below it a device is hardly busy."""

_FEWEST_TOKENS = 64
_MOST_DOUBLINGS = 5
SAME_SPEED = 0.99
"""Sizes that reach this share of the fastest one count as equally fast."""
_CHECKED_STEPS = 64

_STORED_NAMES = {"gradient_checkpointing": "activation_checkpointing"}
"""Fields of plans and points that have another name in files: version 0.1 wrote those."""


@dataclass(frozen=True)
class BatchPlan:
    """How steps are split, and what that choice rests on.

    Attributes:
        micro_batch_tokens: most positions of a micro-batch.
        gradient_checkpointing: whether it is on.
        curve: the budgets that were looked at; empty for an estimate.
        reason: what was chosen and why, one sentence.
        seconds: that planning took.
        cached: whether the plan was made before.
        facts: what the curve belongs to.
        not_tried: budgets that there was no time for.
        warning: why nothing could be measured; ``None`` when it was.
        file: where it is kept for the next training; ``None`` for one that was not measured.
        memory: what the memory goes into, see
            :meth:`lm_tuning.training.planning.memory.MemoryParts.table`; empty as long as no model is loaded.
    """

    micro_batch_tokens: int
    gradient_checkpointing: bool
    curve: list[ProbePoint]
    reason: str
    seconds: float
    cached: bool
    facts: PlanFacts = field(default_factory=PlanFacts)
    not_tried: list[int] = field(default_factory=list)
    warning: str | None = None
    file: str | None = None
    memory: list[MemoryRow] = field(default_factory=list)

    @property
    def choice(self) -> ProbePoint | None:
        """Return the point of the curve that was chosen; ``None`` without a curve."""
        # Once compiled layers were measured, the choice is among those.
        compiled = any(point.compiled for point in self.curve)
        wanted = (self.micro_batch_tokens, self.gradient_checkpointing, compiled)
        for point in self.curve:
            if (point.micro_batch_tokens, point.gradient_checkpointing, point.compiled) == wanted:
                return point
        return None

    @property
    def tokens_per_second(self) -> float | None:
        """Return the speed that was measured for the choice without compiled layers; ``None`` where none was."""
        choice = self.choice
        return None if choice is None or choice.compiled else choice.tokens_per_second

    def to_json(self) -> JsonObject:
        """Return the plan as plain values."""
        return asdict(self, dict_factory=lambda pairs: {_STORED_NAMES.get(name, name): value for name, value in pairs})

    @classmethod
    def from_json(cls, value: Any) -> BatchPlan:
        """Read what :meth:`to_json` wrote.

        Raises:
            TypeError, KeyError, AttributeError: it was written by another version, or by something else.
        """
        plan = cls(**_read_names(value))
        return replace(plan, curve=[ProbePoint(**_read_names(point)) for point in value["curve"]])


def _read_names(stored: JsonObject) -> dict[str, Any]:
    """Return what a file holds by the names of fields."""
    fields = {name: field for field, name in _STORED_NAMES.items()}
    return {fields.get(name, name): value for name, value in stored.items()}


def list_budgets(settings: TrainingSettings, table: TokenTable, steps: StepPlan) -> tuple[list[int], int]:
    """List the token budgets that can make a difference: from the longest row to a whole step.

    Args:
        settings: of the training.
        table: of the training rows.
        steps: which rows form each step.

    Returns:
        Budgets, ascending, and the index of the one that is tried first.
    """
    if settings.train.micro_batch_tokens != "auto":
        return [settings.train.micro_batch_tokens], 0
    lengths = table.lengths
    largest = 0
    for rows in sample_steps(steps, _CHECKED_STEPS):
        of_step = lengths[rows]
        # Padded, a whole step is one micro-batch only if all of its rows are as long as its longest.
        largest = max(largest, len(rows) * int(of_step.max()) if _may_pad(settings) else int(of_step.sum()))
    # No row is ever divided, so nothing below the longest one changes how steps are split.
    fewest = max(round_up(int(lengths.max(initial=1))), _FEWEST_TOKENS)
    first = max(START_TOKENS.get(settings.device, START_TOKENS["cpu"]), fewest)
    most = max(min(round_up(largest), first << _MOST_DOUBLINGS), fewest)
    powers = [1 << exponent for exponent in range(6, most.bit_length() + 1)]
    grid = sorted({size for power in powers for size in (power, power + power // 2) if fewest <= size < most})
    budgets = sorted({*(size for size in grid if size >= first), *_smaller(grid, fewest, first), most})
    start = next((position for position, size in enumerate(budgets) if size >= first), len(budgets) - 1)
    return budgets, start


def choose_point(points: list[ProbePoint]) -> ProbePoint | None:
    """Choose the fastest point that fits; among equally fast ones the one that takes least.

    Args:
        points: of the curve.

    Returns:
        The choice; the one that takes least when none fits; ``None`` when none was measured.
    """
    measured = [point for point in points if point.tokens_per_second is not None]
    fitting = [point for point in measured if point.fits]
    if not fitting:
        return min(measured, key=lambda point: point.predicted_total_bytes or 0, default=None)
    fastest = max(point.tokens_per_second or 0.0 for point in fitting)
    equal = [point for point in fitting if (point.tokens_per_second or 0.0) >= SAME_SPEED * fastest]
    return min(equal, key=lambda point: (point.gradient_checkpointing, point.predicted_total_bytes or 0))


def explain_choice(choice: ProbePoint, answer: ProbeAnswer) -> str:
    """Describe in one sentence what was chosen and why no other.

    Args:
        choice: from :func:`choose_point`.
        answer: of the probe.
    """
    total, limit = answer.facts["total_bytes"], answer.facts["memory_fraction"]
    with_checkpointing = " with gradient checkpointing" if choice.gradient_checkpointing else ""
    said = [
        f"{choice.micro_batch_tokens:,} tokens{with_checkpointing}: {choice.tokens_per_second or 0:,.0f} tokens/s at "
        f"{_share(choice.predicted_total_bytes, total)} of memory"
    ]
    if not choice.fits:
        said.append(f"nothing that was tried takes less than the share of {limit:.0%}, and this takes least")
    for point in answer.points:
        if point is choice:
            continue
        if point.gradient_checkpointing == choice.gradient_checkpointing:
            if point.micro_batch_tokens < choice.micro_batch_tokens or not choice.fits:
                continue
            size = f"{point.micro_batch_tokens:,}"
        elif point.micro_batch_tokens == choice.micro_batch_tokens:
            size = "without it" if choice.gradient_checkpointing else "with gradient checkpointing, it"
        else:
            continue
        said.append(_compare(point, choice, size, total))
    if answer.not_tried:
        said.append(f"no time for {answer.not_tried[0]:,} and more")
    return "; ".join(said)


def _may_pad(settings: TrainingSettings) -> bool:
    return settings.train.batching != "packed" or settings.task == "seq2seq_lm"


def _smaller(grid: list[int], fewest: int, first: int) -> list[int]:
    """Return what is tried when the first budget does not fit: halves of it that still hold the longest row."""
    sizes = [size for size in grid if size < first and (size & (size - 1) == 0)]
    return sizes or [fewest]


def round_up(tokens: int) -> int:
    """Return the budget that holds so many tokens.

    Args:
        tokens: positions of a micro-batch.
    """
    return -(-tokens // _FEWEST_TOKENS) * _FEWEST_TOKENS


def _share(size: int | None, total: int) -> str:
    return f"{(size or 0) / total:.0%}" if total else "an unknown share"


def _compare(point: ProbePoint, choice: ProbePoint, size: str, total: int) -> str:
    if point.outcome == "out of memory":
        return f"{size} ran out of memory"
    if point.outcome == "predicted":
        return f"{size} would take {_share(point.predicted_total_bytes, total)}"
    speed = f"{point.tokens_per_second or 0:,.0f} tokens/s"
    if not point.fits:
        return f"{size} takes {_share(point.predicted_total_bytes, total)} ({speed})"
    ratio = (point.tokens_per_second or 0.0) / (choice.tokens_per_second or 1.0)
    said = "hardly faster" if ratio > 1 else "no faster" if ratio >= SAME_SPEED else "slower"
    return f"{size} was {said} ({speed})"


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
    """Return an earlier plan, unless other programs hold much more of the device than then.

    Args:
        file: that it may lie in.
        reading: the device's memory now.
    """
    try:
        plan = BatchPlan.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    # Only more of it matters: beside fewer programs a plan fits all the more.
    more = reading.others - plan.facts.get("other_programs_bytes", 0)
    if more > _CHANGED_MEMORY_FRACTION * reading.total:
        logger.info("Other programs hold %.1f GiB more of the device than when %s was made.", more / 2**30, file)
        return None
    return plan
