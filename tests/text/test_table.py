"""The token file gives back what was written, and never scores a position that nothing predicts."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from lm_tuning.errors import UserError
from lm_tuning.text.store.table import (
    IGNORE_INDEX,
    TokenColumns,
    TokenTable,
    TokenTableWriter,
    labels_of,
    open_split,
    scored_spans,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three rows over two batches."""
    path = tmp_path / "train.arrow"
    with TokenTableWriter(path, batch_rows=2) as writer:
        writer.append(7, [1, 5, 6, 2], [(2, 4)])
        writer.append(9, [1, 9, 2], [(0, 3)])
        writer.append(4, [3, 8, 8, 8, 8, 2], [(1, 2), (4, 6)], source=1)
    return path


def test_rows_come_back_as_written(path):
    table = TokenTable(path)
    assert len(table) == 3
    assert table.row_ids.tolist() == [7, 9, 4]
    assert table.lengths.tolist() == [4, 3, 6]
    assert table.sources.tolist() == [0, 0, 1]
    assert [batch.num_rows for batch in table.batches()] == [2, 1]
    assert [row.input_ids.tolist() for row in table] == [[1, 5, 6, 2], [1, 9, 2], [3, 8, 8, 8, 8, 2]]
    assert [row.spans for row in table] == [[(2, 4)], [(1, 3)], [(1, 2), (4, 6)]]
    assert table[-1].row_id == 4
    with pytest.raises(IndexError):
        table[3]


def test_labels_are_the_ids_inside_the_spans_and_ignored_elsewhere(path):
    table = TokenTable(path)
    no = IGNORE_INDEX
    assert labels_of(table[0]).tolist() == [no, no, 6, 2]
    assert labels_of(table[1]).tolist() == [no, 9, 2], "nothing predicts position 0"
    assert labels_of(table[2]).tolist() == [no, 8, no, no, 8, 2]
    assert labels_of(table[0]).dtype == np.int64


def test_supervised_counts_equal_the_labels(path):
    table = TokenTable(path)
    assert table.num_supervised.tolist() == [2, 2, 3]
    assert [row.num_supervised for row in table] == [2, 2, 3]
    assert [int((labels_of(row) != IGNORE_INDEX).sum()) for row in table] == [2, 2, 3]


def test_ids_are_views_that_cannot_be_written_to(path):
    ids = TokenTable(path)[0].input_ids
    assert ids.dtype == np.int32
    assert not ids.flags.writeable
    assert not ids.flags.owndata


def test_a_table_travels_as_its_path(path):
    table = TokenTable(path)
    sent = pickle.dumps(table)
    assert len(sent) < 500
    assert pickle.loads(sent)[2].spans == [(1, 2), (4, 6)]


def test_columns_and_rows_write_the_same_file(path, tmp_path):
    columns = tmp_path / "columns.arrow"
    with TokenTableWriter(columns, batch_rows=2) as writer:
        writer.append_columns(
            TokenColumns(
                np.array([7, 9]),
                np.array([0, 0], dtype=np.int16),
                np.array([1, 5, 6, 2, 1, 9, 2], dtype=np.int32),
                np.array([0, 4, 7]),
                np.array([2, 4, 1, 3], dtype=np.int32),
                np.array([0, 2, 4]),
            )
        )
        writer.append(4, [3, 8, 8, 8, 8, 2], [(1, 2), (4, 6)], source=1)
    assert columns.read_bytes() == path.read_bytes()


def test_an_empty_split_is_a_table_of_length_zero(tmp_path):
    with TokenTableWriter(tmp_path / "test.arrow"):
        pass
    table = open_split(tmp_path, "test")
    assert len(table) == 0
    assert list(table) == []
    assert table.lengths.tolist() == []


def test_a_file_that_was_not_finished_is_refused(tmp_path):
    with pytest.raises(RuntimeError), TokenTableWriter(tmp_path / "train.arrow", batch_rows=1) as writer:
        writer.append(1, [1, 2], [(1, 2)])
        raise RuntimeError("stop")
    with pytest.raises(UserError, match=r"train\.arrow cannot be read"):
        open_split(tmp_path, "train")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"validation\.arrow.*tokenize pipeline"):
        open_split(tmp_path, "validation")


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(0, 4)], [(1, 4)]),
        ([(0, 1)], []),
        ([(2, 2)], []),
        ([(2, 9)], [(2, 4)]),
        ([(3, 4), (1, 2)], [(1, 2), (3, 4)]),
        ([(1, 2), (2, 4)], [(1, 4)]),
        ([(1, 4), (2, 3)], [(1, 4)]),
        ([], []),
    ],
)
def test_scored_spans_are_ordered_disjoint_and_inside_the_row(spans, expected):
    assert scored_spans(spans, 4) == expected
