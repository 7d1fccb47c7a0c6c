"""Stream the rows of a file as dicts, each with its number, without ever guessing a type."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any

from lm_tuning.data.problems import RowProblem, describe_value, list_columns
from lm_tuning.data.raw_opening import RawFile
from lm_tuning.errors import UserError
from lm_tuning.wording import count_of

Row = dict[str, Any]

_PEEKED_ROWS = 1000
_SHOWN_PROBLEMS = 20


class RowSource(ABC):
    """Rows of one file; iterating starts from the first row each time.

    Attributes:
        path: path, address or hub name of the file, for messages.
        name: a short name for progress.
        format: ``jsonl``, ``json``, ``csv``, ``tsv``, ``parquet``, ``arrow`` or ``hub``.
        columns: the column names, in the order of the file. For JSON, those seen in the first 1,000 rows.
        max_rows: reading stops after that many rows; None reads all.
    """

    def __init__(self, raw: RawFile, file_format: str) -> None:
        """Remember the file; subclasses read its column names.

        Args:
            raw: the file.
            file_format: how it is read.
        """
        self.raw = raw
        self.path = raw.path
        self.name = raw.name
        self.format = file_format
        self.columns: list[str] = []
        self.max_rows: int | None = None
        self._selected: list[str] | None = None
        self._taken = 0
        self._has_ended = False

    def __iter__(self) -> Iterator[tuple[int, Row | RowProblem]]:
        """Yield each row with its 1-based number.

        Rows are lines for JSON Lines (blank ones are counted and left out) and records elsewhere; a CSV header is not
        counted. A row that cannot be read is yielded as its problem, and reading goes on.

        Raises:
            UserError: nothing after this place can be read.
        """
        return self._rows() if self.max_rows is None else self._first_rows(self.max_rows)

    @abstractmethod
    def _rows(self) -> Iterator[tuple[int, Row | RowProblem]]:
        """Yield all rows."""

    def _first_rows(self, num_rows: int) -> Iterator[tuple[int, Row | RowProblem]]:
        self._taken, self._has_ended = 0, False
        for num_taken, row in enumerate(self._rows(), 1):
            self._taken = num_taken
            yield row
            if num_taken == num_rows:
                return
        self._has_ended = True

    def select(self, columns: Iterable[str]) -> None:
        """Say which columns will be used, so that a columnar file reads no others.

        Args:
            columns: names out of ``columns``.
        """
        self._selected = list(dict.fromkeys(columns))

    @property
    def selected(self) -> list[str]:
        """Columns to read: those that were selected, else all."""
        return self.columns if self._selected is None else self._selected

    def progress(self) -> tuple[int, int, str]:
        """Return how much has been read, how much there is, and the unit of both: kB as they lie there, or rows.

        A file with fewer rows than ``max_rows`` is known to have them once it was read to its end.
        """
        if self.max_rows is not None:
            return self._taken, self._taken if self._has_ended else self.max_rows, "rows"
        return self._progress()

    def _progress(self) -> tuple[int, int, str]:
        return self.raw.progress()


def open_rows(file: Mapping[str, Any], *, max_rows: int | None = None) -> RowSource:
    """Open a file for reading row by row.

    Args:
        file: ``path``, ``format``, ``compression`` and ``num_bytes`` of a non-empty file, see ``describe_files``.
        max_rows: rows that are read, from the beginning of the file; None reads all.

    Returns:
        The rows, with the column names known.

    Raises:
        UserError: the file is gone, is not what its suffix says, is not UTF-8, or has no rows or a damaged header.
    """
    source = _open_source(file)
    source.max_rows = max_rows
    source.raw.forget()
    return source


def _open_source(file: Mapping[str, Any]) -> RowSource:
    file_format = file["format"]
    if file_format == "hub":
        from lm_tuning.data.hub_rows import HubRows

        return HubRows(file)
    raw = RawFile(file)
    if file_format == "parquet":
        from lm_tuning.data.parquet_rows import ParquetRows

        return ParquetRows(raw, file_format)
    if file_format == "arrow":
        from lm_tuning.data.arrow_rows import ArrowRows

        return ArrowRows(raw, file_format)
    _refuse_other_encodings(raw)
    if file_format in ("csv", "tsv"):
        from lm_tuning.data.csv_rows import CsvRows

        return CsvRows(raw, file_format)
    from lm_tuning.data.json_array import JsonArrayRows, holds_array
    from lm_tuning.data.json_lines import JsonLinesRows

    if file_format == "json" and holds_array(raw):
        return JsonArrayRows(raw, file_format)
    return JsonLinesRows(raw, file_format)


def peek_columns(source: RowSource) -> list[str]:
    """Collect the keys of the first 1,000 rows, in the order in which they appear.

    Args:
        source: rows of a file without a header.

    Raises:
        UserError: there are no rows, or none of these is an object.
    """
    problems: list[str] = []
    columns: dict[str, None] = {}
    num_rows = num_bad = 0
    for number, row in source:
        num_rows += 1
        if isinstance(row, RowProblem):
            num_bad += 1
            if num_bad <= _SHOWN_PROBLEMS:
                problems.append(f"{source.path}, row {number}: {row.reason}")
        else:
            columns.update(dict.fromkeys(row))
        if num_rows == _PEEKED_ROWS:
            break
    if not num_rows:
        raise UserError(f"{source.path} has no rows.")
    if num_bad == num_rows:
        rest = num_bad - len(problems)
        raise UserError([*problems, f"{source.path}: {count_of(rest, 'more bad row')}."] if rest else problems)
    return list(columns)


def not_an_object(value: Any) -> RowProblem:
    """Report a JSON row that has no columns."""
    return RowProblem("not_an_object", f"holds {describe_value(value)}, where an object with columns is wanted.")


def beyond_row(path: str, number: int, error: Exception) -> UserError:
    """Report a file that cannot be read to its end.

    Args:
        path: the file.
        number: the last row that could be read; 0 for none.
        error: what the file system or the unpacker said.
    """
    place = f"after row {number:,}" if number else "before the first row"
    detail = str(error).strip().rstrip(".") or type(error).__name__
    return UserError(f"{path} cannot be read {place}: {detail}. Copy or download the file again.")


def skip_mark(file: IO[bytes]) -> int:
    """Move a file behind its UTF-8 byte-order mark.

    Args:
        file: a buffered stream at its start.

    Returns:
        Number of bytes skipped: 3 or 0.
    """
    has_mark = peek_bytes(file, 3) == codecs.BOM_UTF8
    return len(file.read(3)) if has_mark else 0


def peek_bytes(file: IO[bytes], num_bytes: int) -> bytes:
    """Look at the next bytes of a buffered stream without moving on.

    Args:
        file: a buffered stream.
        num_bytes: how many at most.
    """
    return bytes(file.peek(num_bytes)[:num_bytes])  # type: ignore[attr-defined]


def locate_undecodable(raw: RawFile) -> UserError:
    """Find the first byte that is not UTF-8 and say where it is.

    Args:
        raw: a file that failed to decode.
    """
    offset = 0
    with raw.open() as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return UserError(
                    f"{raw.path}, line {number}: byte {offset + error.start:,} of the file (0x{line[error.start]:02x}) "
                    "is not UTF-8. Save the file as UTF-8; spreadsheets often write a regional encoding such as cp949."
                )
            offset += len(line)
    return UserError(f"{raw.path} is not UTF-8. Save the file as UTF-8.")


def check_columns(path: str, columns: list[str]) -> None:
    """Refuse column names that occur twice; names that are empty cannot be mapped and are let pass.

    Args:
        path: the file, for the message.
        columns: its column names.

    Raises:
        UserError: naming those that repeat.
    """
    repeated = sorted({column for column in columns if column and columns.count(column) > 1})
    if repeated:
        raise UserError(f"{path} names these columns more than once: {list_columns(repeated)}. Rename them.")


def _refuse_other_encodings(raw: RawFile) -> None:
    with raw.open() as file:
        try:
            start = peek_bytes(file, 4)
        except OSError as error:
            raise beyond_row(raw.path, 0, error) from error
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{raw.path} is UTF-16 (byte 0 is its byte-order mark). Save the file as UTF-8.")
