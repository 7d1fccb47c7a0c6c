"""Decide the split of every row from its content, group and class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lm_tuning.data.arrays import Ints, Mask, Splits, is_later_copy, join_units, number_by_appearance
from lm_tuning.data.check.checked import CheckedRows
from lm_tuning.data.records import SPLITS, SplitName
from lm_tuning.data.split.assign import IN_TEST, TEST, TRAIN, VALIDATION, assign_folds, assign_splits, split_sizes
from lm_tuning.data.split.classes import class_facts, lost_facts, share_facts, tabulate_classes, untrained_facts
from lm_tuning.data.split.copies import (
    DividedRows,
    copy_facts,
    count_by_split,
    count_shared,
    describe_overlap,
    list_copies,
)
from lm_tuning.data.split.facts import describe_warnings, group_facts, measure_leakage, near_facts
from lm_tuning.data.split.near_duplicates import NearDuplicates
from lm_tuning.data.split.records import DivisionFacts, FoldFacts
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import SplitParameters

LEFT_OUT = -1


@dataclass(frozen=True)
class Division:
    """Where each row goes, and what there is to say about it.

    Attributes:
        splits: ``(rows,)``: index in ``SPLITS``, ``LEFT_OUT`` for a dropped copy.
        facts: for the summary.
        warnings: sentences for the log.
        copies: ids of rows: ``exact``, those of the splits that repeat an earlier one there, ``left_out``, those
            dropped as copies, and ``near`` when somebody looked.
    """

    splits: Splits
    facts: DivisionFacts
    warnings: list[str]
    copies: dict[str, Ints]


@dataclass(frozen=True)
class _Choice:
    splits: Splits
    rare_classes: Mapping[int, int]
    wanted: Mapping[SplitName, int]
    folds: FoldFacts | None = None


def key_order(rows: CheckedRows) -> Ints:
    """Return the order in which rows of the training files follow their key; rows of held-out files come after.

    Args:
        rows: with ``keys``.
    """
    assert rows.keys is not None, "rows are ordered by a key that they do not have"
    return np.lexsort((rows.keys[:, 1], rows.keys[:, 0], rows.file_splits != TRAIN))


def take_rows(rows: CheckedRows, order: Ints) -> CheckedRows:
    """Return what is known of the rows in another order.

    Args:
        rows: in any order.
        order: ``(rows,)``: index of each row to take.
    """
    return replace(
        rows,
        files=rows.files[order],
        contents=rows.contents[order],
        wholes=rows.wholes[order],
        values={column: values[order] for column, values in rows.values.items()},
        keys=None if rows.keys is None else rows.keys[order],
    )


def divide_rows(
    rows: CheckedRows,
    row_ids: Ints,
    *,
    contents: Ints,
    wholes: Ints,
    near: NearDuplicates | None,
    label: str | None,
    split: SplitParameters,
    seed: int,
) -> Division:
    """Divide the rows of the training files, beside those of files that are a split by themselves.

    Args:
        rows: what was read. With ``keys`` they are in the order of the keys, and the division follows seed and key
            alone: classes are numbered and copies chosen in this order, and units are drawn by their smallest key.
        row_ids: ``(rows,)``: for what is listed.
        contents: ``(rows,)``: equal numbers for equal content, from 0 in the order of the rows.
        wholes: the same with the label.
        near: which contents are almost the same; None when nobody looked.
        label: column of the class; None for none.
        split: what is asked for. ``validation`` and ``test`` have no effect when they have files of their own, and
            ``validation`` none when it is a fold. ``duplicates``: ``keep_together`` puts all copies of a content on one
            side; ``drop`` keeps the first copy, and one in a held-out file before one in the training file; ``ignore``
            looks away. ``near_duplicates``: the same for rows that are almost the same, though no row of a held-out
            file is dropped for them; ``report`` moves none. ``duplicates_by``: ``drop`` leaves out rows of the same
            text and label (``row``) or of the same text (``text``).
        seed: fixes the division.

    Returns:
        The split of each row. Rows of a held-out file never move.

    Raises:
        UserError: too few rows, groups or classes for what was asked.
    """
    file_splits = rows.file_splits  # (rows,)
    from_train = file_splits == TRAIN
    # The copy with the lowest number stays: a test row before a validation row before a training row.
    priority = np.int8(len(SPLITS)) - file_splits
    near_units = None if near is None else near.units[contents]  # from (contents,) to (rows,)
    # Neither is ever written to in place, so both may begin as one array.
    is_copy = is_near_copy = np.zeros(len(contents), dtype=bool)
    if split.duplicates == "drop":
        is_copy = is_later_copy(contents if split.duplicates_by == "text" else wholes, priority)
    if near_units is not None and split.near_duplicates == "drop":
        of_label = rows.values[label] if label and split.duplicates_by == "row" else None
        is_near_copy = _is_later_near_copy(near_units, of_label, is_copy, priority) & from_train
    dropped = is_copy | is_near_copy
    pool = ~dropped & from_train
    left_out = _explain_left_out(is_copy & from_train, is_near_copy & from_train)

    # Near duplicates have equal ones among them, so their units replace those of equal contents.
    joined = near_units if split.near_duplicates in ("keep_together", "drop") else None
    if joined is None and split.duplicates != "ignore":
        joined = contents
    group = split.group
    units = _units(None if joined is None else joined[pool], rows.values[group][pool] if group else None, pool)
    choice = _choose(
        rows,
        pool,
        units,
        split=split,
        seed=seed,
        unit_name=f"groups of {group!r}" if group else "different rows" if joined is not None else "rows",
        left_out=left_out,
    )
    # Rows of held-out files are in their split already; those of training files are overwritten below.
    splits = np.where(dropped, np.int8(LEFT_OUT), file_splits)
    splits[pool] = choice.splits
    got = count_by_split(splits)
    divided = DividedRows(contents, wholes, splits, file_splits, row_ids)
    overlap_rows, other_labels = describe_overlap(divided)
    labels, strata = tabulate_classes(rows, label, splits), tabulate_classes(rows, split.stratify, splits)
    classes = labels or strata
    num_near = int(is_near_copy.sum())
    found_near = near_facts(near, contents, row_ids, split=split, num_dropped=num_near) if near else None
    facts: DivisionFacts = {
        "wanted_rows": {name: choice.wanted.get(name, got[name]) for name in SPLITS},
        "duplicates": copy_facts(
            divided,
            split,
            is_dropped=is_copy,
            labels=labels.ids if labels else None,
            names=labels.names if labels else (),
        ),
        "near_duplicates": found_near,
        "overlap": count_shared(contents, splits),
        "overlap_rows": overlap_rows,
        "overlap_other_labels": other_labels,
        "leakage": measure_leakage(divided, near),
        "groups": group_facts(rows, group, splits),
        "classes": class_facts(strata, choice.rare_classes) if strata else None,
        "class_shares": share_facts(classes) if classes else None,
        "untrained_classes": untrained_facts(labels, splits, row_ids) if labels else None,
        "lost_classes": lost_facts(labels) if labels else None,
        "folds": choice.folds,
    }
    copies = list_copies(divided, near_units, is_dropped=is_copy)
    return Division(splits, facts, describe_warnings(facts, rows, splits), copies)


def _is_later_near_copy(units: Ints, labels: Ints | None, is_copy: Mask, priority: Splits) -> Mask:
    """Return for each row whether another one of its unit, and with its label, is the one to keep."""
    kept = np.flatnonzero(~is_copy)
    # Unit and label as one number; labels begin at -1, for rows without one.
    ids = units[kept] if labels is None else units[kept] * (int(labels.max(initial=-1)) + 2) + labels[kept] + 1
    is_later = np.zeros(len(units), dtype=bool)
    is_later[kept] = is_later_copy(ids, priority[kept])
    return is_later


def _units(joined: Ints | None, groups: Ints | None, pool: Mask) -> Ints:
    """Number the rows that must stay together."""
    # A text in two groups makes these one unit, and with them all their other texts.
    if groups is not None and joined is not None:
        return join_units(joined, number_by_appearance(groups))
    ids = joined if groups is None else groups
    return np.arange(int(pool.sum()), dtype=np.int64) if ids is None else number_by_appearance(ids)


def _explain_left_out(is_copy: Mask, is_near_copy: Mask) -> str:
    """Return how many of some rows were dropped as copies, and by which key; nothing where none was."""
    keys = [
        f"split.{name}: drop"
        for name, rows in (("duplicates", is_copy), ("near_duplicates", is_near_copy))
        if rows.any()
    ]
    num_rows = int((is_copy | is_near_copy).sum())
    return f"copies that were left out before: {num_rows:,} ({' and '.join(keys)})" if keys else ""


def _explain_units(split: SplitParameters, *, left_out: str) -> str:
    """Describe why the rows make no more units, and what to do; the end of a message."""
    reasons, ways = [], []
    if split.group:
        reasons.append(f"rows of a group stay together (split.group: {split.group})")
        ways.append("set split.group: null, where rows of a group may be on both sides")
    if split.near_duplicates in ("keep_together", "drop"):
        reasons.append(f"rows that are almost the same stay together (split.near_duplicates: {split.near_duplicates})")
        ways.append("set split.near_duplicates: report")
    if split.duplicates == "keep_together":
        reasons.append("rows of the same content stay together (split.duplicates: keep_together)")
        ways.append("set split.duplicates: ignore, where copies may be on both sides")
    if split.num_folds:
        ways.append("cut fewer folds (split.num_folds) or hold out no test (split.test: 0)")
    else:
        ways.append("hold out less (split.validation: 0 or split.test: 0)")
        ways.append("name files of their own for held-out rows (data.validation_path, data.test_path)")
    why = " and ".join(reasons) or "each stays whole"
    why += f"; {left_out}" if left_out else ""
    return f"{why}. Remedy: add rows that differ; or {'; or '.join(ways)}."


def _choose(
    rows: CheckedRows, pool: Mask, units: Ints, *, split: SplitParameters, seed: int, unit_name: str, left_out: str
) -> _Choice:
    """Choose the split of each row of the pool."""
    # A split that has files of its own takes nothing from the training files.
    has_file = {file["split"] for file in rows.sources}
    num_rows = int(pool.sum())
    num_folds, stratify = split.num_folds, split.stratify
    test = 0 if "test" in has_file else split.test
    validation = 0 if "validation" in has_file or num_folds else split.validation
    explanation = _explain_units(split, left_out=left_out)
    try:
        sizes = split_sizes(num_rows, validation=validation, test=test)
    except UserError as error:
        if not left_out:
            raise
        raise UserError([*error.problems, f"{left_out[0].upper()}{left_out[1:]}."]) from error
    classes = rows.values[stratify][pool] if stratify else None
    # What the assignment numbers its classes by.
    class_numbers: Sequence[int] = range(len(rows.names[stratify])) if stratify else ()
    marks = None
    if rows.keys is not None:
        firsts = np.unique(units, return_index=True)[1]
        # Rows follow their keys here, so the first row of a unit has its smallest key, which identifies it permanently.
        marks = rows.keys[pool][firsts]
        if classes is not None:
            # Numbers that come from the order in the files would let that order decide between equal shares.
            numbers, firsts = np.unique(classes, return_index=True)
            class_numbers = numbers[np.argsort(firsts, kind="stable")].tolist()
            classes = number_by_appearance(classes)

    def named(rare: Mapping[int, int]) -> dict[int, int]:
        return {class_numbers[position]: count for position, count in rare.items()}

    wanted = {name: size for name, size in zip(SPLITS, sizes, strict=True) if name == "train" or name not in has_file}
    if not num_folds:
        asked = [f"split.{name}: {size}" for name, size in (("validation", validation), ("test", test)) if size]
        chosen = assign_splits(
            units,
            sizes=sizes,
            seed=seed,
            classes=classes,
            marks=marks,
            unit_name=unit_name,
            explanation=f"{' and '.join(asked)} ask{'s' * (len(asked) == 1)} for them and {explanation}",
        )
        # Where all classes are rare nothing is held out, though it was asked for.
        empty = [
            name for position, name in enumerate(SPLITS) if sizes[position] and not (chosen.splits == position).any()
        ]
        if empty:
            raise UserError(
                f"split.stratify: {stratify!r} leaves no row for {' and '.join(empty)}, since a class with fewer "
                f"{unit_name} than there are splits stays in train; classes of that kind: "
                f"{len(chosen.rare_classes):,}. Does the column hold classes?"
            )
        return _Choice(chosen.splits, named(chosen.rare_classes), wanted)
    cut = assign_folds(
        units,
        num_folds=num_folds,
        test_rows=sizes[2],
        seed=seed,
        classes=classes,
        marks=marks,
        unit_name=unit_name,
        explanation=explanation,
    )
    splits = np.full(num_rows, TRAIN, dtype=np.int8)
    splits[cut.folds == IN_TEST] = TEST
    splits[cut.folds == split.fold] = VALIDATION
    counts = np.bincount(cut.folds[cut.folds >= 0], minlength=num_folds).tolist()
    rare = named(cut.rare_classes)
    folds: FoldFacts = {
        "num_folds": num_folds,
        "fold": split.fold,
        "num_rows_by_fold": counts,
        "num_rows_always_in_train": sum(rare.values()),
    }
    # Folds of whole units cannot be asked for a size; test can.
    return _Choice(splits, rare, {"test": sizes[2]} if "test" in wanted else {}, folds)
