"""Account for a division: what the splits share, how groups and classes fell, and what a user should be warned of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from lm_tuning.data.checked_rows import CheckedRows
from lm_tuning.data.near_duplicates import NearDuplicates
from lm_tuning.data.problems import shorten
from lm_tuning.data.rows import SPLITS
from lm_tuning.data.splitting import TRAIN
from lm_tuning.wording import count_of

_MAX_LISTED_CLASSES = 1000
_MAX_LISTED_ROWS = 20
_MAX_WARNED_CLASSES = 10
_HELD_OUT = tuple(enumerate(SPLITS))[1:]

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Splits = npt.NDArray[np.int8]


def num_different(ids: Ints) -> int:
    """Count the numbers from 0 that are given without gaps.

    Args:
        ids: any shape.
    """
    return int(ids.max()) + 1 if len(ids) else 0


def count_shared(ids: Ints, splits: Splits) -> dict[str, int]:
    """Count the numbers that occur in two splits, for each pair of splits.

    Args:
        ids: ``(rows,)``: below 0 for none.
        splits: ``(rows,)``: place in ``SPLITS``, below 0 for a row that is left out.
    """
    present = _presence(ids, splits)
    return {pair: int((present[one] & present[other]).sum()) for pair, one, other in _pairs()}


def describe_overlap(contents: Ints, splits: Splits, row_ids: Ints) -> dict[str, Any]:
    """Count the rows on each side that stand in both splits of a pair, and list the first of them.

    Args:
        contents: ``(rows,)``: equal numbers for equal content.
        splits: see ``count_shared``.
        row_ids: ``(rows,)``.

    Returns:
        By pair, for the pairs that share something: by split ``num_rows`` and ``first_row_ids``.
    """
    present = _presence(contents, splits)
    found: dict[str, Any] = {}
    for pair, one, other in _pairs():
        is_shared = present[one] & present[other]
        if is_shared.any():
            sides = ((SPLITS[place], (splits == place) & is_shared[contents]) for place in (one, other))
            found[pair] = {name: _listed(rows, row_ids) for name, rows in sides}
    return found


def measure_leakage(contents: Ints, near: NearDuplicates | None, splits: Splits, row_ids: Ints) -> dict[str, Any]:
    """Measure how much of the held-out rows the model will have seen in training.

    Args:
        contents: ``(rows,)``: equal numbers for equal content.
        near: which contents are almost the same; None when nobody looked.
        splits: see ``count_shared``.
        row_ids: ``(rows,)``.

    Returns:
        ``num_rows`` and ``fraction`` of the held-out rows that stand in train too; and the same for ``validation`` and
        ``test`` by themselves with ``exact`` and ``near`` (None when nobody looked), which do not count a row twice:
        ``num_rows`` and ``first_row_ids``.
    """
    in_train = _presence(contents, splits)[TRAIN]
    leaks = {"exact": in_train[contents]}
    if near is not None:
        unit_in_train = np.zeros(num_different(near.units), dtype=bool)
        unit_in_train[near.units[in_train]] = True
        is_near = unit_in_train[near.units]
        for one, other in (near.cut_links.T, near.cut_links.T[::-1]):
            is_near[one[in_train[other]]] = True
        leaks["near"] = is_near[contents] & ~leaks["exact"]
    facts: dict[str, Any] = {"num_rows": 0, "fraction": 0.0}
    num_held_out = 0
    for place, name in _HELD_OUT:
        rows = splits == place
        sides: dict[str, Any] = {
            kind: _listed(rows & leaks[kind], row_ids) if kind in leaks else None for kind in ("exact", "near")
        }
        count, total = sum(side["num_rows"] for side in sides.values() if side), int(rows.sum())
        facts[name] = {"num_rows": count, "fraction": count / total if total else 0.0, **sides}
        facts["num_rows"] += count
        num_held_out += total
    facts["fraction"] = facts["num_rows"] / num_held_out if num_held_out else 0.0
    return facts


def near_facts(
    near: NearDuplicates,
    units: Ints | None,
    row_ids: Ints,
    *,
    handling: str,
    similarity: float,
    num_dropped: int,
) -> dict[str, Any]:
    """Say how many rows are almost the same as others.

    Args:
        near: what was found.
        units: ``(rows,)``: unit of each row.
        row_ids: ``(rows,)``.
        handling: what is done with them.
        similarity: from which two rows count as near duplicates.
        num_dropped: rows that were left out for it.

    Returns:
        Among them ``num_near_copies``, the different contents that are near duplicates of an earlier one, and
        ``largest``, the rows that hang together in the largest number.
    """
    assert units is not None
    num_contents = len(near.units)
    facts: dict[str, Any] = {
        "handling": handling,
        "similarity": similarity,
        "num_compared": num_contents,
        "num_near_copies": num_contents - num_different(near.units),
        "num_units": int((np.bincount(near.units) > 1).sum()) if num_contents else 0,
        "largest": None,
        "num_dropped": num_dropped,
        "num_cut_links": len(near.cut_links),
        "num_seconds": round(near.num_seconds, 3),
        "rows_per_second": round(num_contents / near.num_seconds) if near.num_seconds else None,
    }
    if facts["num_units"]:
        # Copies of one row are no near duplicates, so the unit with the most different contents is the largest.
        facts["largest"] = _listed(units == np.bincount(near.units).argmax(), row_ids)
    return facts


def group_facts(rows: CheckedRows, group: str | None, splits: Splits) -> dict[str, Any] | None:
    """Say how the groups fell.

    Args:
        rows: what was read.
        group: the column; None for none.
        splits: see ``count_shared``.
    """
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
        "overlap": count_shared(ids, splits),
    }


def class_facts(
    rows: CheckedRows, stratify: str | None, splits: Splits, rare: Mapping[int, int]
) -> dict[str, Any] | None:
    """Say how the classes fell, the largest first.

    Args:
        rows: what was read.
        stratify: the column; None for none.
        splits: see ``count_shared``.
        rare: number of rows by class, for classes that were too small to be divided.
    """
    if stratify is None:
        return None
    ids, names = rows.values[stratify], rows.names[stratify]
    table = np.stack(
        [np.bincount(ids[(splits == place) & (ids >= 0)], minlength=len(names)) for place in range(len(SPLITS))]
    )
    listed = np.argsort(-table.sum(axis=0), kind="stable")[:_MAX_LISTED_CLASSES].tolist()
    return {
        "column": stratify,
        "num_classes": len(names),
        "rows_by_split": {names[place]: dict(zip(SPLITS, table[:, place].tolist(), strict=True)) for place in listed},
        "num_only_in_train": len(rare),
        "only_in_train": {names[place]: rare[place] for place in list(rare)[:_MAX_LISTED_CLASSES]},
    }


def untrained_facts(rows: CheckedRows, label: str | None, splits: Splits, row_ids: Ints) -> dict[str, Any] | None:
    """Find the classes that training files have and the training split has not: the division held all their rows out.

    Args:
        rows: what was read.
        label: the column of the class; None where rows have none.
        splits: see ``count_shared``.
        row_ids: ``(rows,)``.

    Returns:
        ``column``, ``num_classes``, ``can_stratify`` (whether any class has a row for every split), and of the held-out
        rows of these classes ``num_rows``, ``first_row_ids`` and ``num_rows_by_class`` (the largest 1,000); None where
        there is no such class.
    """
    if label is None:
        return None
    ids, names = rows.values[label], rows.names[label]
    num_classes = len(names)
    has_class = ids >= 0
    from_train_file = np.array([file["split"] == SPLITS[TRAIN] for file in rows.sources], dtype=bool)[rows.files]
    in_files = np.bincount(ids[has_class & from_train_file], minlength=num_classes)
    in_train = np.bincount(ids[has_class & (splits == TRAIN)], minlength=num_classes) > 0
    held_out = has_class & (splits > TRAIN)
    counts = np.bincount(ids[held_out], minlength=num_classes)
    untrained = (in_files > 0) & ~in_train & (counts > 0)
    if not untrained.any():
        return None
    listed = np.argsort(-(counts * untrained), kind="stable")[: min(int(untrained.sum()), _MAX_LISTED_CLASSES)]
    held_out[held_out] = untrained[ids[held_out]]
    return {
        "column": label,
        "num_classes": int(untrained.sum()),
        "can_stratify": bool(in_files.max() >= len(SPLITS)),
        "num_rows_by_class": {names[place]: int(counts[place]) for place in listed.tolist()},
        **_listed(held_out, row_ids),
    }


def describe_warnings(facts: Mapping[str, Any], splits: Splits) -> list[str]:
    """Return sentences about what a user would not expect.

    Args:
        facts: of ``divide_rows``.
        splits: see ``count_shared``.
    """
    return [
        *_size_warnings(facts, splits),
        *_untrained_warnings(facts),
        *_copy_warnings(facts),
        *_near_warnings(facts),
        *_group_warnings(facts["groups"]),
    ]


def _size_warnings(facts: Mapping[str, Any], splits: Splits) -> Iterator[str]:
    got = {name: int((splits == place).sum()) for place, name in enumerate(SPLITS)}
    if got != facts["wanted_rows"]:
        short = ", ".join(
            f"{name} {count_of(got[name], 'row')} instead of {facts['wanted_rows'][name]:,}" for name in SPLITS
        )
        yield f"What stays together could not be divided closer than this: {short}."
    if facts["classes"] and facts["classes"]["only_in_train"]:
        num_rare, rare = facts["classes"]["num_only_in_train"], facts["classes"]["only_in_train"]
        listed = ", ".join(f"{shorten(name)!r} ({count_of(count, 'row')})" for name, count in list(rare.items())[:20])
        more = f" and {num_rare - 20:,} more" if num_rare > 20 else ""
        parts = "fold" if facts["folds"] else "split"
        yield f"Too few rows to be in every {parts}, so only in train: {listed}{more}."


def _untrained_warnings(facts: Mapping[str, Any]) -> Iterator[str]:
    untrained = facts["untrained_classes"]
    if not untrained:
        return
    column, num_classes, num_rows = untrained["column"], untrained["num_classes"], untrained["num_rows"]
    listed = ", ".join(repr(shorten(name)) for name in list(untrained["num_rows_by_class"])[:_MAX_WARNED_CLASSES])
    more = f" and {num_classes - _MAX_WARNED_CLASSES:,} more" if num_classes > _MAX_WARNED_CLASSES else ""
    remedy = "give these classes more rows"
    if not facts["classes"] or facts["classes"]["column"] != column:
        stratify = f"set split.stratify: {column}"
        remedy = (
            f"{stratify}, which keeps a class of few rows in train, or {remedy}"
            if untrained["can_stratify"]
            else f"{remedy}, {len(SPLITS)} or more, and {stratify}"
        )
    yield (
        f"Held-out rows of classes that no training row has: {num_rows:,}, of "
        f"{count_of(num_classes, 'class')} in column {column!r} ({listed}{more}). These classes are never learned, so "
        f"no answer to these rows can be right. Remedy: {remedy}."
    )


def _copy_warnings(facts: Mapping[str, Any]) -> Iterator[str]:
    conflicts = facts["duplicates"]["num_label_conflicts"]
    if conflicts:
        yield f"Rows that repeat a text under another label: {conflicts:,}."
    for pair, count in facts["overlap"].items():
        if count:
            first, second = pair.split("_")
            sides = facts["overlap_rows"][pair]
            ways = f"drop removes them from {first}"
            if facts["duplicates"]["handling"] == "ignore":
                ways += ", keep_together puts the copies of one file on one side"
            yield (
                f"{first} and {second} share {count:,} different contents (rows of {first}: "
                f"{sides[first]['num_rows']:,}, of {second}: {sides[second]['num_rows']:,}), so what is measured on "
                f"{second} looks too good. split.duplicates: {ways}."
            )


def _near_warnings(facts: Mapping[str, Any]) -> Iterator[str]:
    near = facts["near_duplicates"]
    if not near:
        return
    if near["num_cut_links"]:
        yield (
            "Links between near duplicates that were not followed, since they join rows that are not alike to a long "
            f"chain: {near['num_cut_links']:,}. A higher split.near_duplicate_similarity finds fewer."
        )
    for name in SPLITS[1:]:
        leak = facts["leakage"][name]["near"]["num_rows"]
        if leak:
            ways = "drop removes what is like them from train"
            if near["handling"] == "report":
                ways += ", keep_together puts near duplicates of one file on one side"
            yield (
                f"Rows of {name} with a near duplicate in train: {leak:,}, so what is measured on {name} looks too "
                f"good. split.near_duplicates: {ways}."
            )


def _group_warnings(groups: Mapping[str, Any] | None) -> Iterator[str]:
    if not groups:
        return
    for pair, count in groups["overlap"].items():
        if count:
            first, second = pair.split("_")
            yield f"{first} and {second} share {count_of(count, 'group')} of {groups['column']!r}."


def _pairs() -> Iterator[tuple[str, int, int]]:
    for one, other in combinations(range(len(SPLITS)), 2):
        yield f"{SPLITS[one]}_{SPLITS[other]}", one, other


def _presence(ids: Ints, splits: Splits) -> Mask:
    """Say which numbers occur in which split, ``(splits, numbers)``."""
    present = np.zeros((len(SPLITS), num_different(ids)), dtype=bool)
    for place in range(len(SPLITS)):
        present[place, ids[(splits == place) & (ids >= 0)]] = True
    return present


def _listed(rows: Mask, row_ids: Ints) -> dict[str, Any]:
    """Count rows and list the first of them."""
    ids = row_ids[rows]
    first = np.sort(ids if len(ids) <= _MAX_LISTED_ROWS else np.partition(ids, _MAX_LISTED_ROWS)[:_MAX_LISTED_ROWS])
    return {"num_rows": len(ids), "first_row_ids": first.tolist()}
