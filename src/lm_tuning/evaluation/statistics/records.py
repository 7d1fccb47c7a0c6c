"""What an evaluation stores of how sure its scores are.

Lists, so that a dozen scores do not become a hundred metrics in MLflow; those worth comparing there are in mappings.
"""

from __future__ import annotations

from typing import Literal, TypedDict

Outcome = Literal["better", "worse", "no difference", "too few rows", "not measured"]
"""``not measured``: one of both scores is no finite number."""


class IntervalRecord(TypedDict):
    """A score with its 95 % interval; ``None`` where there is none."""

    value: float | None
    low: float | None
    high: float | None


class DifferenceRecord(IntervalRecord):
    """A difference of two models, second less first, with its p-value."""

    p_value: float | None


class ScoreRecord(TypedDict):
    """One score of base and tuned model on the same rows."""

    name: str
    title: str
    unit: str
    higher_is_better: bool
    signature: str
    num_rows: int
    base: IntervalRecord
    tuned: IntervalRecord
    difference: DifferenceRecord
    outcome: Outcome


class ScoreMetrics(TypedDict):
    """What MLflow gets of one score beside its value."""

    tuned_low: float | None
    tuned_high: float | None
    difference_low: float | None
    difference_high: float | None
    p_value: float | None


class EarlierRunRecord(TypedDict):
    """The best earlier model on the same rows, beside the present one."""

    output: str
    date: str
    model_digest: str
    mlflow_run_id: str | None
    score: str
    num_rows: int
    earlier: float | None
    present: float | None
    difference: DifferenceRecord
    outcome: Outcome
    # How many earlier models there were to be the best of.
    num_earlier: int


class GateRecord(TypedDict):
    """One bound of ``evaluate.gate`` and whether it was reached."""

    score: str
    bound: float | str
    value: float | None
    is_reached: bool
    # What was found, for a reader.
    message: str


class GateCount(TypedDict):
    """How many bounds there were, as metrics."""

    num_bounds: int
    num_not_reached: int
