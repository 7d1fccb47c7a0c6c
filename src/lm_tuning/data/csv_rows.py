"""Stream CSV or TSV records: every value is text, exactly as it stands between the separators."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from io import TextIOWrapper

from lm_tuning.data.problems import RowProblem, shorten
from lm_tuning.data.raw_opening import RawFile
from lm_tuning.data.reading import Row, RowSource, beyond_row, check_columns, locate_undecodable
from lm_tuning.errors import UserError
from lm_tuning.wording import count_of

# The module's own limit of 131,072 characters refuses long documents; it holds for the process.
_MAX_FIELD_CHARACTERS = 2**31 - 1
_SEPARATORS = {"csv": ",", "tsv": "\t"}


class CsvRows(RowSource):
    r"""Records with a header, separated by commas or tabs; quoted fields may hold separators, quotes and line breaks.

    In a file whose lines end in ``\r\n``, the line breaks inside fields are the same convention and become ``\n``.
    """

    def __init__(self, raw: RawFile, file_format: str) -> None:
        """Read the header.

        Args:
            raw: a file in UTF-8, with or without a byte-order mark.
            file_format: ``csv`` or ``tsv``.

        Raises:
            UserError: the header is missing, damaged or names a column twice, or nothing follows it.
        """
        super().__init__(raw, file_format)
        csv.field_size_limit(_MAX_FIELD_CHARACTERS)
        self._separator = _SEPARATORS[file_format]
        with raw.open() as file:
            try:
                self._has_crlf = file.readline().endswith(b"\r\n")
            except OSError as error:
                raise beyond_row(self.path, 0, error) from error
        records = self._records()
        _, header = next(records, (0, []))
        if not any(name.strip() for name in header):
            raise UserError(f"{self.path} has no header: its first line must name the columns.")
        check_columns(self.path, header)
        self.columns = header
        if next(records, None) is None:
            raise UserError(f"{self.path} has a header and no rows.")

    def _rows(self) -> Iterator[tuple[int, Row | RowProblem]]:
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
                        f"has {count_of(len(cells), 'field')}, where the header names {width}; it begins "
                        f"{shorten(cells[0])!r}.",
                    ),
                )

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the fields of each record that is not blank, the header as number 0."""
        with self.raw.open() as raw, TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=self._separator, strict=True)
            number = -1
            first_line = 1
            try:
                for cells in reader:
                    if cells:
                        number += 1
                        yield number, _with_plain_breaks(cells) if self._has_crlf else cells
                    first_line = reader.line_num + 1
            except csv.Error as error:
                raise UserError(_explain(self.path, number + 1, first_line, reader.line_num, error)) from error
            except UnicodeDecodeError as error:
                raise locate_undecodable(self.raw) from error
            except OSError as error:
                raise beyond_row(self.path, max(number, 0), error) from error


def _with_plain_breaks(cells: list[str]) -> list[str]:
    return [cell.replace("\r\n", "\n") if "\r" in cell else cell for cell in cells]


def _explain(path: str, number: int, first_line: int, line: int, error: csv.Error) -> str:
    place = f"{path}, row {number} (line {first_line})" if number else f"{path}, header"
    if "unexpected end of data" in str(error):
        return f"{place}: a quoted field begins here and never ends."
    return f"{place}: {error} in line {line}. Write a quote inside a quoted field twice."
