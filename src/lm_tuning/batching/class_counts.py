"""Count rows and predictions by class: what every score of a classifier is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
IntArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class ClassCounts:
    """What every score of a classifier is made of.

    Attributes:
        rows: evaluated rows of each class, ``(classes,)``.
        predicted: rows that each class was predicted for, ``(classes,)``.
        right: rows of each class that were predicted to be of it, ``(classes,)``.
    """

    rows: Int64Array
    predicted: Int64Array
    right: Int64Array

    @property
    def accuracy(self) -> float:
        """Share of the rows whose class was predicted, 0 to 1; NaN without rows."""
        num_rows = int(self.rows.sum())
        # A micro average over classes is the accuracy, so none is kept beside it.
        return int(self.right.sum()) / num_rows if num_rows else math.nan

    @property
    def macro_f1(self) -> float:
        """Mean F1 of the classes that occur among the rows or the predictions, 0 to 1; NaN without rows.

        Each class weighs the same, however rare it is.
        """
        occurring = self.rows + self.predicted > 0
        return float(self.f1[occurring].mean()) if occurring.any() else math.nan

    @property
    def f1(self) -> npt.NDArray[np.float64]:
        """Harmonic mean of precision and recall of each class, ``(classes,)``; 0 for one that does not occur."""
        # 2PR / (P + R) with P = right / predicted and R = right / rows, without a division by zero for either.
        f1: npt.NDArray[np.float64] = 2 * self.right / np.maximum(self.rows + self.predicted, 1)
        return f1


def count_classes(references: IntArray, predictions: IntArray, *, num_classes: int) -> ClassCounts:
    """Count rows, predictions and agreements by class.

    Args:
        references: class of each row, ``(rows,)``.
        predictions: predicted class of each row, ``(rows,)``.
        num_classes: classes of the label map.
    """
    return ClassCounts(
        rows=np.bincount(references, minlength=num_classes),
        predicted=np.bincount(predictions, minlength=num_classes),
        # A row that was predicted right is counted under its class alone; (rows,) to (classes,).
        right=np.bincount(references[references == predictions], minlength=num_classes),
    )
