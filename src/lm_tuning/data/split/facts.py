"""Account for a division: how much of the held-out rows leaks, how groups fell, and what a user is warned of."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lm_tuning.data.arrays import Ints, Splits
from lm_tuning.data.check.checked import CheckedRows
from lm_tuning.data.records import HELD_OUT, SPLITS
from lm_tuning.data.split.assign import TEST, TRAIN, VALIDATION
from lm_tuning.data.split.classes import class_warnings
from lm_tuning.data.split.copies import (
    DividedRows,
    copy_warnings,
    count_by_split,
    count_shared,
    list_rows,
    num_different,
    presence,
)
from lm_tuning.data.split.near_duplicates import NearDuplicates
from lm_tuning.data.split.records import DivisionFacts, GroupFacts, HeldOutLeakage, Leakage, NearFacts
from lm_tuning.parameters.data import SplitParameters
from lm_tuning.wording import count_of, shorten


def measure_leakage(rows: DividedRows, near: NearDuplicates | None) -> Leakage:
    """Measure how much of the held-out rows the model will have seen in training.

    Args:
        rows: all rows.
        near: which contents are almost the same; None when nobody looked.

    Returns:
        ``num_rows`` and ``fraction`` of the held-out rows that stand in train too; and the same for ``validation`` and
        ``test`` by themselves with ``exact`` and ``near`` (None when nobody looked), which do not count a row twice:
        ``num_rows`` and ``first_row_ids``.
    """
    contents, splits, row_ids = rows.contents, rows.splits, rows.row_ids
    in_train = presence(contents, splits)[TRAIN]  # (contents,)
    is_exact = in_train[contents]  # (rows,)
    is_near = None
    if near is not None:
        unit_in_train = np.zeros(num_different(near.units), dtype=bool)  # (units,)
        unit_in_train[near.units[in_train]] = True
        near_in_train = unit_in_train[near.units]  # (contents,)
        # The two ends of a link that was cut are alike all the same, whichever of them stands in train.
        for one, other in (near.cut_links.T, near.cut_links.T[::-1]):
            near_in_train[one[in_train[other]]] = True
        is_near = near_in_train[contents] & ~is_exact

    def leakage_into(index: int) -> HeldOutLeakage:
        of_split = splits == index
        exact = list_rows(of_split & is_exact, row_ids)
        similar = None if is_near is None else list_rows(of_split & is_near, row_ids)
        count, total = exact["num_rows"] + (similar["num_rows"] if similar else 0), int(of_split.sum())
        return {"num_rows": count, "fraction": count / total if total else 0.0, "exact": exact, "near": similar}

    validation, test = leakage_into(VALIDATION), leakage_into(TEST)
    num_rows, num_held_out = validation["num_rows"] + test["num_rows"], int((splits > TRAIN).sum())
    return {
        "num_rows": num_rows,
        "fraction": num_rows / num_held_out if num_held_out else 0.0,
        "validation": validation,
        "test": test,
    }


def near_facts(
    near: NearDuplicates, contents: Ints, row_ids: Ints, *, split: SplitParameters, num_dropped: int
) -> NearFacts:
    """Return how many rows are almost the same as others.

    Args:
        near: what was found.
        contents: ``(rows,)``: the different content that each row has.
        row_ids: ``(rows,)``.
        split: what is done with them, and the similarity that they were found with.
        num_dropped: rows that were left out for it.

    Returns:
        Among them ``num_near_copies``, the different contents that are near duplicates of an earlier one, and
        ``largest``, the rows that belong together in the largest number.
    """
    num_contents = len(near.units)
    sizes = np.bincount(near.units)  # (units,)
    num_units = int((sizes > 1).sum())
    return {
        "handling": split.near_duplicates,
        "similarity": split.near_duplicate_similarity,
        "num_compared": num_contents,
        "num_near_copies": num_contents - num_different(near.units),
        "num_units": num_units,
        # Copies of one row are no near duplicates, so the unit with the most different contents is the largest.
        "largest": list_rows(near.units[contents] == sizes.argmax(), row_ids) if num_units else None,
        "num_dropped": num_dropped,
        "num_cut_links": len(near.cut_links),
        "num_seconds": round(near.num_seconds, 3),
        "rows_per_second": round(num_contents / near.num_seconds) if near.num_seconds else None,
    }


def group_facts(rows: CheckedRows, group: str | None, splits: Splits) -> GroupFacts | None:
    """Describe how the groups fell.

    Args:
        rows: what was read.
        group: the column; None for none.
        splits: see ``count_by_split``.
    """
    if group is None:
        return None
    # Below 0 for rows of held-out files that have no such column.
    ids = rows.values[group]
    counts = np.bincount(ids[ids >= 0])
    largest = int(counts.argmax())
    num_groups = presence(ids, splits).sum(axis=1).tolist()
    return {
        "column": group,
        "num_groups": len(counts),
        "largest": {"value": shorten(rows.names[group][largest], 100), "num_rows": int(counts[largest])},
        "num_groups_by_split": dict(zip(SPLITS, num_groups, strict=True)),
        "overlap": count_shared(ids, splits),
    }


def describe_warnings(facts: DivisionFacts, rows: CheckedRows, splits: Splits) -> list[str]:
    """Return sentences about what a user would not expect.

    Args:
        facts: of ``divide_rows``.
        rows: what was read.
        splits: see ``count_by_split``.
    """
    return [
        *_size_warnings(facts, splits),
        *class_warnings(facts, rows),
        *copy_warnings(facts, rows.sources),
        *_near_warnings(facts),
        *_group_warnings(facts["groups"]),
    ]


def _size_warnings(facts: DivisionFacts, splits: Splits) -> Iterator[str]:
    got = count_by_split(splits)
    if got != facts["wanted_rows"]:
        wanted = facts["wanted_rows"]
        short = ", ".join(f"{name} {count_of(got[name], 'row')} instead of {wanted[name]:,}" for name in SPLITS)
        yield f"What stays together could not be divided closer than this: {short}."


def _near_warnings(facts: DivisionFacts) -> Iterator[str]:
    near = facts["near_duplicates"]
    if not near:
        return
    if near["num_cut_links"]:
        yield (
            "Links between near duplicates that were not followed, since they join rows that are not alike to a long "
            f"chain: {near['num_cut_links']:,}. A higher split.near_duplicate_similarity finds fewer."
        )
    for name in HELD_OUT:
        leak = facts["leakage"][name]["near"]
        if leak and leak["num_rows"]:
            copies = facts["duplicates"]
            by_label = copies["conflicts"] is not None and copies["by"] == "row"
            yield (
                f"Rows of {name} with a near duplicate in train: {leak['num_rows']:,}, so what is measured on {name} "
                f"looks too good. {_fix_near(near, by_label=by_label)}"
            )


def _fix_near(near: NearFacts, *, by_label: bool) -> str:
    """Describe what takes near duplicates of held-out rows out of train; ``by_label`` takes those of the same label."""
    if near["handling"] == "drop":
        # What is left has another label, or hangs on a link that was not followed.
        by_text = "set split.duplicates_by: text, which leaves them out whatever their label, or " if by_label else ""
        return f"Fix: {by_text}raise split.near_duplicate_similarity."
    together = ", or keep_together, which puts those of one file on one side" if near["handling"] == "report" else ""
    by_text = " (with split.duplicates_by: text whatever the label)" if by_label else ""
    return f"Fix: set split.near_duplicates: drop, which leaves what is like them out of train{by_text}{together}."


def _group_warnings(groups: GroupFacts | None) -> Iterator[str]:
    if not groups:
        return
    for pair, count in groups["overlap"].items():
        if count:
            first, second = pair.split("_")
            yield f"{first} and {second} share {count_of(count, 'group')} of {groups['column']!r}."
