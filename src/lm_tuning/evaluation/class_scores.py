"""Score a classifier by counts of rows, and the class that a guess without a model would take.

A class counts in macro-F1 when it occurs among the evaluated rows or among the predictions: a class of the label map
that is in neither says nothing about the model, and would pull the mean down by a 0 that nobody could have avoided.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lm_tuning.batching.held_out_loss import ClassCounts, IntArray, count_classes
from lm_tuning.data.split.class_shares import count_largest
from lm_tuning.evaluation.records import ClassScores, Confusion

MAX_CONFUSIONS = 20


def tabulate_classes(counts: ClassCounts, names: Sequence[str]) -> list[ClassScores]:
    """List the classes that occur, the worst first.

    Args:
        counts: counts by class.
        names: name of each class, in the order of their ids.

    Returns:
        ``class``, ``num_rows``, ``num_predicted``, ``precision`` (``None`` for a class that was never predicted),
        ``recall`` (``None`` for one without rows) and ``f1`` of each class among the rows or the predictions. Of
        equally good ones the larger comes first.
    """
    columns = (counts.rows.tolist(), counts.predicted.tolist(), counts.right.tolist(), counts.f1.tolist())
    table: list[ClassScores] = [
        {
            "class": names[class_id],
            "num_rows": rows,
            "num_predicted": predicted,
            "precision": right / predicted if predicted else None,
            "recall": right / rows if rows else None,
            "f1": f1,
        }
        for class_id, (rows, predicted, right, f1) in enumerate(zip(*columns, strict=True))
        # A class of the label map that is among neither says nothing about the model, and has no line.
        if rows or predicted
    ]
    return sorted(table, key=lambda line: (line["f1"], -line["num_rows"]))


def list_confusions(
    references: IntArray, predictions: IntArray, names: Sequence[str], *, max_confusions: int = MAX_CONFUSIONS
) -> list[Confusion]:
    """List which classes are taken for which other ones, the most frequent first.

    Args:
        references: class of each row, ``(rows,)``.
        predictions: predicted class of each row, ``(rows,)``.
        names: name of each class, in the order of their ids.
        max_confusions: most pairs to list.

    Returns:
        ``reference``, ``predicted``, ``num_rows`` and ``fraction`` (of the reference's rows) of each pair.
    """
    is_wrong = references != predictions  # (rows,)
    # Pairs that occur, rather than a matrix of all: with 50,000 classes that would have 2.5 billion cells.
    pairs = Counter(zip(references[is_wrong].tolist(), predictions[is_wrong].tolist(), strict=True))
    rows_of_class = np.bincount(references, minlength=len(names)).tolist()
    most_frequent = sorted(pairs.items(), key=lambda item: (-item[1], item[0]))[:max_confusions]
    return [
        Confusion(
            reference=names[reference],
            predicted=names[predicted],
            num_rows=num_rows,
            fraction=num_rows / rows_of_class[reference],
        )
        for (reference, predicted), num_rows in most_frequent
    ]


@dataclass(frozen=True)
class ConstantAnswer:
    """What always answering one class reaches on the evaluated rows.

    Attributes:
        class_id: id of the class; the lowest id of equally frequent ones.
        num_tied: classes that are equally frequent where the class was chosen, itself included.
        accuracy: 0 to 1; NaN without rows.
        macro_f1: 0 to 1; NaN without rows.
    """

    class_id: int
    num_tied: int
    accuracy: float
    macro_f1: float


@dataclass(frozen=True)
class MajorityClass(ConstantAnswer):
    """What a guess that knows only how frequent the classes are in training reaches on held-out rows.

    Attributes:
        nats_per_row: mean negative logarithm of the frequency that the row's class has in training; infinite when an
            evaluated class has no training row.
    """

    nats_per_row: float


def measure_constant(class_rows: IntArray, references: IntArray) -> ConstantAnswer:
    """Measure what always answering the most frequent class reaches.

    Args:
        class_rows: rows of each class that decide which one is most frequent, ``(classes,)``, not all 0. Those of
            ``references`` themselves give the best constant answer that there is.
        references: class of each evaluated row, ``(rows,)``.
    """
    assert class_rows.any(), "a class is chosen from some rows"
    # The first of equal ones, so that the choice does not depend on the order of the rows.
    class_id = int(class_rows.argmax())
    counts = count_classes(references, np.full_like(references, class_id), num_classes=len(class_rows))
    return ConstantAnswer(
        class_id=class_id, num_tied=count_largest(class_rows), accuracy=counts.accuracy, macro_f1=counts.macro_f1
    )


def measure_majority(class_rows: IntArray, references: IntArray) -> MajorityClass:
    """Measure the line that a classifier must beat.

    Args:
        class_rows: training rows of each class, ``(classes,)``, not all 0.
        references: class of each evaluated row, ``(rows,)``.
    """
    constant = measure_constant(class_rows, references)
    nats = math.nan
    if len(references):
        seen = class_rows[references]  # (rows,)
        nats = float(-np.log(seen / int(class_rows.sum())).mean()) if seen.all() else math.inf
    return MajorityClass(**vars(constant), nats_per_row=nats)
