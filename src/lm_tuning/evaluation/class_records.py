"""What an evaluation of a classifier stores beside its scores: how sure it is, where it should not answer, bad rows.

All of these stand in lists, apart from ``Abstaining``, so that they do not become metrics of the run.
"""

from __future__ import annotations

from typing import Literal, TypedDict


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


class QuantizedClasses(TypedDict):
    """The tuned classifier once more with its weights in fewer bits, beside the same as it was trained.

    The differences are quantized less trained. A speed is that of the whole measurement, in rows per second.
    """

    quantization: Literal["int8", "nf4"]
    accuracy: float | None
    macro_f1: float | None
    nats_per_row: float | None
    accuracy_difference: float | None
    macro_f1_difference: float | None
    nats_per_row_difference: float | None
    # Rows that get another class than by the model as trained.
    num_changed_rows: int
    weights_bytes: int
    unquantized_weights_bytes: int
    rows_per_second: float
    unquantized_rows_per_second: float
