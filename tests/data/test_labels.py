"""Classes are numbered by their names, never by the order of rows."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from lm_tuning.data.format import labels
from lm_tuning.data.format.labels import build_label_map, count_classes, find_class_problem, refuse_unknown_weights
from lm_tuning.errors import UserError


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["1", "2", "3"], {"1": 0, "2": 1, "3": 2}),
        (["10", "9", "-1"], {"-1": 0, "9": 1, "10": 2}),
        (["01", "1", "2"], {"01": 0, "1": 1, "2": 2}),
        (["10", "9", "x"], {"10": 0, "9": 1, "x": 2}),
        (["false", "true"], {"false": 0, "true": 1}),
        (["b", "B", "é", "값"], {"B": 0, "b": 1, "é": 2, "값": 3}),
        (["9" * 400, "10"], {"10": 0, "9" * 400: 1}),
    ],
)
def test_ids_follow_numbers_or_code_points_whatever_the_order(names, expected):
    for order in permutations(names):
        assert list(build_label_map(order).items()) == list(expected.items())


def test_rows_are_counted_by_class_of_the_training_files():
    ids = np.array([0, 1, 0, 2, 0, -1, 3], dtype=np.int64)
    is_train = np.array([True] * 6 + [False])
    assert count_classes(ids, ["b", "A", "a", "z"], is_train=is_train, column="kind") == {
        "column": "kind",
        "num_classes": 3,
        "num_rows": {"b": 3, "A": 1, "a": 1},
        "largest": "b",
        "smallest": "a",
        "only_held_out": ["z"],
        "similar": [["A", "a"]],
    }


def problem_of(names: list[str], ids: list[int]) -> str | None:
    numbers = np.array(ids, dtype=np.int64)
    return find_class_problem(count_classes(numbers, names, is_train=numbers >= 0, column="kind"))


def test_one_class_is_too_few_and_is_named():
    assert problem_of(["값"], [0, 0]) == (
        "data.columns.label: column 'kind' holds one class only in the training rows, '값' (2 rows); "
        "classification needs at least 2 classes."
    )
    assert problem_of(["a", "b"], [0, 1]) is None


def test_free_text_is_not_taken_for_classes(monkeypatch):
    monkeypatch.setattr(labels, "MAX_CLASSES", 2)
    assert "holds 3 different labels, more than the 2 that are taken for classes" in (
        problem_of(["a", "b", "c"], [0, 1, 2]) or ""
    )


def test_a_weight_of_no_class_is_refused_with_the_nearest_name_and_all_names():
    classes = {"card": 0, "cash": 1, "loan": 2}
    with pytest.raises(UserError) as caught:
        refuse_unknown_weights({"card": 2.0, "laon": 2.5, "CASH": 1.0, "01": 3.0}, classes)
    assert caught.value.problems == [
        "train.class_weights.laon = 2.5: no training row has the class 'laon'. Did you mean 'loan'?",
        "train.class_weights.CASH = 1: no training row has the class 'CASH'. Did you mean 'cash'?",
        "train.class_weights.01 = 3: no training row has the class '01'.",
        "The classes are 'card', 'cash', 'loan'; those without a weight count as 1.",
    ]
    with pytest.raises(UserError, match=r"'class0', .*, 'class19' and 30 more; "):
        refuse_unknown_weights({"none": 1.0}, {f"class{index}": index for index in range(50)})
    with pytest.raises(UserError) as caught:
        refuse_unknown_weights({"none": 1.0}, {"a|b": 0, "new\nline": 1})
    assert caught.value.problems[-1] == r"The classes are 'a|b', 'new\nline'; those without a weight count as 1."


@pytest.mark.parametrize(
    ("weights", "label_map"),
    [(None, {"a": 0}), ("balanced", {"a": 0}), ({"a": 2.0}, {"a": 0, "b": 1}), ({"a": 2.0}, None)],
)
def test_weights_of_classes_that_are_there_pass(weights, label_map):
    refuse_unknown_weights(weights, label_map)
