"""Classes are numbered by their names, never by the order of rows."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from lm_tuning.data import labels
from lm_tuning.data.labels import build_label_map, count_classes, find_class_problem


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
        "data.columns.label: column 'kind' holds one class only, '값'; classification needs at least 2 classes."
    )
    assert problem_of(["a", "b"], [0, 1]) is None


def test_free_text_is_not_taken_for_classes(monkeypatch):
    monkeypatch.setattr(labels, "MAX_CLASSES", 2)
    assert "holds 3 different labels, more than the 2 that are taken for classes" in (
        problem_of(["a", "b", "c"], [0, 1, 2]) or ""
    )
