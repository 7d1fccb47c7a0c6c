"""A share of a class that moved is found, chance is not taken for it, and the largest classes are shown."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_tuning.data.split.class_shares import (
    choose_shown,
    count_largest,
    find_moved_classes,
    list_moved,
    log_chance,
    name_tied,
    summarize_classes,
)


def counts(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@given(total=st.integers(2, 9), data=st.data())
def test_the_chance_is_that_of_all_ways_to_draw(total, data):
    drawn, marked = data.draw(st.integers(1, total - 1)), data.draw(st.integers(1, total))
    least = max(0, drawn + marked - total)
    hits = data.draw(st.integers(least, min(drawn, marked)))
    ways = list(combinations(range(total), drawn))
    as_many = sum(sum(index < marked for index in way) >= hits for way in ways)
    assert log_chance(hits, marked, drawn, total) == pytest.approx(math.log(as_many / len(ways)), abs=1e-9)


def test_a_test_set_with_a_fifth_of_one_of_151_equal_classes_is_found():
    train, test = np.full(151, 100), np.full(151, 30)
    test[7] = 1000
    assert find_moved_classes(train, test) == [7]
    names = [f"intent {index}" for index in range(151)]
    (moved,) = list_moved(train, test, names)
    assert moved == {
        "class": "intent 7",
        "num_train_rows": 100,
        "num_rows": 1000,
        "fraction_of_train": 100 / 15_100,
        "fraction": 1000 / 5500,
    }


def test_a_class_that_is_gone_or_halved_is_found_in_either_direction():
    assert find_moved_classes(counts(500, 500), counts(800, 200)) == [0, 1]
    assert find_moved_classes(counts(900, 100), counts(500, 0)) == [0, 1]
    assert find_moved_classes(counts(900, 30), counts(930, 0)) == [1]


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        (counts(500, 500), counts(7, 3)),
        (counts(500, 500), counts(16, 4)),
        (counts(3, 1), counts(0, 4)),
        (counts(5, 5), counts(0, 0)),
        (counts(0, 0), counts(5, 5)),
        (counts(500_000, 500_000), counts(45_000, 55_000)),  # surely no chance, but no large difference either
        (np.full(1000, 1), np.concatenate([counts(2), np.zeros(999, dtype=np.int64)])),
    ],
)
def test_few_rows_and_small_differences_are_no_finding(train, held_out):
    assert find_moved_classes(train, held_out) == []


def test_rows_that_are_divided_at_random_raise_no_alarm():
    drawn = np.random.default_rng(1)
    found = 0
    for _ in range(2000):
        num_classes = int(drawn.integers(2, 60))
        labels = drawn.choice(num_classes, size=400, p=drawn.dirichlet(np.full(num_classes, 0.3)))
        size = int(drawn.integers(5, 150))
        parts = [np.bincount(part, minlength=num_classes) for part in (labels[size:], labels[:size])]
        found += bool(find_moved_classes(*parts))
    assert found <= 6, "one in a thousand is what is allowed"


@given(st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=60), min_size=3, max_size=3), st.integers(9, 30))
def test_the_largest_of_each_split_are_shown(tables, most):
    size = min(map(len, tables))
    rows = [np.array(table[:size]) for table in tables]
    shown = choose_shown(rows, most=most)
    assert len(shown) == len(set(shown)) == min(most, size)
    for of_split in rows:
        if of_split.any():
            assert max(of_split[shown]) == of_split.max()
    order = [tuple(-of_split[index] for of_split in rows) for index in shown]
    assert order == sorted(order)


def test_ties_are_counted_and_said():
    assert [count_largest(counts(*values)) for values in ((3, 3, 1), (0, 0), (5,), (1, 2))] == [2, 0, 1, 1]
    assert name_tied("'a'", 151) == "'a', one of 151 equally frequent classes"
    assert name_tied("'a'", 1) == "'a'"
    assert summarize_classes(counts(2, 0, 5, 5), ["a", "b", "c", "d"]) == {
        "num_rows": 12,
        "num_classes": 3,
        "num_largest": 2,
        "largest": [
            {"class": "c", "num_rows": 5},
            {"class": "d", "num_rows": 5},
            {"class": "a", "num_rows": 2},
        ],
    }
