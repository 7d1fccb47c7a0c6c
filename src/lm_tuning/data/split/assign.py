"""Divide rows into splits or folds: exact in size, the same for a seed, and never across a unit."""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from lm_tuning.data.arrays import Digests, Ints, Splits
from lm_tuning.errors import UserError
from lm_tuning.wording import count_of

TRAIN, VALIDATION, TEST = 0, 1, 2
_HELD_OUT = (VALIDATION, TEST)

# Units that stand as Python integers at one time: each takes about 30 bytes, where numpy takes 8.
_CHUNK_UNITS = 65_536
_PLURAL = re.compile(r"\b(unit|row|group)s\b")


# Both below 0, so that ``folds >= 0`` picks the rows of folds.
IN_TEST, ALWAYS_IN_TRAIN = -2, -1


@dataclass(frozen=True)
class Assignment:
    """Where each row goes.

    Attributes:
        splits: ``(rows,)``: ``TRAIN``, ``VALIDATION`` or ``TEST``.
        rare_classes: classes that are too small to be divided and stay in train, with their number of rows.
    """

    splits: Splits
    rare_classes: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Folds:
    """Which fold each row belongs to.

    Attributes:
        folds: ``(rows,)``: number of the fold from 0, ``IN_TEST``, or ``ALWAYS_IN_TRAIN`` for a row of a rare class.
        rare_classes: classes that are too small to be divided, with their number of rows.
    """

    folds: npt.NDArray[np.int16]
    rare_classes: dict[int, int] = field(default_factory=dict)


def split_sizes(num_rows: int, *, validation: float | int, test: float | int) -> tuple[int, int, int]:
    """Turn fractions and counts into numbers of rows.

    Counts are taken as they are. Fractions are rounded by largest remainder: each split gets the whole part of its
    share, and the rows that are left go to the largest remainders, train before validation before test. A split that
    was asked for, and train, get at least one row.

    Args:
        num_rows: rows to divide.
        validation: a float is a fraction in [0, 1), an int a number of rows.
        test: the same.

    Returns:
        Rows of train, validation and test; they add up to ``num_rows``.

    Raises:
        UserError: there are too few rows for what was asked; the message has the row count and both settings.
    """
    asked = (validation, test)
    settings = f"split.validation: {validation}, split.test: {test}"
    # A fraction, however small, is one row at least; so is train.
    num_needed = 1 + sum(max(size, 1) if isinstance(size, int) else 1 for size in asked if size)
    if num_rows < num_needed:
        raise UserError(
            f"{count_of(num_rows, 'row')} cannot be divided as asked ({settings}): at least {num_needed:,} rows are "
            "needed, one of them for training."
        )
    # As written, so that 0.29 of 100 rows is 29 and not 28.999….
    held_out = [Fraction(size) if isinstance(size, int) else Fraction(repr(size)) * num_rows for size in asked]
    shares = [num_rows - sum(held_out, Fraction(0)), *held_out]
    if shares[0] <= 0:
        raise UserError(f"Nothing of {count_of(num_rows, 'row')} is left for training ({settings}).")
    sizes = [int(share) for share in shares]
    # Largest remainder first; of equal ones train before validation before test.
    by_remainder = sorted(range(3), key=lambda index: (sizes[index] - shares[index], index))
    for index in by_remainder[: num_rows - sum(sizes)]:
        sizes[index] += 1
    for index, is_asked in enumerate((True, validation > 0, test > 0)):
        if is_asked and not sizes[index]:
            # Fixed counts give nothing away; one of the others always has a row to spare here.
            givers = [other for other in range(3) if other == 0 or not isinstance(asked[other - 1], int)]
            givers = [other for other in givers if sizes[other] > 1]
            giver = max(givers, key=lambda other: (sizes[other] - shares[other], -other))
            sizes[giver] -= 1
            sizes[index] += 1
    return sizes[0], sizes[1], sizes[2]


def assign_splits(
    units: Ints,
    *,
    sizes: Sequence[int],
    seed: int,
    classes: Ints | None = None,
    marks: Digests | None = None,
    min_class_units: int = 0,
    unit_name: str = "units",
    explanation: str = "each stays whole.",
) -> Assignment:
    """Choose whole units for validation and test; the rest is train.

    The units are gone through once in an order that the seed fixes. Validation takes each unit that still fits, test
    takes it otherwise if it fits there. Without units of several rows the sizes are met exactly; with them a split
    ends up short by less than the smallest unit of train, and then takes that one if it comes closer to the size by it,
    or if it has none yet.

    With classes this is done class by class. The rows of a class are shared out by largest remainder, so that the
    splits keep their sizes; a unit counts for the class that most of its rows have. A class with fewer units than there
    are splits stays in train.

    Args:
        units: ``(rows,)``: numbers from 0 without gaps; rows of one unit stay together.
        sizes: rows of train, validation and test, as ``split_sizes`` gives them.
        seed: any integer; the same seed gives the same result on every machine.
        classes: ``(rows,)``: class numbers from 0, to divide each class alike; None to ignore classes.
        marks: ``(units, 2)``: two 64-bit halves of a digest that permanently identifies the unit. The order of the
            units then comes from seed and mark alone; None takes it from the number of the unit.
        min_class_units: units from which a class is divided, where that is more than the number of splits.
        unit_name: plural noun for messages.
        explanation: why there are no more units, and what to do about it; the end of a sentence after "since".

    Returns:
        The split of each row.

    Raises:
        UserError: there are fewer units than splits.
    """
    unit_sizes = np.bincount(units)  # (units,): rows of each
    num_splits = 1 + sum(size > 0 for size in sizes[1:])
    if len(unit_sizes) < num_splits:
        units_counted = count_units(len(unit_sizes), unit_name)
        raise UserError(f"{units_counted} cannot be divided into {num_splits} splits, since {explanation}")
    # Units are drawn, not rows: by its rows, a large unit would nearly always come up early.
    whole_order = order = _seeded_order(len(unit_sizes), seed, marks)
    if classes is None:
        # One stratum that has all units: the same filling serves with classes and without.
        targets = np.array([[sizes[1]], [sizes[2]]], dtype=np.int64)
        strata = np.zeros(len(unit_sizes), dtype=np.int64)
        rare: dict[int, int] = {}
    else:
        strata = _unit_classes(units, classes)
        rows_of = np.bincount(strata, weights=unit_sizes).astype(np.int64)
        rare = {
            int(stratum): int(rows_of[stratum])
            for stratum, num_units in enumerate(np.bincount(strata))
            if 0 < num_units < max(num_splits, min_class_units)
        }
        targets = _class_targets(rows_of, rare, sizes)
        # Class by class, and within a class in the seeded order, which a stable sort keeps. Rare classes are not gone
        # through at all.
        order = order[np.argsort(strata[order], kind="stable")]
        order = order[~np.isin(strata[order], list(rare))]
    chosen = np.zeros(len(unit_sizes), dtype=np.int8)
    _fill(chosen, order, unit_sizes, strata, targets)
    # What units of several rows left short in their class is filled up from any class: the sizes that were asked for
    # come before equal shares.
    left = [sizes[index] - int(unit_sizes[chosen == index].sum()) for index in _HELD_OUT]
    if any(left):
        order = whole_order[(chosen[whole_order] == TRAIN) & ~np.isin(strata[whole_order], list(rare))]
        _fill(chosen, order, unit_sizes, np.zeros_like(strata), np.array([[left[0]], [left[1]]], dtype=np.int64))
        for index in _HELD_OUT:
            if sizes[index]:
                _come_closer(chosen, order, unit_sizes, index, sizes[index])
    return Assignment(chosen[units], rare)


def assign_folds(
    units: Ints,
    *,
    num_folds: int,
    test_rows: int,
    seed: int,
    classes: Ints | None = None,
    marks: Digests | None = None,
    unit_name: str = "units",
    explanation: str = "each stays whole.",
) -> Folds:
    """Draw test out, then cut the rest into folds of equal size.

    The largest units go first, else in an order that the seed fixes, each into the fold that has the fewest rows so
    far. With classes this is done class by class: of the folds with the fewest rows of the class the smallest one takes
    the unit. So folds of single rows differ by one row at most, in each class and in all, and folds of units by one
    unit in each class.

    A class with fewer units than there are folds (and test) is in no fold: it is always in train.

    Args:
        units: ``(rows,)``: numbers from 0 without gaps; rows of one unit stay together.
        num_folds: how many folds, at least 2.
        test_rows: rows of test, 0 for none.
        seed: see ``assign_splits``.
        classes: see ``assign_splits``.
        marks: see ``assign_splits``.
        unit_name: plural noun for messages.
        explanation: see ``assign_splits``.

    Returns:
        The fold of each row.

    Raises:
        UserError: there are fewer units than folds and test.
    """
    unit_sizes = np.bincount(units)  # (units,): rows of each
    num_needed = num_folds + (test_rows > 0)
    parts = f"{num_folds} folds (split.num_folds)" + " and test" * (test_rows > 0)
    if len(unit_sizes) < num_needed:
        raise UserError(
            f"{count_units(len(unit_sizes), unit_name)} cannot be divided into {parts}, since {explanation}"
        )
    sizes = (len(units) - test_rows, 0, test_rows)
    assignment = assign_splits(
        units, sizes=sizes, seed=seed, classes=classes, marks=marks, min_class_units=num_needed, unit_name=unit_name
    )
    # Test is drawn as in a division without folds, so every fold of a seed has the same test rows.
    in_test = np.zeros(len(unit_sizes), dtype=bool)
    in_test[units[assignment.splits == TEST]] = True
    strata = np.zeros(len(unit_sizes), dtype=np.int64) if classes is None else _unit_classes(units, classes)
    order = _seeded_order(len(unit_sizes), seed, marks)
    order = order[~in_test[order] & ~np.isin(strata[order], list(assignment.rare_classes))]
    order = order[np.lexsort((-unit_sizes[order], strata[order]))]  # stable: units of one size stay in seeded order
    folds = np.full(len(unit_sizes), ALWAYS_IN_TRAIN, dtype=np.int16)
    folds[in_test] = IN_TEST
    # An empty fold would train on everything and validate on nothing, and only its figures would show it.
    if not _deal(folds, order, unit_sizes, strata, num_folds):
        raise UserError(
            f"The {unit_name} cannot be divided into {parts}: a fold would be empty, since test takes its rows first "
            f"and classes of fewer than {num_needed} {unit_name} stay in train."
        )
    return Folds(folds[units], assignment.rare_classes)


def count_units(number: int, unit_name: str) -> str:
    """Count units in words, such as ``1 different row`` and ``2 groups of 'book'``.

    Args:
        number: how many.
        unit_name: their plural, ``rows`` or ``groups`` with other words around it.
    """
    name = _PLURAL.sub(r"\1", unit_name, count=1) if number == 1 else unit_name
    return f"{number:,} {name}"


def _deal(folds: npt.NDArray[np.int16], order: Ints, unit_sizes: Ints, strata: Ints, num_folds: int) -> bool:
    """Give each unit to the fold with the fewest rows of its stratum, then in all; say whether no fold stays empty."""
    totals = [0] * num_folds
    present = -1
    smallest: list[tuple[int, int, int]] = []
    for start in range(0, len(order), _CHUNK_UNITS):
        part = order[start : start + _CHUNK_UNITS]
        chosen = []
        for size, stratum in zip(unit_sizes[part].tolist(), strata[part].tolist(), strict=True):
            # A new class: the folds stand level in it, and those with the fewest rows in all come first.
            if stratum != present:
                present = stratum
                smallest = sorted((0, total, fold) for fold, total in enumerate(totals))
            # A heap by rows of the class, then rows in all, then number: the first entry is the fold to fill next.
            rows, total, fold = smallest[0]
            heapq.heapreplace(smallest, (rows + size, total + size, fold))
            totals[fold] = total + size
            chosen.append(fold)
        folds[part] = chosen
    return min(totals) > 0


def _fill(chosen: Splits, order: Ints, unit_sizes: Ints, strata: Ints, targets: Ints) -> None:
    """Give units that fit to validation, else to test, until the targets ``(2, strata)`` are used up."""
    validation, test = targets[0].tolist(), targets[1].tolist()
    missing = sum(validation) + sum(test)
    for start in range(0, len(order), _CHUNK_UNITS):  # in chunks, since Python's integers are large
        part = order[start : start + _CHUNK_UNITS]
        for unit, size, stratum in zip(part.tolist(), unit_sizes[part].tolist(), strata[part].tolist(), strict=True):
            if size <= validation[stratum]:
                chosen[unit] = VALIDATION
                validation[stratum] -= size
            elif size <= test[stratum]:
                chosen[unit] = TEST
                test[stratum] -= size
            else:
                continue
            missing -= size
            if not missing:
                return


def _come_closer(chosen: Splits, order: Ints, unit_sizes: Ints, index: int, wanted: int) -> None:
    """Move the smallest unit of train if the split comes closer to its size by it, or is empty."""
    # Train keeps a unit whatever the size of the other splits.
    free = order[chosen[order] == TRAIN]
    has = int(unit_sizes[chosen == index].sum())
    if not len(free) or has == wanted or (chosen == TRAIN).sum() < 2:
        return
    unit = free[np.argmin(unit_sizes[free])]
    if not has or abs(has + int(unit_sizes[unit]) - wanted) < wanted - has:
        chosen[unit] = index


def _seeded_order(count: int, seed: int, marks: Digests | None = None) -> Ints:
    """Shuffle 0 to ``count - 1``: the same for a seed whatever the version of numpy, whose own shuffles may change."""
    # Seeds 0, 1 and 2 differ in a bit or two; mixed, they are nothing alike.
    start = np.uint64(mixed(np.array([seed % 2**64], dtype=np.uint64))[0])
    if marks is None:
        return np.argsort(mixed(np.arange(count, dtype=np.uint64) ^ start), kind="stable")
    assert marks.shape == (count, 2), marks.shape
    # Sorted by a hash of seed and mark, a unit's position among the others does not depend on which others there are: a
    # row that is added moves none of the old ones past each other.
    return np.lexsort((marks[:, 1], mixed(marks[:, 0] ^ start)))


def mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Turn numbers into evenly spread ones, one to one.

    Args:
        values: any shape.

    Source: SplitMix64, Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014.
    """
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def _unit_classes(units: Ints, classes: Ints) -> Ints:
    """Return the class that most rows of each unit have; the lower number when two are level."""
    num_classes = int(classes.max()) + 1
    # Each pair of unit and class as one number, which int64 holds for any table that fits into memory.
    pairs, counts = np.unique(units * num_classes + classes, return_counts=True)
    pair_units, pair_classes = pairs // num_classes, pairs % num_classes
    # By unit, then the most rows, then the lower class: the first entry of a unit is its class.
    order = np.lexsort((pair_classes, -counts, pair_units))
    first = np.unique(pair_units[order], return_index=True)[1]
    majority: Ints = pair_classes[order][first]
    return majority


def _class_targets(rows_of: Ints, rare: dict[int, int], sizes: Sequence[int]) -> Ints:
    """Share the rows of validation and test out over the classes, ``(2, classes)``."""
    counts = rows_of.copy()
    counts[list(rare)] = 0
    # One row of each class is left to train, of what validation took as well as of what test takes.
    validation = _share_out(sizes[1], counts, np.maximum(counts - 1, 0), counts)
    test = _share_out(sizes[2], counts, np.maximum(counts - validation - 1, 0), counts - validation)
    return np.stack([validation, test])


def _share_out(total: int, counts: Ints, soft_limits: Ints, limits: Ints) -> Ints:
    """Divide a total in proportion to counts by largest remainder.

    The soft limits leave a row of each class to train; they give way, largest room first, when the total needs it.
    """
    if not total or not counts.sum():
        return np.zeros_like(counts)
    shares, remainders = np.divmod(total * counts, counts.sum())
    shares = np.minimum(shares, soft_limits)
    by_remainder = np.lexsort((-counts, -remainders))
    with_room = by_remainder[(shares < soft_limits)[by_remainder]]
    shares[with_room[: total - shares.sum()]] += 1
    for bounds in (soft_limits, limits):
        # Each round fills the class with the most room, so there are no more rounds than classes.
        while (short := total - shares.sum()) > 0 and (shares < bounds).any():
            stratum = np.argmax(bounds - shares)
            shares[stratum] += min(short, bounds[stratum] - shares[stratum])
    return shares
