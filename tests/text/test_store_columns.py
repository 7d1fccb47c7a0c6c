"""Columns of rows are joined, picked and cut with all that belongs to each row."""

from __future__ import annotations

import numpy as np
import pytest

from lm_tuning.text.store.columns import cut_ends, hold_token, join_columns, join_sides, take_rows
from lm_tuning.text.store.table import columns_of, flatten_ids

FIRST = columns_of([1, 2], [0, 1], [[5, 6], [7]], [[(1, 2)], []], [3, 4])
SECOND = columns_of([3], [0], [[8, 9]], [[]], [5])


def test_classes_go_with_their_rows():
    taken = take_rows(join_columns(FIRST, SECOND), np.array([2, 0]))
    assert taken.row_ids.tolist() == [3, 1]
    assert taken.labels is not None
    assert taken.labels.tolist() == [5, 3]
    assert taken.ids.tolist() == [8, 9, 5, 6]
    assert taken.spans.tolist() == [1, 2]
    assert taken.span_offsets.tolist() == [0, 0, 2]


def test_rows_without_classes_stay_without():
    plain = columns_of([1], [0], [[5, 6]], [[(1, 2)]])
    assert join_columns(plain, plain).labels is None
    assert take_rows(plain, np.array([0])).labels is None
    with pytest.raises(AssertionError, match="only some of the rows have classes"):
        join_columns(plain, SECOND)


def test_the_sides_of_each_row_come_one_behind_the_other():
    sources, targets = flatten_ids([[1, 2], [], [3]]), flatten_ids([[7], [8, 9], []])
    ids, offsets = join_sides(*sources, *targets)
    assert ids.tolist() == [1, 2, 7, 8, 9, 3]
    assert offsets.tolist() == [0, 3, 5, 6]


def test_rows_may_be_cut_at_limits_of_their_own():
    ids, offsets = flatten_ids([[1, 2, 3], [4, 5], [6]])
    kept, moved = cut_ends(ids, offsets, np.array([2, 5, 0]))
    assert (kept.tolist(), moved.tolist()) == ([1, 2, 4, 5], [0, 2, 4, 4])
    kept, moved = cut_ends(ids, offsets, 1)
    assert (kept.tolist(), moved.tolist()) == ([1, 4, 6], [0, 1, 2, 3])


def test_rows_that_hold_a_token_are_found():
    ids, offsets = flatten_ids([[1, 2], [], [2, 2], [3]])
    assert hold_token(ids, offsets, 2).tolist() == [True, False, True, False]
