"""What makes a JSON value a row: an object with columns, or a list whose columns are its positions."""

from __future__ import annotations

from typing import Any

from lm_tuning.data.check.problems import RowProblem, describe_value
from lm_tuning.data.readers.open import Row, RowSource


class JsonRows(RowSource):
    """Rows of a JSON file; what the first one is, an object or a list, all have to be."""

    _by_position: bool | None = None

    def _as_row(self, value: Any) -> Row | RowProblem:
        """Return the row that a JSON value is, or why it is none.

        The elements of a list are the columns ``0``, ``1``, …; a list of objects is no row of columns.
        """
        if value.__class__ is dict:
            if self._by_position is None:
                self._by_position = False
            if not self._by_position:
                return value
        elif value.__class__ is list and value and not any(item.__class__ is dict for item in value):
            if self._by_position is None:
                self._by_position = True
            if self._by_position:
                return {str(position): item for position, item in enumerate(value)}
        elif isinstance(value, RowProblem):
            return value
        wanted = "a list, as in the first row," if self._by_position else "an object with columns"
        return RowProblem("not_an_object", f"holds {describe_value(value)}, where {wanted} is wanted.")

    def describe_inside(self) -> str:
        """Say how the columns of lists are named, see ``RowSource``."""
        if self._by_position:
            return ' The rows are lists, and their columns are positions in quotes, such as data.columns.text: "0".'
        return super().describe_inside()
