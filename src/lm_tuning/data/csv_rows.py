"""Stream CSV records: every value is text, exactly as it stands between the separators."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path

from lm_tuning.data.problems import RowProblem, shorten
from lm_tuning.data.reading import Row, RowSource, check_columns, locate_undecodable
from lm_tuning.errors import UserError

# The module's own limit of 131,072 characters refuses long documents; it holds for the process.
_MAX_FIELD_CHARACTERS = 2**31 - 1


class CsvRows(RowSource):
    r"""Records separated by commas, with a header; quoted fields may hold commas, quotes and line breaks.

    In a file whose lines end in ``\r\n``, the line breaks inside fields are the same convention and become ``\n``.
    """

    def __init__(self, path: Path) -> None:
        """Read the header.

        Args:
            path: an existing file in UTF-8, with or without a byte-order mark.

        Raises:
            UserError: the header is missing, damaged or names a column twice.
        """
        super().__init__(path)
        csv.field_size_limit(_MAX_FIELD_CHARACTERS)
        with path.open("rb") as file:
            self._has_crlf = file.readline().endswith(b"\r\n")
        header = next((cells for _, cells in self._records()), [])
        if not any(name.strip() for name in header):
            raise UserError(f"{path} has no header: its first line must name the columns.")
        check_columns(path, header)
        self.columns = header

    def __iter__(self) -> Iterator[tuple[int, Row | RowProblem]]:
        """Yield each record; see the base class."""
        columns = self.columns
        width = len(columns)
        records = self._records()
        next(records)
        for number, cells in records:
            if len(cells) == width:
                yield number, dict(zip(columns, cells, strict=True))
            else:
                yield (
                    number,
                    RowProblem(
                        "wrong_field_count",
                        f"has {len(cells)} fields, where the header names {width}; it begins {shorten(cells[0])!r}.",
                    ),
                )

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the fields of each record that is not blank, the header as number 0."""
        with self.path.open("rb") as raw, TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            number = -1
            first_line = 1
            try:
                for cells in reader:
                    if cells:
                        number += 1
                        if number % 1024 == 0:
                            self._bytes_done = raw.tell()
                        yield number, _with_plain_breaks(cells) if self._has_crlf else cells
                    first_line = reader.line_num + 1
            except csv.Error as error:
                raise UserError(_explain(self.path, number + 1, first_line, reader.line_num, error)) from error
            except UnicodeDecodeError as error:
                raise locate_undecodable(self.path) from error
            self._bytes_done = self._num_bytes


def _with_plain_breaks(cells: list[str]) -> list[str]:
    return [cell.replace("\r\n", "\n") if "\r" in cell else cell for cell in cells]


def _explain(path: Path, number: int, first_line: int, line: int, error: csv.Error) -> str:
    place = f"{path}, row {number} (line {first_line})" if number else f"{path}, header"
    if "unexpected end of data" in str(error):
        return f"{place}: a quoted field begins here and never ends."
    return f"{place}: {error} in line {line}. Write a quote inside a quoted field twice."
