"""Decide the split of every row from its content, group and class, and account for what was decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from lm_tuning.data.collecting import CollectedRows
from lm_tuning.data.duplicates import is_later_copy, join_units, number_by_appearance, number_equal
from lm_tuning.data.problems import shorten
from lm_tuning.data.rows import SPLITS
from lm_tuning.data.splitting import TRAIN, assign_splits, split_sizes

LEFT_OUT = -1
_MAX_LISTED_CLASSES = 1000

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Division:
    """Where each row goes, and what there is to say about it.

    Attributes:
        splits: ``(rows,)``: place in ``SPLITS``, ``LEFT_OUT`` for a dropped copy.
        facts: for the summary: ``wanted_rows``, ``duplicates``, ``overlap``, ``groups`` and ``classes``.
        warnings: sentences for the log.
    """

    splits: npt.NDArray[np.int8]
    facts: dict[str, Any]
    warnings: list[str]


def divide_rows(
    rows: CollectedRows,
    *,
    validation: float | int,
    test: float | int,
    group: str | None,
    stratify: str | None,
    duplicates: str,
    seed: int,
) -> Division:
    """Divide the rows of the training file, beside those of files that are a split by themselves.

    Args:
        rows: what was read.
        validation: see ``split_sizes``; without effect when validation has a file of its own.
        test: the same.
        group: column whose equal values stay together; None for none.
        stratify: column whose classes are divided alike; None for none.
        duplicates: ``keep_together`` puts all copies of a content on one side; ``drop`` keeps the first copy, and one
            in a held-out file before one in the training file; ``ignore`` looks away.
        seed: fixes the division.

    Returns:
        The split of each row. Rows of a held-out file never move.

    Raises:
        UserError: too few rows or groups for what was asked.
    """
    file_splits = np.array([SPLITS.index(name) for name in rows.sources], dtype=np.int8)[rows.files]
    contents = number_equal(rows.contents)
    wholes = number_equal(rows.wholes)
    dropped = np.zeros(len(contents), dtype=bool)
    if duplicates == "drop":
        dropped = is_later_copy(wholes, np.int8(len(SPLITS)) - file_splits)
    pool = ~dropped & (file_splits == TRAIN)
    groups = rows.values[group] if group else None
    classes = rows.values[stratify][pool] if stratify else None

    asked = [0 if name in rows.sources else size for name, size in (("validation", validation), ("test", test))]
    sizes = split_sizes(int(pool.sum()), validation=asked[0], test=asked[1])
    units = _units(contents[pool], None if groups is None else groups[pool], duplicates)
    kind = f"groups of {group!r}" if group else "different rows"
    chosen = assign_splits(units, sizes=sizes, seed=seed, classes=classes, unit_name=kind)

    splits = np.where(dropped, np.int8(LEFT_OUT), file_splits)
    splits[pool] = chosen.splits
    wanted = {name: int((splits == place).sum()) for place, name in enumerate(SPLITS)}
    wanted |= {name: size for name, size in zip(SPLITS, sizes, strict=True) if name not in list(rows.sources)[1:]}
    facts: dict[str, Any] = {
        "wanted_rows": wanted,
        "duplicates": {
            "handling": duplicates,
            "num_copies": len(contents) - _num_different(contents),
            "num_dropped": int(dropped.sum()),
            "num_label_conflicts": _num_different(wholes) - _num_different(contents),
        },
        "overlap": _shared(contents, splits),
        "groups": _group_facts(rows, group, splits),
        "classes": _class_facts(rows, stratify, splits, chosen.rare_classes),
    }
    return Division(splits, facts, _warnings(facts, splits))


def _units(contents: Ints, groups: Ints | None, duplicates: str) -> Ints:
    """Number the rows that must stay together."""
    if groups is not None and duplicates != "ignore":
        return join_units(contents, number_by_appearance(groups))
    if groups is not None:
        return number_by_appearance(groups)
    if duplicates != "ignore":
        return number_by_appearance(contents)
    return np.arange(len(contents), dtype=np.int64)


def _num_different(ids: Ints) -> int:
    return int(ids.max()) + 1 if len(ids) else 0


def _shared(ids: Ints, splits: npt.NDArray[np.int8]) -> dict[str, int]:
    """Count the numbers that occur in two splits, for each pair of splits."""
    present = np.zeros((len(SPLITS), _num_different(ids)), dtype=bool)
    for place in range(len(SPLITS)):
        present[place, ids[(splits == place) & (ids >= 0)]] = True
    pairs = combinations(range(len(SPLITS)), 2)
    return {f"{SPLITS[one]}_{SPLITS[other]}": int((present[one] & present[other]).sum()) for one, other in pairs}


def _group_facts(rows: CollectedRows, group: str | None, splits: npt.NDArray[np.int8]) -> dict[str, Any] | None:
    if group is None:
        return None
    ids = rows.values[group]
    counts = np.bincount(ids[ids >= 0])
    largest = int(counts.argmax())
    present = {name: len(np.unique(ids[(splits == place) & (ids >= 0)])) for place, name in enumerate(SPLITS)}
    return {
        "column": group,
        "num_groups": len(counts),
        "largest": {"value": shorten(rows.names[group][largest], 100), "num_rows": int(counts[largest])},
        "num_groups_by_split": present,
        "overlap": _shared(ids, splits),
    }


def _class_facts(
    rows: CollectedRows, stratify: str | None, splits: npt.NDArray[np.int8], rare: Mapping[int, int]
) -> dict[str, Any] | None:
    if stratify is None:
        return None
    ids, names = rows.values[stratify], rows.names[stratify]
    table = np.stack(
        [np.bincount(ids[(splits == place) & (ids >= 0)], minlength=len(names)) for place in range(len(SPLITS))]
    )
    listed = np.argsort(-table.sum(axis=0), kind="stable")[:_MAX_LISTED_CLASSES]
    return {
        "column": stratify,
        "num_classes": len(names),
        "rows_by_split": {names[place]: dict(zip(SPLITS, table[:, place].tolist(), strict=True)) for place in listed},
        "only_in_train": {names[place]: count for place, count in rare.items()},
    }


def _warnings(facts: Mapping[str, Any], splits: npt.NDArray[np.int8]) -> list[str]:
    warnings = []
    got = {name: int((splits == place).sum()) for place, name in enumerate(SPLITS)}
    if got != facts["wanted_rows"]:
        short = ", ".join(f"{name} {got[name]:,} rows instead of {facts['wanted_rows'][name]:,}" for name in SPLITS)
        warnings.append(f"What stays together could not be divided closer than this: {short}.")
    if facts["classes"] and facts["classes"]["only_in_train"]:
        rare = facts["classes"]["only_in_train"]
        listed = ", ".join(f"{shorten(name)!r} ({count} rows)" for name, count in list(rare.items())[:20])
        more = f" and {len(rare) - 20} more" if len(rare) > 20 else ""
        warnings.append(f"Too few rows to be in every split, so only in train: {listed}{more}.")
    conflicts = facts["duplicates"]["num_label_conflicts"]
    if conflicts:
        warnings.append(f"{conflicts:,} rows repeat a text under another label.")
    for pair, count in facts["overlap"].items():
        if count:
            first, second = pair.split("_")
            ways = f"drop removes them from {first}"
            if facts["duplicates"]["handling"] == "ignore":
                ways += ", keep_together puts the copies of one file on one side"
            warnings.append(
                f"{first} and {second} share {count:,} different contents, so what is measured on {second} looks too "
                f"good. split.duplicates: {ways}."
            )
    for pair, count in facts["groups"]["overlap"].items() if facts["groups"] else ():
        if count:
            first, second = pair.split("_")
            warnings.append(f"{first} and {second} share {count:,} groups of {facts['groups']['column']!r}.")
    return warnings
