"""Split the rows of a step into micro-batches: how many rows go through the model at once. Needs no torch."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Literal

Batching = Literal["packed", "padded"]

MICRO_BATCH_TOKENS = {"cpu": 512, "cuda": 8192}
"""Positions of a micro-batch when ``micro_batch_tokens`` is ``auto``, by device."""


def choose_micro_batch_tokens(micro_batch_tokens: int | None, *, device: str) -> int:
    """Return the positions of a micro-batch.

    Args:
        micro_batch_tokens: what the user set; ``None`` chooses by device.
        device: ``cpu``, ``cuda`` or ``mps``.
    """
    return micro_batch_tokens or MICRO_BATCH_TOKENS.get(device, MICRO_BATCH_TOKENS["cpu"])


def choose_batching(
    batching: Literal["auto", "packed", "padded"], *, device: str, attention: str, can_pack: bool = True
) -> Batching:
    """Pack where nothing is lost by it, as far as that can be told without the model.

    Attention that is told where rows begin costs nothing. An attention that the user chose needs an explicit mask
    instead: on a CPU that costs little and saves all padding; on a GPU it would switch flash attention off, so rows of
    like length are padded.

    Args:
        batching: what the user set.
        device: ``cpu``, ``cuda`` or ``mps``.
        attention: ``auto``, ``sdpa``, ``eager`` or ``flash_attention_2``.
        can_pack: whether the task allows it.
    """
    if batching != "auto":
        return batching
    takes_masks = device == "cpu" and attention in {"sdpa", "eager"}
    return "packed" if can_pack and (attention == "auto" or takes_masks) else "padded"


def split_rows(
    rows: Iterable[int], lengths: Iterable[int], *, budget_tokens: int, batching: Batching
) -> list[list[int]]:
    """Group rows into micro-batches of at most a number of positions.

    Packed rows are placed longest first into the fullest micro-batch with room for them (best-fit decreasing), never
    cut. That says how many micro-batches are needed; if the rows can be spread over as many evenly, they are, so that
    none is far smaller than the others and the largest needs least memory. Padded rows are sorted by length, so that
    neighbours need little padding. A row longer than the budget stands alone.

    Args:
        rows: row indices.
        lengths: tokens of each of those rows.
        budget_tokens: most positions of a micro-batch, padding included.
        batching: ``packed`` or ``padded``.

    Returns:
        The row indices of each micro-batch.
    """
    # Stable, so rows of one length keep their order and the same step is split the same way in every process.
    pairs = sorted(zip(map(int, lengths), map(int, rows), strict=True), key=lambda pair: -pair[0])
    groups: list[list[int]] = []
    if batching == "packed":
        room: list[tuple[int, int]] = []  # (positions left, micro-batch), the fullest first
        for length, row in pairs:
            # The fullest one that still has room for the row. Micro-batches count from 0, so (length, 0) sorts before
            # all of that room.
            at = bisect_left(room, (length, 0))
            if at == len(room):
                left, position = budget_tokens, len(groups)
                groups.append([])
            else:
                left, position = room.pop(at)
            groups[position].append(row)
            insort(room, (left - length, position))
        # Best fit fills all but the last to the brim; spread evenly, the largest, which decides the memory, is smaller.
        return _spread_evenly(pairs, len(groups), budget_tokens) or groups
    # The first row of a padded group is its longest, and all others are padded to it.
    longest = 0
    for length, row in pairs:
        if groups and longest * (len(groups[-1]) + 1) <= budget_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
            longest = length
    return groups


def _spread_evenly(pairs: list[tuple[int, int]], num_groups: int, budget_tokens: int) -> list[list[int]] | None:
    """Place rows, longest first, each into the emptiest of a number of groups; ``None`` where one gets too full."""
    # (positions so far, group): a heap, the emptiest first
    filled = [(0, position) for position in range(num_groups)]
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    for length, row in pairs:
        positions, position = heapq.heappop(filled)
        if positions + length > budget_tokens:
            return None
        groups[position].append(row)
        heapq.heappush(filled, (positions + length, position))
    return groups


def split_pairs(
    rows: Iterable[int], sources: Iterable[int], targets: Iterable[int], *, budget_tokens: int
) -> list[list[int]]:
    """Group rows of a source and a target, each padded to the longest of its micro-batch.

    Rows are sorted by both lengths together, so that neighbours need little padding. A row longer than the budget
    stands alone.

    Args:
        rows: row indices.
        sources: tokens of each row's source.
        targets: tokens of each row's target.
        budget_tokens: most positions of a micro-batch, padding included.

    Returns:
        The row indices of each micro-batch.
    """
    triples = zip(map(int, sources), map(int, targets), map(int, rows), strict=True)
    groups: list[list[int]] = []
    longest_source = longest_target = 0
    for source, target, row in sorted(triples, key=lambda triple: (-triple[0] - triple[1], -triple[0])):
        # Both sides of a pair are padded on their own, so what a row costs depends on the longest of either.
        wider = max(longest_source, source) + max(longest_target, target)
        if groups and wider * (len(groups[-1]) + 1) <= budget_tokens:
            groups[-1].append(row)
            longest_source, longest_target = max(longest_source, source), max(longest_target, target)
        else:
            groups.append([row])
            longest_source, longest_target = source, target
    return groups
