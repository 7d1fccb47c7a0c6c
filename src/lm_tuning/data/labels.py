"""Number the classes of labelled rows, whatever order the rows come in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lm_tuning.data.problems import shorten

MAX_CLASSES = 50_000
"""More different labels than this are taken for free text in the wrong column."""

_MAX_LISTED = 1000
# Longer ones are names made of digits; Python refuses to read very long numbers at all.
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,300}")


def build_label_map(names: Iterable[str]) -> dict[str, int]:
    """Number the names of classes from 0.

    Args:
        names: different names.

    Returns:
        Id by name: in numeric order when all names are whole numbers, else in the order of Unicode code points.
    """
    listed = sorted(names)
    if all(_WHOLE_NUMBER.fullmatch(name) for name in listed):
        listed.sort(key=int)
    return {name: place for place, name in enumerate(listed)}


def trained_names(ids: npt.NDArray[np.int64], names: list[str], *, is_train: npt.NDArray[np.bool_]) -> list[str]:
    """Return the names of the classes that training files have: a model knows no others.

    Args:
        ids: ``(rows,)``: number of the row's class; -1 for none.
        names: what the numbers stand for.
        is_train: ``(rows,)``: rows of the training files.
    """
    counts = np.bincount(ids[is_train & (ids >= 0)], minlength=len(names))
    return [name for name, count in zip(names, counts.tolist(), strict=True) if count]


def count_classes(
    ids: npt.NDArray[np.int64], names: list[str], *, is_train: npt.NDArray[np.bool_], column: str
) -> dict[str, Any]:
    """Count the rows of each class in the training files, for reports.

    Args:
        ids: ``(rows,)``: number of the row's class; -1 for none.
        names: what the numbers stand for.
        is_train: ``(rows,)``: rows of the training files.
        column: where the classes come from.

    Returns:
        ``column``, ``num_classes``, ``num_rows`` by class (the largest 1,000), ``largest`` and ``smallest`` class,
        ``only_held_out``: classes of held-out files that no training row has, and ``similar``: lists of names that
        differ in upper and lower case only.
    """
    counts = np.bincount(ids[is_train & (ids >= 0)], minlength=len(names))
    order = sorted(np.flatnonzero(counts).tolist(), key=lambda place: (-int(counts[place]), names[place]))
    similar: dict[str, list[str]] = {}
    for name in names if len(names) <= MAX_CLASSES else []:
        similar.setdefault(name.casefold(), []).append(name)
    return {
        "column": column,
        "num_classes": len(order),
        "num_rows": {names[place]: int(counts[place]) for place in order[:_MAX_LISTED]},
        "largest": names[order[0]] if order else None,
        "smallest": names[order[-1]] if order else None,
        "only_held_out": sorted(names[place] for place in np.flatnonzero(counts == 0).tolist())[:_MAX_LISTED],
        "similar": [sorted(group) for group in similar.values() if len(group) > 1],
    }


def find_class_problem(classes: Mapping[str, Any]) -> str | None:
    """Say why the classes cannot be told apart by a model, or return None.

    Args:
        classes: what ``count_classes`` returned.
    """
    column, num_classes = classes["column"], classes["num_classes"]
    if num_classes == 1:
        return (
            f"data.columns.label: column {column!r} holds one class only, {shorten(classes['largest'], 100)!r}; "
            "classification needs at least 2 classes."
        )
    if num_classes > MAX_CLASSES:
        return (
            f"data.columns.label: column {column!r} holds {num_classes:,} different labels, more than the "
            f"{MAX_CLASSES:,} that are taken for classes. Does it hold free text? Then use the format 'text' or "
            "'prompt_response'."
        )
    return None
