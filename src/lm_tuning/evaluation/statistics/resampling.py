"""Draw rows again, or swap two models' results, and sum what is drawn: in parts, so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

NUM_RESAMPLES = 2000
NUM_SWAPS = 9999
"""Draws of a bootstrap and of a test. With 9,999 swaps the smallest p is 0.0001."""

MIN_DRAWS = 999
MAX_DRAWN_ROWS = 1_000_000_000
"""Of a million rows fewer draws are made, since each is worth more: about ten seconds on one core, not minutes."""

_MAX_CELLS = 2_000_000
"""Draws times rows, and draws times sums, that exist at once: 16 MB each as doubles."""

Statistics = Any
"""``(rows, k)``, plain or sparse."""


def bootstrap_sums(statistics: Sequence[Statistics], seed: int) -> Iterator[list[FloatArray]]:
    """Yield sums over rows drawn with replacement, as many as there are.

    Args:
        statistics: of one or several scores of the same rows, ``(rows, k)`` each; a row is drawn for all of them alike.
        seed: of the draws.

    Yields:
        Of each, the sums of some draws, ``(draws, k)``.
    """
    num_rows = int(statistics[0].shape[0])
    generator = np.random.default_rng([seed, 0])
    for num_draws in _parts(num_rows, statistics, _num_draws(NUM_RESAMPLES, num_rows)):
        drawn = generator.integers(0, num_rows, size=(num_draws, num_rows))
        # How often each row was drawn: a product with those counts sums all draws at once.
        drawn += np.arange(num_draws)[:, None] * num_rows
        counts = np.bincount(drawn.ravel(), minlength=num_draws * num_rows).reshape(num_draws, num_rows)
        weights = counts.astype(np.float64)  # (draws, rows)
        yield [np.asarray(weights @ each) for each in statistics]


def swap_sums(base: Statistics, tuned: Statistics, seed: int) -> tuple[Iterator[tuple[FloatArray, FloatArray]], bool]:
    """Swap the two models' results of rows by a coin, and sum them.

    Args:
        base: statistics of one model, ``(rows, k)``.
        tuned: of the other.
        seed: of the coins.

    Returns:
        Sums of both, ``(draws, k)`` each, some draws at a time; and whether these are all swaps that there are.
    """
    num_rows = int(base.shape[0])
    wanted = _num_draws(NUM_SWAPS, num_rows)
    is_exact = 2**num_rows <= wanted if num_rows < 30 else False
    before, total = _sum(base), _sum(base) + _sum(tuned)
    change = tuned - base

    def sums() -> Iterator[tuple[FloatArray, FloatArray]]:
        for swaps in _all_swaps(num_rows) if is_exact else _coins(num_rows, (base, tuned), wanted, seed):
            # What goes to the other side is the difference of the swapped rows; (draws, rows) to (draws, k).
            first = before + np.asarray(swaps.astype(np.float64) @ change)
            yield first, total - first

    return sums(), is_exact


def _coins(num_rows: int, statistics: Sequence[Statistics], wanted: int, seed: int) -> Iterator[npt.NDArray[np.int8]]:
    generator = np.random.default_rng([seed, 1])
    for num_draws in _parts(num_rows, statistics, wanted):
        yield generator.integers(0, 2, size=(num_draws, num_rows), dtype=np.int8)


def _all_swaps(num_rows: int) -> Iterator[npt.NDArray[np.int8]]:
    numbers = np.arange(2**num_rows)[:, None]
    yield (numbers >> np.arange(num_rows) & 1).astype(np.int8)


def _num_draws(wanted: int, num_rows: int) -> int:
    return max(min(wanted, MAX_DRAWN_ROWS // num_rows), min(wanted, MIN_DRAWS))


def _parts(num_rows: int, statistics: Sequence[Statistics], num_draws: int) -> Iterator[int]:
    """Yield how many draws are made at once, up to all of them."""
    widest = max(num_rows, *(int(each.shape[1]) for each in statistics))
    at_once = max(1, _MAX_CELLS // widest)
    for start in range(0, num_draws, at_once):
        yield min(at_once, num_draws - start)


def _sum(statistics: Statistics) -> FloatArray:
    return np.asarray(statistics.sum(axis=0), dtype=np.float64).reshape(-1)
