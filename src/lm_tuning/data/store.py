"""Keep examples in Arrow files, one per split, that are written in batches and read memory-mapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self, TypeAlias

import numpy as np
import pyarrow as pa

from lm_tuning.data.arrays import Ints, Splits
from lm_tuning.data.format.examples import FIELDS
from lm_tuning.data.records import SPLITS, Preview, RowsBySplit
from lm_tuning.errors import UserError
from lm_tuning.wording import shorten

StoredRow: TypeAlias = dict[str, str | int | list[int] | None]
"""A row as it is stored: texts, ``row_id`` and ``source``, and perhaps column ranges."""

# Rows that wait in memory, and rows of a batch: few enough that previews and samples read little.
BATCH_ROWS = 4096
_MAX_PREVIEW_CHARACTERS = 300

_FORMAT_KEY = b"lm_tuning.format"


COLUMN_RANGES = "column_ranges"
"""Name of the stored column that says which characters of a rendered prompt came from the columns of the raw row."""


def example_schema(format: str, *, is_composed: bool = False) -> pa.Schema:
    """Return the columns of stored rows: ``row_id``, the fields of the format, all text, and ``source``.

    ``source`` is the index of the training source that a row came from, -1 for rows of held-out files. Rows whose
    prompt, or text, is composed of columns and fixed text have ``column_ranges``: start and end of each, in characters.

    Args:
        format: see ``FIELDS``; it stands in the metadata of the schema as well.
        is_composed: whether prompts, or texts, are composed.
    """
    # Strings have offsets of 32 bits, half as long as large ones: a batch may then hold 2 GiB of text.
    fields = [("row_id", pa.int64()), *((name, pa.string()) for name in FIELDS[format]), ("source", pa.int16())]
    if is_composed:
        fields.append((COLUMN_RANGES, pa.list_(pa.int32())))
    return pa.schema(fields, metadata={_FORMAT_KEY: format.encode()})


class RowWriter:
    """Write an Arrow file row by row or batch by batch; a context manager, readable after a clean exit.

    Attributes:
        num_rows: rows written so far.
        num_appended: rows taken in by ``append_row``, those that wait to be written among them.
    """

    def __init__(self, path: Path, schema: pa.Schema, inspect: Callable[[pa.RecordBatch], None] | None = None) -> None:
        """Create the file.

        Args:
            path: where to write; its folder exists.
            schema: the columns.
            inspect: called with each batch of rows that were taken in one by one, before it is written.
        """
        self.num_rows = 0
        self.num_appended = 0
        self._schema = schema
        self._inspect = inspect
        self._rows: list[Sequence[str | int | Sequence[int] | None]] = []
        self._batches: list[pa.RecordBatch] = []
        self._num_waiting = 0
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._sink, self._schema)

    def append_row(self, row: Sequence[str | int | Sequence[int] | None]) -> None:
        """Add one row.

        Args:
            row: one value per column.
        """
        self._rows.append(row)
        self.num_appended += 1
        if len(self._rows) == BATCH_ROWS:
            self._flush_rows()

    def append_batch(self, batch: pa.RecordBatch) -> None:
        """Add some rows; small chunks are joined before they are written.

        Args:
            batch: any number of rows in the schema of the file.
        """
        self._batches.append(batch)
        self._num_waiting += batch.num_rows
        if self._num_waiting >= BATCH_ROWS:
            self._flush_batches()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write what is waiting and close the file; after an error close it only."""
        if kind is None:
            self._flush_rows()
            self._flush_batches()
            self._writer.close()
        self._sink.close()

    def _flush_rows(self) -> None:
        if self._rows:
            # Column by column: Arrow takes many rows of few columns far faster than one row after the other.
            columns = zip(*self._rows, strict=True)
            arrays = [pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
            batch = pa.record_batch(arrays, schema=self._schema)
            if self._inspect:
                self._inspect(batch)
            self._write(batch)
            self._rows.clear()

    def _flush_batches(self) -> None:
        if self._num_waiting:
            for batch in pa.Table.from_batches(self._batches, self._schema).combine_chunks().to_batches():
                self._write(batch)
        self._batches.clear()
        self._num_waiting = 0

    def _write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)
        self.num_rows += batch.num_rows


class ExampleWriter(RowWriter):
    """Write a file of examples."""

    def __init__(
        self,
        path: Path,
        format: str,
        *,
        is_composed: bool = False,
        inspect: Callable[[pa.RecordBatch], None] | None = None,
    ) -> None:
        """Create the file.

        Args:
            path: where to write; its folder exists.
            format: see ``FIELDS``.
            is_composed: whether rows come with column ranges.
            inspect: see ``RowWriter``.
        """
        super().__init__(path, example_schema(format, is_composed=is_composed), inspect)
        self._is_composed = is_composed

    def append(
        self, row_id: int, values: Sequence[str | None], source: int = 0, column_ranges: Sequence[int] = ()
    ) -> None:
        """Add one row.

        Args:
            row_id: identity of the row.
            values: one value per field of the format.
            source: index of the training source that it came from; -1 for a row of a held-out file.
            column_ranges: start and end of each column in a composed prompt, or text, end to end.
        """
        row = (row_id, *values, source)
        self.append_row((*row, column_ranges) if self._is_composed else row)


class ExampleTable:
    """Read a split, memory-mapped: rows stay on disk until they are asked for.

    Attributes:
        path: the file.
        format: ``text``, ``prompt_response``, ``messages`` or ``text_label``.
        is_composed: whether rows come with column ranges.
    """

    def __init__(self, path: Path) -> None:
        """Map the file.

        Args:
            path: an Arrow file of ``ExampleWriter``.

        Raises:
            UserError: it is missing or damaged.
        """
        self.path = Path(path)
        try:
            # Mapped, so that the pages of a file are shared by all processes that read it, and go first when memory is
            # short.
            self._reader = pa.ipc.open_file(pa.memory_map(str(self.path), "r"))
            self.format = self._reader.schema.metadata[_FORMAT_KEY].decode()
            self.is_composed = COLUMN_RANGES in self._reader.schema.names
        except (OSError, pa.ArrowInvalid, TypeError, KeyError) as error:
            raise UserError(
                f"The split {self.path} is missing or damaged ({error}). Make it with: kedro run --pipelines=split"
            ) from error
        self._num_rows = sum(batch.num_rows for batch in self.batches())

    def __len__(self) -> int:
        """Count the rows."""
        return int(self._num_rows)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows in file order, a few thousand at a time, without copying them."""
        return (self._reader.get_batch(index) for index in range(self._reader.num_record_batches))

    def row_ids(self) -> Ints:
        """Return the id of each row, ``(rows,)``."""
        # Of no batch nothing can be concatenated.
        return np.concatenate([np.zeros(0, np.int64), *(batch.column("row_id").to_numpy() for batch in self.batches())])

    def head(self, num_rows: int) -> list[StoredRow]:
        """Return the first rows.

        Args:
            num_rows: how many at most.
        """
        # Batch by batch, since reading all rows for the first few would take the whole file.
        rows: list[StoredRow] = []
        for batch in self.batches():
            rows += batch.slice(0, num_rows - len(rows)).to_pylist()
            if len(rows) >= num_rows:
                break
        return rows


def open_examples(folder: Path, split: str) -> ExampleTable:
    """Open one split of a stored folder.

    Args:
        folder: what the split pipeline stored.
        split: ``train``, ``validation`` or ``test``.

    Raises:
        UserError: the file is missing or damaged.
    """
    assert split in SPLITS, split
    return ExampleTable(Path(folder) / f"{split}.arrow")


def write_selected(
    source: ExampleTable, folder: Path, assignment: Splits, *, on_rows: Callable[[int], None]
) -> RowsBySplit:
    """Write one file per split, each in the order of the source.

    Args:
        source: all rows.
        folder: where ``train.arrow`` and the others go.
        assignment: ``(rows,)``: index in ``SPLITS``, or -1 for a row that is left out.
        on_rows: called with the number of rows done so far.

    Returns:
        Number of rows by split.
    """
    start = 0
    with ExitStack() as stack:
        writers = [
            stack.enter_context(ExampleWriter(folder / f"{split}.arrow", source.format, is_composed=source.is_composed))
            for split in SPLITS
        ]
        for batch in source.batches():
            part = assignment[start : start + batch.num_rows]
            for index, writer in enumerate(writers):
                # (rows of the batch,)
                mask = part == index
                if mask.all():
                    writer.append_batch(batch)
                elif mask.any():
                    writer.append_batch(batch.filter(pa.array(mask)))
            start += batch.num_rows
            on_rows(start)
    return {split: writer.num_rows for split, writer in zip(SPLITS, writers, strict=True)}


def preview_rows(table: ExampleTable, num_rows: int) -> Preview:
    """Return the column names and the values of the first rows, long text cut, as a catalog preview shows them.

    Args:
        table: the rows.
        num_rows: how many at most.
    """
    rows = table.head(num_rows)
    shown: list[list[str | int | None]] = [
        [
            shorten(value, _MAX_PREVIEW_CHARACTERS) if isinstance(value, str) else value
            for value in row.values()
            if not isinstance(value, list)  # column ranges are for programs, not for a reader
        ]
        for row in rows
    ]
    return {"columns": [name for name in rows[0] if name != COLUMN_RANGES] if rows else [], "data": shown}
