"""Parse JSON without losing anything in silence: no NaN, no key that stands twice in one object, no rounded integer.

A text of any size is parsed value by value with little of it in memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from io import TextIOWrapper
from typing import NoReturn

import orjson

from lm_tuning.data.check.findings import RowProblem, too_long
from lm_tuning.data.records import Cell, Row
from lm_tuning.wording import shorten

# Answer of the count of keys where a float may be an integer that was rounded: no text has so many colons.
_UNSURE = -1
_SIMPLE = frozenset({str, int, bool, type(None)})
# White space that JSON allows between a key and its colon.
_GAPS = (" :", "\t:", "\n:", "\r:")
_GAPS_OF_LINE = (b" :", b"\t:", b"\r:")


def parse_line(line: bytes) -> Cell:
    """Parse one line of JSON.

    The fast parser takes the last of several equal keys and rounds integers beyond 64 bits; so its result counts only
    where neither can have happened, and all else goes through the exact one.

    Args:
        line: UTF-8, one JSON value, with space around it at will.

    Returns:
        The value.

    Raises:
        RowProblem: NaN or an infinity, or an object that names a key twice.
        UnicodeDecodeError: the line is not UTF-8.
        ValueError: the line is not JSON.
        RecursionError: it is nested too deeply.
    """
    try:
        # About twice as fast as the standard library on ordinary rows; it refuses NaN by itself.
        row: Cell = orjson.loads(line)
    except ValueError:
        # Either no JSON at all, or what only the slow parser takes or explains: its error names the character.
        return _parse_exactly(line.decode())
    if isinstance(row, dict):
        num_keys = _count_keys(row)
        # Every key has its colon. Where there are no more colons than keys in the result, each key was there once.
        if line.count(b":") == num_keys:
            return row
        # Texts hold colons too. The same follows when only those behind a quote are counted and none stands off.
        if line.count(b'":') == num_keys and not any(gap in line for gap in _GAPS_OF_LINE):
            return row
    return _parse_exactly(line.decode())


def _parse_exactly(text: str) -> Cell:
    """Parse one JSON value, slowly; see ``parse_line``."""
    value: Cell = _EXACT.decode(text)
    return value


def _has_each_key_once(value: Row, text: str, start: int, end: int) -> bool:
    """Return whether a parsed value certainly has no object that named a key twice; False if that is not certain.

    Args:
        value: what was parsed.
        text: what it was parsed from.
        start: where the value begins in the text.
        end: where it ends.
    """
    num_keys = _count_keys(value)
    return text.count(":", start, end) == num_keys or (
        text.count('":', start, end) == num_keys and not any(text.find(gap, start, end) >= 0 for gap in _GAPS)
    )


def explain_error(error: Exception, *, has_position: bool = True) -> str:
    """Describe in a few words why a text is not JSON.

    Args:
        error: what a parser raised.
        has_position: whether the parser's position counts from the beginning of the text.
    """
    if not isinstance(error, json.JSONDecodeError):
        return shorten(str(error), 80)
    # Some of the parser's words end as if a position followed.
    return error.msg.removesuffix(" at") + (f" at character {error.pos + 1}" if has_position else "")


def _constant_problem(name: str) -> RowProblem:
    """Report a number that JSON does not have.

    Args:
        name: ``NaN``, ``Infinity`` or ``-Infinity``.
    """
    return RowProblem("not_json", f"holds {name}, which is no number of JSON; write null or a text.")


def _count_keys(row: Row) -> int:
    """Count the keys of all objects in a row; ``_UNSURE`` where a float may be an integer that was rounded."""
    values = row.values()
    if _SIMPLE.issuperset(map(type, values)):
        return len(row)
    inner = _count_keys_inside(values)
    return _UNSURE if inner == _UNSURE else len(row) + inner


def _count_keys_inside(values: Iterable[Cell]) -> int:
    total = 0
    for value in values:
        if isinstance(value, float):
            return _UNSURE
        if isinstance(value, dict):
            inner = _count_keys(value)
        elif isinstance(value, list):
            inner = _count_keys_inside(value)
        else:
            continue
        if inner == _UNSURE:
            return _UNSURE
        total += inner
    return total


def _refuse_constant(name: str) -> NoReturn:
    raise _constant_problem(name)


def _object_of_pairs(pairs: list[tuple[str, Cell]]) -> Row:
    row = dict(pairs)
    if len(row) == len(pairs):
        return row
    seen: set[str] = set()
    repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
    raise RowProblem("repeated_name", f"names {shorten(repeated)!r} twice in one object; only one value can count.")


_EXACT = json.JSONDecoder(object_pairs_hook=_object_of_pairs, parse_constant=_refuse_constant)


_CHUNK_CHARACTERS = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")
_MARK = re.compile(r'["\[\]{}]')
_DEPTH_OF_MARK = {'"': 0, "[": 1, "{": 1, "]": -1, "}": -1}
_SCALAR_END = re.compile(r"[,\]}\s]")


class FieldDamaged(ValueError):
    """Describe what is wrong with the object that encloses the list of ``data.field``."""


class JsonWindow:
    """A part of a text file that moves forward."""

    def __init__(self, file: TextIOWrapper, max_value_bytes: int) -> None:
        """Begin the window at the position that the file has.

        Args:
            file: the text.
            max_value_bytes: of a value that is parsed.
        """
        self._file = file
        self._max_value_bytes = max_value_bytes
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

    def decode(self) -> Cell | RowProblem:
        """Return the JSON value that begins here, or what is wrong with it as a row, and move behind it.

        A value that is too long is passed by with little of it in memory.

        Raises:
            ValueError: it is not JSON.
            RecursionError: it is nested too deeply.
        """
        self.peek()
        while True:
            ahead = len(self._text) - self._at
            self._constants.clear()
            try:
                value, end = self._decode(self._text, self._at)
            except (ValueError, RecursionError):
                if ahead > self._max_value_bytes:
                    num_bytes = self.skip(keep=self._max_value_bytes)
                    if num_bytes is None:
                        raise
                    return too_long(num_bytes, self._max_value_bytes)
                if not self._read_on(min(max(_CHUNK_CHARACTERS, ahead), self._max_value_bytes + 1 - ahead)):
                    raise
                continue
            # A number may go on behind the edge of the window; objects and texts end with a mark.
            if end < len(self._text) or isinstance(value, dict | list | str) or not self._read_on(_CHUNK_CHARACTERS):
                checked = self._checked(value, end)
                self._at = end
                return checked

    def skip(self, *, keep: int = 0) -> int | None:
        """Move behind the value that begins here without parsing it; only its brackets and quotes are looked at.

        Args:
            keep: a value that ends within so many characters stays: the window does not move.

        Returns:
            Its bytes, None where it stayed. At the end of the file the value ends as well.
        """
        mark = self.peek()
        advance = _NestedScan().advance if mark in ('"', "[", "{") else _end_of_scalar
        num_bytes = 0
        at = start = self._at
        while True:
            at, is_over = advance(self._text, at)
            if is_over:
                if not num_bytes and at - start <= keep:
                    return None
                self._at = at
                return num_bytes + _num_bytes(self._text[start:at])
            num_bytes += _num_bytes(self._text[start:])
            at -= len(self._text)  # 1 where the last character escapes the first one of the next chunk
            self._text = self._file.read(_CHUNK_CHARACTERS)
            self._at = start = 0
            if not self._text:
                return num_bytes

    def found(self) -> str:
        """Describe what stands next, for a message."""
        return f"{self.peek()!r} stands" if self.peek() else "the file ends"

    def keys(self) -> Iterator[str]:
        """Yield the keys of the object that begins here; whoever iterates moves the window behind each value.

        Raises:
            FieldDamaged: it is no JSON up to its end.
        """
        self.take()
        while self.peek() == '"':
            try:
                key = self.decode()
            except ValueError as error:
                raise FieldDamaged(f"a key is not JSON ({explain_error(error, has_position=False)})") from error
            if isinstance(key, RowProblem):
                raise FieldDamaged(f"a key {key.reason.rstrip('.')}")
            assert isinstance(key, str), "what begins with a quote is text"
            if self.take() != ":":
                raise FieldDamaged(f"no colon stands behind the key {shorten(key)!r}")
            yield key
            if self.peek() != ",":
                break
            self.take()
        self.close("}")

    def close(self, mark: str) -> None:
        """Move behind a closing bracket.

        Args:
            mark: the bracket that has to stand next.

        Raises:
            FieldDamaged: something else does.
        """
        if self.peek() != mark:
            raise FieldDamaged(f"{self.found()}, where a comma or {mark!r} is wanted")
        self.take()

    def _checked(self, value: Cell, end: int) -> Cell | RowProblem:
        """Return a value that was parsed, or the problem of a row that JSON allows no other way to read."""
        length = end - self._at
        if length * 4 > self._max_value_bytes:  # a character is four bytes at most
            num_bytes = _num_bytes(self._text[self._at : end])
            if num_bytes > self._max_value_bytes:
                return too_long(num_bytes, self._max_value_bytes)
        if self._constants:
            return _constant_problem(self._constants[0])
        if not isinstance(value, dict) or _has_each_key_once(value, self._text, self._at, end):
            return value
        try:
            return _parse_exactly(self._text[self._at : end])
        except RowProblem as problem:
            return problem

    def _read_on(self, num_characters: int) -> bool:
        more = self._file.read(num_characters)
        self._text = self._text[self._at :] + more
        self._at = 0
        return bool(more)


class _NestedScan:
    """Find the end of an object, a list or a text in chunks of it."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_text = False

    def advance(self, text: str, at: int) -> tuple[int, bool]:
        """Return where the value ends and True, or where to go on in the next chunk and False."""
        while at < len(text):
            if self._is_text:
                at, self._is_text = _end_of_text(text, at)
            else:
                match = _MARK.search(text, at)
                if match is None:
                    return len(text), False
                at = match.end()
                self._is_text = match[0] == '"'
                self._depth += _DEPTH_OF_MARK[match[0]]
            if not self._depth and not self._is_text:
                return at, True
        return at, False


def _end_of_scalar(text: str, at: int) -> tuple[int, bool]:
    match = _SCALAR_END.search(text, at)
    return (match.start(), True) if match else (len(text), False)


def _end_of_text(text: str, at: int) -> tuple[int, bool]:
    """Look for the closing quote of a JSON text from a position inside it.

    Returns:
        The position behind the quote and False; or the position to go on at and True, one behind the end where the last
        character escapes the next one.
    """
    quote = -1
    while True:
        if quote < at:
            quote = text.find('"', at)
        escape = text.find("\\", at, quote if quote >= 0 else len(text))
        if escape < 0:
            return (quote + 1, False) if quote >= 0 else (len(text), True)
        at = escape + 2
        if at > len(text):
            return at, True


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
