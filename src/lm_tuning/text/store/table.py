"""Keep tokenized rows in an Arrow file that training reads without copying."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lm_tuning.data.records import SPLITS
from lm_tuning.errors import UserError
from lm_tuning.text.records import NO_LABEL, Span, TokenRow

IGNORE_INDEX = -100
"""Label of a position that no loss is taken of (the default of PyTorch's cross entropy)."""

BATCH_ROWS = 8192
BATCH_TOKENS = 1 << 24
"""A file is written in batches of about so many rows or tokens: each costs a moment whenever the file is opened."""

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Int16Array = npt.NDArray[np.int16]

TOKEN_SCHEMA = pa.schema(
    [
        ("row_id", pa.int64()),
        ("input_ids", pa.list_(pa.int32())),
        ("spans", pa.list_(pa.int32())),
        ("length", pa.int32()),
        ("num_supervised", pa.int32()),
        ("source", pa.int16()),
        ("label", pa.int32()),
    ]
)


def scored_spans(spans: Sequence[Span], length: int) -> list[Span]:
    """Cut spans to the positions that a causal model can be scored on.

    Nothing predicts position 0, so no span keeps it; that is also what keeps a packed row from being scored
    on its neighbour's last token.

    Args:
        spans: half-open token positions in any order, possibly touching.
        length: number of tokens in the row.

    Returns:
        Ascending, disjoint, non-empty spans inside ``[1, length)``.
    """
    kept: list[Span] = []
    for span in sorted(spans):
        # Position 0 goes: nothing stands before it that could predict it.
        start, end = max(span[0], 1), min(span[1], length)
        if end <= start:
            continue
        if kept and start <= kept[-1][1]:
            kept[-1] = (kept[-1][0], max(kept[-1][1], end))
        else:
            kept.append((start, end))
    return kept


def labels_of(row: TokenRow) -> Int64Array:
    """Build the labels of one row, unshifted as transformers expects them.

    Args:
        row: a row of a token table.

    Returns:
        ``(length,)``: the token id inside the spans, ``IGNORE_INDEX`` everywhere else.
    """
    # int64, as cross-entropy wants targets; the file has int32
    labels = np.full(len(row.input_ids), IGNORE_INDEX, dtype=np.int64)
    for start, end in row.spans:
        labels[start:end] = row.input_ids[start:end]
    return labels


class TokenTable:
    """Read a token file by row number, memory-mapped.

    Pickles as its path, so loader workers and ranks open the file themselves.

    Attributes:
        path: the file.
        lengths: tokens of each row, ``(rows,)``.
        num_supervised: positions of each row that carry loss, plus 1 for a row with a class, ``(rows,)``.
        row_ids: identity of each row, ``(rows,)``.
        sources: index of each training row in the list of sources, ``(rows,)``; -1 for rows of held-out files.
        labels: class of each row, ``(rows,)``; ``NO_LABEL`` for rows without one.
    """

    def __init__(self, path: Path | str) -> None:
        """Map the file; token ids stay on disk until a row is read.

        Args:
            path: an Arrow IPC file written by ``TokenTableWriter``.

        Raises:
            UserError: the file is missing or is not a token file.
        """
        self.path = Path(path)
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(self.path), "r"))
        except (OSError, pa.ArrowInvalid) as error:
            raise UserError(
                f"Token file {self.path} cannot be read ({error}). Run the tokenize pipeline again."
            ) from error
        if not reader.schema.equals(TOKEN_SCHEMA):
            raise UserError(f"{self.path} is not a token file of this version. Run the tokenize pipeline again.")
        self._reader = reader
        batches = list(self.batches())
        # Views into the map, one pair of offsets and values a batch: nothing is read before a row is asked for.
        self._ids = [_list_parts(batch.column("input_ids")) for batch in batches]
        self._spans = [_list_parts(batch.column("spans")) for batch in batches]
        self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)], dtype=np.int64)
        # (rows,): what is small is held in memory, since every plan and report walks over it.
        self.lengths: Int32Array = _joined(batches, "length", np.int32)
        self.num_supervised: Int32Array = _joined(batches, "num_supervised", np.int32)
        self.row_ids: Int64Array = _joined(batches, "row_id", np.int64)
        self.sources: Int16Array = _joined(batches, "source", np.int16)
        self.labels: Int32Array = _joined(batches, "label", np.int32)

    def __len__(self) -> int:
        """Count the rows."""
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> TokenRow:
        """Read one row.

        Args:
            index: position in the file, 0-based; negative counts from the end.

        Returns:
            The row; its ``input_ids`` are a read-only view.
        """
        # numpy's integers come in too, and must not travel on as the row's.
        index = int(index)
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a table of {len(self)} rows")
        # Empty batches share their start with the next one; from the right the last of them is found, which has the
        # row.
        batch = int(np.searchsorted(self._starts, index, side="right")) - 1
        row = index - int(self._starts[batch])
        spans = _slice(self._spans[batch], row).tolist()
        return TokenRow(
            row_id=int(self.row_ids[index]),
            input_ids=_slice(self._ids[batch], row),
            spans=list(zip(spans[::2], spans[1::2], strict=True)),
            label=int(self.labels[index]),
        )

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows in file order, a few thousand at a time, in the columns of ``TOKEN_SCHEMA``."""
        return (self._reader.get_batch(position) for position in range(self._reader.num_record_batches))

    def __iter__(self) -> Iterator[TokenRow]:
        """Read the rows in file order."""
        return (self[index] for index in range(len(self)))

    def __reduce__(self) -> tuple[type[TokenTable], tuple[Path]]:
        """Pickle the path alone."""
        return (TokenTable, (self.path,))


def open_split(folder: Path, split: str) -> TokenTable:
    """Open one split of a tokenized folder.

    Args:
        folder: what the tokenize pipeline stored.
        split: ``train``, ``validation`` or ``test``; a split without rows gives a table of length 0.

    Returns:
        The table, memory-mapped.

    Raises:
        UserError: the folder has no such split.
    """
    return TokenTable(split_path(folder, split))


def split_path(folder: Path, split: str) -> Path:
    """Name the file of a split inside a folder of splits or tokens."""
    assert split in SPLITS, split
    return Path(folder) / f"{split}.arrow"


@dataclass(slots=True)
class TokenColumns:
    """Tokenized rows in columns.

    Attributes:
        row_ids: ``(rows,)``.
        sources: index of each row's source, ``(rows,)``; -1 for held-out files.
        ids: token ids of all rows end to end, ``(tokens,)``.
        id_offsets: ``(rows + 1,)``: where each row starts in ``ids``.
        spans: start and end of all spans end to end, as ``scored_spans`` gives them.
        span_offsets: ``(rows + 1,)``: where each row starts in ``spans``.
        labels: class of each row, ``(rows,)``; ``None`` for rows without classes.
    """

    row_ids: Int64Array
    sources: Int16Array
    ids: Int32Array
    id_offsets: Int64Array
    spans: Int32Array
    span_offsets: Int64Array
    labels: Int32Array | None = None

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.row_ids)


def columns_of(
    row_ids: npt.ArrayLike,
    sources: npt.ArrayLike,
    tokens: Sequence[Sequence[int] | Int32Array],
    spans: Sequence[Sequence[Span]],
    labels: Sequence[int] | None = None,
) -> TokenColumns:
    """Write rows as columns.

    Args:
        row_ids: one per row.
        sources: one per row.
        tokens: token ids of each row.
        spans: scored spans of each row.
        labels: class of each row; ``None`` for rows without classes.
    """
    ids, id_offsets = flatten_ids(tokens)
    # (rows + 1,): two edges a span
    span_offsets = np.cumsum([0, *(2 * len(row) for row in spans)])
    edges = chain.from_iterable(chain.from_iterable(spans))
    flat = np.fromiter(edges, dtype=np.int32, count=int(span_offsets[-1]))
    return TokenColumns(
        np.array(row_ids, dtype=np.int64),
        np.array(sources, dtype=np.int16),
        ids,
        id_offsets,
        flat,
        span_offsets,
        None if labels is None else np.array(labels, dtype=np.int32),
    )


def flatten_ids(tokens: Sequence[Sequence[int] | Int32Array]) -> tuple[Int32Array, Int64Array]:
    """Join token ids end to end.

    Args:
        tokens: of each row.

    Returns:
        The ids and where each row starts, the end included.
    """
    offsets = np.cumsum([0, *map(len, tokens)])
    return np.fromiter(chain.from_iterable(tokens), dtype=np.int32, count=int(offsets[-1])), offsets


class TokenTableWriter:
    """Write a token file batch by batch, holding one batch in memory.

    Use it as a context manager: the file is only readable after a clean exit.
    """

    def __init__(self, path: Path | str, *, batch_rows: int = BATCH_ROWS) -> None:
        """Open the file for writing.

        Args:
            path: file to create; its folder exists.
            batch_rows: rows collected before they are written.
        """
        self.path = Path(path)
        self.num_rows = 0
        self._batch_rows = batch_rows
        self._pending: list[tuple[int, Sequence[int] | Int32Array, list[Span], int, int]] = []
        self._batches: list[pa.RecordBatch] = []
        self._waiting_rows = self._waiting_tokens = 0
        self._sink = pa.OSFile(str(self.path), "wb")
        self._writer = pa.ipc.new_file(self._sink, TOKEN_SCHEMA)

    def append(
        self,
        row_id: int,
        input_ids: Sequence[int] | Int32Array,
        spans: Sequence[Span],
        *,
        source: int = 0,
        label: int = NO_LABEL,
    ) -> None:
        """Add one row.

        Tokenizing adds whole batches, see :meth:`append_columns`; benchmarks and tests make tables row by row.

        Args:
            row_id: identity of the row.
            input_ids: token ids, ``(length,)``.
            spans: half-open token positions that carry loss; position 0 is dropped from them.
            source: which training source the row comes from; -1 for a held-out file.
            label: class of the row.
        """
        self._pending.append((row_id, input_ids, scored_spans(spans, len(input_ids)), source, label))
        if len(self._pending) >= self._batch_rows:
            self._flush()

    def append_columns(self, columns: TokenColumns) -> None:
        """Add a whole batch that is columnar already.

        Args:
            columns: any number of rows.
        """
        self._flush()
        if len(columns):
            self._collect(columns)

    def close(self) -> None:
        """Write what is pending and the footer."""
        self._flush()
        self._write()
        self._writer.close()
        self._sink.close()

    def __enter__(self) -> TokenTableWriter:
        """Return the writer itself."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Finish the file after success; leave it unreadable after an error."""
        if kind is None:
            self.close()
        else:
            self._sink.close()

    def _flush(self) -> None:
        if self._pending:
            row_ids, ids, spans, sources, labels = zip(*self._pending, strict=True)
            self._pending = []
            self._collect(columns_of(row_ids, sources, ids, spans, labels))

    def _collect(self, columns: TokenColumns) -> None:
        # (spans, 2)
        pairs = columns.spans.reshape(-1, 2)
        # (spans + 1,): supervised positions before each span
        covered = np.concatenate([[0], np.cumsum(pairs[:, 1] - pairs[:, 0])])
        # (rows + 1,): offsets count edges, and a span has two
        edges = columns.span_offsets // 2
        labels = columns.labels if columns.labels is not None else np.full(len(columns), NO_LABEL, dtype=np.int32)
        num_supervised = covered[edges[1:]] - covered[edges[:-1]] + (labels != NO_LABEL)
        arrays = [
            pa.array(columns.row_ids),
            # int32 offsets: a batch stays far below two billion tokens.
            pa.ListArray.from_arrays(pa.array(columns.id_offsets.astype(np.int32)), pa.array(columns.ids)),
            pa.ListArray.from_arrays(pa.array(columns.span_offsets.astype(np.int32)), pa.array(columns.spans)),
            pa.array(np.diff(columns.id_offsets).astype(np.int32)),
            pa.array(num_supervised.astype(np.int32)),
            pa.array(columns.sources),
            pa.array(labels),
        ]
        self._batches.append(pa.record_batch(arrays, schema=TOKEN_SCHEMA))
        self.num_rows += len(columns)
        self._waiting_rows += len(columns)
        self._waiting_tokens += len(columns.ids)
        if self._waiting_rows >= self._batch_rows or self._waiting_tokens >= BATCH_TOKENS:
            self._write()

    def _write(self) -> None:
        """Write what is collected as one batch."""
        if self._batches:
            # One batch in the file for many chunks: a reader pays for each batch whenever it opens the file.
            [whole] = pa.Table.from_batches(self._batches).combine_chunks().to_batches()
            self._writer.write_batch(whole)
        self._batches = []
        self._waiting_rows = self._waiting_tokens = 0


def _list_parts(column: Any) -> tuple[Int32Array, Int32Array]:
    """Return offsets and flat values of a list column as views."""
    return column.offsets.to_numpy(), column.values.to_numpy()


def _slice(parts: tuple[Int32Array, Int32Array], row: int) -> Int32Array:
    offsets, values = parts
    return values[offsets[row] : offsets[row + 1]]


def _joined(batches: list[Any], name: str, dtype: type) -> Any:
    if not batches:
        return np.empty(0, dtype=dtype)
    return np.concatenate([batch.column(name).to_numpy() for batch in batches])
