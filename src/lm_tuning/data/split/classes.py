"""Account for the classes of a division, and refuse one that leaves nothing to tell apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from lm_tuning.data.arrays import Ints, Mask, Splits
from lm_tuning.data.check.checked import CheckedRows
from lm_tuning.data.check.findings import RowPositions
from lm_tuning.data.format.columns import SEQUENCE_CLASSIFICATION
from lm_tuning.data.format.labels import describe_unknown_classes
from lm_tuning.data.records import HELD_OUT, SPLITS, RowsBySplit, SplitName
from lm_tuning.data.split.assign import TRAIN
from lm_tuning.data.split.class_shares import choose_shown, describe_moved, list_moved, summarize_classes
from lm_tuning.data.split.copies import count_by_split, list_rows
from lm_tuning.data.split.records import ClassFacts, DivisionFacts, LostFacts, ShareFacts, UntrainedFacts
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import SplitParameters
from lm_tuning.wording import count_of, name_first, shorten

# In the JSON summary; then in tables, in warnings, and of rare classes in one of them.
_MAX_LISTED_CLASSES = 1000
_MAX_SHOWN_CLASSES = 30
_MAX_WARNED_CLASSES = 10
_MAX_RARE_CLASSES = 20


@dataclass(frozen=True)
class ClassTable:
    """The classes of a column, and how many rows each has.

    Attributes:
        column: its name.
        names: of the classes.
        ids: ``(rows,)``: number of the row's class; -1 for none.
        by_split: ``(splits, classes)``: rows of the splits.
        in_files: ``(classes,)``: rows of the training files.
    """

    column: str
    names: Sequence[str]
    ids: Ints
    by_split: Ints
    in_files: Ints


def tabulate_classes(rows: CheckedRows, column: str | None, splits: Splits) -> ClassTable | None:
    """Count the rows of each class.

    Args:
        rows: what was read.
        column: of the class; None where there is none.
        splits: see ``count_by_split``.
    """
    if column is None:
        return None
    names, ids = rows.names[column], rows.values[column]
    count = partial(np.bincount, minlength=len(names))
    by_split = np.stack([count(ids[(splits == position) & (ids >= 0)]) for position in range(len(SPLITS))])
    return ClassTable(column, names, ids, by_split, count(ids[(rows.file_splits == TRAIN) & (ids >= 0)]))


def class_facts(classes: ClassTable, rare: Mapping[int, int]) -> ClassFacts:
    """Describe how the classes fell, the largest first.

    Args:
        classes: the strata.
        rare: number of rows by class, for classes that were too small to be divided.
    """
    names, table = classes.names, classes.by_split
    listed = np.argsort(-table.sum(axis=0), kind="stable")[:_MAX_LISTED_CLASSES].tolist()
    return {
        "column": classes.column,
        "num_classes": len(names),
        "rows_by_split": {names[position]: _by_name(table[:, position]) for position in listed},
        "num_only_in_train": len(rare),
        "only_in_train": {names[position]: rare[position] for position in list(rare)[:_MAX_LISTED_CLASSES]},
    }


def share_facts(classes: ClassTable) -> ShareFacts:
    """Name the largest classes of each split, and those whose share differs a lot between train and a held-out split.

    Args:
        classes: of the label, else the strata.

    Returns:
        ``column``, ``num_classes`` (of the splits), ``splits``: see ``summarize_classes``, by split; ``shown``: rows by
        split of some 30 classes, the largest of each split among them; ``moved``: see ``list_moved``, by held-out split
        (the first 1,000).
    """
    names, table = classes.names, classes.by_split
    shown = choose_shown(list(table), most=_MAX_SHOWN_CLASSES)
    return {
        "column": classes.column,
        "num_classes": int((table.sum(axis=0) > 0).sum()),
        "splits": {name: summarize_classes(table[position], names) for position, name in enumerate(SPLITS)},
        "shown": {names[position]: _by_name(table[:, position]) for position in shown if table[:, position].any()},
        "moved": {
            name: list_moved(table[TRAIN], table[position], names)[:_MAX_LISTED_CLASSES]
            for position, name in enumerate(HELD_OUT, TRAIN + 1)
        },
    }


def untrained_facts(labels: ClassTable, splits: Splits, row_ids: Ints) -> UntrainedFacts | None:
    """Find the classes of held-out rows that the training split has not, though a training file has them.

    Args:
        labels: the classes.
        splits: see ``count_by_split``.
        row_ids: ``(rows,)``.

    Returns:
        ``column``, ``num_classes``, ``can_stratify`` (whether any class has a row for every split), and of the held-out
        rows of these classes ``num_rows``, ``first_row_ids`` and ``num_rows_by_class`` (the largest 1,000); None where
        there is no such class.
    """
    counts = labels.by_split[TRAIN + 1 :].sum(axis=0)
    # A class that no training file has is another matter, told by describe_unknown_classes.
    untrained = (labels.in_files > 0) & (labels.by_split[TRAIN] == 0) & (counts > 0)
    if not untrained.any():
        return None
    held_out = (labels.ids >= 0) & (splits > TRAIN)
    # Labels of -1 would pick the last class, so only rows with a label are looked up.
    held_out[held_out] = untrained[labels.ids[held_out]]
    return {
        "column": labels.column,
        "num_classes": int(untrained.sum()),
        "can_stratify": bool(labels.in_files.max() >= len(SPLITS)),
        "num_rows_by_class": _by_class(counts * untrained, labels.names),
        **list_rows(held_out, row_ids),
    }


def lost_facts(labels: ClassTable) -> LostFacts | None:
    """Find the classes that no split has, since all their rows were left out as copies.

    Args:
        labels: the classes.

    Returns:
        ``column``, ``num_classes`` and ``num_rows_by_class``: rows read (the largest 1,000); None where every class has
        a row.
    """
    read = np.bincount(labels.ids[labels.ids >= 0], minlength=len(labels.names))
    lost = read * (labels.by_split.sum(axis=0) == 0)
    if not lost.any():
        return None
    num_lost = int(np.count_nonzero(lost))
    return {"column": labels.column, "num_classes": num_lost, "num_rows_by_class": _by_class(lost, labels.names)}


def refuse_classes(
    rows: CheckedRows,
    splits: Splits,
    row_ids: Ints,
    *,
    label: str | None,
    task: str,
    settings: SplitParameters,
    max_rows: int | None,
) -> list[str]:
    """Refuse a division that leaves a classifier one class to train on, or held-out classes that it cannot know.

    Args:
        rows: what was read.
        splits: see ``count_by_split``.
        row_ids: ``(rows,)``.
        label: the column of the class; None where rows have none.
        task: the ``task`` parameter.
        settings: of the division.
        max_rows: ``data.max_rows``.

    Returns:
        A sentence about a single class, where the task is no classification and it is no error; else nothing.

    Raises:
        UserError: classes and numbers of rows, why, and how to fix it.
    """
    classes = tabulate_classes(rows, label, splits)
    if classes is None:
        return []
    found: list[str] = []
    # Files of one class were refused while they were read; here the division itself left one.
    present = np.flatnonzero(classes.by_split[TRAIN])
    if len(present) == 1 and (classes.in_files > 0).sum() > 1:
        found.append(_describe_single(rows, splits, classes, position=int(present[0]), settings=settings))
    if task != SEQUENCE_CLASSIFICATION:
        return found
    # (classes,): held-out rows of classes that no training file has
    num_rows = np.where(classes.in_files == 0, classes.by_split.sum(axis=0), 0)
    unknown = {classes.names[position]: position for position in np.flatnonzero(num_rows).tolist()}

    def find_rows(name: str) -> tuple[int, RowsBySplit]:
        counts = _by_name(classes.by_split[:, unknown[name]])
        first = row_ids[(classes.ids == unknown[name]) & (splits >= 0)].min()
        return int(first), {split: count for split, count in counts.items() if count}

    found += describe_unknown_classes(
        {name: int(num_rows[position]) for name, position in unknown.items()},
        find_rows,
        RowPositions(rows.sources),
        max_rows=max_rows,
    )
    if found:
        raise UserError(found)
    return []


def class_warnings(facts: DivisionFacts, rows: CheckedRows) -> Iterator[str]:
    """Yield sentences about classes that were not divided, that nobody learns, or whose share differs.

    Args:
        facts: of ``divide_rows``: ``classes``, ``folds``, ``untrained_classes``, ``lost_classes`` and ``class_shares``.
        rows: what was read.
    """
    if facts["classes"] and facts["classes"]["only_in_train"]:
        rare = list(facts["classes"]["only_in_train"].items())[:_MAX_RARE_CLASSES]
        listed = _join_some(map(_with_rows, rare), facts["classes"]["num_only_in_train"])
        yield f"Too few rows to be in every {'fold' if facts['folds'] else 'split'}, so only in train: {listed}."
    yield from _untrained_warnings(facts)
    yield from _lost_warnings(facts["lost_classes"])
    yield from _share_warnings(facts, rows)


def _untrained_warnings(facts: DivisionFacts) -> Iterator[str]:
    untrained = facts["untrained_classes"]
    if not untrained:
        return
    column, num_classes, num_rows = untrained["column"], untrained["num_classes"], untrained["num_rows"]
    named = list(untrained["num_rows_by_class"])[:_MAX_WARNED_CLASSES]
    listed = _join_some((repr(shorten(name)) for name in named), num_classes)
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
        f"{count_of(num_classes, 'class', 'classes')} in column {column!r} ({listed}). These classes are never "
        f"learned, so no answer to these rows can be right. Remedy: {remedy}."
    )


def _lost_warnings(lost: LostFacts | None) -> Iterator[str]:
    if not lost:
        return
    named = list(lost["num_rows_by_class"].items())[:_MAX_WARNED_CLASSES]
    listed = _join_some(map(_with_rows, named), lost["num_classes"])
    # By text and label a copy is left out only where a row of its class stays.
    yield (
        f"Classes without a row in any split: {lost['num_classes']:,} in column {lost['column']!r} ({listed}), "
        "since all their rows were left out as copies of texts under another label. They are neither learned nor "
        "measured. Fix: correct the labels, or set split.duplicates_by: row, which keeps copies under another label."
    )


def _share_warnings(facts: DivisionFacts, rows: CheckedRows) -> Iterator[str]:
    shares = facts["class_shares"]
    if not shares:
        return
    paths: dict[str, list[str]] = {
        name: [file["path"] for file in rows.sources if file["split"] == name] for name in SPLITS
    }
    for name, moved in shares["moved"].items():
        if not moved:
            continue
        column = shares["column"]
        if paths[name]:
            # Held-out rows of a file are never moved, so only the files can be changed.
            where = shorten(", ".join(paths[name]), 200)
            fix = (
                f"add training rows of classes that are rarer in train, or take rows out of {where}, until the shares "
                f"are alike. If {name} shows the classes as they come in use, keep it, and read its figures by class "
                "and beside the best constant answer"
            )
        elif facts["classes"] and facts["classes"]["column"] == column:
            fix = "rows that stay together allow no better division with this seed: set another seed, or hold out more"
        else:
            fix = f"set split.stratify: {column}"
        yield (
            f"Classes in column {column!r} whose share differs a lot between train and {name}, by more than chance: "
            f"{describe_moved(moved, split=name)}. Fix: {fix}."
        )


def _with_rows(class_and_rows: tuple[str, int]) -> str:
    name, num_rows = class_and_rows
    return f"{shorten(name)!r} ({count_of(num_rows, 'row')})"


def _join_some(names: Iterable[str], total: int) -> str:
    """Join names, and say how many more there are."""
    shown = list(names)
    return ", ".join(shown) + (f" and {total - len(shown):,} more" if total > len(shown) else "")


def _describe_single(
    rows: CheckedRows, splits: Splits, classes: ClassTable, *, position: int, settings: SplitParameters
) -> str:
    """Describe which class is left, where the others are, and what to do."""
    label, names, ids = classes.column, classes.names, classes.ids
    num_left = int(((ids == position) & (splits == TRAIN)).sum())
    has_file = {file["split"] for file in rows.sources}
    from_train = rows.file_splits == TRAIN
    others = np.flatnonzero(classes.in_files)
    others = others[others != position]
    is_other = np.isin(ids, others) & from_train
    dropped = int((is_other & (splits < 0)).sum())
    outcomes = [f"{name} {count:,}" for name, count in count_by_split(splits[is_other]).items() if count]
    outcomes += [f"left out as copies {dropped:,}"] if dropped else []
    listed = name_first([repr(shorten(names[other])) for other in others.tolist()], _MAX_WARNED_CLASSES)
    ways = []
    if int(is_other.sum()) > dropped:
        ways += _ways_to_divide(rows, label, from_train & (splits >= 0), has_file, settings)
    if dropped:
        keys = [f"split.{key}: drop" for key in ("duplicates", "near_duplicates") if getattr(settings, key) == "drop"]
        by_text = settings.duplicates_by == "text"
        by = ", or split.duplicates_by: row, which keeps copies under another label" if by_text else ""
        ways.append(f"keep the copies (now {' and '.join(keys)}){by}")
    ways.append("add rows of other classes")
    return (
        f"Only one class is left in train: {shorten(names[position], 100)!r} ({count_of(num_left, 'row')}), and at "
        f"least 2 are needed to tell them apart. The {count_of(int(is_other.sum()), 'row')} of the other "
        f"{'class' if len(others) == 1 else f'{len(others):,} classes'} in column {label!r} ({listed}) went "
        f"elsewhere: {', '.join(outcomes)}. Fix: {'; or '.join(ways)}."
    )


def _ways_to_divide(
    rows: CheckedRows, label: str, in_pool: Mask, has_file: set[SplitName], settings: SplitParameters
) -> list[str]:
    """Describe how the rows can be divided so that train keeps several classes; no way that the rows do not allow."""
    asked = {"validation": settings.validation, "test": settings.test}
    held_out = [f"split.{name}: {asked[name]}" for name in HELD_OUT if asked[name] and name not in has_file]
    num_parts = 1 + len(held_out)
    if settings.num_folds:
        held_out = [f"split.num_folds: {settings.num_folds}"]
        num_parts = settings.num_folds + bool(settings.test and "test" not in has_file)
    group, ids = settings.group, rows.values[label]
    # Without groups every row is a unit. Copies are not counted together, so a way may be named that they forbid.
    units = rows.values[group] if group else np.arange(len(ids))
    # (pairs,): the class of each different pair of unit and class, so a bincount counts the units of each class.
    classes = np.unique(np.stack([units[in_pool], ids[in_pool]]), axis=1)[1]
    ways = []
    # A class of fewer units than there are parts stays in train; with such classes alone nothing could be held out.
    if settings.stratify != label and np.bincount(classes).max() >= num_parts:
        ways.append(f"set split.stratify: {label}, which keeps rows of each class in train")
    if group:
        strata = f" and split.stratify: {label}" if settings.stratify != label else ""
        ways.append(f"set split.group: null{strata} (now {group}: rows of a group stay together)")
        ways.append("give the other classes more groups")
    return [*ways, f"hold out less (now {', '.join(held_out)})"]


def _by_name(counts: Ints) -> RowsBySplit:
    """Return numbers of rows by the name of their split, from ``(splits,)``."""
    return {name: int(count) for name, count in zip(SPLITS, counts, strict=True)}


def _by_class(counts: Ints, names: Sequence[str]) -> dict[str, int]:
    """Return the numbers of rows by class, ``(classes,)``, of the largest 1,000 that have any."""
    order = np.argsort(-counts, kind="stable")[: min(int(np.count_nonzero(counts)), _MAX_LISTED_CLASSES)]
    return {names[position]: int(counts[position]) for position in order.tolist()}
