"""The scores of a classifier are counts of rows, checked against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lm_tuning.batching.held_out_loss import count_classes
from lm_tuning.evaluation.class_scores import list_confusions, measure_majority, tabulate_classes

NAMES = ["red", "green", "blue", "grey"]
# Red: 3 rows, 2 of them found, predicted twice. Green: 2 rows, 1 found, predicted twice. Blue: 1 row, found, predicted
# twice. Grey occurs nowhere.
REFERENCES = np.array([0, 0, 0, 1, 1, 2])
PREDICTIONS = np.array([0, 0, 1, 1, 2, 2])


def test_scores_by_hand() -> None:
    counts = count_classes(REFERENCES, PREDICTIONS, num_classes=4)
    assert (counts.rows.tolist(), counts.predicted.tolist()) == ([3, 2, 1, 0], [2, 2, 2, 0])
    assert counts.right.tolist() == [2, 1, 1, 0]
    assert counts.accuracy == pytest.approx(4 / 6)
    assert counts.f1.tolist() == pytest.approx([0.8, 0.5, 2 / 3, 0])
    assert counts.macro_f1 == pytest.approx((0.8 + 0.5 + 2 / 3) / 3), "grey occurs nowhere and does not count"


def test_a_class_that_is_only_predicted_counts_and_one_that_is_nowhere_does_not() -> None:
    counts = count_classes(np.array([0, 0]), np.array([0, 3]), num_classes=4)
    assert counts.accuracy == 0.5
    assert counts.macro_f1 == pytest.approx((2 / 3 + 0) / 2)


def test_all_right_is_one_and_no_rows_are_no_number() -> None:
    counts = count_classes(REFERENCES, REFERENCES, num_classes=4)
    assert (counts.accuracy, counts.macro_f1) == (1.0, 1.0)
    nothing = count_classes(REFERENCES[:0], PREDICTIONS[:0], num_classes=4)
    assert math.isnan(nothing.accuracy)
    assert math.isnan(nothing.macro_f1)


def test_the_table_has_the_worst_class_first_and_none_that_does_not_occur() -> None:
    table = tabulate_classes(count_classes(REFERENCES, PREDICTIONS, num_classes=4), NAMES)
    assert [line["class"] for line in table] == ["green", "blue", "red"]
    assert table[0] == {
        "class": "green",
        "num_rows": 2,
        "num_predicted": 2,
        "precision": 0.5,
        "recall": 0.5,
        "f1": 0.5,
    }
    assert table[2]["precision"] == 1.0
    assert table[2]["recall"] == pytest.approx(2 / 3)


def test_what_has_no_denominator_has_no_value() -> None:
    table = tabulate_classes(count_classes(np.array([0, 0, 1]), np.array([2, 2, 1]), num_classes=4), NAMES)
    by_name = {line["class"]: line for line in table}
    assert (by_name["red"]["precision"], by_name["red"]["recall"], by_name["red"]["f1"]) == (None, 0.0, 0.0)
    assert (by_name["blue"]["precision"], by_name["blue"]["recall"], by_name["blue"]["f1"]) == (0.0, None, 0.0)
    assert [line["class"] for line in table] == ["red", "blue", "green"], "of equally bad ones the larger is first"


def test_confusions_are_directed_and_the_most_frequent_come_first() -> None:
    references = np.array([0, 0, 0, 0, 1, 1, 2, 3])
    predictions = np.array([1, 1, 2, 0, 0, 1, 2, 1])
    found = list_confusions(references, predictions, NAMES)
    assert found == [
        {"reference": "red", "predicted": "green", "num_rows": 2, "fraction": 0.5},
        {"reference": "red", "predicted": "blue", "num_rows": 1, "fraction": 0.25},
        {"reference": "green", "predicted": "red", "num_rows": 1, "fraction": 0.5},
        {"reference": "grey", "predicted": "green", "num_rows": 1, "fraction": 1.0},
    ]
    assert list_confusions(references, predictions, NAMES, max_confusions=1) == found[:1]
    assert list_confusions(references, references, NAMES) == []


def test_pairs_of_many_classes_do_not_overflow() -> None:
    names = [str(class_id) for class_id in range(50_000)]
    references = np.array([49_999, 49_999, 7], dtype=np.int32)
    predictions = np.array([49_998, 49_998, 0], dtype=np.int32)
    (first, second) = list_confusions(references, predictions, names)
    assert (first["reference"], first["predicted"], first["num_rows"]) == ("49999", "49998", 2)
    assert (second["reference"], second["predicted"]) == ("7", "0")


def test_the_majority_class_by_hand() -> None:
    majority = measure_majority(np.array([5, 3, 2]), np.array([0, 0, 1, 2]))
    assert majority.class_id == 0
    assert majority.accuracy == 0.5
    # The majority class has F1 = 2 * 2 / (2 + 4); the other two occur and have 0.
    assert majority.macro_f1 == pytest.approx((4 / 6) / 3)
    assert majority.nats_per_row == pytest.approx(-(2 * math.log(0.5) + math.log(0.3) + math.log(0.2)) / 4)


def test_the_majority_is_that_of_the_training_rows() -> None:
    majority = measure_majority(np.array([1, 9]), np.array([0, 0, 0]))
    assert (majority.class_id, majority.accuracy, majority.macro_f1) == (1, 0.0, 0.0)
    assert majority.nats_per_row == pytest.approx(math.log(10))
    assert measure_majority(np.array([4, 4]), np.array([1])).class_id == 0, "the lowest id of equally frequent ones"


def test_a_class_without_training_rows_has_an_infinite_loss() -> None:
    assert measure_majority(np.array([4, 0]), np.array([0, 1])).nats_per_row == math.inf
    assert measure_majority(np.array([4, 0]), np.array([0, 0])).nats_per_row == 0.0
