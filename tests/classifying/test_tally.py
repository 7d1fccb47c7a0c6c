"""Counts of predictions are those of scikit-learn, whatever has no label or no answer."""

from __future__ import annotations

import pytest
from sklearn import metrics

from lm_tuning.classifying.records import PredictedRow
from lm_tuning.classifying.tally import Tally


def row(name: str | None, label: str | None = None) -> PredictedRow:
    made: PredictedRow = {"row_id": 1, "text": "t", "class": name, "probability": 0.5}
    if label is not None:
        made["label"] = label
    return made


def test_labelled_rows_are_scored_and_others_are_counted() -> None:
    pairs = [("a", "a"), ("a", "b"), ("b", "b"), ("c", "a"), ("b", "b")]
    tally = Tally(["a", "b", "c"])
    for name, label in pairs:
        tally.add(row(name, label))
    tally.add(row("c"))
    found = tally.labelled()
    assert found is not None
    predictions, labels = zip(*pairs, strict=True)
    assert found["accuracy"] == metrics.accuracy_score(labels, predictions)
    assert found["macro_f1"] == pytest.approx(metrics.f1_score(labels, predictions, average="macro"))
    assert (found["num_labelled"], found["num_unknown_labels"]) == (5, 0)
    assert tally.num_rows == 6
    assert tally.mean_probability == 0.5
    assert tally.per_class() == [
        {"class": "a", "num_rows": 2, "num_labelled": 2, "num_right": 1},
        {"class": "b", "num_rows": 2, "num_labelled": 3, "num_right": 2},
        {"class": "c", "num_rows": 2, "num_labelled": 0, "num_right": 0},
    ]


def test_no_answer_and_an_unknown_label_count_as_wrong() -> None:
    tally = Tally(["a", "b"])
    for one in (row("a", "a"), row(None, "a"), row("a", "zzz")):
        tally.add(one)
    found = tally.labelled()
    assert found == {
        "num_labelled": 3,
        "accuracy": pytest.approx(1 / 3),
        "macro_f1": pytest.approx(2 / 4),
        "num_unknown_labels": 1,
    }
    assert tally.num_abstained == 1


def test_without_labels_there_is_nothing_to_compare() -> None:
    tally = Tally(["a"])
    tally.add(row("a"))
    assert tally.labelled() is None
    assert Tally(["a"]).mean_probability == 0
