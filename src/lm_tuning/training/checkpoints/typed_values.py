"""Compare what was read from JSON with the record that declares it, and name every key that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import NoneType
from typing import Any, Literal, NotRequired, get_args, get_origin, get_type_hints, is_typeddict

# Types by key. A key that ends with * has token or row there: whichever the task's losses are per.
Hints = Mapping[str, object]

_UNITS = ("token", "row")
_MAX_SHOWN = 60

_KINDS: dict[object, tuple[str, Callable[[object], bool]]] = {
    str: ("a string", lambda value: isinstance(value, str)),
    Literal: ("a string", lambda value: isinstance(value, str)),
    bool: ("a boolean", lambda value: isinstance(value, bool)),
    # In Python a boolean is an integer; in JSON it is not.
    int: ("an integer", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    float: ("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool)),
    dict: ("a mapping", lambda value: isinstance(value, dict)),
    list: ("a list", lambda value: isinstance(value, list)),
}


def hints_of(record: Any) -> Hints:
    """Return the types of a ``TypedDict``'s keys; those that need not be there are marked as such."""
    hints = get_type_hints(record, include_extras=True)
    # Those of a class with total=False carry no mark of their own. The reverse holds too: a mark in an annotation that
    # is kept as text (from __future__ import annotations) is not among the optional keys.
    optional: frozenset[str] = getattr(record, "__optional_keys__", frozenset())
    return hints | {name: NotRequired[hints[name]] for name in optional}


def find_misfits(values: object, hints: Hints, prefix: str = "") -> Iterator[str]:
    """Name the keys that are missing or hold another type than they take; other keys are let pass.

    Args:
        values: as read.
        hints: what they should be.
        prefix: stands before the names of keys, with a dot at its end.
    """
    if not isinstance(values, dict):
        yield f"{prefix.removesuffix('.')} = {show(values)}, and it takes a mapping."
        return
    for key, hint in hints.items():
        names = [key[:-1] + unit for unit in _UNITS] if key.endswith("*") else [key]
        is_optional = get_origin(hint) is NotRequired
        name = next((name for name in names if name in values), None)
        if name is not None:
            yield from _find_in(values[name], get_args(hint)[0] if is_optional else hint, f"{prefix}{name}")
        elif not is_optional:
            yield f"{prefix}{' or '.join(names)} is missing."


def _find_in(value: object, hint: object, name: str) -> Iterator[str]:
    """Name a value that is none of its type, and what does not fit inside of it."""
    if NoneType in get_args(hint):
        choices = [each for each in get_args(hint) if each is not NoneType]
        if value is None or len(choices) > 1:  # several types mean any that JSON has
            return
        [hint] = choices
    if is_typeddict(hint):
        yield from find_misfits(value, hints_of(hint), f"{name}.")
        return
    kind = get_origin(hint) or hint
    takes, fits = _KINDS[kind]
    if not fits(value):
        yield f"{name} = {show(value)}, and it takes {takes}."
    elif isinstance(value, list) and get_args(hint):
        for index, inner in enumerate(value):
            yield from _find_in(inner, get_args(hint)[0], f"{name}[{index}]")
    elif isinstance(value, dict) and get_args(hint):
        for key, inner in value.items():
            yield from _find_in(inner, get_args(hint)[-1], f"{name}.{key}")


def show(value: object) -> str:
    """Write a value as far as a message has room for it."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
