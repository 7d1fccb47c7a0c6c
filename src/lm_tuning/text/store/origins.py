"""Where held-out rows came from: file, row number, source and group, beside the tokens of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lm_tuning.data.check.findings import RowPositions
from lm_tuning.data.records import HELD_OUT, FileRows
from lm_tuning.data.split.groups import read_groups
from lm_tuning.data.split.records import SplitsSummary
from lm_tuning.text.store.table import Int64Array, open_split

ORIGINS_NAME = "origins.parquet"

OriginKind = Literal["group", "source", "file"]
ORIGIN_KINDS: tuple[OriginKind, ...] = ("group", "source", "file")

_GROUP_COLUMN = b"lm_tuning.group_column"


@dataclass(frozen=True)
class RowParts:
    """Of which part each of some rows is.

    Attributes:
        indices: into the names, -1 for a row without one, ``(rows,)``.
        names: of the parts that occur, ascending.
    """

    indices: Int64Array
    names: tuple[str, ...]

    def rows_of(self, name: str) -> Int64Array:
        """Return which rows are of a part, ``(rows of it,)``.

        Args:
            name: of the part, which may have none.
        """
        # There may be a part for each row, so its name is looked up by halving.
        index = bisect_left(self.names, name)
        is_there = index < len(self.names) and self.names[index] == name
        return np.flatnonzero(self.indices == index) if is_there else np.zeros(0, dtype=np.int64)


class Origins:
    """What is known of where held-out rows came from.

    Attributes:
        group_column: the column of ``split.group``; ``None`` without one.
    """

    def __init__(self, table: pa.Table) -> None:
        """Keep the columns.

        Args:
            table: what :func:`write_origins` wrote.
        """
        # (rows,), ascending
        self._row_ids: Int64Array = table.column("row_id").to_numpy()
        self._rows = table.column("row")
        self._columns = {kind: table.column(kind).combine_chunks() for kind in ORIGIN_KINDS}
        column = (table.schema.metadata or {}).get(_GROUP_COLUMN)
        self.group_column: str | None = None if column is None else column.decode()

    def describe(self, row_id: int) -> str:
        """Name a row by its file and its 1-based number in it.

        Args:
            row_id: its id.
        """
        index = int(np.searchsorted(self._row_ids, row_id))
        return f"{self._columns['file'][index].as_py()}, row {self._rows[index].as_py()}"

    def parts_of(self, row_ids: Int64Array, kind: OriginKind) -> RowParts:
        """Return the group, source or file of rows.

        Args:
            row_ids: ids of held-out rows, ``(rows,)``.
            kind: which of them.
        """
        named = self._columns[kind]
        # Names as Python strings for each of a million rows would take gigabytes.
        found = named.indices.fill_null(-1).to_numpy()[np.searchsorted(self._row_ids, row_ids)]  # (rows,)
        used, of_used = np.unique(found, return_inverse=True)
        texts = [None if index < 0 else named.dictionary[index].as_py() for index in used.tolist()]
        names = sorted({text for text in texts if text is not None})
        index_of: dict[str | None, int] = {name: index for index, name in enumerate(names)} | {None: -1}
        return RowParts(np.array([index_of[text] for text in texts], dtype=np.int64)[of_used], tuple(names))


def write_origins(folder: Path, splits: Path, summary: SplitsSummary) -> None:
    """Write where the held-out rows of a folder of tokens came from.

    Args:
        folder: the tokens of every split.
        splits: the splits that they were made of.
        summary: of the splits.
    """
    ids = np.sort(np.concatenate([open_split(folder, split).row_ids for split in HELD_OUT]))
    files = summary["files"]
    positions = RowPositions(files)
    # Ids of a file begin where those of the one before end, so one search names the file of each row.
    first_ids = np.array([file["first_row_id"] for file in files], dtype=np.int64)
    of_file = np.searchsorted(first_ids, ids, side="right") - 1
    groups = read_groups(splits)
    schema = pa.schema(
        [
            ("row_id", pa.int64()),
            ("row", pa.int64()),
            *((kind, pa.dictionary(pa.int32(), pa.string())) for kind in ("file", "source", "group")),
        ],
        metadata={} if groups is None else {_GROUP_COLUMN: groups.column.encode()},
    )
    columns = [
        pa.array(ids),
        pa.array(ids - first_ids[of_file] + 1),
        _named(of_file, positions.names),
        _named(*_sources(files, of_file, summary)),
        _named(np.full(len(ids), -1), []) if groups is None else _named(groups.of(ids), groups.names),
    ]
    pq.write_table(pa.table(columns, schema=schema), folder / ORIGINS_NAME)


def read_origins(folder: Path) -> Origins | None:
    """Return where the held-out rows of a folder of tokens came from; ``None`` where it was not noted.

    Args:
        folder: what the tokenize pipeline stored; earlier versions stored no origins.
    """
    path = folder / ORIGINS_NAME
    return Origins(pq.read_table(path)) if path.is_file() else None


def _sources(files: Sequence[FileRows], of_file: Int64Array, summary: SplitsSummary) -> tuple[Int64Array, list[str]]:
    """Return the index of each row's training source, -1 for a row of a held-out file, and the sources' names."""
    source_of_file = np.array([file["source"] for file in files], dtype=np.int64)
    return source_of_file[of_file], [source["path"] for source in summary["sources"]]


def _named(indices: Int64Array, names: Iterable[str]) -> pa.DictionaryArray:
    """Return names by their index, nothing for a negative one."""
    return pa.DictionaryArray.from_arrays(
        pa.array(indices.astype(np.int32), mask=indices < 0), pa.array(list(names), pa.string())
    )
