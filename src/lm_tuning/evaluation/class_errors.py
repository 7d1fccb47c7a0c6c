"""Choose the rows of a classifier's evaluation that are worth reading: wrong ones, hard ones, and bad labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lm_tuning.batching.class_predictions import Predictions
from lm_tuning.batching.held_out_loss import choose_rows
from lm_tuning.evaluation.calibration import find_mislabelled
from lm_tuning.evaluation.class_records import HardRow
from lm_tuning.evaluation.records import ClassSample
from lm_tuning.text.decoding import decode
from lm_tuning.text.store.table import Int64Array, TokenTable

SAMPLE_COLUMNS = tuple(ClassSample.__annotations__)

# Most misclassified rows that are kept, those that the model was surest of.
MAX_WRONG_ROWS = 1000
NUM_RIGHT_ROWS = 20
NUM_HARD_ROWS = 10
NUM_MISLABELLED = 20


@dataclass(frozen=True)
class ClassAnswers:
    """What a tuned classifier answered, with all that is needed to write rows out.

    Attributes:
        table: the evaluated split.
        predictions: of the tuned model, for the scored rows.
        names: of the classes, by id.
        majority: id of the class that the base always answers.
        tokenizer: turns token ids into text.
        seed: decides which right rows are kept.
    """

    table: TokenTable
    predictions: Predictions
    names: Sequence[str]
    majority: int
    tokenizer: Any
    seed: int

    @cached_property
    def references(self) -> Int64Array:
        """The class of each scored row, ``(rows,)``."""
        return self.table.labels[self.predictions.rows].astype(np.int64)

    @cached_property
    def mislabelled(self) -> Int64Array:
        """Indices of the rows whose label is probably wrong, see ``find_mislabelled``."""
        made = self.predictions
        return find_mislabelled(self.references, made.classes, made.probabilities, made.nats)

    @property
    def row_ids(self) -> Int64Array:
        """Identity of each scored row, ``(rows,)``."""
        return self.table.row_ids[self.predictions.rows]

    def samples(self, indices: Sequence[int]) -> list[ClassSample]:
        """Write rows out.

        Args:
            indices: among the scored rows.
        """
        mislabelled = set(self.mislabelled.tolist())
        return [
            {
                "row_id": int(self.row_ids[index]),
                "text": self._text_of(index),
                "reference": self.names[self.references[index]],
                "base": self.names[self.majority],
                "tuned": self.names[self.predictions.classes[index]],
                "probability": float(self.predictions.probabilities[index]),
                "nats": float(self.predictions.nats[index]),
                "is_likely_mislabelled": index in mislabelled,
            }
            for index in indices
        ]

    def hard_rows(self, indices: Sequence[int]) -> list[HardRow]:
        """Write rows out with the probability of their own class.

        Args:
            indices: among the scored rows.
        """
        return [
            {
                "row_id": sample["row_id"],
                "text": sample["text"],
                "reference": sample["reference"],
                "tuned": sample["tuned"],
                "probability": sample["probability"],
                "reference_probability": math.exp(-sample["nats"]),
                "nats": sample["nats"],
            }
            for sample in self.samples(indices)
        ]

    def hardest(self) -> list[int]:
        """Return the indices of the rows with the highest loss, the highest first; none where a loss is no number."""
        nats = self.predictions.nats
        return np.argsort(-nats, kind="stable")[:NUM_HARD_ROWS].tolist() if np.isfinite(nats).all() else []

    def _text_of(self, index: int) -> str:
        row = self.table[int(self.predictions.rows[index])]
        return decode(self.tokenizer, row.input_ids.tolist(), skip_special_tokens=True)


def sort_out(predictions: Predictions, references: Int64Array, *, seed: int) -> tuple[list[int], list[int]]:
    """Return the indices of all wrong rows, the surest first, and of a few right ones, spread over the split.

    Args:
        predictions: of a classifier.
        references: class of each row, ``(rows,)``.
        seed: decides which right rows are taken.
    """
    is_wrong = predictions.classes != references  # (rows,)
    wrong, right = np.flatnonzero(is_wrong), np.flatnonzero(~is_wrong)
    # A confident mistake is either a gap in what the model has learned or a row with a wrong label: both are worth
    # reading first. Stable, so that equally sure ones stay in the order of the rows.
    wrong = wrong[np.argsort(-predictions.probabilities[wrong], kind="stable")]
    return wrong.tolist(), right[choose_rows(len(right), NUM_RIGHT_ROWS, seed)].tolist()


def choose_samples(wrong: list[int], right: list[int], num_samples: int) -> list[int]:
    """Choose wrong rows, and of several samples at least one right row, where there are some.

    Args:
        wrong: indices of wrong rows, the most telling first.
        right: indices of right rows.
        num_samples: how many of both.
    """
    # As many right rows as wrong ones leave room for, and one in any case, to compare with.
    num_right = min(len(right), max(num_samples - len(wrong), 1 if num_samples > 1 else 0))
    return [*wrong[: num_samples - num_right], *right[:num_right]]
