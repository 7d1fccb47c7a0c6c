"""Stream the rows of one JSON array without holding the file in memory, wherever in the file it stands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import TextIOWrapper
from typing import IO, Any

from lm_tuning.data.check.problems import RowProblem
from lm_tuning.data.format.column_paths import Step, format_path, parse_path
from lm_tuning.data.readers.json_fields import FieldDamaged, FieldMissing, describe_lists, find_lists, open_field
from lm_tuning.data.readers.json_rows import JsonRows
from lm_tuning.data.readers.json_values import explain_error, parse_line
from lm_tuning.data.readers.json_window import JsonWindow, found
from lm_tuning.data.readers.open import (
    DEFAULT_SETTINGS,
    ReadSettings,
    Row,
    beyond_row,
    peek_columns,
)
from lm_tuning.data.sources.opening import RawFile
from lm_tuning.data.sources.raw_bytes import locate_undecodable, peek_bytes, skip_mark
from lm_tuning.errors import UserError

_CHUNK_BYTES = 1 << 20


class JsonArrayRows(JsonRows):
    """The elements of an array of objects or lists, each with its position as row number."""

    def __init__(
        self, raw: RawFile, file_format: str, settings: ReadSettings = DEFAULT_SETTINGS, *, field: str | None = None
    ) -> None:
        """Look at the first rows for the column names.

        Args:
            raw: a file in UTF-8, with or without a byte-order mark.
            file_format: ``json``.
            settings: the limit of a row.
            field: path to the array in the object that the file holds; None where the file is the array.

        Raises:
            UserError: no array is there, or no row is among its elements.
        """
        super().__init__(raw, file_format, settings)
        self._steps: tuple[Step, ...] = ()
        if field is not None:
            steps = parse_path(field)
            if steps is None:
                raise UserError(
                    f"data.field = {field!r} is no path to a list. Write keys with dots between them, such as train or "
                    "data.train."
                )
            self._steps = steps
            self.path = f"{raw.path}, field {field!r}"
        self.columns = peek_columns(self)

    def _rows(self) -> Iterator[tuple[int, Row | RowProblem]]:
        number = 0
        with self.raw.open() as raw, TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
            window = JsonWindow(file, self.settings.max_row_bytes)
            try:
                for number, row in enumerate(self._elements(window), 1):
                    yield number, self._as_row(row)
            except UnicodeDecodeError as error:
                raise locate_undecodable(self.raw) from error
            except OSError as error:
                raise beyond_row(self.path, number, error) from error

    def _elements(self, window: JsonWindow) -> Iterator[Any]:
        if not self._steps and window.peek() != "[":
            raise UserError(
                f"{self.path} holds no array. A .json file holds an array of rows, [{{…}}, {{…}}], or one object a "
                f"line.{describe_lists(find_lists(window))}"
            )
        try:
            for _ in open_field(window, self._steps):
                yield from self._elements_here(window)
        except FieldMissing as error:
            raise UserError(
                f"data.field = {format_path(self._steps)!r}: in {self.raw.path}, {error}.{describe_lists(error.lists)}"
            ) from error
        except FieldDamaged as error:
            raise UserError(f"{self.path}: {error}.") from error
        if window.peek():
            where = "behind the array" if not self._steps else "behind the object"
            raise UserError(f"{self.path}: {found(window)} {where}, where the file should end.")

    def _elements_here(self, window: JsonWindow) -> Iterator[Any]:
        """Yield the elements of the array that begins here and move behind it."""
        window.take()
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
                    f"{self.path}: {found(window)} after row {number}, where a comma or the closing bracket is wanted."
                )
        window.take()


def holds_array(raw: RawFile, max_row_bytes: int) -> bool:
    """Say whether a ``.json`` file is to be read as one array, and not as one object a line as many data sets are.

    Args:
        raw: the file.
        max_row_bytes: a longer line is not parsed; where another object begins behind it, it is a row that is too long.

    Raises:
        UserError: it cannot be read.
    """
    with raw.open() as file:
        try:
            skip_mark(file)
            if _skip_space(file) != b"{":
                return True
            line = file.readline(max_row_bytes + 2)  # 2: a line break counts for nothing
            if len(line.rstrip(b"\r\n")) <= max_row_bytes:
                return not isinstance(parse_line(line), dict)
            while line and not line.endswith(b"\n"):
                line = file.readline(_CHUNK_BYTES)
            return _skip_space(file) != b"{"
        except RowProblem:
            return False
        except OSError as error:
            raise beyond_row(raw.path, 0, error) from error
        except (ValueError, RecursionError):
            return True


def _skip_space(file: IO[bytes]) -> bytes:
    """Move behind white space and return the byte that follows, empty at the end."""
    while (mark := peek_bytes(file, 1)).isspace():
        file.read(1)
    return mark
