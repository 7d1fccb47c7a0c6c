"""What an evaluation of a classifier stores beside its scores: how sure it is, where it should not answer, bad rows.

All of these stand in lists, apart from ``Abstaining``, so that they do not become metrics of the run.
"""

from __future__ import annotations

from typing import TypedDict


class CalibrationBin(TypedDict):
    """The rows whose predicted class has a probability in ``(low, high]``; both means are ``None`` without rows."""

    low: float
    high: float
    num_rows: int
    mean_probability: float | None
    accuracy: float | None


class CoveragePoint(TypedDict):
    """What is left when rows below a probability get no answer: their share, and how many of them are right."""

    abstain_below: float
    num_answered: int
    answered_fraction: float
    accuracy: float | None


class Abstaining(CoveragePoint):
    """The same for ``evaluate.abstain_below``, with the shares of wrong and of right rows that it leaves out."""

    wrong_rows_left_out_fraction: float | None
    right_rows_left_out_fraction: float | None


class HardRow(TypedDict):
    """A row that the model is surprised by: ``probability`` is that of ``tuned``, the other that of the row's class."""

    row_id: int
    text: str
    reference: str
    tuned: str
    probability: float
    reference_probability: float
    nats: float


class PartScores(TypedDict):
    """Scores of a part of the rows: those of one file, or of one group."""

    kind: str
    name: str
    num_rows: int
    accuracy: float
    macro_f1: float
    nats_per_row: float | None
