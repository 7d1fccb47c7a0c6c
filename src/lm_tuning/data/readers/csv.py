"""Stream CSV or TSV records: every value is text, exactly as it stands between the separators."""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import TextIOWrapper

from lm_tuning.data.check.findings import NumberedRow, RowProblem, too_long
from lm_tuning.data.readers.base import MAX_COLUMNS, ReadSettings, RowSource, beyond_row, check_columns
from lm_tuning.data.sources.opening import RawFile, locate_undecodable
from lm_tuning.errors import UserError
from lm_tuning.wording import count_of, shorten

logger = logging.getLogger(__name__)

_AUTO = "auto"
_USUAL: Mapping[str, str] = {"csv": ",", "tsv": "\t"}
_KNOWN = (",", ";", "\t", "|")


@dataclass(frozen=True)
class _Trial:
    """What the first records look like with one separator.

    Attributes:
        header: its fields.
        num_records: records looked at, the header not counted.
        num_other: how many of them have another number of fields than the header.
        error: why reading ended before; None where it did not.
    """

    header: list[str]
    num_records: int
    num_other: int
    error: UserError | None = None

    @property
    def fits(self) -> bool:
        """Return whether there are several fields, their names are different, and each record has as many."""
        is_named = all(name.strip() for name in self.header) and len(set(self.header)) == len(self.header) > 1
        return is_named and self.error is None and self.num_records > 0 and not self.num_other


def _choose_delimiter(try_out: Callable[[str], _Trial], *, path: str, file_format: str, given: str) -> str:
    """Return what separates the fields.

    The usual separator of the format is taken wherever its header has several fields; semicolons and tabs in the texts
    of such a file mean nothing. Only a header that is one field, or none that can be read, makes another separator
    possible: the one that gives every record as many fields as the header.

    Args:
        try_out: reads the first records with a separator.
        path: the file, for messages.
        file_format: ``csv`` or ``tsv``.
        given: ``data.delimiter``.

    Raises:
        UserError: several separators are possible, or the usual one can be read neither.
    """
    if given != _AUTO:
        return "\t" if given == "tab" else given
    usual = _USUAL[file_format]
    # Not csv.Sniffer: it goes by how often a character occurs in a sample of text, so a file of prose with many
    # semicolons would be cut at these, and nobody would be told.
    first = try_out(usual)
    if first.fits or len(first.header) > MAX_COLUMNS:
        return usual
    others = {mark: trial for mark in _KNOWN if mark != usual and (trial := try_out(mark)).fits}
    # A header that could not even be read leaves as much open as one of a single field.
    is_one_field = len(first.header) < 2 or (first.error is not None and not first.num_records)
    # Told in the log, since a reader of the file cannot see which one was taken.
    if len(others) == 1 and is_one_field:
        (mark,) = others
        logger.info(
            "%s: read with %s between the fields, on which its header and %s agree; data.delimiter sets another",
            path,
            _name_delimiter(mark),
            count_of(others[mark].num_records, "row"),
        )
        return mark
    if others:
        named = " or ".join(_name_delimiter(mark) for mark in others)
        keys = " or ".join(f"data.delimiter: {_written(mark)}" for mark in (*others, usual))
        if is_one_field:
            num_records = next(iter(others.values())).num_records
            found = f"its header and first {count_of(num_records, 'row')} can be cut at {named}"
        elif first.error:
            found = f"with {_name_delimiter(usual)} it cannot be read ({first.error}), and with {named} it can"
        else:
            have = "has" if first.num_other == 1 else "have"
            found = (
                f"{first.num_other:,} of its first {count_of(first.num_records, 'row')} {have} another number of "
                f"fields than the header with {_name_delimiter(usual)}, and none with {named}"
            )
        raise UserError(f"{path} leaves open what separates its fields: {found}. Say which is meant: {keys}.")
    if first.error:
        # Nothing fits whole, but a header that falls into names by another separator is the best hint there is.
        likely = next((mark for mark in _KNOWN if mark != usual and len(try_out(mark).header) > 1), None)
        if likely is not None:
            hint = (
                f"{path}: the fields look separated by {_name_delimiter(likely)}, not by "
                f"{_name_delimiter(usual)}. If they are, set data.delimiter: {_written(likely)}."
            )
            raise UserError([*first.error.problems, hint])
    return usual  # where it has an error, reading says what is wrong


def _name_delimiter(mark: str) -> str:
    """Name a separator for a message."""
    names = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a vertical bar"}
    return f"{names[mark]} ({mark!r})" if mark in names else repr(mark)


def _written(mark: str) -> str:
    return "tab" if mark == "\t" else f'"{mark}"'


# Read at a time while a record that is too long is passed by, of which nothing is kept.
_CHUNK_CHARACTERS = 1 << 20
# What Excel writes before the header to say what separates the fields.
_DECLARATION = re.compile(r"sep=(.)\r?\n?", re.IGNORECASE)


class _RecordTooLong(Exception):  # a way to leave the parser, caught by its caller
    """Report that the record which is being read has more bytes than the limit."""


class RecordLines:
    """An iterator over lines that knows how long the record at hand has become.

    Attributes:
        num_lines: lines read so far, the declaration of the separator among them.
        num_bytes: bytes of the record at hand so far.
        is_unclosed: the file ended inside quotes while a record was skipped.
        declared: the separator that a first line such as ``sep=;`` declares, which is no record; None without one.
    """

    def __init__(self, file: TextIOWrapper, max_bytes: int) -> None:
        """Look at the first line.

        Args:
            file: UTF-8 at its start, line breaks untranslated.
            max_bytes: of a record, its line break not counted.
        """
        self.num_lines = 0
        self.is_unclosed = False
        self.declared: str | None = None
        self._file = file
        self._max_bytes = max_bytes
        self.num_bytes = self._num_quotes = 0
        self._ends_line = True
        self._num_break = 0
        # Two more than the limit: a line break of one or two characters does not count as part of the record.
        self._pending = file.readline(max_bytes + 2)
        # Only a line that is nothing but the declaration: a header may well begin with a column named sep.
        match = _DECLARATION.fullmatch(self._pending)
        if match:
            self.declared = match[1]
            self.num_lines, self._pending = 1, ""

    def __iter__(self) -> RecordLines:
        """Return itself."""
        return self

    def __next__(self) -> str:
        """Return the next line.

        Raises:
            _RecordTooLong: with it, the record would be too long; ``skip_record`` goes on behind it.
        """
        # What the record may still have, so that a line without an end costs no more memory than the limit. A character
        # is a byte or more, so as many characters are never too few; and never 0, which would read as the end.
        line = self._read(max(self._max_bytes + 2 - self.num_bytes, 1))
        if not line:
            raise StopIteration
        self.num_lines += 1
        self._count(line)
        if self.num_bytes - self._num_break > self._max_bytes:
            raise _RecordTooLong
        return line

    def end_record(self) -> None:
        """Report that the lines so far made a whole record."""
        self.num_bytes = self._num_quotes = 0

    def skip_record(self) -> int:
        """Read to the end of the record, which is the first line break outside quotes.

        Returns:
            The bytes of the whole record, without the line break behind it.
        """
        # A quote inside a quoted field is written twice, so an even number of quotes so far means that none is open.
        # That holds without parsing, for any separator.
        while not (self._ends_line and self._num_quotes % 2 == 0):
            was_whole = self._ends_line
            chunk = self._read(_CHUNK_CHARACTERS)
            if not chunk:
                self.is_unclosed = self._num_quotes % 2 == 1
                break
            self.num_lines += was_whole
            self._count(chunk)
        num_bytes = self.num_bytes - self._num_break
        self.end_record()
        self._ends_line = True
        return num_bytes

    def _read(self, num_characters: int) -> str:
        if not self._pending:
            return self._file.readline(num_characters)
        line, self._pending = self._pending, ""
        return line

    def _count(self, line: str) -> None:
        # CPython knows of each text whether it is ASCII, so most lines are not encoded for the sake of their length.
        self.num_bytes += len(line) if line.isascii() else len(line.encode())
        self._num_quotes += line.count('"')
        self._num_break = len(line) - len(line.rstrip("\r\n"))
        self._ends_line = self._num_break > 0


# The module's own limit of 131,072 characters refuses long documents; it holds for the process.
_MAX_FIELD_CHARACTERS = 2**31 - 1
_TRIED_RECORDS = 100
_UNCLOSED = ": a quoted field begins here and never ends."


class _HeaderTooLong(UserError):
    """Report that the first line alone is longer than a row may be, whatever separates its fields."""


class CsvRows(RowSource):
    r"""Records with a header; quoted fields may hold separators, quotes and line breaks.

    In a file whose lines end in ``\r\n``, the line breaks inside fields are the same convention and become ``\n``.
    """

    def __init__(self, raw: RawFile, file_format: str, settings: ReadSettings) -> None:
        """Find out what separates the fields, and read the header.

        Args:
            raw: a file in UTF-8, with or without a byte-order mark.
            file_format: ``csv`` or ``tsv``.
            settings: the separator, and the limit of a row.

        Raises:
            UserError: the header is missing, damaged, too long or names a column twice, or nothing follows it.
        """
        super().__init__(raw, file_format, settings)
        # The parser of the standard library, driven line by line. pandas, polars and Arrow guess the types of columns,
        # so that 007 becomes 7 and the text NA a null.
        csv.field_size_limit(_MAX_FIELD_CHARACTERS)
        with raw.open() as file:
            try:
                # Seen in bytes, before anything translates line breaks.
                self._has_crlf = file.readline(settings.max_row_bytes).endswith(b"\r\n")
            except OSError as error:
                raise beyond_row(self.path, 0, error) from error
        self._separator = _choose_delimiter(
            self._try, path=self.path, file_format=file_format, given=self._declared() or settings.delimiter
        )
        # A trial, since only the header and the fact of a row behind it are wanted: a record that is too long is one.
        records = self._records(self._separator, is_trial=True)
        _, header = next(records, (0, []))
        assert not isinstance(header, RowProblem), "a header that is too long raises"
        if not any(name.strip() for name in header):
            raise UserError(f"{self.path} has no header: its first line must name the columns.")
        check_columns(self.path, header)
        self.columns = self._header = header
        if next(records, None) is None:
            raise UserError(f"{self.path} has a header and no rows.")

    def explain_missing(self, column: str) -> str:
        """Add more about a missing column, see ``RowSource``: what separates the fields may be another character."""
        told = super().explain_missing(column)
        return told + (
            self._told_separator() or ("" if told else " If these are values, the file lacks a header line.")
        )

    def describe_inside(self) -> str:
        """Report that the fields may be separated by another character, where it looks so."""
        return super().describe_inside() + self._told_separator()

    def _told_separator(self) -> str:
        # A header that is a single field with another separator in it: most likely that one was meant.
        mark = next((mark for mark in ";\t|," if len(self._header) == 1 and mark in self._header[0]), None)
        if mark is None or mark == self._separator:
            return ""
        return f" The fields seem to be separated by {_name_delimiter(mark)}: set data.delimiter to it."

    def _declared(self) -> str | None:
        """Return the separator that the file itself declares; None where data.delimiter says one, or it does not."""
        if self.settings.delimiter != _AUTO:
            return None
        with self.raw.open() as raw, TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
            try:
                return RecordLines(file, self.settings.max_row_bytes).declared
            except (OSError, UnicodeDecodeError):
                return None  # reading the header says what is wrong

    def _rows(self) -> Iterator[NumberedRow]:
        columns = self._header
        width = len(columns)
        records = self._records(self._separator)
        # The header, which the constructor has read.
        next(records)
        for number, cells in records:
            if isinstance(cells, RowProblem):
                yield number, cells
            elif len(cells) == width:
                yield number, dict(zip(columns, cells, strict=True))
            else:
                has = f"has {count_of(len(cells), 'field')}, where the header names {width}"
                yield number, RowProblem("wrong_field_count", f"{has}; it begins {shorten(cells[0])!r}.")

    def _records(self, separator: str, *, is_trial: bool = False) -> Iterator[tuple[int, list[str] | RowProblem]]:
        """Yield the fields of each record that is not blank, the header as number 0, or the problem of one.

        A trial ends with a record that is too long, whose end may be gigabytes away.
        """
        limit = self.settings.max_row_bytes
        with self.raw.open() as raw, TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
            # The header is record 0, so rows count from 1.
            number = -1
            try:
                lines = RecordLines(file, limit)
                first_line = lines.num_lines + 1
                # Each _RecordTooLong leaves the parser in the middle of a record; a new one goes on behind it.
                while True:
                    try:
                        # Strict: the parser otherwise takes a quote that is never closed, or text behind a closing
                        # quote, as part of the field without a word.
                        for cells in csv.reader(lines, delimiter=separator, strict=True):
                            if cells:
                                number += 1
                                yield number, _with_plain_breaks(cells) if self._has_crlf else cells
                            lines.end_record()
                            first_line = lines.num_lines + 1
                        return
                    except _RecordTooLong:
                        number += 1
                        # Then the first line alone is too long, whatever separates its fields.
                        is_one_line = lines.num_lines == first_line
                        num_bytes = lines.num_bytes if is_trial and number else lines.skip_record()
                        if lines.is_unclosed:  # all rows from here to the end would pass for one
                            raise UserError(_name_record(self.path, number, first_line) + _UNCLOSED) from None
                        if not number:
                            kind = _HeaderTooLong if is_one_line else UserError
                            raise kind(f"{self.path}, header: {too_long(num_bytes, limit).reason}") from None
                        yield number, too_long(num_bytes, limit)
                        if is_trial:
                            return
                        first_line = lines.num_lines + 1
            except csv.Error as error:
                is_unclosed = "unexpected end of data" in str(error)
                fix = f": {error} in line {lines.num_lines}. Write a quote inside a quoted field twice."
                record = _name_record(self.path, number + 1, first_line)
                raise UserError(record + (_UNCLOSED if is_unclosed else fix)) from error
            except UnicodeDecodeError as error:
                raise locate_undecodable(self.raw) from error
            except OSError as error:
                raise beyond_row(self.path, max(number, 0), error) from error

    def _try(self, separator: str) -> _Trial:
        """Read the first records with a separator."""
        header: list[str] = []
        num_records = num_other = 0
        try:
            for number, cells in self._records(separator, is_trial=True):
                if isinstance(cells, RowProblem):
                    continue
                if not number:
                    header = cells
                    if len(header) > MAX_COLUMNS:  # it is refused whatever follows
                        break
                    continue
                num_records += 1
                num_other += len(cells) != len(header)
                if number >= _TRIED_RECORDS:
                    break
        except _HeaderTooLong:
            raise
        except UserError as error:
            return _Trial(header, num_records, num_other, error)
        return _Trial(header, num_records, num_other)


def _with_plain_breaks(cells: list[str]) -> list[str]:
    return [cell.replace("\r\n", "\n") if "\r" in cell else cell for cell in cells]


def _name_record(path: str, number: int, first_line: int) -> str:
    return f"{path}, row {number} (line {first_line})" if number else f"{path}, header"
