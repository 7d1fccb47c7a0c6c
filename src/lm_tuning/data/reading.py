"""Stream the rows of a file as dicts, each with its number, without ever guessing a type."""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lm_tuning.data.problems import MAX_REPORTED, RowProblem, RowProblems, describe_value, list_columns, shorten
from lm_tuning.errors import UserError

Row = dict[str, Any]

FORMAT_OF_SUFFIX = {".jsonl": "jsonl", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
"""File formats by the suffix that names them."""

_PEEKED_ROWS = 1000


class RowSource(ABC):
    """Rows of one file; iterating starts from the first row each time.

    Attributes:
        path: the file.
        columns: the column names, in the order of the file. For JSON, those seen in the first 1,000 rows.
    """

    def __init__(self, path: Path) -> None:
        """Remember the file; subclasses read its column names.

        Args:
            path: an existing file.
        """
        self.path = path
        self.columns: list[str] = []
        self._num_bytes = path.stat().st_size
        self._bytes_done = 0

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[int, Row | RowProblem]]:
        """Yield each row with its 1-based number.

        Rows are lines for JSON Lines (blank ones are counted and left out) and records elsewhere; a CSV header is not
        counted. A row that cannot be read is yielded as its problem, and reading goes on.

        Raises:
            UserError: nothing after this place can be read.
        """

    def select(self, columns: Iterable[str]) -> None:  # noqa: B027 - only columnar files gain from it
        """Say which columns will be used, so that a columnar file reads no others.

        Args:
            columns: names out of ``columns``.
        """

    def progress(self) -> tuple[int, int, str]:
        """Return how much has been read, how much there is, and the unit of both."""
        return self._bytes_done // 1000, self._num_bytes // 1000 + 1, "kB"


def open_rows(path: Path, file_format: str) -> RowSource:
    """Open a file for reading row by row.

    Args:
        path: an existing, non-empty file.
        file_format: one of the values of ``FORMAT_OF_SUFFIX``.

    Returns:
        The rows, with the column names known.

    Raises:
        UserError: the file is not what its suffix says, is not UTF-8, or has no rows or a damaged header.
    """
    if file_format == "parquet":
        from lm_tuning.data.parquet_rows import ParquetRows

        return ParquetRows(path)
    _refuse_other_encodings(path)
    if file_format == "csv":
        from lm_tuning.data.csv_rows import CsvRows

        return CsvRows(path)
    if file_format == "json" and not _holds_json_lines(path):
        from lm_tuning.data.json_array import JsonArrayRows

        return JsonArrayRows(path)
    return JsonLinesRows(path)


class JsonLinesRows(RowSource):
    r"""One JSON object a line. Only ``\n`` ends a line, so the other separators of Unicode may stand in strings."""

    def __init__(self, path: Path) -> None:
        """Look at the first rows for the column names.

        Args:
            path: an existing file in UTF-8, with or without a byte-order mark.

        Raises:
            UserError: no object is among the first 1,000 rows.
        """
        super().__init__(path)
        self.columns = peek_columns(self)

    def __iter__(self) -> Iterator[tuple[int, Row | RowProblem]]:
        """Yield each line that is not blank; see the base class."""
        decode = json.JSONDecoder().decode
        with self.path.open("rb") as file:
            self._bytes_done = skip_mark(file)
            for number, line in enumerate(file, 1):
                self._bytes_done += len(line)
                try:
                    row = decode(line.decode())
                except UnicodeDecodeError as error:
                    offset = self._bytes_done - len(line) + error.start
                    yield number, RowProblem("not_utf8", f"byte {offset:,} of the file is not UTF-8.")
                    continue
                except (ValueError, RecursionError) as error:
                    if line.strip():
                        yield number, _explain_bad_line(line, error)
                    continue
                yield number, row if row.__class__ is dict else not_an_object(row)


def peek_columns(source: Iterable[tuple[int, Row | RowProblem]]) -> list[str]:
    """Collect the keys of the first 1,000 rows, in the order in which they appear.

    Args:
        source: rows of a file without a header; has a ``path``.

    Raises:
        UserError: there are no rows, or none of these is an object.
    """
    path: Path = source.path  # type: ignore[attr-defined]
    problems = RowProblems(path, limit=MAX_REPORTED)
    columns: dict[str, None] = {}
    num_rows = 0
    for number, row in source:
        num_rows += 1
        if isinstance(row, RowProblem):
            problems.add(number, row)
        else:
            columns.update(dict.fromkeys(row))
        if num_rows == _PEEKED_ROWS:
            break
    if len(problems) == num_rows and problems:
        raise UserError(problems.lines())
    if not num_rows:
        raise UserError(f"{path} has no rows.")
    return list(columns)


def not_an_object(value: Any) -> RowProblem:
    """Report a JSON row that has no columns."""
    return RowProblem("not_an_object", f"holds {describe_value(value)}, where an object with columns is wanted.")


def skip_mark(file: Any) -> int:
    """Move a binary file behind its UTF-8 byte-order mark.

    Args:
        file: opened for reading bytes, at its start.

    Returns:
        Number of bytes skipped: 3 or 0.
    """
    if file.read(3) == codecs.BOM_UTF8:
        return 3
    file.seek(0)
    return 0


def locate_undecodable(path: Path) -> UserError:
    """Find the first byte that is not UTF-8 and say where it is.

    Args:
        path: a file that failed to decode.
    """
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return UserError(
                    f"{path}, line {number}: byte {offset + error.start:,} of the file (0x{line[error.start]:02x}) is "
                    "not UTF-8. Save the file as UTF-8; spreadsheets often write a regional encoding such as cp949."
                )
            offset += len(line)
    return UserError(f"{path} is not UTF-8. Save the file as UTF-8.")


def check_columns(path: Path, columns: list[str]) -> None:
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


def _refuse_other_encodings(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(4)
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{path} is UTF-16 (byte 0 is its byte-order mark). Save the file as UTF-8.")
    if start.startswith(b"\x1f\x8b"):
        raise UserError(f"{path} is compressed (gzip). Unpack it first.")


def _holds_json_lines(path: Path) -> bool:
    """Say whether a ``.json`` file holds one object a line, as many data sets do."""
    with path.open("rb") as file:
        skip_mark(file)
        first = next((line for line in file if line.strip()), b"")
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _explain_bad_line(line: bytes, error: Exception) -> RowProblem:
    if isinstance(error, json.JSONDecodeError):
        detail = f"{error.msg} at character {error.pos + 1}"
    else:
        detail = shorten(str(error), 80)
    hint = " An array of rows belongs in a .json file." if line.strip() == b"[" else ""
    return RowProblem("not_json", f"is not JSON ({detail}): {shorten(line.decode().strip())!r}.{hint}")
