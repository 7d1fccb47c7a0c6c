"""Stream the rows of one JSON array without holding the file in memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from lm_tuning.data.problems import RowProblem, shorten
from lm_tuning.data.reading import Row, RowSource, locate_undecodable, not_an_object, peek_columns
from lm_tuning.errors import UserError

_CHUNK_CHARACTERS = 1 << 20
# A row that is not closed within this many characters is taken for a syntax error, so that a damaged file of many
# gigabytes is not read to its end first.
_MAX_ROW_CHARACTERS = 1 << 26
_SPACE = re.compile(r"[ \t\r\n]*")


class JsonArrayRows(RowSource):
    """The elements of an array of objects, each with its position as row number."""

    def __init__(self, path: Path) -> None:
        """Look at the first rows for the column names.

        Args:
            path: an existing file in UTF-8, with or without a byte-order mark.

        Raises:
            UserError: the file holds no array, or no object is among the first 1,000 elements.
        """
        super().__init__(path)
        self.columns = peek_columns(self)

    def __iter__(self) -> Iterator[tuple[int, Row | RowProblem]]:
        """Yield each element; see the base class."""
        with self.path.open("rb") as raw, TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
            window = _Window(file)
            try:
                for number, row in enumerate(self._elements(window), 1):
                    if number % 1024 == 0:
                        self._bytes_done = raw.tell()
                    yield number, row if row.__class__ is dict else not_an_object(row)
            except UnicodeDecodeError as error:
                raise locate_undecodable(self.path) from error

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
                detail = error.msg if isinstance(error, json.JSONDecodeError) else shorten(str(error), 80)
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


class _Window:
    """A piece of a text file that moves forward."""

    def __init__(self, file: TextIOWrapper) -> None:
        self._file = file
        self._text = ""
        self._at = 0
        self._decode = json.JSONDecoder().raw_decode

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
        """Return the JSON value that begins here and move behind it."""
        self.peek()
        while True:
            ahead = len(self._text) - self._at
            try:
                value, end = self._decode(self._text, self._at)
            except (ValueError, RecursionError):
                if ahead > _MAX_ROW_CHARACTERS or not self._read_on(max(_CHUNK_CHARACTERS, ahead)):
                    raise
                continue
            # A number may go on behind the edge of the window; objects and texts end with a mark.
            if end < len(self._text) or isinstance(value, dict | list | str) or not self._read_on(_CHUNK_CHARACTERS):
                self._at = end
                return value

    def _read_on(self, num_characters: int) -> bool:
        more = self._file.read(num_characters)
        self._text = self._text[self._at :] + more
        self._at = 0
        return bool(more)


def _found(window: _Window) -> str:
    return f"{window.peek()!r} stands" if window.peek() else "the file ends"
