"""Stream the rows of Parquet and Arrow files, and of data sets on the hub: plain values of the types they declare."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from lm_tuning.data.check.findings import NumberedRow, RowProblem, too_long
from lm_tuning.data.readers.base import ReadSettings, RowSource, beyond_row, check_columns
from lm_tuning.data.records import Cell, Row, SourceFile
from lm_tuning.data.sources.opening import RawFile, peek_bytes
from lm_tuning.data.sources.remote import load_hub_split
from lm_tuning.errors import UserError
from lm_tuning.json_types import JsonObject, JsonValue

# Rows that are turned into Python values at a time, where they are short.
_BATCH_ROWS = 2048
# Bytes that are turned into Python values at a time, where rows are long: 32 MiB.
_BATCH_BYTES = 1 << 25

Read: TypeAlias = Callable[[Cell], Cell]

_METADATA_KEY = b"huggingface"


def _declared_features(schema: pa.Schema) -> JsonObject:
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


def _column_readers(schema: pa.Schema, names: Sequence[str]) -> dict[str, Read | None]:
    """Return for each column the function that makes its value plain; None where it is so already.

    A class is given by its name, and -1, which stands for no class, as None. Structs of a column all have the same
    keys, with null where a row had none: such keys are left out. What was kept as JSON is parsed.

    Args:
        schema: the columns with their types and notes.
        names: the columns that are read.
    """
    # Read off the schema's note, not through the datasets library, whose import takes seconds.
    features = _declared_features(schema)
    readers: dict[str, Read | None] = {}
    for name in names:
        feature, kind = features.get(name), schema.field(name).type
        # A dictionary is a way of storing alone: to_pylist gives its values.
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
        readers: see ``_column_readers``.
        max_row_bytes: a row that takes more of Arrow's memory is a bad row and never becomes Python values.
    """
    columns = [batch.column(name) for name in readers]
    num_bytes = sum(column.nbytes for column in columns)
    # As many rows as stay within the bound at the mean size of this batch.
    step = max(1, min(_BATCH_ROWS, _BATCH_BYTES * batch.num_rows // max(num_bytes, 1)))
    for start in range(0, batch.num_rows, step):
        part = batch.slice(start, step)
        sizes = _sizes_of_rows([part.column(name) for name in readers], max_row_bytes)
        # The common case: together they are small enough, so no row has to be measured by itself.
        if sizes is None:
            yield from _plain_rows(part, readers)
            continue
        for index, size in enumerate(sizes):
            # Known from Arrow's buffers; as Python values the row would take several times as much memory.
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
    # The bytes of a dictionary are those of all its values.
    return int(cell.dictionary_decode().nbytes if pa.types.is_dictionary(cell.type) else cell.nbytes)


def _plain_rows(part: pa.RecordBatch, readers: Mapping[str, Read | None]) -> Iterator[Row | RowProblem]:
    names = list(readers)
    values: list[list[Cell | RowProblem]] = []
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


def _cells(column: pa.Array, name: str, read: Read | None) -> tuple[list[Cell | RowProblem], bool]:
    """Return the values of a column, and whether all of them could be read."""
    try:
        cells = column.to_pylist()
        return ([read(cell) for cell in cells] if read else cells), True
    # One by one, so that only the rows of the bad cells are bad.
    except (ValueError, OverflowError, ArithmeticError):  # among them what is no UTF-8, and years beyond 9999
        return [_cell(scalar, name, read) for scalar in column], False


def _cell(scalar: pa.Scalar, name: str, read: Read | None) -> Cell | RowProblem:
    try:
        value: Cell = scalar.as_py()
        return read(value) if read else value
    except UnicodeDecodeError as error:
        return RowProblem("not_utf8", f"column {name!r} holds text whose byte {error.start:,} is not UTF-8.")
    except (ValueError, OverflowError, ArithmeticError) as error:
        return RowProblem("wrong_type", f"column {name!r} holds a value that Python cannot hold ({error}).")


def _reader_of(feature: JsonValue) -> Read:
    """Return the function that makes the value of a nested or noted column plain."""
    if isinstance(feature, list):  # a list, as older versions wrote it
        return _list_reader(_reader_of(feature[0] if feature else None))
    # No note of what is inside, so nulls in structs are taken for keys that the row did not have.
    if not isinstance(feature, dict):
        return _without_nulls
    kind = feature.get("_type")
    names = feature.get("names")
    if kind == "ClassLabel" and isinstance(names, list):
        return _class_reader(list(map(str, names)))
    if kind == "Json":
        return lambda value: json.loads(value) if isinstance(value, str) else value
    if kind in ("List", "LargeList", "Sequence"):
        return _list_reader(_reader_of(feature.get("feature")))
    if isinstance(kind, str):
        return _without_nulls
    return _struct_reader({key: _reader_of(inner) for key, inner in feature.items()})


def _class_reader(names: list[str]) -> Read:
    def read(value: Cell) -> Cell:
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        if 0 <= value < len(names):
            return names[value]
        return None if value == -1 else value

    return read


def _list_reader(read_item: Read) -> Read:
    def read(value: Cell) -> Cell:
        if isinstance(value, list):
            return [read_item(item) for item in value]
        return _without_nulls(value)

    return read


def _struct_reader(readers: Mapping[str, Read]) -> Read:
    def read(value: Cell) -> Cell:
        if not isinstance(value, dict):
            return value
        return {key: readers.get(key, _without_nulls)(inner) for key, inner in value.items() if inner is not None}

    return read


def _without_nulls(value: Cell) -> Cell:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


class ColumnarRows(RowSource):
    """Rows that lie in batches of columns; values keep the types that are declared, see ``_column_readers``."""

    def _begin(self, schema: pa.Schema, num_rows: int | None, *, what: str) -> None:
        """Keep what the file says of itself.

        Args:
            schema: the columns.
            num_rows: of the file; None where nothing tells it before they are read.
            what: the file, to begin a message with.
        """
        self._schema = schema
        self._num_rows = num_rows
        self._rows_done = 0
        self.columns = list(schema.names)
        if num_rows == 0:
            raise UserError(f"{what} has no rows.")
        check_columns(self.path, self.columns)

    @abstractmethod
    def _batches(self, names: list[str]) -> Iterator[pa.RecordBatch | RowProblem]:
        """Yield all rows in batches with some columns, and in place of a row that must not be read its problem."""

    def _rows(self) -> Iterator[NumberedRow]:
        names, limit = self.selected, self.settings.max_row_bytes
        readers = _column_readers(self._schema, names)
        number = self._rows_done = 0
        try:
            for batch in self._batches(names):
                rows = [batch] if isinstance(batch, RowProblem) else batch_rows(batch, readers, max_row_bytes=limit)
                for row in rows:
                    number += 1
                    yield number, row
                self._rows_done = number
        except (OSError, pa.ArrowException) as error:
            raise beyond_row(self.path, number, error) from error

    def _progress(self) -> tuple[int, int, str]:
        return super()._progress() if self._num_rows is None else (self._rows_done, self._num_rows, "rows")


class ParquetRows(ColumnarRows):
    """The rows of a Parquet file."""

    def __init__(self, raw: RawFile, file_format: str, settings: ReadSettings) -> None:
        """Read the schema.

        Args:
            raw: the file.
            file_format: ``parquet``.
            settings: the limit of a row.

        Raises:
            UserError: the file is no Parquet, has no rows, or names a column twice.
        """
        super().__init__(raw, file_format, settings)
        with self._open() as file:
            self._begin(file.schema_arrow, int(file.metadata.num_rows), what=self.path)

    def _batches(self, names: list[str]) -> Iterator[pa.RecordBatch | RowProblem]:
        with self._open() as file:
            for group in range(file.metadata.num_row_groups):
                num_rows, num_bytes = _size_of_group(file.metadata.row_group(group), names)
                if num_rows == 1 and num_bytes > self.settings.max_row_bytes:  # known without reading it
                    yield too_long(num_bytes, self.settings.max_row_bytes)
                    continue
                # Arrow holds a batch as a whole, so long rows are read few at a time.
                num_wanted = max(1, min(_BATCH_ROWS, _BATCH_BYTES * num_rows // max(num_bytes, 1)))
                yield from file.iter_batches(num_wanted, row_groups=[group], columns=names)

    @contextmanager
    def _open(self) -> Iterator[pq.ParquetFile]:
        with self.raw.open_stored() as stored:
            try:
                file = pq.ParquetFile(stored)
            except (OSError, pa.ArrowException) as error:
                raise UserError(f"{self.path} is no readable Parquet file: {error}") from error
            yield file


def _size_of_group(group: pq.RowGroupMetaData, names: list[str]) -> tuple[int, int]:
    """Return the rows of a row group, and the bytes that the columns which are read take unpacked and encoded."""
    # The path of a value inside a column begins with the column's name, which may hold dots itself.
    roots = tuple(f"{name}." for name in names)
    columns = (group.column(index) for index in range(group.num_columns))
    num_bytes = sum(
        column.total_uncompressed_size for column in columns if f"{column.path_in_schema}.".startswith(roots)
    )
    return int(group.num_rows), int(num_bytes)


_FILE_MAGIC = b"ARROW1"


class ArrowRows(ColumnarRows):
    """The rows of an Arrow or Feather file."""

    def __init__(self, raw: RawFile, file_format: str, settings: ReadSettings) -> None:
        """Read the schema.

        Args:
            raw: the file.
            file_format: ``arrow``.
            settings: the limit of a row.

        Raises:
            UserError: the file is no Arrow, has no rows, or names a column twice.
        """
        super().__init__(raw, file_format, settings)
        with self._open() as (schema, _):
            self._begin(schema, None, what=self.path)
        if next(self._rows(), None) is None:
            raise UserError(f"{self.path} has no rows.")

    def _batches(self, names: list[str]) -> Iterator[pa.RecordBatch | RowProblem]:
        with self._open() as (_, batches):
            yield from batches

    @contextmanager
    def _open(self) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
        """Yield the schema and the batches of rows."""
        with self.raw.open_stored() as file:
            try:
                # Feather files and those of ``datasets`` differ: the first have an index at their end, the second are
                # streams, and nothing but the first bytes tells which it is.
                is_file = peek_bytes(file, len(_FILE_MAGIC)) == _FILE_MAGIC
                reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
            except (OSError, pa.ArrowException) as error:
                raise UserError(f"{self.path} is no readable Arrow file: {error}") from error
            yield reader.schema, map(reader.get_batch, range(reader.num_record_batches)) if is_file else iter(reader)


class HubRows(ColumnarRows):
    """The rows of one split."""

    def __init__(self, file: SourceFile, settings: ReadSettings) -> None:
        """Download the split into the cache of the hub's client, unless it is there.

        Args:
            file: ``path`` (the name), ``config``, ``split``, ``revision`` and ``digest``, see ``describe_files``.
            settings: the limit of a row.

        Raises:
            UserError: the hub cannot be reached and the cache lacks the set, there is no such set, configuration or
                split, or it has no rows.
        """
        super().__init__(RawFile(file), "hub", settings)
        self.name = self.path
        self._dataset = load_hub_split(file)
        what = f"The split {file['split']!r} of the hub data set {self.path}"
        self._begin(self._dataset.features.arrow_schema, len(self._dataset), what=what)

    def _batches(self, names: list[str]) -> Iterator[pa.RecordBatch | RowProblem]:
        for table in self._dataset.select_columns(names).with_format("arrow").iter(_BATCH_ROWS):
            yield from table.to_batches()
