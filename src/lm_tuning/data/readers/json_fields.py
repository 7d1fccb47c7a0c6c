"""Find the list of rows inside the object that a JSON file holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from lm_tuning.data.check.problems import RowProblem, list_columns, shorten
from lm_tuning.data.format.column_paths import Step, format_path
from lm_tuning.data.readers.json_window import JsonWindow, found

_MAX_LISTS = 10
_MAX_DEPTH = 3
_KINDS = {"[": "a list", "{": "an object", '"': "text", "t": "a boolean", "f": "a boolean", "n": "null"}


class FieldMissing(LookupError):
    """Say why no list is at the path of ``data.field``.

    Attributes:
        lists: paths of the lists that were passed by on the way.
    """

    def __init__(self, reason: str, lists: Sequence[str] = ()) -> None:
        """Keep both.

        Args:
            reason: a part of a sentence.
            lists: see the class.
        """
        self.lists = list(lists)
        super().__init__(reason)


class FieldDamaged(ValueError):
    """Say what is wrong with the object that encloses the list of ``data.field``."""


def open_field(window: JsonWindow, steps: tuple[Step, ...], behind: tuple[Step, ...] = ()) -> Iterator[None]:
    """Move to the list at a path, yield once there, and read on to the end of what encloses it.

    Args:
        window: at the beginning of a JSON value; whoever iterates moves it behind the list.
        steps: the path from there.
        behind: the steps that led there.

    Raises:
        FieldMissing: no list is there.
        FieldDamaged: the file is no JSON up to the end of the object, or an object on the way names the key twice.
    """
    mark = window.peek()
    if not steps:
        if mark != "[":
            lists = [format_path((*behind, *inner)) for inner in _lists_here(window, 0)] if mark == "{" else []
            raise FieldMissing(f"{format_path(behind)!r} holds {_kind(mark)}, where a list of rows is wanted", lists)
        yield
        return
    where = repr(format_path(behind)) if behind else "the file"
    if mark == "{":
        yield from _open_key(window, steps, behind, where)
    elif mark == "[" and str(steps[0]).isdecimal():
        yield from _open_element(window, steps, behind, where)
    elif mark == "[" and isinstance(steps[0], int):
        raise FieldMissing(f"{where} is read from its beginning, so index {steps[0]} cannot count from its end")
    else:
        wanted = "a list" if isinstance(steps[0], int) else "an object"
        raise FieldMissing(f"{where} holds {_kind(mark)}, where {wanted} is wanted")


def find_lists(window: JsonWindow) -> list[str]:
    """Return the paths of the first lists in an object, down to the third level, for a suggestion.

    Args:
        window: at the beginning of a JSON value, of which much is read.
    """
    try:
        return [format_path(steps) for steps in _lists_here(window, 0)]
    except FieldDamaged:  # a damaged file has no lists to suggest
        return []


def lists_in(row: dict[str, Any]) -> list[str]:
    """Return the paths of the lists of objects or lists in a parsed object, down to the third level.

    Args:
        row: the object.
    """
    found_lists: list[str] = []

    def collect(value: Any, steps: tuple[Step, ...]) -> None:
        if isinstance(value, list) and steps and value and isinstance(value[0], list | dict):
            found_lists.append(format_path(steps))
        elif isinstance(value, dict) and len(steps) < _MAX_DEPTH:
            for key, inner in value.items():
                collect(inner, (*steps, key))

    collect(row, ())
    return found_lists[:_MAX_LISTS]


def describe_lists(names: Sequence[str]) -> str:
    """Say which lists a file has and how to read one, in sentences that follow others; empty without lists.

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
    for key in _keys(window):
        if key == str(steps[0]):
            if is_found:
                raise FieldDamaged(f"{where} names {shorten(key)!r} twice in one object; only one value can count")
            is_found = True
            yield from open_field(window, steps[1:], (*behind, steps[0]))
            continue
        names.append(key)
        if window.peek() == "[" and len(lists) < _MAX_LISTS:
            lists.append(format_path((*behind, key)))
        window.skip()
    if not is_found:
        keys = f"its keys: {list_columns(names)}" if names else "it is empty"
        raise FieldMissing(f"{where} has no key {str(steps[0])!r} ({keys})", lists)


def _open_element(window: JsonWindow, steps: tuple[Step, ...], behind: tuple[Step, ...], where: str) -> Iterator[None]:
    wanted = int(steps[0])
    window.take()
    number = 0
    while window.peek() not in ("]", ""):
        if number == wanted:
            yield from open_field(window, steps[1:], (*behind, steps[0]))
        else:
            window.skip()
        number += 1
        if window.peek() == ",":
            window.take()
        elif window.peek() != "]":
            break
    _close(window, "]")
    if number <= wanted:
        raise FieldMissing(f"{where} has {number:,} element{'s' * (number != 1)} and none at index {wanted}")


def _lists_here(window: JsonWindow, depth: int) -> Iterator[tuple[Step, ...]]:
    if window.peek() != "{":
        window.skip()
        return
    num_lists = 0
    for key in _keys(window):
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


def _keys(window: JsonWindow) -> Iterator[str]:
    """Yield the keys of the object that begins here; whoever iterates moves the window behind each value."""
    window.take()
    while window.peek() == '"':
        try:
            key = window.decode()
        except ValueError as error:
            raise FieldDamaged(f"a key is not JSON ({_detail(error)})") from error
        if isinstance(key, RowProblem):
            raise FieldDamaged(f"a key {key.reason.rstrip('.')}")
        if window.take() != ":":
            raise FieldDamaged(f"no colon stands behind the key {shorten(key)!r}")
        yield key
        if window.peek() != ",":
            break
        window.take()
    _close(window, "}")


def _close(window: JsonWindow, mark: str) -> None:
    if window.peek() != mark:
        raise FieldDamaged(f"{found(window)}, where a comma or {mark!r} is wanted")
    window.take()


def _kind(mark: str) -> str:
    return _KINDS.get(mark, "a number" if mark else "nothing")


def _detail(error: ValueError) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)
