"""Look at whole columns of text at once: odd characters, lengths, and numbers for the values of a column."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lm_tuning.data.arrays import Ints, Mask
from lm_tuning.data.records import TextLength
from lm_tuning.data.store import RowWriter
from lm_tuning.json_types import JsonValue

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_REPLACEMENT = "\ufffd"
_NAMES = {"\x00": "NUL", "\x08": "BS", "\x0b": "VT", "\x0c": "FF", "\x1b": "ESC", "\x7f": "DEL", "\x85": "NEL"}


def find_odd_characters(column: pa.StringArray, *, is_json: bool) -> Iterator[tuple[int, str, str]]:
    """Find control characters other than tab and line breaks, and the mark of text that was decoded wrongly.

    Ordinary text costs a fraction of a nanosecond a byte: only rows that hold one of the bytes in question are looked
    at as text.

    Args:
        column: texts; null ones are passed over.
        is_json: each is JSON whose strings are the text.

    Yields:
        Index of the row, kind (``control_character`` or ``replacement_character``), and the reason.
    """
    for index in _suspicious_rows(column, is_json=is_json):
        texts = list(_strings(json.loads(column[index].as_py()))) if is_json else [column[index].as_py()]
        found = [mark for text in texts for mark in _CONTROL.findall(text)]
        if found:
            more = f", and {len(found) - 1:,} more" if len(found) > 1 else ""
            yield index, "control_character", f"holds the control character {_describe(found[0])}{more}."
        count = sum(text.count(_REPLACEMENT) for text in texts)
        if count:
            times = f" {count:,} times" if count > 1 else ""
            yield index, "replacement_character", f"holds U+FFFD{times}: some of it was decoded wrongly once."


def _suspicious_rows(column: pa.StringArray, *, is_json: bool) -> list[int]:
    """Return the indices of rows that may hold such a character."""
    # Looked at as bytes: in UTF-8 no byte below 0x80 is part of another character, so control characters are found
    # without decoding anything.
    _, offset_buffer, data_buffer = column.buffers()
    if data_buffer is None or not len(column):
        return []
    # (rows + 1,): in bytes; a slice shares the buffers of its column, so its rows begin at an offset
    offsets = np.frombuffer(offset_buffer, dtype=np.int32)[column.offset : column.offset + len(column) + 1]
    data = np.frombuffer(data_buffer, dtype=np.uint8)[offsets[0] : offsets[-1]]
    # Positions in the bytes of all rows together, one array for each thing that is looked for.
    positions = [np.flatnonzero(data == 0x7F)]
    is_control = data < 0x20
    num_breaks = sum(int(np.count_nonzero(data == mark)) for mark in (0x09, 0x0A, 0x0D))
    # Tabs and line breaks are in every text; only where there is more than these, the slower search begins.
    if int(np.count_nonzero(is_control)) != num_breaks:
        positions.append(np.flatnonzero(is_control & (data != 0x09) & (data != 0x0A) & (data != 0x0D)))
    positions.append(_followed(data, 0xC2, below=0xA0))  # U+0080 to U+009F
    marks = _followed(data, 0xEF, below=0xC0)
    # EF BF BD is U+FFFD.
    positions.append(marks[(data[marks + 1] == 0xBF) & (data[marks + 2] == 0xBD)])
    if is_json:
        # In JSON they are escapes such as \u0000, \b and \f; an escaped backslash before a letter is found too, and
        # then passes the closer look.
        escapes = np.flatnonzero(data[:-1] == ord("\\"))
        follower = data[escapes + 1]
        positions.append(escapes[(follower == ord("u")) | (follower == ord("b")) | (follower == ord("f"))])
    found = np.concatenate(positions)
    # The last row that begins at a position or before it.
    rows: list[int] = np.unique(np.searchsorted(offsets - offsets[0], found, side="right") - 1).tolist()
    return rows


def _followed(data: npt.NDArray[np.uint8], lead: int, *, below: int) -> npt.NDArray[np.intp]:
    """Return where a lead byte stands whose follower is below a value; a lead byte is never the last one of a text."""
    indices = np.flatnonzero(data == lead)
    return indices[data[indices + 1] < below]


def _strings(value: JsonValue) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings(list(value.values()))
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _describe(mark: str) -> str:
    name = _NAMES.get(mark) or unicodedata.name(mark, "")
    return f"U+{ord(mark):04X}{f' ({name})' if name else ''}"


_QUANTILES = (0.5, 0.9, 0.99)
_NO_TEXT = -1


class TextLengths:
    """Count the characters of each field of each row: four bytes of memory for each."""

    def __init__(self, fields: Sequence[str]) -> None:
        """Start with no row.

        Args:
            fields: columns of text of the batches.
        """
        self._lengths: dict[str, list[npt.NDArray[np.int32]]] = {name: [] for name in fields}

    def add(self, batch: pa.RecordBatch) -> None:
        """Count the texts of some rows.

        Args:
            batch: has the fields; a null has no length.
        """
        import pyarrow.compute as pc

        for name, lengths in self._lengths.items():
            counted = pc.fill_null(pc.utf8_length(batch.column(name)), _NO_TEXT)
            # 32 bits: a column whose offsets in bytes have as many holds no longer text.
            lengths.append(counted.to_numpy(zero_copy_only=False).astype(np.int32))

    def describe(self, keep: Mask | None = None) -> dict[str, TextLength]:
        """Return by field what its texts are like, without fields that no row has.

        Args:
            keep: ``(rows,)``: rows that count; None for all.

        Returns:
            ``num_rows`` that have a text, and in characters ``mean``, ``p50``, ``p90``, ``p99`` and ``longest``. Every
            quantile is a length that occurs.
        """
        described: dict[str, TextLength] = {}
        for name, parts in self._lengths.items():
            lengths = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
            lengths = lengths if keep is None else lengths[keep]
            lengths = lengths[lengths != _NO_TEXT]
            if not len(lengths):
                continue
            p50, p90, p99 = map(int, np.quantile(lengths, _QUANTILES, method="higher"))
            described[name] = {
                "num_rows": len(lengths),
                "mean": round(float(lengths.mean(dtype=np.float64)), 2),
                "p50": p50,
                "p90": p90,
                "p99": p99,
                "longest": int(lengths.max()),
            }
        return described


# Beyond this many names of a column a list of them costs more memory than a look-up costs time.
_MAX_LISTED_NAMES = 100_000


def value_writer(path: Path, columns: Sequence[str]) -> RowWriter:
    """Return a writer of the values of some columns, one row after the other.

    Args:
        path: the Arrow file to write.
        columns: their names.
    """
    # Names of columns may hold anything, so the file knows them by number. Offsets of 64 bits, since all different
    # values of a column become one array when they are numbered.
    return RowWriter(path, pa.schema([(str(index), pa.large_string()) for index in range(len(columns))]))


def number_values(
    path: Path, columns: Sequence[str], keep: Mask | None
) -> tuple[dict[str, Ints], dict[str, pa.LargeStringArray]]:
    """Number the values of each column in the order in which they first appear; missing ones are -1.

    Args:
        path: what ``value_writer`` wrote.
        columns: their names.
        keep: ``(rows,)``: rows that count; None for all.

    Returns:
        By column, ``(rows,)``: the numbers; and what they stand for.
    """
    if not columns:
        return {}, {}
    table = pa.ipc.open_file(pa.memory_map(str(path), "r")).read_all()
    if keep is not None:
        table = table.filter(pa.array(keep))
    values: dict[str, Ints] = {}
    names: dict[str, pa.LargeStringArray] = {}
    for index, column in enumerate(columns):
        # All chunks share one dictionary, in the order in which its values first appear in any of them.
        chunks = table.column(index).dictionary_encode().chunks
        # (rows of the chunk,): nulls are rows of held-out files that lack the column
        numbers = [chunk.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64) for chunk in chunks]
        values[column] = np.concatenate(numbers) if numbers else np.zeros(0, dtype=np.int64)
        names[column] = chunks[-1].dictionary if chunks else pa.array([], pa.large_string())
    return values, names


class StoredNames(Sequence[str]):
    """Names that stay on disk until they are asked for."""

    def __init__(self, column: pa.LargeStringArray) -> None:
        """Wrap a column of text.

        Args:
            column: memory-mapped.
        """
        self._column = column

    def __len__(self) -> int:
        """Count the names."""
        return len(self._column)

    def __getitem__(self, index: Any) -> Any:
        """Return one name, or a list of some."""
        found = self._column[index]
        return found.to_pylist() if isinstance(index, slice) else found.as_py()


def write_names(path: Path, names: pa.LargeStringArray) -> None:
    """Write what the numbers of a column stand for.

    Args:
        path: the Arrow file to write.
        names: in the order of the numbers.
    """
    batch = pa.record_batch([names], names=["name"])
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def read_names(path: Path) -> Sequence[str]:
    """Read what the numbers of a column stand for; very many names stay on disk.

    Args:
        path: what ``write_names`` wrote.
    """
    column = pa.ipc.open_file(pa.memory_map(str(path), "r")).get_batch(0).column(0)
    if len(column) > _MAX_LISTED_NAMES:
        return StoredNames(column)
    names: list[str] = column.to_pylist()
    return names
