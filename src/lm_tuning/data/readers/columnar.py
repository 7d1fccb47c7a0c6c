"""Turn Arrow columns into plain Python values of the types that they declare."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lm_tuning.data.check.problems import RowProblem, too_long
from lm_tuning.data.readers.open import Row

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 2048
"""Rows that are turned into Python values at a time, where they are short."""

BATCH_BYTES = 1 << 25
"""Bytes that are turned into Python values at a time, where rows are long: 32 MiB."""

Read = Callable[[Any], Any]

_METADATA_KEY = b"huggingface"


def declared_features(schema: pa.Schema) -> dict[str, Any]:
    """Return what the `datasets` library noted of the columns when it wrote a file: classes, lists, nested JSON.

    Args:
        schema: of an Arrow or Parquet file.

    Returns:
        Feature by column, as JSON; empty for files of other origin.
    """
    text = (schema.metadata or {}).get(_METADATA_KEY)
    if text is None:
        return {}
    try:
        features = json.loads(text)["info"]["features"]
    except (ValueError, KeyError, TypeError):  # somebody else's note under the same name
        return {}
    return features if isinstance(features, dict) else {}


def column_readers(schema: pa.Schema, names: Sequence[str]) -> dict[str, Read | None]:
    """Return for each column the function that makes its value plain; None where it is so already.

    A class is given by its name, and -1, which stands for no class, as None. Structs of a column all have the same
    keys, with null where a row had none: such keys are left out. What was kept as JSON is parsed.

    Args:
        schema: the columns with their types and notes.
        names: the columns that are read.
    """
    import pyarrow as pa

    features = declared_features(schema)
    readers: dict[str, Read | None] = {}
    for name in names:
        feature, kind = features.get(name), schema.field(name).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        is_noted = isinstance(feature, dict) and feature.get("_type") in ("ClassLabel", "Json")
        readers[name] = _reader_of(feature) if is_noted or pa.types.is_nested(kind) else None
    return readers


def batch_rows(
    batch: pa.RecordBatch, readers: Mapping[str, Read | None], *, max_row_bytes: int
) -> Iterator[Row | RowProblem]:
    """Yield the rows of a batch.

    Args:
        batch: has the columns that ``readers`` names.
        readers: see ``column_readers``.
        max_row_bytes: a row that takes more of Arrow's memory is a bad row and never becomes Python values.
    """
    columns = [batch.column(name) for name in readers]
    num_bytes = sum(column.nbytes for column in columns)
    step = max(1, min(BATCH_ROWS, BATCH_BYTES * batch.num_rows // max(num_bytes, 1)))
    for start in range(0, batch.num_rows, step):
        part = batch.slice(start, step)
        sizes = _sizes_of_rows([part.column(name) for name in readers], max_row_bytes)
        if sizes is None:
            yield from _plain_rows(part, readers)
            continue
        for index, size in enumerate(sizes):
            if size > max_row_bytes:
                yield too_long(size, max_row_bytes)
            else:
                yield from _plain_rows(part.slice(index, 1), readers)


def _sizes_of_rows(columns: Sequence[pa.Array], max_row_bytes: int) -> list[int] | None:
    """Return the bytes of each row; None where all of them together are no more than one row may have."""
    if sum(column.nbytes for column in columns) <= max_row_bytes:
        return None
    return [sum(_size_of_cell(column.slice(index, 1)) for column in columns) for index in range(len(columns[0]))]


def _size_of_cell(cell: pa.Array) -> int:
    import pyarrow as pa

    # The bytes of a dictionary are those of all its values.
    return int(cell.dictionary_decode().nbytes if pa.types.is_dictionary(cell.type) else cell.nbytes)


def _plain_rows(part: pa.RecordBatch, readers: Mapping[str, Read | None]) -> Iterator[Row | RowProblem]:
    names = list(readers)
    values: list[list[Any]] = []
    has_problems = False
    for name, read in readers.items():
        cells, is_whole = _cells(part.column(name), name, read)
        values.append(cells)
        has_problems |= not is_whole
    if not names:
        yield from ({} for _ in range(part.num_rows))
    for row in zip(*values, strict=True):
        problem = next((cell for cell in row if isinstance(cell, RowProblem)), None) if has_problems else None
        yield problem or dict(zip(names, row, strict=True))


def _cells(column: pa.Array, name: str, read: Read | None) -> tuple[list[Any], bool]:
    """Return the values of a column, and whether all of them could be read."""
    try:
        cells = column.to_pylist()
        return ([read(cell) for cell in cells] if read else cells), True
    except (ValueError, OverflowError, ArithmeticError):  # among them what is no UTF-8, and years beyond 9999
        return [_cell(scalar, name, read) for scalar in column], False


def _cell(scalar: pa.Scalar[Any], name: str, read: Read | None) -> Any:
    try:
        value = scalar.as_py()
        return read(value) if read else value
    except UnicodeDecodeError as error:
        return RowProblem("not_utf8", f"column {name!r} holds text whose byte {error.start:,} is not UTF-8.")
    except (ValueError, OverflowError, ArithmeticError) as error:
        return RowProblem("wrong_type", f"column {name!r} holds a value that Python cannot hold ({error}).")


def _reader_of(feature: Any) -> Read:
    """Return the function that makes the value of a nested or noted column plain."""
    if isinstance(feature, list):  # a list, as older versions wrote it
        return _list_reader(_reader_of(feature[0] if feature else None))
    if not isinstance(feature, dict):
        return _without_nulls
    kind = feature.get("_type")
    if kind == "ClassLabel" and isinstance(feature.get("names"), list):
        return _class_reader(feature["names"])
    if kind == "Json":
        return lambda value: json.loads(value) if isinstance(value, str) else value
    if kind in ("List", "LargeList", "Sequence"):
        return _list_reader(_reader_of(feature.get("feature")))
    if isinstance(kind, str):
        return _without_nulls
    return _struct_reader({key: _reader_of(inner) for key, inner in feature.items()})


def _class_reader(names: list[str]) -> Read:
    def read(value: Any) -> Any:
        if value.__class__ is not int:
            return value
        if 0 <= value < len(names):
            return names[value]
        return None if value == -1 else value

    return read


def _list_reader(read_item: Read) -> Read:
    def read(value: Any) -> Any:
        if isinstance(value, list):
            return [read_item(item) for item in value]
        return _without_nulls(value)

    return read


def _struct_reader(readers: Mapping[str, Read]) -> Read:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: readers.get(key, _without_nulls)(inner) for key, inner in value.items() if inner is not None}

    return read


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
