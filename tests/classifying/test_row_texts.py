"""Rows come back by their numbers, whichever batch of the file they lie in, and nothing else is copied."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from lm_tuning.classifying.row_texts import RowTexts
from lm_tuning.classifying.rows import ROW_SCHEMA
from lm_tuning.data.store import RowWriter

NUM_ROWS, TEXT_BYTES = 10_000, 1_000


def test_rows_are_taken_without_copying_the_others(tmp_path: Path) -> None:
    with RowWriter(tmp_path / "rows.arrow", ROW_SCHEMA) as writer:
        for index in range(NUM_ROWS):
            writer.append_row((index + 1, 0, index + 1, f"{index:05d}" + "x" * TEXT_BYTES, None))
    texts = RowTexts(tmp_path / "rows.arrow")
    wanted = np.array([0, 1, NUM_ROWS // 2, NUM_ROWS - 1])
    before = pa.default_memory_pool()
    watched = pa.proxy_memory_pool(before)
    pa.set_memory_pool(watched)
    try:
        rows = texts.take(wanted)
    finally:
        pa.set_memory_pool(before)
    assert [int(row["text"][:5]) for row in rows] == wanted.tolist()
    assert [row["row_id"] for row in rows] == (wanted + 1).tolist()
    assert 0 < watched.max_memory() < NUM_ROWS * TEXT_BYTES / 10
    assert texts.take(np.array([], dtype=np.int64)) == []
