"""Collect what is wrong with rows and report it together, by row number."""

from __future__ import annotations

from typing import Any

MAX_REPORTED = 20
_MAX_SHOWN_CHARACTERS = 40


class RowProblem(ValueError):
    """Say why one row cannot be used.

    Attributes:
        kind: short name that counts go by, such as ``wrong_type``.
        reason: the rest of the sentence that begins with file and row number.
    """

    def __init__(self, kind: str, reason: str) -> None:
        """Keep kind and reason.

        Args:
            kind: short name that counts go by.
            reason: the rest of the sentence that begins with file and row number.
        """
        self.kind = kind
        self.reason = reason
        super().__init__(reason)


def describe_value(value: Any) -> str:
    """Name the type of a value as JSON calls it, with the value if it is short.

    Args:
        value: what a reader gave.

    Returns:
        For example ``a number (42)``, ``null``, ``a list``.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"a boolean ({'true' if value else 'false'})"
    if isinstance(value, int | float):
        return f"a number ({shorten(repr(value))})"
    for kind, name in ((str, "text"), (list, "a list"), (dict, "an object"), (bytes, "binary data")):
        if isinstance(value, kind):
            return name
    return f"a value of type {type(value).__name__}"


def shorten(text: str, limit: int = _MAX_SHOWN_CHARACTERS) -> str:
    """Cut a text for a message.

    Args:
        text: what to show.
        limit: characters that stay.
    """
    return text if len(text) <= limit else f"{text[:limit]}…"


def list_columns(columns: list[str]) -> str:
    """Write column names for a message: at most 30 of them, each shortened."""
    shown = ", ".join(repr(shorten(column)) for column in columns[:30])
    return f"{shown} and {len(columns) - 30} more" if len(columns) > 30 else shown


def too_long(num_bytes: int, max_row_bytes: int) -> RowProblem:
    """Report a row of too many bytes.

    Args:
        num_bytes: its size.
        max_row_bytes: the limit.
    """
    return RowProblem(
        "too_long",
        f"is {num_bytes:,} bytes long, and data.max_row_bytes lets {max_row_bytes:,} pass. Cut its text into several "
        "rows, or raise the limit.",
    )
