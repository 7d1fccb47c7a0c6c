"""Read checked rows back by their numbers, memory-mapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from lm_tuning.text.store.table import Int64Array


class RowTexts:
    """The rows of a file of ``rows.ROW_SCHEMA``.

    Rows are taken batch by batch: from a table of all batches Arrow takes strings by copying the whole column first,
    however few are wanted, and fails for one of more than 2 GiB.
    """

    def __init__(self, path: Path) -> None:
        """Map the file.

        Args:
            path: an Arrow file of ``RowWriter``.
        """
        reader = pa.ipc.open_file(pa.memory_map(str(path), "r"))
        self._batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
        # (batches + 1,)
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])

    def take(self, indices: Int64Array) -> list[dict[str, Any]]:
        """Return rows by index, with the names of the columns.

        Args:
            indices: ascending, ``(rows,)``.
        """
        owners = np.searchsorted(self._starts, indices, side="right") - 1  # (rows,)
        rows: list[dict[str, Any]] = []
        for owner in np.unique(owners).tolist():
            inside = indices[owners == owner] - self._starts[owner]
            rows += self._batches[owner].take(pa.array(inside)).to_pylist()
        return rows
