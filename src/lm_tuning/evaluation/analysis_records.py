"""What an evaluation stores of where a language model's answers go wrong.

All of it in lists: counts of kinds and lengths are for readers, and would crowd the metrics of a run.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class KindRecord(TypedDict):
    """Answers of one kind, such as empty ones."""

    kind: str
    num_base: int
    num_tuned: int
    # Mean of the first score over the tuned model's answers of this kind; None without any.
    tuned_score: float | None
    # A few of the tuned model's.
    row_ids: list[int]


class LengthRecord(TypedDict):
    """Rows whose prompt, or whose reference, is about as long, and their mean of the first score."""

    of: Literal["prompt", "reference"]
    low: int
    high: int
    num_rows: int
    base: float
    tuned: float


class HardRowRecord(TypedDict):
    """A row that the tuned model finds unlikely."""

    row_id: int
    num_tokens: int
    base_nats_per_token: float
    tuned_nats_per_token: float
    # Far above what is usual among these rows, and hardly lower than under the base.
    is_suspect: bool
    # File and row; missing where it is not known.
    where: NotRequired[str]


class RowTextRecord(TypedDict):
    """The text of a row that the report names; answers only where it was answered."""

    row_id: int
    prompt: str
    reference: str
    base: NotRequired[str]
    tuned: NotRequired[str]
    base_score: NotRequired[float]
    tuned_score: NotRequired[float]
    base_kinds: NotRequired[list[str]]
    tuned_kinds: NotRequired[list[str]]


class HistogramRecord(TypedDict):
    """How a quantity is spread over the rows: counts in bins of equal width, by what they are of."""

    title: str
    unit: str
    edges: list[float]
    counts: dict[str, list[int]]


class AnalysisRecord(TypedDict, total=False):
    """Everything that the analysis adds to ``evaluation.json``."""

    answer_kinds: list[KindRecord]
    answer_lengths: list[LengthRecord]
    hard_rows: list[HardRowRecord]
    best_rows: list[int]
    worst_rows: list[int]
    row_texts: list[RowTextRecord]
    histograms: list[HistogramRecord]
