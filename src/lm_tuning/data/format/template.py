"""Render a prompt from the columns of a row."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from string import Formatter

from lm_tuning.data.check.findings import RowProblem, wrong_type
from lm_tuning.data.records import Cell, Row

_Part = tuple[str, str | None]


def parse_template(template: str) -> list[_Part]:
    """Cut a template into literal text and the column that follows it.

    Args:
        template: text with ``{column}`` placeholders; ``{{`` and ``}}`` stand for braces.

    Returns:
        Pairs of literal text and column name; the name is None where no column follows.

    Raises:
        ValueError: a brace is left open, a placeholder is empty, or it asks for more than a column.
    """
    try:
        # The grammar of str.format, whose rendering is never used: values must not be looked into by attributes, and
        # their own braces must stay.
        fields = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{error}. Write a brace that is meant as text twice: '{{{{' or '}}}}'.") from error
    parts: list[_Part] = []
    for literal, column, layout, conversion in fields:
        if column is not None and (layout or conversion):
            raise ValueError(f"the placeholder of {column!r} holds more than a column name, which is all it may hold.")
        if column is not None and not column.strip():
            raise ValueError("a placeholder is empty: write a column name between the braces.")
        parts.append((literal, column))
    return parts


def template_columns(template: str) -> list[str]:
    """Return the columns that a template names, each once, in order.

    Raises:
        ValueError: see ``parse_template``.
    """
    return list(dict.fromkeys(column for _, column in parse_template(template) if column is not None))


Composed = tuple[str, tuple[int, ...]]
"""A text, and start and end of each column in it, in characters, end to end."""


def template_renderer(template: str) -> Callable[[Row], Composed]:
    """Return a function from a row to its rendered text and the columns' positions in that.

    Values are inserted as they are, so braces in them are safe. Numbers and booleans are written as JSON writes them; a
    missing value is written as nothing, for columns that only some rows fill.

    Args:
        template: see ``parse_template``.

    Returns:
        The function. It raises ``RowProblem`` when every placeholder is empty or one holds a list or an object.
    """
    parts = parse_template(template)

    def render(row: Row) -> Composed:
        chunks: list[str] = []
        edges: list[int] = []
        length = 0
        is_filled = False
        for literal, column in parts:
            chunks.append(literal)
            length += len(literal)
            if column is None:
                continue
            value = row.get(column)
            text = value if isinstance(value, str) else _written(column, value)
            if text and not text.isspace():
                is_filled = True
            chunks.append(text)
            edges += (length, length + len(text))
            length += len(text)
        if not is_filled:
            raise RowProblem("empty", "every column of the template is empty.")
        return "".join(chunks), tuple(edges)

    return render


def normalize_composed(composed: Composed) -> Composed:
    """Bring a composed text to NFC, and the columns' positions with it.

    Args:
        composed: text and positions.
    """
    text, edges = composed
    if text.isascii() or unicodedata.is_normalized("NFC", text):
        return composed
    # An accent that joins a letter across an edge moves the edge by one character.
    moved = tuple(len(unicodedata.normalize("NFC", text[:edge])) for edge in edges)
    return unicodedata.normalize("NFC", text), moved


def _written(column: str, value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise wrong_type(f"column {column!r} holds", value, "text or a number")
