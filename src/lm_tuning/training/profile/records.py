"""What a profile stores."""

from __future__ import annotations

from typing import Literal, TypedDict


class OperationFigures(TypedDict):
    """One operation in ``profile.json``: its time in seconds, its share of all, and how often it ran."""

    name: str
    group: str
    seconds: float
    fraction: float
    count: int


class ProfileFigures(TypedDict):
    """What is stored as ``profile.json``; ``metrics`` go to tracking."""

    metrics: dict[str, dict[str, float | None]]
    measured_on: Literal["gpu", "cpu"]
    operations: list[OperationFigures]
