"""What planning passes around: the question to the process that measures, its answer, and the facts of a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypedDict

from lm_tuning.batching.micro_batches import Batching
from lm_tuning.parameters.model import EnvironmentParameters
from lm_tuning.training.settings import TrainingSettings


class PlanFacts(TypedDict, total=False):
    """What a curve belongs to. A plan that was not measured has the first three, or none where it had no choice.

    Sizes ending in ``bytes`` are those of :class:`lm_tuning.training.planning.memory.ModelBytes` and of the device.
    """

    device: str
    total_bytes: int
    memory_fraction: float
    other_programs_bytes: int
    batching: Batching
    choices: dict[str, str]
    longest_row_tokens: int
    load_seconds: float
    weights_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    optimizer_extra_bytes: int
    buffers_bytes: int
    peaks_hold_optimizer: bool
    cut_short_at_tokens: float


class MemoryRow(TypedDict):
    """One part of a training's memory."""

    part: str
    bytes: int
    source: Literal["counted", "measured", "estimated"]


@dataclass(frozen=True)
class ProbeRequest:
    """What is to be measured; it is pickled for the process that measures.

    Attributes:
        tokens: folder with ``train.arrow``.
        settings: of the training.
        budgets: token budgets that may be tried, ascending.
        start: index of the budget that is tried first; smaller ones are tried when it does not fit.
        checkpointing: whether gradient checkpointing is on; a second entry is tried when the first did not fit.
        began_at: when planning began, in seconds since the epoch.
        ends_at: when to stop measuring, in seconds since the epoch.
        run_tokens: that the run will train on; more than a tenth of the time that they take is not spent on planning.
        backend: how torch's switches stand in the process that trains.
    """

    tokens: Path
    settings: TrainingSettings
    budgets: list[int]
    start: int
    checkpointing: list[bool]
    ends_at: float
    began_at: float = 0.0
    run_tokens: float = math.inf
    backend: EnvironmentParameters = field(default_factory=EnvironmentParameters)


@dataclass
class ProbePoint:
    """One budget of the curve.

    Attributes:
        micro_batch_tokens: most positions of a micro-batch.
        gradient_checkpointing: whether it was on.
        outcome: ``measured``; ``predicted``, when the smaller ones let expect that it does not fit; or
            ``out of memory``.
        tokens_per_second: real tokens of ordinary micro-batches; ``None`` when not measured.
        peak_memory_bytes: the most held by tensors (by the process on a CPU) in the heaviest micro-batches.
        predicted_total_bytes: what a training would take of the device, optimizer and other programs included.
        fits: whether that is within the share.
        compiled: whether decoder layers ran compiled.
    """

    micro_batch_tokens: int
    gradient_checkpointing: bool
    outcome: Literal["measured", "predicted", "out of memory"]
    tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None
    predicted_total_bytes: int | None = None
    fits: bool = False
    compiled: bool = False


@dataclass
class ProbeAnswer:
    """What the probe found out about a model on its device.

    Attributes:
        points: of the curve, in the order in which they were measured.
        facts: what the curve belongs to: device, its memory, what the model holds.
        not_tried: budgets that there was no time for.
        error: why it ended early; ``None`` when it did not.
        finished: whether it came to its end.
    """

    points: list[ProbePoint] = field(default_factory=list)
    facts: PlanFacts = field(default_factory=PlanFacts)
    not_tried: list[int] = field(default_factory=list)
    error: str | None = None
    finished: bool = False
