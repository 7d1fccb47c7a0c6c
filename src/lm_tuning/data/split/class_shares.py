"""Compare how frequent classes are in two sets of rows: which are largest, which share of rows moved by no chance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from lm_tuning.data.arrays import Ints
from lm_tuning.data.split.records import LargestClasses, MovedClass
from lm_tuning.wording import name_first, shorten

# Classes of a split that are listed as its largest.
_MAX_LARGEST = 10

# A share has moved a lot by ten points, or by two points when it is three times the other one.
_MANY_POINTS = 0.1
_FEW_POINTS = 0.02
_MANY_TIMES = 3.0
# Far below what a row makes, so that 0.9 to 1.0 are ten points.
_DIGITS = 12
# Of a thousand pairs of sets whose rows were drawn alike at most one is reported, whatever the number of classes.
_MAX_CHANCE = 1e-3
_MAX_NAMED = 5


def find_moved_classes(reference: Ints, others: Ints) -> list[int]:
    """Find the classes whose share of the rows differs a lot between two sets, and by more than chance.

    Chance is what Fisher's exact test says of dividing the rows of both sets at random, times two for both directions
    and times the number of classes that are looked at (Bonferroni). So few rows raise no alarm.

    Args:
        reference: rows of each class in one set, ``(classes,)``.
        others: the same of the other set.

    Returns:
        Indices of the classes, the largest difference of the shares first.
    """
    totals = int(reference.sum()), int(others.sum())
    if not all(totals):
        return []
    shares = reference / totals[0], others / totals[1]
    # Rounded, so that 0.3 - 0.2 counts as the ten points that it is.
    difference = np.abs(shares[1] - shares[0]).round(_DIGITS)
    low, high = np.minimum(*shares), np.maximum(*shares)
    is_large = (difference >= _MANY_POINTS) | (
        (difference >= _FEW_POINTS) & (high.round(_DIGITS) >= (_MANY_TIMES * low).round(_DIGITS))
    )
    candidates = np.flatnonzero(is_large)
    # In logarithms, since chances of large sets are far below the smallest float.
    allowed = math.log(_MAX_CHANCE / (2 * int(((reference + others) > 0).sum())))
    found = []
    for index in candidates[np.argsort(-difference[candidates], kind="stable")].tolist():
        counts = int(reference[index]), int(others[index])
        # The tail on the side that is larger; by symmetry it is the same as the other one's lower tail.
        larger = 1 if shares[1][index] > shares[0][index] else 0
        if log_chance(counts[larger], sum(counts), totals[larger], sum(totals)) <= allowed:
            found.append(index)
    return found


def log_chance(hits: int, marked: int, drawn: int, total: int) -> float:
    """Return the logarithm of the probability of at least so many hits when rows are drawn without looking.

    Args:
        hits: marked rows among those that are drawn.
        marked: rows that are marked in all.
        drawn: rows that are drawn.
        total: rows in all.

    Source: upper tail of the hypergeometric distribution, Fisher's exact test.
    """
    # Not scipy.stats.hypergeom.logsf: it adds up an array as long as the rows that are drawn, for every class, and
    # importing it takes seconds.
    first = _log_choose(marked, hits) + _log_choose(total - marked, drawn - hits) - _log_choose(total, drawn)
    # The terms of the tail as multiples of its first one; beyond the mean they fall faster and faster.
    factor, tail = 1.0, 1.0
    for count in range(hits, min(marked, drawn)):
        factor *= (marked - count) * (drawn - count) / ((count + 1) * (total - marked - drawn + count + 1))
        tail += factor
        if factor < 1e-16 * tail:
            break
    return first + math.log(tail)


def _log_choose(total: int, chosen: int) -> float:
    return math.lgamma(total + 1) - math.lgamma(chosen + 1) - math.lgamma(total - chosen + 1)


def choose_shown(rows_by_split: Sequence[Ints], *, most: int) -> list[int]:
    """Choose the classes that a table shows: the largest of each split, then those with most rows in the first one.

    Args:
        rows_by_split: for each split the rows of each class, ``(classes,)``.
        most: classes to choose, where there are so many.

    Returns:
        Their indices, those with most rows in the first split first; of equal ones those with most rows in the others.
    """
    orders = [np.argsort(-rows, kind="stable") for rows in rows_by_split]
    chosen: dict[int, None] = {}
    # Rank by rank over all splits, so that no split fills the table with its own.
    for rank in range(min(_MAX_LARGEST, max(most // max(len(orders), 1), 1))):
        for rows, order in zip(rows_by_split, orders, strict=True):
            if rank < len(order) and rows[order[rank]]:
                chosen[int(order[rank])] = None
    rest = orders[0].tolist() if orders else []
    for index in rest:
        if len(chosen) >= most:
            break
        chosen[index] = None
    return sorted(chosen, key=lambda index: tuple(-int(rows[index]) for rows in rows_by_split))[:most]


def summarize_classes(rows: Ints, names: Sequence[str]) -> LargestClasses:
    """Describe which classes of a set are largest.

    Args:
        rows: rows of each class, ``(classes,)``.
        names: of the classes.

    Returns:
        ``num_rows``, ``num_classes`` (that occur), ``num_largest`` (equally frequent ones that nothing is larger than)
        and ``largest``: ``class`` and ``num_rows`` of the first 10.
    """
    order = np.argsort(-rows, kind="stable")[:_MAX_LARGEST].tolist()
    return {
        "num_rows": int(rows.sum()),
        "num_classes": int((rows > 0).sum()),
        "num_largest": count_largest(rows),
        "largest": [{"class": names[index], "num_rows": int(rows[index])} for index in order if rows[index]],
    }


def count_largest(rows: Iterable[int] | Ints) -> int:
    """Count the classes that share the largest number of rows; 0 without rows.

    Args:
        rows: rows of each class.
    """
    counts = np.asarray(list(rows) if not isinstance(rows, np.ndarray) else rows, dtype=np.int64)
    largest = int(counts.max(initial=0))
    return int((counts == largest).sum()) if largest else 0


def name_tied(name: str, num_largest: int) -> str:
    """Name the most frequent class, and say when others are as frequent.

    Args:
        name: of the class, as it is shown.
        num_largest: see ``count_largest``.
    """
    return f"{name}, one of {num_largest:,} equally frequent classes" if num_largest > 1 else name


def describe_moved(moved: Sequence[MovedClass], *, split: str) -> str:
    """Name the classes whose share moved, with both shares.

    Args:
        moved: ``class``, ``fraction_of_train`` and ``fraction`` of each, see ``list_moved``.
        split: the other set.
    """
    named = [
        f"{shorten(str(one['class']))!r} ({one['fraction_of_train']:.1%} of the training rows, {one['fraction']:.1%} "
        f"of the {split} rows)"
        for one in moved
    ]
    return name_first(named, _MAX_NAMED)


def list_moved(train: Ints, others: Ints, names: Sequence[str]) -> list[MovedClass]:
    """Return what there is to say of the classes that ``find_moved_classes`` finds.

    Args:
        train: training rows of each class, ``(classes,)``.
        others: rows of the other set.
        names: of the classes.

    Returns:
        ``class``, ``num_train_rows``, ``num_rows``, ``fraction_of_train`` and ``fraction`` of each.
    """
    return [
        {
            "class": names[index],
            "num_train_rows": int(train[index]),
            "num_rows": int(others[index]),
            "fraction_of_train": int(train[index]) / int(train.sum()),
            "fraction": int(others[index]) / int(others.sum()),
        }
        for index in find_moved_classes(train, others)
    ]
