"""Scores of a classifier, and of the guess that stands in for its base, as what each row adds to them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lm_tuning.batching.held_out_loss import IntArray
from lm_tuning.evaluation.statistics.scored_rows import FloatArray, ScoredRows, mean_of_rows
from lm_tuning.text.store.table import Int64Array

DEFAULT_TOP_K = 5


@dataclass(frozen=True)
class ClassRows:
    """What one model says to each evaluated row.

    Attributes:
        classes: the class that it answers, ``(rows,)``.
        ranks: classes that it finds likelier than the row's own, ``(rows,)``.
        nats: negative log-probability of the row's own class, ``(rows,)``; infinite for one it rules out.
    """

    classes: IntArray
    ranks: IntArray
    nats: npt.NDArray[Any]


def guess_by_frequency(class_rows: IntArray, references: IntArray) -> ClassRows:
    """Answer each row by how frequent classes are in training: the most frequent one, and the others by their rows.

    Args:
        class_rows: training rows of each class, ``(classes,)``, not all 0.
        references: class of each evaluated row, ``(rows,)``.
    """
    # Of equally frequent classes the one of lower id comes first, as the majority class is chosen.
    order = np.argsort(-class_rows, kind="stable")  # (classes,)
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order))
    with np.errstate(divide="ignore"):
        nats = -np.log(class_rows / class_rows.sum())  # (classes,)
    return ClassRows(np.full_like(references, order[0]), ranks[references], nats[references])


def choose_top_k(wanted: int | str, num_classes: int) -> int | None:
    """Return the k of top-k accuracy; ``None`` where there is none.

    Args:
        wanted: ``evaluate.top_k``; ``auto`` takes 5 where there are more classes than that.
        num_classes: classes of the model.
    """
    if isinstance(wanted, int):
        return wanted
    return DEFAULT_TOP_K if num_classes > DEFAULT_TOP_K else None


def score_classes(
    answered: ClassRows, references: Int64Array, row_ids: Int64Array, *, num_classes: int, top_k: int | None
) -> dict[str, ScoredRows]:
    """Score what one model says.

    Args:
        answered: its answers.
        references: class of each row, ``(rows,)``.
        row_ids: identity of each row, ``(rows,)``.
        num_classes: classes of the label map.
        top_k: see :func:`choose_top_k`.

    Returns:
        ``accuracy``, which the verdict is about, ``macro_f1``, ``micro_f1``, ``weighted_f1``, ``nats_per_row`` and,
        where asked for, ``top_k_accuracy``.
    """
    is_right = answered.classes == references  # (rows,)
    counts = count_by_row(references, answered.classes, num_classes=num_classes)

    def f1(average: str, title: str) -> ScoredRows:
        name = f"{average}_f1"
        combine = partial(combine_f1, average=average)
        return ScoredRows(
            name, counts, combine, signature=f"average:{average}", row_ids=row_ids, title=title, unit="0 to 1"
        )

    scores = [
        mean_of_rows("accuracy", is_right, row_ids, title="Accuracy", unit="0 to 1"),
        f1("macro", "Macro-F1"),
        f1("weighted", "Weighted F1"),
        # Of one class a row it is the accuracy, under the name that some publish it by.
        mean_of_rows("micro_f1", is_right, row_ids, signature="average:micro", title="Micro-F1", unit="0 to 1"),
        mean_of_rows(
            "nats_per_row",
            answered.nats,
            row_ids,
            higher_is_better=False,
            title="Held-out loss",
            unit="nats per row",
        ),
    ]
    if top_k is not None:
        hits, title = answered.ranks < top_k, f"Top-{top_k} accuracy"
        scores.append(mean_of_rows("top_k_accuracy", hits, row_ids, signature=f"k:{top_k}", title=title, unit="0 to 1"))
    return {score.name: score for score in scores}


def count_by_row(references: Int64Array, predictions: IntArray, *, num_classes: int) -> Any:
    """Return what each row adds to the counts of classes, ``(rows, 3 * classes)``, sparse.

    The first third counts rows of a class, the second rows that it was predicted for, the last those that agree.

    Args:
        references: class of each row, ``(rows,)``.
        predictions: predicted class of each row, ``(rows,)``.
        num_classes: classes of the label map.
    """
    # Sparse, since a row touches three of the columns, of which there may be a thousand.
    from scipy.sparse import csr_array

    rows = np.arange(len(references))
    is_right = references == predictions
    columns = [references, num_classes + predictions, 2 * num_classes + references[is_right]]
    where = np.concatenate([rows, rows, rows[is_right]]), np.concatenate(columns)
    return csr_array((np.ones(len(where[0])), where), shape=(len(rows), 3 * num_classes))


def combine_f1(sums: FloatArray, *, average: str) -> FloatArray:
    """Make an F1 of counts by class.

    A class counts when it occurs among the rows or the predictions, as in scikit-learn's ``f1_score``.

    Args:
        sums: see :func:`count_by_row`, ``(…, 3 * classes)``.
        average: ``macro`` weighs classes alike, ``weighted`` by their rows.

    Returns:
        ``(…)``; NaN without rows.
    """
    rows, predicted, right = np.moveaxis(sums.reshape(*sums.shape[:-1], 3, -1), -2, 0)  # (…, classes) each
    f1 = 2 * right / np.maximum(rows + predicted, 1)
    weights = rows if average == "weighted" else (rows + predicted > 0)
    with np.errstate(invalid="ignore"):
        mean: FloatArray = (f1 * weights).sum(axis=-1) / weights.sum(axis=-1)
    return mean
