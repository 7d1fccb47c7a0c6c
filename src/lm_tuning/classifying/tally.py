"""Count what was predicted, row by row, so that no row has to be kept for the figures."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lm_tuning.batching.held_out_loss import ClassCounts
from lm_tuning.classifying.records import LabelledFigures, PredictedClass, PredictedRow


class Tally:
    """Counts by class, of predicted rows and of those with a label.

    Attributes:
        num_rows: rows so far.
        num_abstained: those without an answer.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Start without rows.

        Args:
            names: of the classes, by id.
        """
        self._names = list(names)
        self._ids = {name: index for index, name in enumerate(names)}
        # (classes,) each: predictions of all rows; then labels, predictions and agreements of labelled rows
        self._all, self._labels, self._predicted, self._right = (np.zeros(len(names), dtype=np.int64) for _ in range(4))
        self.num_rows = self.num_abstained = 0
        self._num_labelled = self._num_unknown = 0
        self._probability = 0.0

    def add(self, row: PredictedRow) -> None:
        """Count one row.

        Args:
            row: as it is written.
        """
        self.num_rows += 1
        self._probability += row["probability"]
        chosen = row["class"]
        if chosen is None:
            self.num_abstained += 1
        else:
            self._all[self._ids[chosen]] += 1
        if "label" not in row:
            return
        self._num_labelled += 1
        label = self._ids.get(row["label"])
        if label is None:
            self._num_unknown += 1
        else:
            self._labels[label] += 1
            self._right[label] += row["class"] == row["label"]
        if chosen is not None:
            self._predicted[self._ids[chosen]] += 1

    @property
    def mean_probability(self) -> float:
        """Mean probability of the likeliest classes, 0 to 1; 0 without rows."""
        return self._probability / max(self.num_rows, 1)

    def labelled(self) -> LabelledFigures | None:
        """Return how the predictions compare with the labels; ``None`` where no row has one."""
        if not self._num_labelled:
            return None
        macro_f1 = ClassCounts(self._labels, self._predicted, self._right).macro_f1
        return {
            "num_labelled": self._num_labelled,
            "accuracy": int(self._right.sum()) / self._num_labelled,
            # Without a label or an answer that is a class of the model there is no F1 to average.
            "macro_f1": 0.0 if math.isnan(macro_f1) else macro_f1,
            "num_unknown_labels": self._num_unknown,
        }

    def per_class(self) -> list[PredictedClass]:
        """List the classes that were predicted or are labels, the most predicted first."""
        table: list[PredictedClass] = [
            {"class": name, "num_rows": rows, "num_labelled": labels, "num_right": right}
            for name, rows, labels, right in zip(
                self._names, self._all.tolist(), self._labels.tolist(), self._right.tolist(), strict=True
            )
            if rows or labels
        ]
        return sorted(table, key=lambda line: -line["num_rows"])
