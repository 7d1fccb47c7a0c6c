"""Splits are exact, the same for a seed, and never part what belongs together."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_tuning.data.arrays import is_later_copy, join_units, number_by_appearance, number_equal
from lm_tuning.data.split.assign import ALWAYS_IN_TRAIN, IN_TEST, assign_folds, assign_splits, split_sizes
from lm_tuning.errors import UserError


@pytest.mark.parametrize(
    ("num_rows", "validation", "test", "expected"),
    [
        (3, 0.1, 0.1, (1, 1, 1)),
        (10, 0, 0, (10, 0, 0)),
        (10, 0.0, 0.2, (8, 0, 2)),
        (10, 0.3, 0, (7, 3, 0)),
        (100, 0.29, 0.0, (71, 29, 0)),
        (30, 0.05, 0.05, (27, 2, 1)),
        (2, 0.9, 0, (1, 1, 0)),
        (1000, 100, 0.1, (800, 100, 100)),
        (7, 5, 0.01, (1, 5, 1)),
        (9, 0.5625, 0.03125, (3, 5, 1)),
        (2_988_208, 0.05, 0.05, (2_689_387, 149_411, 149_410)),
    ],
)
def test_sizes_are_exact(num_rows, validation, test, expected):
    assert split_sizes(num_rows, validation=validation, test=test) == expected


@pytest.mark.parametrize(
    ("num_rows", "validation", "test", "expected"),
    [
        (1, 0.1, 0, ["1 row ", "split.validation: 0.1", "2 rows"]),
        (2, 0.1, 0.1, ["2 rows", "split.validation: 0.1", "split.test: 0.1", "3 rows"]),
        (10, 8, 4, ["10 rows", "split.validation: 8", "13 rows"]),
        (10, 8, 0.5, ["Nothing of 10 rows is left for training"]),
        (0, 0, 0, ["0 rows"]),
    ],
)
def test_too_few_rows_name_the_count_and_what_was_asked(num_rows, validation, test, expected):
    with pytest.raises(UserError) as caught:
        split_sizes(num_rows, validation=validation, test=test)
    assert all(part in str(caught.value) for part in expected)


@given(
    num_rows=st.integers(1, 3000),
    validation=st.one_of(st.integers(0, 50), st.floats(0, 0.6)),
    test=st.one_of(st.integers(0, 50), st.floats(0, 0.6)),
)
def test_sizes_add_up_and_lie_within_one_row_of_what_was_asked(num_rows, validation, test):
    try:
        sizes = split_sizes(num_rows, validation=validation, test=test)
    except UserError:
        return
    assert sum(sizes) == num_rows
    assert sizes[0] >= 1
    for size, asked in zip(sizes[1:], (validation, test), strict=True):
        if isinstance(asked, int):
            assert size == asked
        else:
            assert (size > 0) == (asked > 0)
            assert abs(size - Fraction(repr(asked)) * num_rows) < 1 or 1 in (size, sizes[0])


def assign(
    units: list[int], sizes: tuple[int, int, int], seed: int = 0, classes: list[int] | None = None
) -> np.ndarray:
    as_array = None if classes is None else np.array(classes)
    return assign_splits(np.array(units), sizes=sizes, seed=seed, classes=as_array).splits


def counts_of(splits: np.ndarray) -> tuple[int, ...]:
    return tuple(np.bincount(splits, minlength=3).tolist())


EXPECTED_42 = [1, 0, 2, 0, 1, 0, 0, 1, 0, 0, 2, 2]


def test_the_division_for_a_seed_never_changes():
    # Written down: a result that depends on the machine or on a library's version would part from it.
    assert assign(list(range(12)), (6, 3, 3), seed=42).tolist() == EXPECTED_42
    assert assign(list(range(12)), (6, 3, 3), seed=43).tolist() != EXPECTED_42


def test_negative_seeds_are_seeds():
    assert assign(list(range(50)), (40, 5, 5), seed=-1).tolist() != assign(list(range(50)), (40, 5, 5), seed=1).tolist()


def test_every_row_is_held_out_about_equally_often():
    held_out = sum((assign(list(range(20)), (16, 2, 2), seed=seed) > 0).astype(int) for seed in range(1000))
    assert held_out.min() > 140  # 200 expected, standard deviation 12.6
    assert held_out.max() < 260


@settings(max_examples=200)
@given(
    units=st.lists(st.integers(0, 12), min_size=6, max_size=60),
    classes=st.lists(st.integers(0, 3), min_size=60, max_size=60),
    stratified=st.booleans(),
    seed=st.integers(0, 5),
)
def test_units_stay_whole_and_every_split_gets_rows(units, classes, stratified, seed):
    ids = number_by_appearance(np.array(units))
    num_units = int(ids.max()) + 1
    sizes = split_sizes(len(ids), validation=0.2, test=0.2)
    strata = number_by_appearance(np.array(classes[: len(ids)])) if stratified else None
    if num_units < 3:
        with pytest.raises(UserError, match="cannot be divided into 3 splits"):
            assign_splits(ids, sizes=sizes, seed=seed, classes=strata)
        return
    result = assign_splits(ids, sizes=sizes, seed=seed, classes=strata)
    for unit in range(num_units):
        assert len(set(result.splits[ids == unit].tolist())) == 1
    if not stratified:
        smallest = np.bincount(ids)[np.unique(ids[result.splits == 0])].min()
        got = counts_of(result.splits)
        assert min(got) >= 1
        for index in (1, 2):
            assert got[index] >= sizes[index] - smallest


def test_sizes_are_met_exactly_when_single_rows_can_fill_the_gaps():
    units = [0] * 5 + [1] * 4 + [2] * 3 + list(range(3, 20))
    for seed in range(50):
        assert counts_of(assign(units, (19, 6, 4), seed)) == (19, 6, 4)


def test_large_units_come_as_close_as_whole_ones_can():
    for seed in range(10):
        assert counts_of(assign([0] * 5 + [1] * 5, (7, 3, 0), seed)) == (5, 5, 0)  # 5 is closer to 3 than 0 is
        assert counts_of(assign([0] * 9 + [1] * 4 + [2] * 4, (15, 1, 1), seed)) == (9, 4, 4)  # none may be empty


def test_strata_share_the_held_out_rows_exactly():
    classes = [0] * 60 + [1] * 30 + [2] * 10
    for seed in range(10):
        splits = assign(list(range(100)), (80, 10, 10), seed, classes)
        table = [counts_of(splits[np.array(classes) == stratum]) for stratum in range(3)]
        assert table == [(48, 6, 6), (24, 3, 3), (8, 1, 1)]


def test_strata_keep_the_total_when_shares_are_not_whole():
    classes = [0] * 7 + [1] * 7 + [2] * 7
    splits = assign(list(range(21)), (17, 2, 2), 3, classes)
    assert counts_of(splits) == (17, 2, 2)
    assert all(counts_of(splits[np.array(classes) == stratum])[0] >= 5 for stratum in range(3))


def test_a_rare_class_stays_in_train_and_the_sizes_hold():
    classes = [0] * 9 + [1]
    for seed in range(20):
        result = assign_splits(np.arange(10), sizes=(8, 0, 2), seed=seed, classes=np.array(classes))
        assert result.splits[9] == 0
        assert result.rare_classes == {1: 1}
        assert counts_of(result.splits) == (8, 0, 2)


def test_a_unit_of_several_classes_counts_for_the_one_that_most_of_its_rows_have():
    units = [0, 0, 0, 1, 2, 3, 4, 5]
    classes = [1, 1, 0, 1, 1, 0, 0, 0]
    for seed in range(10):
        splits = assign(units, (6, 2, 0), seed, classes)
        assert counts_of(splits) == (6, 2, 0)
        assert splits[0] == splits[1] == splits[2]


def test_equal_digests_get_equal_numbers_in_order_of_appearance():
    digests = np.array([[9, 1], [9, 2], [9, 1], [0, 0], [9, 2], [9, 1]], dtype=np.uint64)
    assert number_equal(digests).tolist() == [0, 1, 0, 2, 1, 0]
    assert number_equal(digests[:0]).tolist() == []


def test_later_copies_are_those_after_the_first_or_after_a_preferred_one():
    ids = np.array([0, 1, 0, 1, 0])
    assert is_later_copy(ids).tolist() == [False, False, True, True, True]
    preferred = np.array([1, 1, 1, 0, 1], dtype=np.int8)
    assert is_later_copy(ids, preferred).tolist() == [False, True, True, False, True]


def test_units_join_through_copies_that_stand_in_several_groups():
    contents = np.array([0, 1, 1, 2, 2, 3, 4])
    groups = np.array([0, 0, 1, 1, 2, 3, 3])
    assert join_units(contents, groups).tolist() == [0, 0, 0, 0, 0, 1, 1]


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), max_size=40))
def test_joined_units_are_the_connected_parts(pairs):
    contents = number_by_appearance(np.array([pair[0] for pair in pairs], dtype=np.int64))
    groups = number_by_appearance(np.array([pair[1] for pair in pairs], dtype=np.int64))
    units = join_units(contents, groups)
    reached = list(range(len(pairs)))
    for _ in pairs:  # the slow way: pass the smallest row number on until nothing changes
        for one in range(len(pairs)):
            for other in range(len(pairs)):
                if contents[one] == contents[other] or groups[one] == groups[other]:
                    reached[one] = reached[other] = min(reached[one], reached[other])
    assert units.tolist() == number_by_appearance(np.array(reached, dtype=np.int64)).tolist()


def fold_counts(folds: np.ndarray, num_folds: int) -> list[int]:
    return np.bincount(folds[folds >= 0], minlength=num_folds).tolist()


def test_folds_of_single_rows_differ_by_one_row_at_most_in_each_class_and_in_all():
    classes = np.array([0] * 23 + [1] * 17 + [2] * 11)
    cut = assign_folds(np.arange(51), num_folds=5, test_rows=0, seed=3, classes=classes)
    assert sorted(fold_counts(cut.folds, 5)) == [10, 10, 10, 10, 11]
    for stratum in range(3):
        counts = fold_counts(cut.folds[classes == stratum], 5)
        assert max(counts) - min(counts) <= 1


def test_folds_for_a_seed_never_change():
    assert assign_folds(np.arange(12), num_folds=3, test_rows=3, seed=42).folds.tolist() == EXPECTED_FOLDS_42
    assert assign_folds(np.arange(12), num_folds=3, test_rows=3, seed=43).folds.tolist() != EXPECTED_FOLDS_42


EXPECTED_FOLDS_42 = [-2, 2, 0, 1, -2, 1, 0, -2, 0, 2, 2, 1]


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2)), min_size=4, max_size=60),
    stratified=st.booleans(),
    num_folds=st.integers(2, 5),
    test_rows=st.integers(0, 3),
    seed=st.integers(-3, 3),
)
def test_folds_partition_what_is_not_in_test_and_keep_units_whole(rows, stratified, num_folds, test_rows, seed):
    ids = number_by_appearance(np.array([unit for unit, _ in rows]))
    strata = number_by_appearance(np.array([stratum for _, stratum in rows])) if stratified else None
    num_needed = num_folds + (test_rows > 0)
    try:
        cut = assign_folds(ids, num_folds=num_folds, test_rows=test_rows, seed=seed, classes=strata)
    except UserError as error:
        assert "split.num_folds" in str(error)
        assert ids.max() + 1 < num_needed or ((stratified or test_rows) and "a fold would be empty" in str(error))
        return
    for unit in range(int(ids.max()) + 1):
        assert len(set(cut.folds[ids == unit].tolist())) == 1
    counts = fold_counts(cut.folds, num_folds)
    assert min(counts) > 0
    assert (cut.folds == IN_TEST).any() == (test_rows > 0)
    num_left = int((cut.folds == ALWAYS_IN_TRAIN).sum())
    assert sum(counts) + int((cut.folds == IN_TEST).sum()) + num_left == len(ids)
    assert (num_left > 0) == bool(cut.rare_classes)
    if not stratified:
        largest = np.bincount(ids)[np.unique(ids[cut.folds >= 0])].max()
        assert max(counts) - min(counts) <= largest


def test_marks_and_seed_alone_decide_the_order_of_units():
    marks = np.random.default_rng(0).integers(0, 2**64, size=(100, 2), dtype=np.uint64)
    first = assign_splits(np.arange(100), sizes=(70, 20, 10), seed=1, marks=marks).splits
    order = np.random.default_rng(1).permutation(100)
    again = assign_splits(np.arange(100), sizes=(70, 20, 10), seed=1, marks=marks[order]).splits
    assert again.tolist() == first[order].tolist()
    assert assign_splits(np.arange(100), sizes=(70, 20, 10), seed=2, marks=marks).splits.tolist() != first.tolist()
    folds = assign_folds(np.arange(100), num_folds=3, test_rows=10, seed=1, marks=marks).folds
    assert assign_folds(np.arange(100), num_folds=3, test_rows=10, seed=1, marks=marks[order]).folds.tolist() == (
        folds[order].tolist()
    )
