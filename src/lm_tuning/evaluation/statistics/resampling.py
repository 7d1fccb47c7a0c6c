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

MAX_DRAWN_ROWS = 20_000
MAX_SWAPPED_ROWS = 5_000
"""Sums over more rows are drawn from the normal distribution that they have by the central limit theorem: drawing each
row would take minutes, and change no digit that is shown.

Not sparse ones. A column of these is a count that few rows take part in, such as the rows of a rare class, and is not
normal however many rows there are: the interval of a macro-F1 would leave out the score itself. Rows that count alike
are drawn together in that case, which is the same distribution as that of single rows."""

MIN_DRAWS = 999
MAX_DRAWS_TIMES_ROWS = 100_000_000

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
    num_rows, widths = int(statistics[0].shape[0]), [int(each.shape[1]) for each in statistics]
    generator = np.random.default_rng([seed, 0])
    if num_rows > MAX_DRAWN_ROWS and any(map(_is_sparse, statistics)):
        kinds, num_alike = _group_alike(statistics)
        for num_draws in _parts(len(num_alike), widths, _num_draws(NUM_RESAMPLES, len(num_alike))):
            weights = generator.multinomial(num_rows, num_alike / num_rows, size=num_draws).astype(np.float64)
            yield [np.asarray(weights @ each) for each in kinds]
        return
    if num_rows > MAX_DRAWN_ROWS:
        total = np.concatenate([_sum(each) for each in statistics])
        covariance = _products(statistics) - np.outer(total, total) / num_rows
        ends = np.cumsum(widths)[:-1].tolist()
        for part in _normal_sums(total, covariance, NUM_RESAMPLES, generator):
            yield np.split(part, ends, axis=1)
        return
    for num_draws in _parts(num_rows, widths, _num_draws(NUM_RESAMPLES, num_rows)):
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
    before, total = _sum(base), _sum(base) + _sum(tuned)
    change = tuned - base
    # A row that both models do alike is the same swapped: it takes part in no sum that changes.
    changed = np.asarray(abs(change).sum(axis=1)).reshape(-1) > 0
    change = change[np.flatnonzero(changed)]  # (changed rows, k)
    num_rows, width = change.shape
    is_exact = num_rows < 30 and 2**num_rows <= NUM_SWAPS
    generator = np.random.default_rng([seed, 1])

    def moved() -> Iterator[FloatArray]:
        """Yield what goes to the other side: the change of the swapped rows, ``(draws, k)``."""
        if num_rows > MAX_SWAPPED_ROWS and _is_sparse(change):
            (kinds,), num_alike = _group_alike([change])
            for num_draws in _parts(len(num_alike), [width], _num_draws(NUM_SWAPS, len(num_alike))):
                swapped = generator.binomial(num_alike, 0.5, size=(num_draws, len(num_alike)))
                yield np.asarray(swapped.astype(np.float64) @ kinds)
            return
        if num_rows > MAX_SWAPPED_ROWS:
            yield from _normal_sums(_sum(change) / 2, _products([change]) / 4, NUM_SWAPS, generator)
            return
        if is_exact:
            numbers = np.arange(2**num_rows)[:, None]
            yield np.asarray((numbers >> np.arange(num_rows) & 1).astype(np.float64) @ change)
            return
        for num_draws in _parts(num_rows, [width], _num_draws(NUM_SWAPS, num_rows)):
            coins = generator.integers(0, 2, size=(num_draws, num_rows), dtype=np.int8)
            yield np.asarray(coins.astype(np.float64) @ change)

    return ((before + each, total - before - each) for each in moved()), is_exact


def _normal_sums(
    mean: FloatArray, covariance: FloatArray, num_draws: int, generator: np.random.Generator
) -> Iterator[FloatArray]:
    """Yield sums with this mean and covariance, ``(draws, k)``."""
    # By eigenvectors, since the covariance is singular where a sum is the same in every draw, as the count of rows is.
    values, vectors = np.linalg.eigh(covariance)
    root = np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T  # (k, k)
    for part in _parts(1, [len(mean)], num_draws):
        yield mean + generator.standard_normal((part, len(mean))) @ root


def _products(statistics: Sequence[Statistics]) -> FloatArray:
    """Return the sum over rows of each statistic times each other one, ``(k, k)`` for all scores together."""
    return np.block([[np.asarray(first.T @ second) for second in statistics] for first in statistics])


def _group_alike(statistics: Sequence[Statistics]) -> tuple[list[Statistics], npt.NDArray[np.int64]]:
    """Return one row of each kind, and how many rows are of it, ``(kinds,)``."""
    generator = np.random.default_rng(0)
    # (rows, scores): a random number for each column tells rows apart; equal ones get equal sums.
    marks = np.stack([each @ generator.standard_normal(each.shape[1]) for each in statistics], axis=1)
    _, first, num_alike = np.unique(marks, axis=0, return_index=True, return_counts=True)
    return [each[first] for each in statistics], num_alike


def _is_sparse(statistics: Statistics) -> bool:
    return not isinstance(statistics, np.ndarray)


def _num_draws(wanted: int, num_rows: int) -> int:
    return max(min(wanted, MAX_DRAWS_TIMES_ROWS // max(num_rows, 1)), min(wanted, MIN_DRAWS))


def _parts(num_rows: int, widths: Sequence[int], num_draws: int) -> Iterator[int]:
    """Yield how many draws are made at once, up to all of them."""
    at_once = max(1, _MAX_CELLS // max(num_rows, *widths, 1))
    for start in range(0, num_draws, at_once):
        yield min(at_once, num_draws - start)


def _sum(statistics: Statistics) -> FloatArray:
    return np.asarray(statistics.sum(axis=0), dtype=np.float64).reshape(-1)
