"""What a prediction stores: a line for each row, and the figures of all of them."""

from __future__ import annotations

from typing import NotRequired, TypedDict

PredictedRow = TypedDict(
    "PredictedRow",
    {
        "row_id": int,
        # Only where several files are read: which one, and the number of the row in it.
        "file": NotRequired[str],
        "row": NotRequired[int],
        "text": str,
        # None below the threshold of predict.abstain_below; ``likeliest`` says which class it would have been.
        "class": str | None,
        "probability": float,
        "likeliest": NotRequired[str],
        # By the name of each class, with predict.all_scores.
        "scores": NotRequired[dict[str, float]],
        # Where the file has a label, as it stands there.
        "label": NotRequired[str],
    },
)
"""A line of ``predictions.jsonl``. Not a class statement, since "class" is a key."""

PredictedClass = TypedDict("PredictedClass", {"class": str, "num_rows": int, "num_labelled": int, "num_right": int})
"""How often one class was predicted, how many rows have it as their label, and in how many of them both agree."""


class LabelledFigures(TypedDict):
    """How predictions compare with the labels of the file; rows without an answer count as wrong."""

    num_labelled: int
    accuracy: float
    macro_f1: float
    # Labels that are no class of the model: no answer could be right.
    num_unknown_labels: int


class PredictionsRecord(TypedDict):
    """``predictions.json``. Numbers become metrics, those in lists do not."""

    tuned_folder: str
    reading: str
    num_rows: int
    num_skipped: int
    num_shortened: int
    # Rows that an earlier run had done.
    num_resumed: int
    num_abstained: int
    answered_fraction: float
    mean_probability: float
    # Of this run; None where nothing was left to do.
    rows_per_second: float | None
    tokens_per_second: float | None
    abstain_below: str
    per_class: list[PredictedClass]
    labelled: NotRequired[LabelledFigures]
