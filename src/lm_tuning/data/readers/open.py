"""Open a file of rows by the reader of its format."""

from __future__ import annotations

import codecs

from lm_tuning.data.readers.base import DEFAULT_SETTINGS, ReadSettings, RowSource, beyond_row
from lm_tuning.data.records import SourceFile
from lm_tuning.data.sources.opening import RawFile, peek_bytes
from lm_tuning.errors import UserError


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
        from lm_tuning.data.readers.hub import HubRows

        return HubRows(file, settings)
    # Imports stand in the branches: a run pays for pyarrow's readers, or for orjson, only where a file needs them.
    raw = RawFile(file)
    if file_format == "parquet":
        from lm_tuning.data.readers.columnar import ParquetRows

        return ParquetRows(raw, file_format, settings)
    if file_format == "arrow":
        from lm_tuning.data.readers.columnar import ArrowRows

        return ArrowRows(raw, file_format, settings)
    # Only for the text formats; binary ones have marks of their own.
    _refuse_other_encodings(raw)
    if file_format in ("csv", "tsv"):
        from lm_tuning.data.readers.csv import CsvRows

        return CsvRows(raw, file_format, settings)
    from lm_tuning.data.readers.json_array import JsonArrayRows, holds_array
    from lm_tuning.data.readers.json_lines import JsonLinesRows

    if file_format == "json" and (field is not None or holds_array(raw, settings.max_row_bytes)):
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
