"""Scores with an interval, and the difference of two models on the same rows with a test.

Every score here is a function of sums of per-row statistics: a mean of sum and count, BLEU of counts of n-grams,
macro-F1 of counts by class. So one bootstrap serves all: a resample only changes how often each row is in the sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lm_tuning.evaluation.statistics.resampling import bootstrap_sums, swap_sums
from lm_tuning.text.store.table import Int64Array

FloatArray = npt.NDArray[np.float64]

Statistics = Any
"""An array of ``(rows, k)``, or one of SciPy's sparse ones (``csr_array``), whose package has no type information."""

MIN_ROWS = 10
"""Fewer rows get neither interval nor test. Of 5 rows no test could ever say p < 0.05 (2 / 2^5 = 0.06), and a bootstrap
of fewer than about 10 draws the same few sums again and again."""

FEW_ROWS = 30
"""With fewer rows the interval is given, and said to be rough."""

UNIT_SHARE = "0 to 1"
"""Unit of scores that cannot lie outside of 0 and 1."""

LEVEL = 0.95
SIGNIFICANT = 0.05

_Z = 1.959963984540054  # quantile of the normal distribution that leaves 2.5 % above it


def ratio(sums: FloatArray) -> FloatArray:
    """Divide the first sum by the second: a mean of values and their count, or nats and tokens.

    Args:
        sums: ``(…, 2)``.

    Returns:
        ``(…)``; NaN where the second is 0.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient: FloatArray = sums[..., 0] / sums[..., 1]
    return quotient


@dataclass(frozen=True)
class ScoredRows:
    """A score of one model as what each row adds to it.

    Attributes:
        name: key of the score, such as ``rouge_l``.
        statistics: what each row adds to the sums, ``(rows, k)``; a sparse array where most of it is 0, as counts by
            class are.
        combine: makes scores of sums, ``(…, k)`` to ``(…)``.
        higher_is_better: false for a loss.
        signature: how it is computed (tokenizer, normalization, version); scores of two signatures are two scores.
        row_ids: which rows, ``(rows,)``, without repetition; the same and in the same order for both models.
        title: what reports call it; the name where empty.
        unit: what one unit is, such as ``0 to 1`` or ``nats per token``; may be empty.
    """

    name: str
    statistics: Statistics
    combine: Callable[[FloatArray], FloatArray]
    higher_is_better: bool = True
    signature: str = ""
    row_ids: Int64Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    title: str = ""
    unit: str = ""

    def __post_init__(self) -> None:
        """Check that ids and statistics are of the same rows."""
        assert self.statistics.ndim == 2, self.name
        assert len(self.row_ids) in (0, self.num_rows), f"{self.name}: {len(self.row_ids)} ids, {self.num_rows} rows"

    @property
    def num_rows(self) -> int:
        """Rows that are scored."""
        return int(self.statistics.shape[0])

    @property
    def value(self) -> float:
        """The score over all rows; NaN without rows."""
        return float(self.combine(self.sums)) if self.num_rows else math.nan

    @property
    def sums(self) -> FloatArray:
        """The sums that the score is made of, ``(k,)``."""
        return np.asarray(self.statistics.sum(axis=0), dtype=np.float64).reshape(-1)

    @property
    def row_values(self) -> FloatArray:
        """The score of each row by itself, ``(rows,)``."""
        # A part of the rows at a time: counts by class are sparse, and all of them at once would not be.
        step = max(1, 1_000_000 // max(int(self.statistics.shape[1]), 1))
        parts = [
            np.asarray(self.combine(dense(self.statistics[start : start + step])), dtype=np.float64)
            for start in range(0, self.num_rows, step)
        ]
        return np.concatenate(parts) if parts else np.zeros(0)

    @property
    def is_binary(self) -> bool:
        """Whether it is a mean of values that are 0 or 1, one a row, as accuracy and exact match are.

        Also that of a score from 0 to 1 that happens to be at its ends alone, such as an answer that shares no word.
        """
        if self.combine is not ratio or self.unit != UNIT_SHARE:
            return False
        values, counts = dense(self.statistics).T
        return bool(((values == 0) | (values == 1)).all() and (counts == 1).all())

    def take(self, rows: Int64Array) -> ScoredRows:
        """Return the same score of some rows.

        Args:
            rows: indices, ``(taken rows,)``.
        """
        ids = self.row_ids[rows] if len(self.row_ids) else self.row_ids
        return replace(self, statistics=self.statistics[rows], row_ids=ids)


def mean_of_rows(name: str, values: Any, row_ids: Any, **more: Any) -> ScoredRows:
    """Return a score that is the mean of one value a row.

    Args:
        name: key of the score.
        values: ``(rows,)``.
        row_ids: ``(rows,)``.
        **more: further attributes of :class:`ScoredRows`.
    """
    values = np.asarray(values, dtype=np.float64)
    # (rows,) to (rows, 2): value and count
    statistics = np.stack([values, np.ones_like(values)], axis=1)
    return ScoredRows(name, statistics, ratio, row_ids=np.asarray(row_ids, dtype=np.int64), **more)


@dataclass(frozen=True)
class Interval:
    """A score and where it lies with 95 % confidence.

    Attributes:
        value: over all rows.
        low: lower end; NaN where the rows are too few, or the score is no finite number.
        high: upper end, likewise.
        num_rows: rows it is of.
    """

    value: float
    low: float
    high: float
    num_rows: int


@dataclass(frozen=True)
class Difference:
    """By how much a score of one model is above that of another on the same rows.

    Attributes:
        value: tuned less base; whether that is better depends on the score.
        low: lower end of the 95 % interval; NaN where the rows are too few, or a score is no finite number.
        high: upper end, likewise.
        p_value: how often a difference as large, up or down, comes about when each row's two results are swapped by a
            coin; never 0. NaN as above.
        num_rows: rows that both were scored on.
    """

    value: float
    low: float
    high: float
    p_value: float
    num_rows: int

    @property
    def is_significant(self) -> bool:
        """Whether chance is ruled out: p below 0.05, and an interval without 0."""
        return self.p_value < SIGNIFICANT and (self.low > 0 or self.high < 0)


def interval(scored: ScoredRows, seed: int) -> Interval:
    """Return a score with its 95 % interval.

    By the percentiles of a bootstrap over rows; of a mean of zeros and ones by Wilson's interval, since a bootstrap of
    0 right in 50 would say "0 to 0".

    Args:
        scored: the score's rows.
        seed: of the draws.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 13.3; Wilson, JASA 22 (1927).
    """
    value, num_rows = scored.value, scored.num_rows
    if num_rows < MIN_ROWS or not math.isfinite(value):
        return Interval(value, math.nan, math.nan, num_rows)
    if scored.is_binary:
        return Interval(value, *_wilson(value, num_rows), num_rows)
    values = np.concatenate([scored.combine(sums) for (sums,) in bootstrap_sums([scored.statistics], seed)])
    return Interval(value, *_percentiles(values), num_rows)


def compare(base: ScoredRows, tuned: ScoredRows, seed: int) -> Difference:
    """Compare two models on the same rows.

    The interval is that of a paired bootstrap (both models' results of a row are drawn together), of means of zeros and
    ones that of Agresti and Min. The p-value is that of approximate randomization: exact where all swaps can be tried,
    else with 1 added to both counts, so that it is never 0.

    Args:
        base: the score of one model.
        tuned: the same score of the other, row by row.
        seed: of the draws.

    Source: Noreen, Computer-Intensive Methods (1989); Agresti and Min, Statistics in Medicine 24 (2005).
    """
    assert base.num_rows == tuned.num_rows, f"{base.name}: rows of both models"
    assert np.array_equal(base.row_ids, tuned.row_ids), f"{base.name}: the same rows in the same order"
    value, num_rows = tuned.value - base.value, base.num_rows
    if num_rows < MIN_ROWS or not math.isfinite(value):
        return Difference(value, math.nan, math.nan, math.nan, num_rows)
    both = [base.statistics, tuned.statistics]
    if base.is_binary and tuned.is_binary:
        low, high = _agresti_min(base, tuned)
    else:
        low, high = _percentiles(
            np.concatenate(
                [tuned.combine(second) - base.combine(first) for first, second in bootstrap_sums(both, seed)]
            )
        )
    swapped, is_exact = swap_sums(base.statistics, tuned.statistics, seed)
    differences = np.concatenate([tuned.combine(second) - base.combine(first) for first, second in swapped])
    # Sums in another order differ in the last digits: equal differences must count as equal.
    slack = 1e-9 * max(abs(value), abs(base.value), 1e-12)
    num_as_large = int((np.abs(differences) >= abs(value) - slack).sum())
    extra = 0 if is_exact else 1
    return Difference(value, low, high, (num_as_large + extra) / (len(differences) + extra), num_rows)


def dense(statistics: Statistics) -> FloatArray:
    """Return statistics, sparse or not, as a plain array."""
    plain = statistics if isinstance(statistics, np.ndarray) else statistics.toarray()
    return np.asarray(plain, dtype=np.float64)


def _percentiles(values: FloatArray) -> tuple[float, float]:
    # A resample without a single counted token has no mean; where that is more than a rarity there is no interval.
    values = values[np.isfinite(values)] if np.isfinite(values).mean() > LEVEL else np.full(1, math.nan)
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _wilson(share: float, num_rows: int) -> tuple[float, float]:
    """Return the interval of a share, which is right near 0 and 1 too."""
    scale = 1 + _Z**2 / num_rows
    middle = (share + _Z**2 / (2 * num_rows)) / scale
    half = _Z / scale * math.sqrt(share * (1 - share) / num_rows + _Z**2 / (4 * num_rows**2))
    # Rounding must not leave a bound past 0, 1 or the share itself.
    return min(max(middle - half, 0.0), share), max(min(middle + half, 1.0), share)


def _agresti_min(base: ScoredRows, tuned: ScoredRows) -> tuple[float, float]:
    """Return the interval of a difference of paired shares: half a row is added to each cell of the 2 by 2 table."""
    first, second = dense(base.statistics)[:, 0], dense(tuned.statistics)[:, 0]  # (rows,)
    gained, lost = float((second > first).sum()) + 0.5, float((second < first).sum()) + 0.5
    total = base.num_rows + 2
    middle = (gained - lost) / total
    half = _Z * math.sqrt(gained + lost - (gained - lost) ** 2 / total) / total
    return middle - half, middle + half
