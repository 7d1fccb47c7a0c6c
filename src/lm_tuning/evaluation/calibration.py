"""Compare how sure a classifier says it is with how often it is right, and find what refusing to answer would gain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lm_tuning.batching.class_predictions import Float32Array
from lm_tuning.evaluation.class_records import Abstaining, CalibrationBin, CoveragePoint
from lm_tuning.text.store.table import Int64Array

BoolArray = npt.NDArray[np.bool_]

NUM_BINS = 15
"""Bins of equal width, as most published figures have them."""

COVERAGE_THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class Calibration:
    """How far stated probabilities are from what happens.

    Attributes:
        bins: rows by the probability of their predicted class, in :data:`NUM_BINS` bins of equal width.
        error: expected calibration error, 0 to 1: the mean distance of accuracy and probability, by bins weighted by
            their rows. NaN without rows, or where a probability is no number.
        mean_probability: of the predicted classes, 0 to 1. Above the accuracy the model is too sure of itself.
    """

    bins: list[CalibrationBin]
    error: float
    mean_probability: float


def calibrate(probabilities: Float32Array, is_right: BoolArray) -> Calibration:
    """Sort rows into bins by how sure the model is.

    Args:
        probabilities: of the predicted class of each row, ``(rows,)``.
        is_right: whether that is the row's class, ``(rows,)``.

    Source: Guo et al., On Calibration of Modern Neural Networks (2017), equation 3.
    """
    if not len(probabilities) or not np.isfinite(probabilities).all():
        return Calibration([], math.nan, math.nan)
    stated = probabilities.astype(np.float64)
    # (rows,): a bin ends with its upper edge, so that 1 belongs to the last one
    numbers = np.clip(np.ceil(stated * NUM_BINS).astype(np.int64) - 1, 0, NUM_BINS - 1)
    counts, sums, hits = (
        np.bincount(numbers, weights=weights, minlength=NUM_BINS) for weights in (None, stated, is_right)
    )
    bins: list[CalibrationBin] = [
        {
            "low": index / NUM_BINS,
            "high": (index + 1) / NUM_BINS,
            "num_rows": int(counts[index]),
            "mean_probability": float(sums[index] / counts[index]) if counts[index] else None,
            "accuracy": float(hits[index] / counts[index]) if counts[index] else None,
        }
        for index in range(NUM_BINS)
    ]
    # The rows of a bin cancel: |hits / count - sum / count| * count.
    return Calibration(bins, float(np.abs(hits - sums).sum() / len(stated)), float(stated.mean()))


def cover(
    probabilities: Float32Array, is_right: BoolArray, thresholds: Sequence[float] = COVERAGE_THRESHOLDS
) -> list[CoveragePoint]:
    """Return what is left, and how much of that is right, when rows below a probability get no answer.

    Args:
        probabilities: see :func:`calibrate`.
        is_right: see :func:`calibrate`.
        thresholds: the probabilities.
    """
    points: list[CoveragePoint] = []
    for threshold in thresholds:
        answered = is_answered(probabilities, threshold)
        num_answered = int(answered.sum())
        points.append(
            {
                "abstain_below": threshold,
                "num_answered": num_answered,
                "answered_fraction": num_answered / len(answered) if len(answered) else 0.0,
                "accuracy": float(is_right[answered].mean()) if num_answered else None,
            }
        )
    return points


def is_answered(probabilities: Float32Array, abstain_below: float) -> BoolArray:
    """Return which rows get an answer, ``(rows,)``: those at the threshold do, those without a probability do not.

    Args:
        probabilities: of the predicted class of each row, ``(rows,)``.
        abstain_below: the threshold.
    """
    answered: BoolArray = probabilities >= np.float32(abstain_below)
    return answered


def abstain(probabilities: Float32Array, is_right: BoolArray, abstain_below: float) -> Abstaining:
    """Measure one threshold, and what it leaves out.

    Args:
        probabilities: see :func:`calibrate`.
        is_right: see :func:`calibrate`.
        abstain_below: rows whose predicted class is less probable get no answer.
    """
    [point] = cover(probabilities, is_right, [abstain_below])
    left_out = ~is_answered(probabilities, abstain_below)

    def share_of(rows: BoolArray) -> float | None:
        return float(left_out[rows].mean()) if rows.any() else None

    return {
        **point,
        "wrong_rows_left_out_fraction": share_of(~is_right),
        "right_rows_left_out_fraction": share_of(is_right),
    }


def find_mislabelled(
    references: Int64Array, predictions: Int64Array, probabilities: Float32Array, nats: Float32Array
) -> Int64Array:
    """Find the rows whose label is probably wrong: the model is as sure of another class as of rows that have it.

    A class's own measure is the mean probability that its rows get for it, so a class that the model is never sure of
    needs less than one that it always is.

    Args:
        references: class of each row, ``(rows,)``.
        predictions: predicted class of each row, ``(rows,)``.
        probabilities: of the predicted class, ``(rows,)``.
        nats: negative log-probability of the row's own class, ``(rows,)``.

    Returns:
        Indices of rows, those that lose most against the other class first.

    Source: Northcutt et al., Confident Learning (2021), the confident joint, with the rows of a class that no row has
    left alone.
    """
    if not len(references):
        return np.zeros(0, dtype=np.int64)
    own = np.exp(-nats.astype(np.float64))  # (rows,)
    num_classes = int(max(references.max(), predictions.max())) + 1
    num_rows = np.bincount(references, minlength=num_classes)
    # Infinite where no row has the class: nothing says how sure the model is of it when it is right.
    sure = np.full(num_classes, math.inf)
    np.divide(np.bincount(references, weights=own, minlength=num_classes), num_rows, out=sure, where=num_rows > 0)
    found = np.flatnonzero((predictions != references) & (probabilities >= sure[predictions]))
    margins = probabilities[found] - own[found]
    return found[np.argsort(-margins, kind="stable")]
