"""Open a file of rows by the reader of its format."""

from __future__ import annotations

import codecs
from typing import IO

from lm_tuning.data.check.findings import RowProblem
from lm_tuning.data.readers.base import DEFAULT_SETTINGS, ReadSettings, RowSource, beyond_row
from lm_tuning.data.records import SourceFile
from lm_tuning.data.sources.opening import RawFile, peek_bytes, skip_mark
from lm_tuning.errors import UserError

_CHUNK_BYTES = 1 << 20


def open_rows(file: SourceFile, *, settings: ReadSettings = DEFAULT_SETTINGS) -> RowSource:
    """Open a file for reading row by row.

    Args:
        file: ``path``, ``format``, ``compression`` and ``num_bytes`` of a non-empty file, perhaps ``field``, see
            ``describe_files``.
        settings: limits, and what is to be known about its form.

    Returns:
        The rows, with the column names known.

    Raises:
        UserError: the file is gone, is not what its suffix says, is not UTF-8, or has no rows or a damaged header.
    """
    source = _open_source(file, settings)
    source.max_rows = settings.max_rows
    if settings.explode:
        source.explode(settings.explode)
    source.raw.forget()
    return source


def _open_source(file: SourceFile, settings: ReadSettings) -> RowSource:
    file_format, field = file["format"], file.get("field")
    if field is not None and file_format != "json":
        raise UserError(
            f"data.field = {field!r}: {file['path']} is no .json file, and only these hold rows in an object. Leave it "
            "out, or name it with the files that need it: {path: …, field: …}."
        )
    if file_format == "hub":
        from lm_tuning.data.readers.columnar import HubRows

        return HubRows(file, settings)
    # Imports stand in the branches: a run pays for pyarrow's readers, or for orjson, only where a file needs them.
    raw = RawFile(file)
    if file_format in ("parquet", "arrow"):
        from lm_tuning.data.readers.columnar import ArrowRows, ParquetRows

        reader = ParquetRows if file_format == "parquet" else ArrowRows
        return reader(raw, file_format, settings)
    # Only for the text formats; binary ones have marks of their own.
    _refuse_other_encodings(raw)
    if file_format in ("csv", "tsv"):
        from lm_tuning.data.readers.csv import CsvRows

        return CsvRows(raw, file_format, settings)
    from lm_tuning.data.readers.json import JsonArrayRows, JsonLinesRows

    if file_format == "json" and (field is not None or _holds_array(raw, settings.max_row_bytes)):
        return JsonArrayRows(raw, file_format, settings, field=field)
    return JsonLinesRows(raw, file_format, settings)


def _refuse_other_encodings(raw: RawFile) -> None:
    with raw.open() as file:
        try:
            start = peek_bytes(file, 4)
        except OSError as error:
            raise beyond_row(raw.path, 0, error) from error
    # Other encodings cannot be told from a few bytes; they show where a byte is no UTF-8.
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{raw.path} is UTF-16 (byte 0 is its byte-order mark). Save the file as UTF-8.")


def _holds_array(raw: RawFile, max_row_bytes: int) -> bool:
    """Return whether a ``.json`` file is to be read as one array, and not as one object a line as many data sets are.

    A line of more than ``max_row_bytes`` is not parsed; where another object begins behind it, it is a row that is too
    long.
    """
    from lm_tuning.data.readers.json_values import parse_line

    with raw.open() as file:
        try:
            skip_mark(file)
            # Everything but an object is for the reader of arrays, whose messages say what else the file begins with.
            if _skip_space(file) != b"{":
                return True
            line = file.readline(max_row_bytes + 2)  # 2: a line break counts for nothing
            if len(line.rstrip(b"\r\n")) <= max_row_bytes:
                return not isinstance(parse_line(line), dict)
            # Too long to be parsed for this question alone; what follows its line decides.
            while line and not line.endswith(b"\n"):
                line = file.readline(_CHUNK_BYTES)
            return _skip_space(file) != b"{"
        # A row with a repeated key or a NaN is a row all the same.
        except RowProblem:
            return False
        except OSError as error:
            raise beyond_row(raw.path, 0, error) from error
        except (ValueError, RecursionError):
            return True


def _skip_space(file: IO[bytes]) -> bytes:
    """Move behind white space and return the byte that follows, empty at the end."""
    while (mark := peek_bytes(file, 1)).isspace():
        file.read(1)
    return mark
