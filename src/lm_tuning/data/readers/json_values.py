"""Parse JSON without losing anything in silence: no NaN, no key that stands twice in one object, no rounded integer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NoReturn

import orjson

from lm_tuning.data.check.problems import RowProblem, shorten

_UNSURE = -1
_SIMPLE = frozenset({str, int, bool, type(None)})
_GAPS = (" :", "\t:", "\n:", "\r:")


def parse_line(line: bytes) -> Any:
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
        row = orjson.loads(line)
    except ValueError:
        return parse_exactly(line.decode())
    if row.__class__ is dict:
        num_keys = _count_keys(row)
        # Every key has its colon. Where there are no more colons than keys in the result, each key was there once.
        if line.count(b":") == num_keys:
            return row
        # Texts hold colons too. The same follows when only those behind a quote are counted and none stands off.
        if (
            line.count(b'":') == num_keys
            and b" :" not in line
            and (b"\t" not in line or b"\t:" not in line)
            and (b"\r" not in line or b"\r:" not in line)
        ):
            return row
    return parse_exactly(line.decode())


def parse_exactly(text: str) -> Any:
    """Parse one JSON value, slowly; see ``parse_line``."""
    return _EXACT.decode(text)


def has_each_key_once(value: dict[str, Any], text: str, start: int, end: int) -> bool:
    """Say whether a parsed value certainly has no object that named a key twice; False if that is not certain.

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


def explain_error(error: Exception) -> str:
    """Say in a few words why a text is not JSON.

    Args:
        error: what a parser raised.
    """
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos + 1}"
    return shorten(str(error), 80)


def constant_problem(name: str) -> RowProblem:
    """Report a number that JSON does not have.

    Args:
        name: ``NaN``, ``Infinity`` or ``-Infinity``.
    """
    return RowProblem("not_json", f"holds {name}, which is no number of JSON; write null or a text.")


def _count_keys(row: dict[str, Any]) -> int:
    """Count the keys of all objects in a row; ``_UNSURE`` where a float may be an integer that was rounded."""
    values = row.values()
    if _SIMPLE.issuperset(map(type, values)):
        return len(row)
    inner = _count_keys_inside(values)
    return _UNSURE if inner == _UNSURE else len(row) + inner


def _count_keys_inside(values: Iterable[Any]) -> int:
    total = 0
    for value in values:
        kind = value.__class__
        if kind is float:
            return _UNSURE
        if kind is dict:
            inner = _count_keys(value)
        elif kind is list:
            inner = _count_keys_inside(value)
        else:
            continue
        if inner == _UNSURE:
            return _UNSURE
        total += inner
    return total


def _refuse_constant(name: str) -> NoReturn:
    raise constant_problem(name)


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) == len(pairs):
        return row
    seen: set[str] = set()
    repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
    raise RowProblem("repeated_name", f"names {shorten(repeated)!r} twice in one object; only one value can count.")


_EXACT = json.JSONDecoder(object_pairs_hook=_object_of_pairs, parse_constant=_refuse_constant)
