"""What goes between a training and the process that measures micro-batches for it: plain values in JSON files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ProbeRequest:
    """What is to be measured; plain values, so that it can be a JSON file.

    Attributes:
        tokens: folder with ``train.arrow``.
        settings: fields of :class:`TrainingSettings`.
        budgets: token budgets that may be tried, ascending.
        start: index of the budget that is tried first; smaller ones are tried when it does not fit.
        checkpointing: whether gradient checkpointing is on; a second entry is tried when the first did not fit.
        memory_fraction: share of the memory that a training may take.
        ends_at: when to stop measuring, in seconds since the epoch.
        backend: arguments of :func:`lm_tuning.runtime.backend.apply_backend`.
    """

    tokens: str
    settings: dict[str, Any]
    budgets: list[int]
    start: int
    checkpointing: list[bool]
    memory_fraction: float
    ends_at: float
    backend: dict[str, Any] = field(default_factory=dict)


@dataclass
class ProbePoint:
    """One budget of the curve.

    Attributes:
        micro_batch_tokens: most positions of a micro-batch.
        activation_checkpointing: whether gradient checkpointing was on.
        outcome: ``measured``; ``predicted``, when the smaller ones let expect that it does not fit; or
            ``out of memory``.
        tokens_per_second: real tokens of ordinary micro-batches; ``None`` when not measured.
        peak_memory_bytes: the most held by tensors (by the process on a CPU) in the heaviest micro-batches.
        predicted_total_bytes: what a training would take of the device, optimizer and other programs included.
        fits: whether that is within the share.
        compiled: whether decoder layers ran compiled.
    """

    micro_batch_tokens: int
    activation_checkpointing: bool
    outcome: str
    tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None
    predicted_total_bytes: int | None = None
    fits: bool = False
    compiled: bool = False


@dataclass
class ProbeAnswer:
    """What was found out.

    Attributes:
        points: of the curve, in the order in which they were measured.
        facts: what the curve belongs to: device, its memory, what the model holds.
        not_tried: budgets that there was no time for.
        error: why it ended early; ``None`` when it did not.
        finished: whether it came to its end.
    """

    points: list[ProbePoint] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    not_tried: list[int] = field(default_factory=list)
    error: str | None = None
    finished: bool = False

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ProbeAnswer:
        """Read what ``asdict`` wrote."""
        return cls(**{**value, "points": [ProbePoint(**point) for point in value["points"]]})
