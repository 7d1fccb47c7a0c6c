"""Number the classes of labelled rows, whatever order the rows come in."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches

import numpy as np

from lm_tuning.data.arrays import Ints, Mask
from lm_tuning.data.check.findings import RowPositions
from lm_tuning.data.records import Cell, ClassCounts, LabelMap, LabelTypeCounts
from lm_tuning.errors import UserError
from lm_tuning.wording import count_of, name_first, shorten

MAX_CLASSES = 50_000
"""More different labels than this are taken for free text in the wrong column."""

_MAX_LISTED = 1000
_MAX_NAMED = 20
# Longer ones are names made of digits; Python refuses to read very long numbers at all.
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,300}")


_TYPE_NAMES: Mapping[type, str] = {str: "text", int: "integer", bool: "boolean"}
# Names of each type that are remembered to find those of several types.
_MAX_NAMES_OF_TYPE = 1000


class LabelTypes:
    """Count labels by the type that they have in the file: all become text, so ``1`` and ``"1"`` are one class."""

    def __init__(self) -> None:
        """Start without labels."""
        self._counts: Counter[type] = Counter()
        self._names: defaultdict[type, set[str | int]] = defaultdict(set)

    def add(self, value: Cell) -> None:
        """Count one label.

        Args:
            value: as the file has it: text, an integer or a boolean.
        """
        assert isinstance(value, str | int), "rows with other labels are bad rows"
        kind = value.__class__
        self._counts[kind] += 1
        if len(self._names[kind]) < _MAX_NAMES_OF_TYPE:
            self._names[kind].add(value)

    def describe(self) -> LabelTypeCounts:
        """Return ``types``: rows by type, the most frequent first; ``joined``: names that several types have."""
        # Each type's names once, so that more than one means more than one type.
        times = Counter(name for values in self._names.values() for name in set(map(_name_of, values)))
        return {
            "types": {_TYPE_NAMES[kind]: count for kind, count in self._counts.most_common()},
            "joined": sorted(name for name, count in times.items() if count > 1),
        }


def _name_of(value: str | int) -> str:
    """Return the class that a label stands for, see ``value_reader``."""
    return str(value).lower() if isinstance(value, bool) else str(value).strip()


def build_label_map(names: Iterable[str]) -> LabelMap:
    """Number the names of classes from 0.

    Args:
        names: different names.

    Returns:
        Id by name: in numeric order when all names are integers, else in the order of Unicode code points.
    """
    listed = sorted(names)
    # Classes 0 to 279 keep their numbers as ids, where text would put 10 before 2.
    if all(_WHOLE_NUMBER.fullmatch(name) for name in listed):
        listed.sort(key=int)
    return {name: index for index, name in enumerate(listed)}


def count_classes(ids: Ints, names: list[str], *, is_train: Mask, column: str) -> ClassCounts:
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
    # (classes,): rows of the training files
    counts = np.bincount(ids[is_train & (ids >= 0)], minlength=len(names))
    order = sorted(np.flatnonzero(counts).tolist(), key=lambda index: (-int(counts[index]), names[index]))
    similar: dict[str, list[str]] = {}
    # Beyond it the column holds texts, which are refused anyway.
    for name in names if len(names) <= MAX_CLASSES else []:
        similar.setdefault(name.casefold(), []).append(name)
    return {
        "column": column,
        "num_classes": len(order),
        "num_rows": {names[index]: int(counts[index]) for index in order[:_MAX_LISTED]},
        "largest": names[order[0]] if order else None,
        "smallest": names[order[-1]] if order else None,
        "only_held_out": sorted(names[index] for index in np.flatnonzero(counts == 0).tolist())[:_MAX_LISTED],
        "similar": [sorted(group) for group in similar.values() if len(group) > 1],
    }


def find_class_problem(classes: ClassCounts, *, num_skipped: int = 0, max_rows: int | None = None) -> str | None:
    """Describe why the classes cannot be told apart by a model, or return None.

    Args:
        classes: what ``count_classes`` returned.
        num_skipped: rows of the training files that cannot be used.
        max_rows: ``data.max_rows``: rows that were read of each file; ``None`` for all.
    """
    column, num_classes, only = classes["column"], classes["num_classes"], classes["largest"]
    if num_classes == 1 and only is not None:
        num_rows = sum(classes["num_rows"].values())
        reasons = ""
        if num_skipped:
            reasons += f" {count_of(num_skipped, 'bad row')} of the training files cannot be used and do not count."
        if max_rows is not None:
            reasons += f" {_describe_max_rows(max_rows)}"
        return (
            f"data.columns.label: column {column!r} holds one class only in the training rows, "
            f"{shorten(only, 100)!r} ({count_of(num_rows, 'row')}); classification needs at least 2 "
            f"classes.{reasons}"
        )
    if num_classes > MAX_CLASSES:
        return (
            f"data.columns.label: column {column!r} holds {num_classes:,} different labels, more than the "
            f"{MAX_CLASSES:,} that are taken for classes. Does it hold free text? Then use the format 'text' or "
            "'prompt_response'."
        )
    return None


def describe_unknown_classes(
    num_rows: Mapping[str, int],
    find_rows: Callable[[str], tuple[int, Mapping[str, int]]],
    positions: RowPositions,
    *,
    max_rows: int | None = None,
) -> list[str]:
    """Describe which classes of held-out rows a classifier cannot know, since no training row has them.

    Args:
        num_rows: held-out rows by class.
        find_rows: returns the id of the first row of a class, and its rows by split.
        positions: where rows stand in their files.
        max_rows: ``data.max_rows``: rows that were read of each file; ``None`` for all.

    Returns:
        A line for each of these classes (up to 20, those with most rows) with its number of rows and the first of them,
        then how to fix it; nothing without such a class.
    """
    if not num_rows:
        return []
    order = sorted(num_rows, key=lambda name: -num_rows[name])
    problems = []
    for name in order[:_MAX_NAMED]:
        first, by_split = find_rows(name)
        file, row = positions.find(first)
        counts = " and ".join(f"{count_of(count, 'row')} of {split}" for split, count in by_split.items())
        where = "at" if num_rows[name] == 1 else "the first at"
        problems.append(f"No training row has the class {shorten(name, 100)!r} of {counts}, {where} {file}, row {row}.")
    rest = [num_rows[name] for name in order[_MAX_NAMED:]]
    if rest:
        more = count_of(len(rest), "more such class", "more such classes")
        problems.append(f"{more} with {count_of(sum(rest), 'row')}.")
    if max_rows is not None:
        problems.append(_describe_max_rows(max_rows))
    problems.append(
        "A model knows the classes of its training rows only. Give these classes training rows, correct their names, "
        "or leave these rows out."
    )
    return problems


def _describe_max_rows(max_rows: int) -> str:
    return (
        f"data.max_rows: {max_rows} took only the first {count_of(max_rows, 'row')} of each file, and files that are "
        "sorted by class lose classes that way: leave it out, or shuffle the files. For a quick look train.max_steps "
        "alone is enough."
    )


def refuse_unknown_weights(
    class_weights: str | Mapping[str, float] | None, label_map: Mapping[str, int] | None
) -> None:
    """Refuse weights of classes that no training row has: a mistyped name would weigh nothing.

    Args:
        class_weights: ``train.class_weights``: a weight by class name, a word for all classes, or ``None``.
        label_map: id by name of the training rows' classes; ``None`` where rows have none, which is refused elsewhere.

    Raises:
        UserError: a line for each unknown name with the nearest one there is, then the classes (up to 20).
    """
    if label_map is None or class_weights is None or isinstance(class_weights, str):
        return
    problems = [
        f"train.class_weights.{name} = {weight:g}: no training row has the class {name!r}.{_suggest(name, label_map)}"
        for name, weight in class_weights.items()
        if name not in label_map
    ]
    if problems:
        listed = name_first([repr(shorten(name, 100)) for name in label_map], _MAX_NAMED)
        raise UserError([*problems, f"The classes are {listed}; those without a weight count as 1."])


def _suggest(name: str, label_map: Mapping[str, int]) -> str:
    """Name the class that was most likely meant; a slip in upper and lower case comes nearest."""
    near = [known for known in label_map if known.casefold() == name.casefold()]
    near = near or get_close_matches(name, label_map, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
