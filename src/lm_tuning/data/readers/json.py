"""Stream the rows of JSON Lines, and of a JSON array wherever it stands, without holding the file in memory.

A row is an object with columns, or a list whose columns are its positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import TextIOWrapper
from itertools import islice

from lm_tuning.data.check.findings import NumberedRow, RowProblem, list_columns, too_long, wrong_type
from lm_tuning.data.format.nested import Step, format_path, parse_path
from lm_tuning.data.readers.base import ReadSettings, RowSource, beyond_row, peek_columns
from lm_tuning.data.readers.json_values import FieldDamaged, JsonWindow, explain_error, parse_line
from lm_tuning.data.records import Cell, Row
from lm_tuning.data.sources.opening import RawFile, locate_undecodable, skip_mark
from lm_tuning.errors import UserError
from lm_tuning.wording import shorten

_CHUNK_BYTES = 1 << 20
# Lists that a message suggests, and how deep in objects they are looked for.
_MAX_LISTS = 10
_MAX_DEPTH = 3
_KINDS = {"[": "a list", "{": "an object", '"': "text", "t": "a boolean", "f": "a boolean", "n": "null"}


class JsonRows(RowSource):
    """Rows of a JSON file; what the first one is, an object or a list, all have to be."""

    _by_position: bool | None = None

    def _as_row(self, value: Cell | RowProblem) -> Row | RowProblem:
        """Return the row that a JSON value is, or why it is none.

        The elements of a list are the columns ``0``, ``1``, …; a list of objects is no row of columns.
        """
        if isinstance(value, RowProblem):
            return value
        if isinstance(value, dict):
            if not self._by_position:
                self._by_position = False
                return value
        elif isinstance(value, list) and value and not any(isinstance(item, dict) for item in value):
            if self._by_position is not False:
                self._by_position = True
                return {str(position): item for position, item in enumerate(value)}
        wanted = "a list, as in the first row," if self._by_position else "an object with columns"
        return wrong_type("holds", value, wanted, kind="not_an_object")

    def describe_inside(self) -> str:
        """Describe how the columns of lists are named, see ``RowSource``."""
        if self._by_position:
            return ' The rows are lists, and their columns are positions in quotes, such as data.columns.text: "0".'
        return super().describe_inside()


class JsonLinesRows(JsonRows):
    r"""One JSON object (or list) a line. Only ``\n`` ends one, so other separators of Unicode may stand in strings."""

    def __init__(self, raw: RawFile, file_format: str, settings: ReadSettings) -> None:
        """Look at the first rows for the column names.

        Args:
            raw: a file in UTF-8, with or without a byte-order mark.
            file_format: ``jsonl`` or ``json``.
            settings: the limit of a row.

        Raises:
            UserError: no row is among the lines.
        """
        super().__init__(raw, file_format, settings)
        self.columns = peek_columns(self)

    def describe_inside(self) -> str:
        """Report that a file of one object may hold its rows in a list, see ``RowSource``."""
        first = list(islice(self._rows(), 2))
        row = first[0][1]
        names = _lists_in(row) if self.format == "json" and len(first) == 1 and isinstance(row, dict) else []
        return _describe_lists(names) or super().describe_inside()

    def _rows(self) -> Iterator[NumberedRow]:
        number = offset = 0
        limit = self.settings.max_row_bytes
        with self.raw.open() as file:
            try:
                # Bytes from the beginning of the file, for the message about what is no UTF-8; of packed files,
                # unpacked ones.
                offset = skip_mark(file)
                while line := file.readline(limit + 2):  # 2: a line break counts for nothing
                    number += 1
                    offset += len(line)
                    if len(line) > limit and len(line.rstrip(b"\r\n")) > limit:
                        num_bytes = len(line)
                        # The rest of the line goes by in chunks that are only counted: memory stays at the limit of a
                        # row.
                        while line[-1:] != b"\n" and (line := file.readline(_CHUNK_BYTES)):
                            num_bytes += len(line)
                            offset += len(line)
                        num_bytes -= len(line) - len(line.rstrip(b"\r\n"))
                        yield number, too_long(num_bytes, limit)
                        continue
                    try:
                        row = parse_line(line)
                    except RowProblem as problem:
                        yield number, problem
                        continue
                    except UnicodeDecodeError as error:
                        index = offset - len(line) + error.start
                        reason = f"byte {index:,} of the file is not UTF-8. Save the file as UTF-8."
                        yield number, RowProblem("not_utf8", reason)
                        continue
                    except (ValueError, RecursionError) as error:
                        # A blank line is no row and no mistake, though it has a number: numbers are those that an
                        # editor shows.
                        if line.strip():
                            yield number, _explain_bad_line(line, error)
                        continue
                    yield number, self._as_row(row)
            except OSError as error:
                raise beyond_row(self.path, number, error) from error


def _explain_bad_line(line: bytes, error: Exception) -> RowProblem:
    hint = " An array of rows belongs in a .json file." if line.strip() == b"[" else ""
    text = shorten(line.decode().strip())
    return RowProblem("not_json", f"is not JSON ({explain_error(error)}): {text!r}.{hint}")


class _FieldMissing(LookupError):
    """Describe why no list is at the path of ``data.field``.

    Attributes:
        lists: paths of the lists that were passed by on the way.
    """

    def __init__(self, reason: str, lists: Sequence[str] = ()) -> None:
        """Note why there is no list, and which were passed by.

        Args:
            reason: a part of a sentence.
            lists: see the class.
        """
        self.lists = list(lists)
        super().__init__(reason)


def _open_field(window: JsonWindow, steps: tuple[Step, ...], behind: tuple[Step, ...] = ()) -> Iterator[None]:
    """Move to the list at a path, yield once there, and read on to the end of what encloses it.

    Args:
        window: at the beginning of a JSON value; whoever iterates moves it behind the list.
        steps: the path from there.
        behind: the steps that led there.

    Raises:
        _FieldMissing: no list is there.
        FieldDamaged: the file is no JSON up to the end of the object, or an object on the way names the key twice.
    """
    mark = window.peek()
    if not steps:
        if mark != "[":
            lists = [format_path((*behind, *inner)) for inner in _lists_here(window, 0)] if mark == "{" else []
            raise _FieldMissing(f"{format_path(behind)!r} holds {_kind(mark)}, where a list of rows is wanted", lists)
        yield
        return
    where = repr(format_path(behind)) if behind else "the file"
    if mark == "{":
        yield from _open_key(window, steps, behind, where)
    elif mark == "[" and str(steps[0]).isdecimal():
        yield from _open_element(window, steps, behind, where)
    elif mark == "[" and isinstance(steps[0], int):
        raise _FieldMissing(f"{where} is read from its beginning, so index {steps[0]} cannot count from its end")
    else:
        wanted = "a list" if isinstance(steps[0], int) else "an object"
        raise _FieldMissing(f"{where} holds {_kind(mark)}, where {wanted} is wanted")


def _find_lists(window: JsonWindow) -> list[str]:
    """Return the paths of the first lists in an object, down to the third level, for a suggestion.

    Args:
        window: at the beginning of a JSON value, of which much is read.
    """
    try:
        return [format_path(steps) for steps in _lists_here(window, 0)]
    except FieldDamaged:  # a damaged file has no lists to suggest
        return []


def _lists_in(row: Row) -> list[str]:
    """Return the paths of the lists of objects or lists in a parsed object, down to the third level.

    Args:
        row: the object.
    """
    found_lists: list[str] = []

    def collect(value: Cell, steps: tuple[Step, ...]) -> None:
        if isinstance(value, list) and steps and value and isinstance(value[0], list | dict):
            found_lists.append(format_path(steps))
        elif isinstance(value, dict) and len(steps) < _MAX_DEPTH:
            for key, inner in value.items():
                collect(inner, (*steps, key))

    collect(row, ())
    return found_lists[:_MAX_LISTS]


def _describe_lists(names: Sequence[str]) -> str:
    """Describe which lists a file has and how to read one, in sentences that follow others; empty without lists.

    Args:
        names: paths of lists.
    """
    if not names:
        return ""
    are = "Its lists are" if len(names) > 1 else "It has the list"
    return f" {are} {list_columns(list(names))}: name the one that holds the rows, such as data.field: {names[0]}."


def _open_key(window: JsonWindow, steps: tuple[Step, ...], behind: tuple[Step, ...], where: str) -> Iterator[None]:
    names: list[str] = []
    lists: list[str] = []
    is_found = False
    for key in window.keys():
        if key == str(steps[0]):
            # Only a repetition of the key on the way counts: what other keys hold is passed by unread.
            if is_found:
                raise FieldDamaged(f"{where} names {shorten(key)!r} twice in one object; only one value can count")
            is_found = True
            yield from _open_field(window, steps[1:], (*behind, steps[0]))
            continue
        names.append(key)
        # Noted by the way, for the message that names the lists which the file does have.
        if window.peek() == "[" and len(lists) < _MAX_LISTS:
            lists.append(format_path((*behind, key)))
        window.skip()
    if not is_found:
        keys = f"its keys: {list_columns(names)}" if names else "it is empty"
        raise _FieldMissing(f"{where} has no key {str(steps[0])!r} ({keys})", lists)


def _open_element(window: JsonWindow, steps: tuple[Step, ...], behind: tuple[Step, ...], where: str) -> Iterator[None]:
    wanted = int(steps[0])
    window.take()
    number = 0
    # The empty text is the end of the file, which `close` reports.
    while window.peek() not in ("]", ""):
        if number == wanted:
            yield from _open_field(window, steps[1:], (*behind, steps[0]))
        else:
            window.skip()
        number += 1
        if window.peek() == ",":
            window.take()
        elif window.peek() != "]":
            break
    window.close("]")
    if number <= wanted:
        raise _FieldMissing(f"{where} has {number:,} element{'s' * (number != 1)} and none at index {wanted}")


def _lists_here(window: JsonWindow, depth: int) -> Iterator[tuple[Step, ...]]:
    if window.peek() != "{":
        window.skip()
        return
    num_lists = 0
    for key in window.keys():
        if window.peek() == "[":
            window.skip()
            num_lists += 1
            yield (key,)
            if num_lists == _MAX_LISTS:
                return
        elif depth + 1 < _MAX_DEPTH:
            yield from ((key, *inner) for inner in _lists_here(window, depth + 1))
        else:
            window.skip()


def _kind(mark: str) -> str:
    return _KINDS.get(mark, "a number" if mark else "nothing")


class JsonArrayRows(JsonRows):
    """The elements of an array of objects or lists, each with its position as row number."""

    def __init__(self, raw: RawFile, file_format: str, settings: ReadSettings, *, field: str | None = None) -> None:
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

    def _rows(self) -> Iterator[NumberedRow]:
        number = 0
        # Line breaks are not translated, since a row's bytes are counted as they stand in the file.
        with self.raw.open() as raw, TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
            # Not json.load: it would hold the whole file as text and as values at once, and one bad element would take
            # all others with it.
            window = JsonWindow(file, self.settings.max_row_bytes)
            try:
                for number, row in enumerate(self._elements(window), 1):
                    yield number, self._as_row(row)
            except UnicodeDecodeError as error:
                raise locate_undecodable(self.raw) from error
            except OSError as error:
                raise beyond_row(self.path, number, error) from error

    def _elements(self, window: JsonWindow) -> Iterator[Cell | RowProblem]:
        if not self._steps and window.peek() != "[":
            raise UserError(
                f"{self.path} holds no array. A .json file holds an array of rows, [{{…}}, {{…}}], or one object a "
                f"line.{_describe_lists(_find_lists(window))}"
            )
        try:
            for _ in _open_field(window, self._steps):
                yield from self._elements_here(window)
        except _FieldMissing as error:
            raise UserError(
                f"data.field = {format_path(self._steps)!r}: in {self.raw.path}, {error}.{_describe_lists(error.lists)}"
            ) from error
        except FieldDamaged as error:
            raise UserError(f"{self.path}: {error}.") from error
        if window.peek():
            where = "behind the array" if not self._steps else "behind the object"
            raise UserError(f"{self.path}: {window.found()} {where}, where the file should end.")

    def _elements_here(self, window: JsonWindow) -> Iterator[Cell | RowProblem]:
        """Yield the elements of the array that begins here and move behind it."""
        window.take()
        number = 0
        while window.peek() != "]":
            number += 1
            try:
                value = window.decode()
            except (ValueError, RecursionError) as error:
                # Its position counts from the part of the file that is held, so it says nothing here.
                detail = explain_error(error, has_position=False)
                raise UserError(
                    f"{self.path}, row {number}: is not JSON ({detail}); the row begins {window.glance()!r}."
                ) from error
            yield value
            if window.peek() == ",":
                window.take()
            elif window.peek() != "]":
                raise UserError(
                    f"{self.path}: {window.found()} after row {number}, where a comma or the closing bracket is wanted."
                )
        window.take()
