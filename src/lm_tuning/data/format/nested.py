"""Values inside nested rows: columns by path, such as ``translation.en``, and a row for every element of a list."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches

from lm_tuning.data.check.findings import NumberedRow, RowProblem, describe_value, wrong_type
from lm_tuning.data.records import Cell, ExplodedRows, Row
from lm_tuning.errors import UserError
from lm_tuning.wording import count_of, name_first, shorten

Step = str | int
"""A key of an object, or the 0-based index of an element of a list (negative ones count from its end)."""

_STEP = re.compile(
    r"""(?P<dot>\.)?(?P<key>[^.\[\]]+)|\[(?P<index>-?\d{1,9})\]|\[(?:"(?P<double>[^"]*)"|'(?P<single>[^']*)')\]"""
)
_PLAIN_KEY = re.compile(r"[^.\[\]]+")
_MAX_LISTED_KEYS = 10
_MAX_DEPTH = 4
_MAX_NAMES = 200


def parse_path(text: str) -> tuple[Step, ...] | None:
    """Cut a path into its steps.

    Keys are parted by dots; a key that holds a dot or a bracket stands in brackets and quotes. A number in brackets is
    the index of an element, from 0; a number behind a dot is a key, or an index where there is a list.

    Args:
        text: the path as typed.

    Returns:
        The steps; None where the text is no path, such as ``a..b`` or ``a[``.
    """
    steps: list[Step] = []
    at = 0
    while at < len(text):
        match = _STEP.match(text, at)
        # A key has a dot before it exactly when it is not the first step; brackets never have one.
        if match is None or (match["key"] is not None and bool(match["dot"]) == (at == 0)):
            return None
        quoted = match["double"] if match["double"] is not None else match["single"]
        if match["index"] is not None:
            steps.append(int(match["index"]))
        else:
            steps.append(match["key"] if match["key"] is not None else quoted)
        at = match.end()
    return tuple(steps) or None


def format_path(steps: Iterable[Step]) -> str:
    """Write steps as a user would type them; the opposite of ``parse_path``.

    Args:
        steps: keys and indices.
    """
    text = ""
    for step in steps:
        if isinstance(step, int):
            text += f"[{step}]"
        elif _PLAIN_KEY.fullmatch(step):
            text += f".{step}" if text else step
        else:
            text += f"['{step}']" if '"' in step else f'["{step}"]'
    return text


class NotThere(LookupError):
    """Describe where a path ends in a row.

    Attributes:
        reason: a part of a sentence, such as ``'translation' has no key 'en'``.
        is_wrong_type: a value of another type stands in the way; otherwise there is just nothing: a missing key, a list
            that is too short, or null.
    """

    def __init__(self, reason: str, *, is_wrong_type: bool) -> None:
        """Note where and why a path ends.

        Args:
            reason: where the path ends.
            is_wrong_type: whether a value of another type stands in the way.
        """
        self.reason = reason
        self.is_wrong_type = is_wrong_type
        super().__init__(reason)


def reach(row: Row, steps: tuple[Step, ...]) -> Cell:
    """Return the value at a path.

    Args:
        row: one row.
        steps: see ``parse_path``.

    Raises:
        NotThere: the path ends before.
    """
    value: Cell = row
    for depth, step in enumerate(steps):
        if isinstance(value, dict):
            # A number in brackets is a key where there is an object: keys of JSON are text.
            key = str(step)
            if key not in value:
                raise NotThere(_no_key(value, steps, depth), is_wrong_type=False)
            value = value[key]
        elif isinstance(value, list) and (isinstance(step, int) or step.isdecimal()):
            elements = value
            try:
                value = elements[int(step)]
            except IndexError:
                length = count_of(len(elements), "element")
                reason = f"{_at(steps, depth)} has {length} and none at index {step}"
                raise NotThere(reason, is_wrong_type=False) from None
        elif value is None:
            raise NotThere(f"{_at(steps, depth)} is null", is_wrong_type=False)
        else:
            wanted = "a list" if isinstance(step, int) else "an object"
            raise NotThere(
                f"{_at(steps, depth)} holds {describe_value(value)}, where {wanted} is wanted", is_wrong_type=True
            )
    return value


def explain_missing(row: Row, column: str) -> str | None:
    """Describe where the path of a column ends in a row.

    Args:
        row: one row, its nested values still in it.
        column: a column name.

    Returns:
        A part of a sentence; None where the name is no path into something that the row has.
    """
    steps = parse_path(column)
    if steps is None or len(steps) == 1 or str(steps[0]) not in row:
        return None
    try:
        reach(row, steps)
    except NotThere as error:
        return error.reason
    return None


def names_reached(row: Row, paths: Mapping[str, tuple[Step, ...]]) -> set[str]:
    """Return the columns by path that a row has a value for, of the right types on the way.

    Args:
        row: one row.
        paths: steps by name.
    """
    names = set()
    for name, steps in paths.items():
        with suppress(NotThere):
            reach(row, steps)
            names.add(name)
    return names


def fill_paths(rows: Iterable[NumberedRow], paths: Mapping[str, tuple[Step, ...]]) -> Iterator[NumberedRow]:
    """Add columns by path to each row; a row in which a path meets a value of another type becomes its problem.

    Args:
        rows: rows with their numbers, as a file has them.
        paths: steps by name.
    """
    for number, row in rows:
        yield number, _filled(row, paths) if isinstance(row, dict) else row


def nested_names(row: Row) -> list[str]:
    """Return the paths of the values inside a row, for suggestions: of lists the first element's.

    Args:
        row: one row.
    """
    names: list[str] = []

    def collect(value: Cell, steps: tuple[Step, ...]) -> None:
        if len(steps) > _MAX_DEPTH or len(names) >= _MAX_NAMES:
            return
        if isinstance(value, dict):
            for key, inner in value.items():
                collect(inner, (*steps, key))
        elif isinstance(value, list) and value and isinstance(value[0], dict | list):
            collect(value[0], (*steps, 0))
        elif len(steps) > 1:
            names.append(format_path(steps))

    collect(dict(row), ())
    return names[:_MAX_NAMES]


def suggest_path(column: str, names: Iterable[str]) -> str | None:
    """Return the nested path that a column name probably means: one that ends in it, else the nearest.

    Args:
        column: a name that the file lacks.
        names: see ``nested_names``.
    """
    # Somebody who writes output means instances[0].output more likely than anything of similar letters.
    listed = list(names)
    ending = [name for name in listed if name.endswith((f".{column}", f'["{column}"]'))]
    return next(iter(ending or get_close_matches(column, listed, n=1)), None)


def _filled(row: Row, paths: Mapping[str, tuple[Step, ...]]) -> Row | RowProblem:
    # A copy, since an exploded row shares what is not its own with its siblings.
    filled = dict(row)
    for name, steps in paths.items():
        try:
            filled[name] = reach(row, steps)
        except NotThere as error:
            # Where nothing is there the column stays missing, and whoever needs it says so.
            if error.is_wrong_type:
                return RowProblem("wrong_type", f"column {name!r}: {error.reason}.")
    return filled


def _no_key(value: Row, steps: tuple[Step, ...], depth: int) -> str:
    has = f"its keys: {name_first([repr(shorten(key)) for key in value], _MAX_LISTED_KEYS)}" if value else "it is empty"
    return f"{_at(steps, depth)} has no key {str(steps[depth])!r} ({has})"


def _at(steps: tuple[Step, ...], depth: int) -> str:
    return repr(format_path(steps[:depth])) if depth else "the row"


_MAX_NAMED_ROWS = 20


class Exploding:
    """Rows of a file after their lists were exploded, and an account of where each came from.

    An exploded row is a copy in which the element stands where its list stood; all else is repeated.

    Attributes:
        names: the paths of the lists, as typed, from the outermost to the innermost.
        num_rows_in_file: rows of the file that were exploded, the bad ones among them.
        num_empty: rows of the file with an empty list, at any depth, that gave no row of their own.
        first_empty: numbers of the first 20 of them.
    """

    def __init__(self, names: Sequence[str], columns: Sequence[str]) -> None:
        """Read the paths.

        Args:
            names: ``data.explode``.
            columns: the columns of the file; one that bears the name itself is the list.

        Raises:
            UserError: one of them is no path.
        """
        self.names = list(names)
        self._paths: list[tuple[Step, ...]] = []
        for name in names:
            steps = (name,) if name in columns else parse_path(name)
            if steps is None:
                raise UserError(
                    f"data.explode = {name!r} is no path to a list. Write keys with dots between them, such as "
                    "instances or document.paragraphs."
                )
            self._paths.append(steps)
        self._forget()

    @property
    def roots(self) -> list[str]:
        """Name the columns of the file that hold the lists."""
        return [str(steps[0]) for steps in self._paths]

    def _forget(self) -> None:
        self.num_rows_in_file = self.num_empty = 0
        self.first_empty: list[int] = []
        self._row = 0
        self._elements: tuple[int, ...] = ()

    @property
    def where(self) -> str:
        """Describe where the last row came from, such as ``row 3, element 2`` (of lists in lists: ``element 2.1``)."""
        if not self._elements:
            return f"row {self._row}"
        return f"row {self._row}, element {'.'.join(map(str, self._elements))}"

    def explode(self, rows: Iterable[NumberedRow]) -> Iterator[NumberedRow]:
        """Yield the exploded rows, numbered again from 1; a row whose list is none is yielded as its problem.

        Args:
            rows: rows with their numbers, as a file has them.
        """
        self._forget()
        number = 0
        # Kept while the row is out, so that whoever finds it bad can ask where it stood in its file.
        for self._row, row in rows:
            self.num_rows_in_file += 1
            self._elements = ()
            if isinstance(row, RowProblem):
                number += 1
                yield number, row
                continue
            is_empty = False
            # An empty list inside another counts once for its row, however many there are.
            for elements, exploded in self._elements_of(row, 0, ()):
                if exploded is None:
                    is_empty = True
                    continue
                number += 1
                self._elements = elements
                yield number, exploded
            if is_empty:
                self.num_empty += 1
                if len(self.first_empty) < _MAX_NAMED_ROWS:
                    self.first_empty.append(self._row)

    def describe(self) -> ExplodedRows:
        """Return the account as JSON holds it."""
        return {
            "lists": self.names,
            "rows_in_file": self.num_rows_in_file,
            "rows_with_empty_lists": self.num_empty,
            "first_rows_with_empty_lists": self.first_empty,
        }

    def _elements_of(
        self, row: Row, depth: int, elements: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], Row | RowProblem | None]]:
        """Yield element numbers and row of each element, and None for an empty list."""
        if depth == len(self._paths):
            yield elements, row
            return
        steps = self._paths[depth]
        try:
            values = reach(row, steps)
        except NotThere as error:
            kind = "wrong_type" if error.is_wrong_type else "missing_column"
            yield elements, RowProblem(kind, f"has no list at {format_path(steps)!r} (data.explode): {error.reason}.")
            return
        if not isinstance(values, list):
            subject = f"column {format_path(steps)!r} (data.explode) holds"
            kind = "missing_value" if values is None else "wrong_type"
            yield elements, wrong_type(subject, values, "a list", kind=kind)
            return
        if not values:
            yield elements, None
        for position, value in enumerate(values, 1):
            copied = _replaced(row, steps, value)
            assert isinstance(copied, dict), "a row stays a row"
            yield from self._elements_of(copied, depth + 1, (*elements, position))


def _replaced(inside: Cell, steps: Sequence[Step], value: Cell) -> Cell:
    """Copy a row, or a value in it, along a path, with another value at its end; all beside the path is shared."""
    if not steps:
        return value
    if isinstance(inside, list):
        index = int(steps[0])
        copied = list(inside)
        copied[index] = _replaced(inside[index], steps[1:], value)
        return copied
    assert isinstance(inside, dict), "the path was followed before"
    key = str(steps[0])
    return {**inside, key: _replaced(inside[key], steps[1:], value)}
