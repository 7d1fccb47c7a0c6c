"""Names of the arrays that functions of the package hand to each other, and numbers for what is equal in them."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
"""Ids, indices, counts, and numbers that stand for equal things."""

Mask: TypeAlias = npt.NDArray[np.bool_]
"""Which of some things."""

Splits: TypeAlias = npt.NDArray[np.int8]
"""Index in ``SPLITS``, below 0 for a row that is left out."""

Digests: TypeAlias = npt.NDArray[np.uint64]
"""``(things, 2)``: two halves of 16 bytes that are equal for equal things."""


def number_equal(digests: Digests) -> Ints:
    """Give equal digests the same number.

    Args:
        digests: ``(rows, 2)``: 16 bytes per row.

    Returns:
        ``(rows,)``: numbers from 0, in the order in which the digests first appear.
    """
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: equal rows stay in the order of the file
    ordered = digests[order]
    # True where a run of equal digests begins; a running sum of it numbers the runs.
    is_new = np.ones(len(order), dtype=bool)
    is_new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    ids = np.empty(len(order), dtype=np.int64)
    # Runs come in the order of the digests; they are numbered in that of their first rows.
    ids[order] = _ranks(order[is_new])[np.cumsum(is_new) - 1]
    return ids


def is_later_copy(ids: Ints, priority: Splits | None = None) -> Mask:
    """Return for each row whether an equal one comes before it.

    Args:
        ids: ``(rows,)``: equal numbers for equal rows.
        priority: ``(rows,)``: rows with a lower number come first; None keeps the order of the rows alone.

    Returns:
        ``(rows,)``.
    """
    # Stable, so of equal rows with one priority the first in the file stays first.
    order = np.lexsort((ids,)) if priority is None else np.lexsort((priority, ids))
    is_copy = np.zeros(len(ids), dtype=bool)
    is_copy[order[1:]] = ids[order[1:]] == ids[order[:-1]]
    return is_copy


def join_units(first: Ints, second: Ints) -> Ints:
    """Number the rows that belong together by either of two relations, directly or through other rows.

    Args:
        first: ``(rows,)``: rows with equal numbers belong together.
        second: ``(rows,)``: the same by another relation, such as a group.

    Returns:
        ``(rows,)``: numbers from 0, in the order in which the units first appear.
    """
    # Only a content that stands in more than one group joins groups, so the slow part is as long as there are such.
    order = np.lexsort((second, first))
    is_bridge = (first[order[1:]] == first[order[:-1]]) & (second[order[1:]] != second[order[:-1]])
    # A forest over the groups; in a list, since looking up single values of an array costs several times as much.
    parents = list(range(int(second.max(initial=-1)) + 1))

    def root_of(node: int) -> int:
        # Each look halves the way to the root for those that follow.
        while parents[node] != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    ends = second[order]
    for left, right in zip(ends[:-1][is_bridge].tolist(), ends[1:][is_bridge].tolist(), strict=True):
        one, other = root_of(left), root_of(right)
        if one != other:
            # Which of the two becomes the root changes nothing: units are numbered by appearance at the end.
            parents[max(one, other)] = min(one, other)
    if is_bridge.any():
        second = np.array([root_of(node) for node in range(len(parents))], dtype=np.int64)[second]
    return number_by_appearance(second)


def number_by_appearance(ids: Ints) -> Ints:
    """Renumber from 0 without gaps, in the order in which the numbers first appear.

    Args:
        ids: ``(rows,)``: any numbers.
    """
    _, first_rows, inverse = np.unique(ids, return_index=True, return_inverse=True)
    return _ranks(first_rows)[inverse]


def _ranks(values: Ints) -> Ints:
    """Return how many of some different numbers are smaller than each."""
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranks


def find_repeats(digests: Digests, is_train: Mask) -> tuple[Ints, Ints]:
    """Find the training rows that repeat the key of an earlier one.

    Args:
        digests: ``(rows, 2)``: 16 bytes per row, equal for equal keys.
        is_train: ``(rows,)``: rows that are compared.

    Returns:
        Indices of the rows that repeat, ascending, and beside each the index of the first row with that key.
    """
    indices = np.flatnonzero(is_train)
    ids = number_equal(digests[indices])
    is_repeat = is_later_copy(ids)
    # Numbers follow the rows that have them first, so the first row of a number stands where the number says.
    firsts = indices[~is_repeat]
    return indices[is_repeat], firsts[ids[is_repeat]]
