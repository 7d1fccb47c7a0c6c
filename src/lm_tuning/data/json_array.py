"""Stream the rows of one JSON array without holding the file in memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from io import TextIOWrapper
from typing import Any

from lm_tuning.data.json_values import (
    constant_problem,
    explain_error,
    has_each_key_once,
    parse_exactly,
    parse_line,
)
from lm_tuning.data.problems import RowProblem, shorten
from lm_tuning.data.raw_opening import RawFile
from lm_tuning.data.reading import (
    Row,
    RowSource,
    beyond_row,
    locate_undecodable,
    not_an_object,
    peek_bytes,
    peek_columns,
    skip_mark,
)
from lm_tuning.errors import UserError

_CHUNK_CHARACTERS = 1 << 20
# A row that is not closed within this many characters is taken for a syntax error, so that a damaged file of many
# gigabytes is not read to its end first.
_MAX_ROW_CHARACTERS = 1 << 26
_SPACE = re.compile(r"[ \t\r\n]*")


class JsonArrayRows(RowSource):
    """The elements of an array of objects, each with its position as row number."""

    def __init__(self, raw: RawFile, file_format: str) -> None:
        """Look at the first rows for the column names.

        Args:
            raw: a file in UTF-8, with or without a byte-order mark.
            file_format: ``json``.

        Raises:
            UserError: the file holds no array, or no object is among the first 1,000 elements.
        """
        super().__init__(raw, file_format)
        self.columns = peek_columns(self)

    def _rows(self) -> Iterator[tuple[int, Row | RowProblem]]:
        number = 0
        with self.raw.open() as raw, TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
            window = _Window(file)
            try:
                for number, row in enumerate(self._elements(window), 1):
                    yield number, row if isinstance(row, dict | RowProblem) else not_an_object(row)
            except UnicodeDecodeError as error:
                raise locate_undecodable(self.raw) from error
            except OSError as error:
                raise beyond_row(self.path, number, error) from error

    def _elements(self, window: _Window) -> Iterator[Any]:
        if window.take() != "[":
            raise UserError(
                f"{self.path} holds no array. A .json file holds an array of rows, [{{…}}, {{…}}], or one object a "
                "line."
            )
        number = 0
        while window.peek() != "]":
            number += 1
            try:
                value = window.decode()
            except (ValueError, RecursionError) as error:
                detail = error.msg if isinstance(error, json.JSONDecodeError) else explain_error(error)
                raise UserError(
                    f"{self.path}, row {number}: is not JSON ({detail}); the row begins {window.glance()!r}."
                ) from error
            yield value
            if window.peek() == ",":
                window.take()
            elif window.peek() != "]":
                raise UserError(
                    f"{self.path}: {_found(window)} after row {number}, where a comma or the closing bracket is wanted."
                )
        window.take()
        if window.peek():
            raise UserError(f"{self.path}: {_found(window)} behind the array, where the file should end.")


def holds_array(raw: RawFile) -> bool:
    """Say whether a ``.json`` file is to be read as one array, and not as one object a line as many data sets are.

    Args:
        raw: the file.

    Raises:
        UserError: it cannot be read.
    """
    with raw.open() as file:
        try:
            skip_mark(file)
            while peek_bytes(file, 1).isspace():
                file.read(1)
            if peek_bytes(file, 1) != b"{":
                return True
            first = file.readline(_MAX_ROW_CHARACTERS)
            return not isinstance(parse_line(first), dict)
        except RowProblem:
            return False
        except OSError as error:
            raise beyond_row(raw.path, 0, error) from error
        except (ValueError, RecursionError):
            return True


class _Window:
    """A piece of a text file that moves forward."""

    def __init__(self, file: TextIOWrapper) -> None:
        self._file = file
        self._text = ""
        self._at = 0
        self._constants: list[str] = []
        self._decode = json.JSONDecoder(parse_constant=self._constants.append).raw_decode

    def peek(self) -> str:
        """Return the next character that is no space, empty at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_on(_CHUNK_CHARACTERS):
                return ""

    def take(self) -> str:
        """Return the same as ``peek`` and move behind it."""
        mark = self.peek()
        self._at += len(mark)
        return mark

    def glance(self) -> str:
        """Return the text ahead, for a message."""
        return shorten(self._text[self._at : self._at + 200])

    def decode(self) -> Any:
        """Return the JSON value that begins here, or what is wrong with it as a row, and move behind it."""
        self.peek()
        while True:
            ahead = len(self._text) - self._at
            self._constants.clear()
            try:
                value, end = self._decode(self._text, self._at)
            except (ValueError, RecursionError):
                if ahead > _MAX_ROW_CHARACTERS or not self._read_on(max(_CHUNK_CHARACTERS, ahead)):
                    raise
                continue
            # A number may go on behind the edge of the window; objects and texts end with a mark.
            if end < len(self._text) or isinstance(value, dict | list | str) or not self._read_on(_CHUNK_CHARACTERS):
                value = self._checked(value, end)
                self._at = end
                return value

    def _checked(self, value: Any, end: int) -> Any:
        """Return a value that was parsed, or the problem of a row that JSON allows no other way to read."""
        if self._constants:
            return constant_problem(self._constants[0])
        if value.__class__ is not dict or has_each_key_once(value, self._text, self._at, end):
            return value
        try:
            return parse_exactly(self._text[self._at : end])
        except RowProblem as problem:
            return problem

    def _read_on(self, num_characters: int) -> bool:
        more = self._file.read(num_characters)
        self._text = self._text[self._at :] + more
        self._at = 0
        return bool(more)


def _found(window: _Window) -> str:
    return f"{window.peek()!r} stands" if window.peek() else "the file ends"
