"""Hand the lines of a CSV file to the parser without ever holding a record beyond a limit."""

from __future__ import annotations

import re
from io import TextIOWrapper

_CHUNK_CHARACTERS = 1 << 20
# What Excel writes before the header to say what separates the fields.
_DECLARATION = re.compile(r"sep=(.)\r?\n?", re.IGNORECASE)


class RecordTooLong(Exception):  # a way to leave the parser, caught by its caller
    """Say that the record which is being read has more bytes than the limit."""


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
        self._pending = file.readline(max_bytes + 2)
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
            RecordTooLong: with it, the record would be too long; ``skip_record`` goes on behind it.
        """
        line = self._read(max(self._max_bytes + 2 - self.num_bytes, 1))
        if not line:
            raise StopIteration
        self.num_lines += 1
        self._count(line)
        if self.num_bytes > self._max_bytes:
            if self.num_bytes - self._num_break > self._max_bytes or not self._ends_line:
                raise RecordTooLong
        return line

    def end_record(self) -> None:
        """Say that the lines so far made a whole record."""
        self.num_bytes = self._num_quotes = 0

    def skip_record(self) -> int:
        """Read to the end of the record, which is the first line break outside quotes.

        Returns:
            The bytes of the whole record, without the line break behind it.
        """
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
        self.num_bytes += len(line) if line.isascii() else len(line.encode())
        self._num_quotes += line.count('"')
        self._num_break = len(line) - len(line.rstrip("\r\n"))
        self._ends_line = self._num_break > 0
