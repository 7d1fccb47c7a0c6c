"""Keep the group of each held-out row beside the splits, so that figures can be told by group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lm_tuning.data.arrays import Ints

GROUPS_NAME = "groups.parquet"

_COLUMN_KEY = b"lm_tuning.group_column"


@dataclass(frozen=True)
class RowGroups:
    """The groups of held-out rows.

    Attributes:
        column: of ``split.group``.
        row_ids: ascending, ``(rows,)``.
        indices: of each row's group in ``names``, ``(rows,)``.
        names: values of the column.
    """

    column: str
    row_ids: Ints
    indices: Ints
    names: Sequence[str]

    def of(self, row_ids: Ints) -> Ints:
        """Return the indices of some rows' groups, ``(asked rows,)``.

        Args:
            row_ids: ids of held-out rows.
        """
        found: Ints = self.indices[np.searchsorted(self.row_ids, row_ids)]
        return found


def write_groups(folder: Path, column: str, row_ids: Ints, values: Ints, names: Sequence[str]) -> None:
    """Write the groups of held-out rows.

    Args:
        folder: of the splits.
        column: of ``split.group``.
        row_ids: of the held-out rows, in any order.
        values: index of each row's group in ``names``, ``(rows,)``.
        names: of all groups, those of other rows too.
    """
    order = np.argsort(row_ids, kind="stable")
    used, indices = np.unique(values[order], return_inverse=True)
    of_rows = pa.DictionaryArray.from_arrays(
        pa.array(indices.astype(np.int32)), pa.array([names[index] for index in used.tolist()], pa.string())
    )
    schema = pa.schema([("row_id", pa.int64()), ("group", of_rows.type)], metadata={_COLUMN_KEY: column.encode()})
    pq.write_table(pa.table([pa.array(row_ids[order]), of_rows], schema=schema), folder / GROUPS_NAME)


def read_groups(folder: Path) -> RowGroups | None:
    """Return the groups of held-out rows; ``None`` without ``split.group``, or of splits of an earlier version.

    Args:
        folder: what the split pipeline stored.
    """
    path = folder / GROUPS_NAME
    if not path.is_file():
        return None
    table = pq.read_table(path)
    of_rows = table.column("group").combine_chunks()
    return RowGroups(
        column=table.schema.metadata[_COLUMN_KEY].decode(),
        row_ids=table.column("row_id").to_numpy(),
        indices=of_rows.indices.to_numpy().astype(np.int64),
        names=of_rows.dictionary.to_pylist(),
    )
