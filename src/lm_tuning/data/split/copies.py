"""Account for copies: how many there are, what was left out, which splits share texts, and which texts have labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from lm_tuning.data.arrays import Ints, Mask, Splits, is_later_copy
from lm_tuning.data.check.findings import RowPositions
from lm_tuning.data.records import SPLITS, FileRows, RowsBySplit
from lm_tuning.data.split.records import CopyFacts, DivisionFacts, LabelConflict, LabelConflicts, ListedRows
from lm_tuning.parameters.data import SplitParameters
from lm_tuning.wording import count_of, shorten

_MAX_LISTED_ROWS = 20
_MAX_LISTED_TEXTS = 20
_MAX_ROWS_OF_TEXT = 4


def num_different(ids: Ints) -> int:
    """Count the numbers from 0 that are given without gaps.

    Args:
        ids: any shape.
    """
    return int(ids.max()) + 1 if len(ids) else 0


@dataclass(frozen=True)
class DividedRows:
    """Rows and the split that each has come to. All arrays are ``(rows,)``.

    Attributes:
        contents: equal numbers for equal texts, from 0 without gaps.
        wholes: the same with the label.
        splits: index in ``SPLITS``, below 0 for a row that is left out.
        file_splits: split of the file that the row stands in.
        row_ids: ascending in the order of reading, training files first, then those of held-out rows.
    """

    contents: Ints
    wholes: Ints
    splits: Splits
    file_splits: Splits
    row_ids: Ints


def count_by_split(splits: Splits) -> RowsBySplit:
    """Count rows by the name of their split.

    Args:
        splits: ``(rows,)``: index in ``SPLITS``, below 0 for a row that is left out.
    """
    return {name: int(np.count_nonzero(splits == index)) for index, name in enumerate(SPLITS)}


def count_shared(ids: Ints, splits: Splits) -> RowsBySplit:
    """Count the numbers that occur in two splits, for each pair of splits.

    Args:
        ids: ``(rows,)``: below 0 for none.
        splits: see ``count_by_split``.
    """
    present = presence(ids, splits)
    return {pair: int((present[one] & present[other]).sum()) for pair, one, other in _pairs()}


def presence(ids: Ints, splits: Splits) -> Mask:
    """Describe which numbers occur in which split, ``(splits, numbers)``.

    Args:
        ids: ``(rows,)``: below 0 for none.
        splits: see ``count_by_split``.
    """
    present = np.zeros((len(SPLITS), num_different(ids)), dtype=bool)
    for index in range(len(SPLITS)):
        # A table of flags in place of sets of numbers: a byte for each, whatever the number of rows.
        present[index, ids[(splits == index) & (ids >= 0)]] = True
    return present


def list_rows(rows: Mask, row_ids: Ints) -> ListedRows:
    """Count rows and list the first of them.

    Args:
        rows: ``(rows,)``: which.
        row_ids: ``(rows,)``.
    """
    ids = row_ids[rows]
    # A partition first: sorting millions of ids for the sake of twenty takes seconds.
    first = np.sort(ids if len(ids) <= _MAX_LISTED_ROWS else np.partition(ids, _MAX_LISTED_ROWS)[:_MAX_LISTED_ROWS])
    return {"num_rows": len(ids), "first_row_ids": first.tolist()}


def copy_facts(
    rows: DividedRows, split: SplitParameters, *, is_dropped: Mask, labels: Ints | None, names: Sequence[str]
) -> CopyFacts:
    """Count the copies before the division and after it.

    Args:
        rows: all rows.
        split: what is done with copies.
        is_dropped: ``(rows,)``: rows left out as copies.
        labels: ``(rows,)``: number of the row's label; None where rows have none.
        names: what the numbers of ``labels`` stand for.

    Returns:
        ``num_copies``: rows read that repeat the text of another one; ``num_dropped`` and ``num_dropped_by_file``: rows
        left out for it, by the split of their file; ``num_kept``: rows of the splits that repeat the text of another
        one there; ``num_label_conflicts``: those of ``num_kept`` that no row of the same text and label comes before;
        ``num_shared_texts``: texts in more than one split; ``conflicts``: texts read with more than one label.
    """
    is_kept = rows.splits >= 0
    kept_texts, kept_wholes = (len(np.unique(ids[is_kept])) for ids in (rows.contents, rows.wholes))
    return {
        "handling": split.duplicates,
        "by": split.duplicates_by,
        "num_copies": len(rows.contents) - num_different(rows.contents),
        "num_dropped": int(is_dropped.sum()),
        "num_dropped_by_file": count_by_split(rows.file_splits[is_dropped]),
        "num_kept": int(is_kept.sum()) - kept_texts,
        # Each text has one whole without a conflict; every further one is a row under another label.
        "num_label_conflicts": kept_wholes - kept_texts,
        "num_shared_texts": int((presence(rows.contents, rows.splits).sum(axis=0) > 1).sum()),
        "conflicts": None if labels is None else _describe_conflicts(rows, labels, names),
    }


def list_copies(rows: DividedRows, near_units: Ints | None, *, is_dropped: Mask) -> dict[str, Ints]:
    """Return the ids of copies.

    Args:
        rows: all rows.
        near_units: ``(rows,)``: equal numbers for rows that are almost the same; None when nobody looked.
        is_dropped: see ``copy_facts``.

    Returns:
        ``exact``: rows of the splits that repeat an earlier one there; ``left_out``; and, when somebody looked,
        ``near``: rows of the splits that are almost like an earlier one there, without its exact copies.
    """
    is_kept = rows.splits >= 0
    kept_ids = rows.row_ids[is_kept]
    exact = _later_copies(rows.contents[is_kept], kept_ids)
    copies = {"exact": exact, "left_out": np.sort(rows.row_ids[is_dropped])}
    if near_units is not None:
        copies["near"] = np.setdiff1d(_later_copies(near_units[is_kept], kept_ids), exact)
    return copies


def describe_overlap(rows: DividedRows) -> tuple[dict[str, dict[str, ListedRows]], dict[str, RowsBySplit]]:
    """Count the rows whose text stands in both splits of a pair.

    Args:
        rows: all rows.

    Returns:
        By pair, for the pairs that share something, and by split: ``num_rows`` and ``first_row_ids`` of these rows; and
        how many of them the other split of the pair has under other labels only.
    """
    # (splits, contents) and (splits, wholes)
    present, whole_present = presence(rows.contents, rows.splits), presence(rows.wholes, rows.splits)
    shared: dict[str, dict[str, ListedRows]] = {}
    other_labels: dict[str, RowsBySplit] = {}
    for pair, one, other in _pairs():
        if not (present[one] & present[other]).any():
            continue
        shared[pair], other_labels[pair] = {}, {}
        for side, opposite in ((one, other), (other, one)):
            is_shared = (rows.splits == side) & present[opposite][rows.contents]  # (rows,)
            shared[pair][SPLITS[side]] = list_rows(is_shared, rows.row_ids)
            other_labels[pair][SPLITS[side]] = int((is_shared & ~whole_present[opposite][rows.wholes]).sum())
    return shared, other_labels


def describe_copies(copies: CopyFacts) -> str:
    """Describe in a few words how many copies there are and what became of them, for the log.

    Args:
        copies: what ``copy_facts`` returned.
    """
    num_copies, num_dropped = copies["num_copies"], copies["num_dropped"]
    if not num_copies:
        return "no duplicates"
    found = count_of(num_copies, "duplicate")
    if copies["handling"] == "drop":
        if num_dropped == num_copies:
            return f"{found} dropped"
        others = f"{copies['num_kept']:,} kept, the text under another label (split.duplicates_by: row)"
        return f"{found}, {num_dropped:,} dropped" + (f", {others}" if copies["num_kept"] else "")
    shared = count_of(copies["num_shared_texts"], "text")
    if copies["num_shared_texts"]:
        return f"{found}, {shared} in more than one split"
    return f"{found} {'ignored' if copies['handling'] == 'ignore' else 'kept together'}"


def copy_warnings(facts: DivisionFacts, sources: Sequence[FileRows]) -> Iterator[str]:
    """Yield sentences about labels that contradict each other and about texts that two splits share.

    Args:
        facts: of ``divide_rows``: ``duplicates``, ``overlap``, ``overlap_rows`` and ``overlap_other_labels``.
        sources: the files, see ``CheckedRows``.
    """
    copies = facts["duplicates"]
    conflicts = copies["conflicts"]
    if conflicts and conflicts["num_texts"]:
        yield _describe_conflicting(conflicts, copies, RowPositions(sources))
    # Train is none of them: rows of its files are what is divided.
    has_file = {str(source["split"]) for source in sources} - {SPLITS[0]}
    for pair, count in facts["overlap"].items():
        if count:
            yield _describe_shared(facts, pair, has_file=has_file)


def describe_conflict(conflict: LabelConflict, positions: RowPositions, *, max_characters: int = 40) -> str:
    """Name the first rows of a text with more than one label, each with its label.

    Args:
        conflict: one of ``first`` of the conflicts, see ``copy_facts``.
        positions: where rows stand in their files.
        max_characters: of a label that are shown.
    """
    named = []
    for row_id, label in zip(conflict["row_ids"], conflict["labels"], strict=True):
        path, number = positions.find(row_id)
        named.append(f"{path}, row {number} ({shorten(label, max_characters)!r})")
    more = conflict["num_rows"] - len(named)
    return " and ".join(named) + (f" and {count_of(more, 'more row')}" if more else "")


def _describe_conflicting(conflicts: LabelConflicts, copies: CopyFacts, positions: RowPositions) -> str:
    """Describe which texts have more than one label, and what to do about it."""
    by_split = {**conflicts["num_rows_by_split"], "left out": conflicts["num_rows_left_out"]}
    counts = ", ".join(f"{name} {count:,}" for name, count in by_split.items() if count)
    where = (
        f"{conflicts['num_texts']:,}, in {count_of(conflicts['num_rows'], 'row')} ({counts}), such "
        f"as {describe_conflict(conflicts['first'][0], positions)}"
    )
    order = "a test row before a validation row before a training row, else the first"
    if not conflicts["num_texts_in_splits"]:
        # By row, only a near duplicate of the same label can have taken a text's row with it, or even all of them.
        kept = (
            f"split.duplicates_by: text kept one label of each ({order})"
            if copies["by"] == "text"
            else "split.near_duplicates: drop left no more than one label of each"
        )
        return (
            f"Texts whose copies had more than one label: {where}. {kept}, which may be the wrong one. Fix: correct "
            "the labels, or take such texts out of the files."
        )
    key = "split.duplicates_by: text"
    if copies["handling"] != "drop":
        key = f"split.duplicates: drop with {key}"
    return (
        f"Texts with more than one label: {where}. No answer is right for all rows of such a text. Fix: correct the "
        f"labels, or set {key}, which keeps one row of each text: {order}."
    )


def _describe_shared(facts: DivisionFacts, pair: str, *, has_file: set[str]) -> str:
    """Describe what two splits share, and what takes it away."""
    num_rows = {name: side["num_rows"] for name, side in facts["overlap_rows"][pair].items()}
    others, copies = facts["overlap_other_labels"][pair], facts["duplicates"]
    first, second = num_rows
    # Left out is the row of the training files, and of two files of held-out rows that of validation.
    giver = second if first in has_file and second not in has_file else first
    num_other = others[giver]
    rows = ", ".join(f"{count_of(count, 'row')} of {name}" for name, count in num_rows.items())
    if others == num_rows:
        meaning = f"under other labels, so what {first} says of them is wrong in {second}"
    else:
        meaning = f"so what is measured on {second} looks too good"
        if num_other:
            meaning += f"; {count_of(num_other, 'row')} of {giver} under another label"
    said = f"{first} and {second} share {count_of(facts['overlap'][pair], 'text')} ({rows}), {meaning}."
    if not has_file & {first, second}:
        return (
            f"{said} Fix: set split.duplicates: keep_together, which puts copies on one side, or drop, which keeps one "
            "of them."
        )
    if copies["handling"] == "drop":
        return f"{said} Fix: set split.duplicates_by: text, which leaves them out of {giver} whatever their label."
    # What is left after dropping is drawn again, so a text under two labels may come to both splits then.
    has_conflicts = copies["conflicts"] is not None and copies["conflicts"]["num_texts"] > 0
    key = "split.duplicates: drop" + (" with split.duplicates_by: text" if num_other or has_conflicts else "")
    return f"{said} Fix: set {key}, which leaves them out of {giver}."


def _describe_conflicts(rows: DividedRows, labels: Ints, names: Sequence[str]) -> LabelConflicts:
    """Find the texts that have more than one label, those with the first rows first."""
    # Rows that were left out count too: dropping copies whatever their label hides a conflict and settles none.
    found = np.flatnonzero(_count_labels(rows, np.arange(len(rows.contents)))[rows.contents] > 1)
    found = found[np.argsort(rows.row_ids[found], kind="stable")]
    texts, first_positions = np.unique(rows.contents[found], return_index=True)
    listed: list[LabelConflict] = []
    for text in texts[np.argsort(first_positions)][:_MAX_LISTED_TEXTS].tolist():
        of_text = found[rows.contents[found] == text]
        # A row of each label says more than the first rows.
        shown = np.sort(np.unique(rows.wholes[of_text], return_index=True)[1])[:_MAX_ROWS_OF_TEXT]
        listed.append(
            {
                "num_rows": len(of_text),
                "row_ids": rows.row_ids[of_text[shown]].tolist(),
                "labels": [names[label] for label in labels[of_text[shown]].tolist()],
            }
        )
    return {
        "num_texts": len(texts),
        "num_texts_in_splits": int((_count_labels(rows, np.flatnonzero(rows.splits >= 0)) > 1).sum()),
        "num_rows": len(found),
        "num_rows_by_split": count_by_split(rows.splits[found]),
        "num_rows_left_out": int(np.count_nonzero(rows.splits[found] < 0)),
        "first": listed,
    }


def _count_labels(rows: DividedRows, positions: Ints) -> Ints:
    """Count the different labels of each text among the rows at some positions, ``(contents,)``."""
    # One row of each text and label, so that counting the rows of a text counts its labels.
    firsts = positions[np.unique(rows.wholes[positions], return_index=True)[1]]
    return np.bincount(rows.contents[firsts], minlength=num_different(rows.contents))


def _later_copies(ids: Ints, row_ids: Ints) -> Ints:
    """Return the ids of the rows that repeat one of a smaller id."""
    # Row ids ascend in the order of reading, while rows may follow their keys here.
    order = np.argsort(row_ids, kind="stable")
    return row_ids[order][is_later_copy(ids[order])]


def _pairs() -> Iterator[tuple[str, int, int]]:
    for one, other in combinations(range(len(SPLITS)), 2):
        yield f"{SPLITS[one]}_{SPLITS[other]}", one, other
