"""Make one row of every element of a list: ``data.explode``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from lm_tuning.data.check.findings import NumberedRow, RowProblem, wrong_type
from lm_tuning.data.format.column_paths import NotThere, Step, format_path, parse_path, reach
from lm_tuning.data.records import Cell, ExplodedRows, Row
from lm_tuning.errors import UserError

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
