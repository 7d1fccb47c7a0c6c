"""Account for a division: how much of the held-out rows leaks, how groups fell, and what a user is warned of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lm_tuning.data.check.checked import CheckedRows
from lm_tuning.data.check.findings import shorten
from lm_tuning.data.records import SPLITS
from lm_tuning.data.split.assign import TRAIN
from lm_tuning.data.split.classes import class_warnings
from lm_tuning.data.split.copies import copy_warnings, count_shared, list_rows, num_different, presence
from lm_tuning.data.split.near_duplicates import NearDuplicates
from lm_tuning.wording import count_of

_HELD_OUT = tuple(enumerate(SPLITS))[1:]

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Splits = npt.NDArray[np.int8]


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
    in_train = presence(contents, splits)[TRAIN]
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
    for index, name in _HELD_OUT:
        rows = splits == index
        sides: dict[str, Any] = {
            kind: list_rows(rows & leaks[kind], row_ids) if kind in leaks else None for kind in ("exact", "near")
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
    """Return how many rows are almost the same as others.

    Args:
        near: what was found.
        units: ``(rows,)``: unit of each row.
        row_ids: ``(rows,)``.
        handling: what is done with them.
        similarity: from which two rows count as near duplicates.
        num_dropped: rows that were left out for it.

    Returns:
        Among them ``num_near_copies``, the different contents that are near duplicates of an earlier one, and
        ``largest``, the rows that belong together in the largest number.
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
        facts["largest"] = list_rows(units == np.bincount(near.units).argmax(), row_ids)
    return facts


def group_facts(rows: CheckedRows, group: str | None, splits: Splits) -> dict[str, Any] | None:
    """Describe how the groups fell.

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
    present = {name: len(np.unique(ids[(splits == index) & (ids >= 0)])) for index, name in enumerate(SPLITS)}
    return {
        "column": group,
        "num_groups": len(counts),
        "largest": {"value": shorten(rows.names[group][largest], 100), "num_rows": int(counts[largest])},
        "num_groups_by_split": present,
        "overlap": count_shared(ids, splits),
    }


def describe_warnings(facts: Mapping[str, Any], rows: CheckedRows, splits: Splits) -> list[str]:
    """Return sentences about what a user would not expect.

    Args:
        facts: of ``divide_rows``.
        rows: what was read.
        splits: see ``count_shared``.
    """
    return [
        *_size_warnings(facts, splits),
        *class_warnings(facts, rows),
        *copy_warnings(facts, rows.sources),
        *_near_warnings(facts),
        *_group_warnings(facts["groups"]),
    ]


def _size_warnings(facts: Mapping[str, Any], splits: Splits) -> Iterator[str]:
    got = {name: int((splits == index).sum()) for index, name in enumerate(SPLITS)}
    if got != facts["wanted_rows"]:
        wanted = facts["wanted_rows"]
        short = ", ".join(f"{name} {count_of(got[name], 'row')} instead of {wanted[name]:,}" for name in SPLITS)
        yield f"What stays together could not be divided closer than this: {short}."


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
            copies = facts["duplicates"]
            by_label = copies["conflicts"] is not None and copies["by"] == "row"
            yield (
                f"Rows of {name} with a near duplicate in train: {leak:,}, so what is measured on {name} looks too "
                f"good. {_fix_near(near, by_label=by_label)}"
            )


def _fix_near(near: Mapping[str, Any], *, by_label: bool) -> str:
    """Describe what takes near duplicates of held-out rows out of train; ``by_label`` takes those of the same label."""
    if near["handling"] == "drop":
        # What is left has another label, or hangs on a link that was not followed.
        by_text = "set split.duplicates_by: text, which leaves them out whatever their label, or " if by_label else ""
        return f"Fix: {by_text}raise split.near_duplicate_similarity."
    together = ", or keep_together, which puts those of one file on one side" if near["handling"] == "report" else ""
    by_text = " (with split.duplicates_by: text whatever the label)" if by_label else ""
    return f"Fix: set split.near_duplicates: drop, which leaves what is like them out of train{by_text}{together}."


def _group_warnings(groups: Mapping[str, Any] | None) -> Iterator[str]:
    if not groups:
        return
    for pair, count in groups["overlap"].items():
        if count:
            first, second = pair.split("_")
            yield f"{first} and {second} share {count_of(count, 'group')} of {groups['column']!r}."
