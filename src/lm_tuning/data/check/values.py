"""Number the values of the columns that rows are divided by, and keep on disk what the numbers stand for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import overload

import numpy as np
import pyarrow as pa

from lm_tuning.data.arrays import Ints, Mask
from lm_tuning.data.store import RowWriter

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

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Return one name, or a list of some."""
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        name: str = self._column[index % len(self)].as_py()
        return name


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
