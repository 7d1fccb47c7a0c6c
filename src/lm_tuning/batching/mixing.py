"""How often the rows of each source come up in an epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from lm_tuning.data.check.account import rows_per_epoch
from lm_tuning.data.records import MixedSource
from lm_tuning.data.split.records import DividedSource

IntArray = npt.NDArray[np.int64]


class TrainedSource(MixedSource):
    """The same with the rows in the steps of a run, a repeated row counted each time."""

    num_rows_trained: int


class SourceMix:
    """Repeat the rows of each source by its weight.

    A source of ``n`` rows and weight ``w`` gives ``w * n`` rows to every epoch, rounded (halves up): each row
    ``floor(w)`` times, and the rest of the rows, drawn again for each epoch, once more.

    Attributes:
        is_plain: every row comes up exactly once, as without any weights.
        num_rows: rows of each source, ``(sources,)``.
        rows_per_epoch: rows that each source gives to an epoch, ``(sources,)``.
    """

    def __init__(self, sources: npt.ArrayLike, weights: Sequence[float] | None = None) -> None:
        """Count the rows.

        Args:
            sources: index of each row's source in ``weights``, ``(rows,)``.
            weights: one per source, at least 0; ``None`` is 1 for each source that there is.
        """
        self._sources: npt.NDArray[np.int16] = np.asarray(sources, dtype=np.int16)
        if weights is None:
            weights = [1.0] * (int(self._sources.max(initial=0)) + 1)
        # As typed: 2.3 means 23/10, not the nearest binary fraction, whose excess over 2 is a little less than 3/10.
        self._weights = [Fraction(str(weight)) for weight in weights]
        assert all(weight >= 0 for weight in self._weights), weights
        num_rows = self.num_rows = self._count(self._sources)
        assert len(num_rows) == len(self._weights), f"rows of source {len(num_rows) - 1}, {len(self._weights)} weights"
        self.is_plain = all(weight == 1 for weight in self._weights)
        self.rows_per_epoch: IntArray = np.array(
            [rows_per_epoch(weight, int(rows)) for weight, rows in zip(self._weights, num_rows, strict=True)],
            dtype=np.int64,
        )

    def draw_rows(self, random: np.random.Generator) -> IntArray:
        """Draw the rows of an epoch.

        Args:
            random: decides which rows come up once more than the others of their source.

        Returns:
            Row indices, ``(rows_per_epoch.sum(),)``, each as often as it comes up; source by source.
        """
        parts = []
        for source, weight in enumerate(self._weights):
            # (rows of the source,), ascending
            rows = np.flatnonzero(self._sources == source)
            repeats = math.floor(weight)
            num_more = int(self.rows_per_epoch[source]) - repeats * len(rows)
            # Not shuffled here: the step plan draws the order of all sources together.
            parts += [np.tile(rows, repeats), random.choice(rows, num_more, replace=False, shuffle=False)]
        return np.concatenate(parts)

    def count(self, rows: IntArray) -> IntArray:
        """Count rows by source.

        Args:
            rows: row indices, ``(any,)``.

        Returns:
            Rows of each source, ``(sources,)``.
        """
        return self._count(self._sources[rows])

    def describe(self, sources: Sequence[DividedSource], num_rows_trained: IntArray) -> list[TrainedSource]:
        """Return the counts beside the names of the sources, for reports.

        Args:
            sources: ``path`` and ``weight`` of each.
            num_rows_trained: rows of each source in the steps of a run, ``(sources,)``.
        """
        counts = zip(self.num_rows.tolist(), self.rows_per_epoch.tolist(), num_rows_trained.tolist(), strict=True)
        return [
            {
                "path": source["path"],
                "weight": source["weight"],
                "num_rows": num_rows,
                "rows_per_epoch": rows_per_epoch,
                "num_rows_trained": trained,
            }
            for source, (num_rows, rows_per_epoch, trained) in zip(sources, counts, strict=True)
        ]

    def identity(self) -> bytes:
        """Return what tells two mixtures apart; nothing at all for one that changes nothing."""
        if self.is_plain:
            return b""
        # The digest of a plan must not change for runs that use no weights, whatever is added to this.
        return b"|mix-1|" + ",".join(map(str, self._weights)).encode() + b"|" + self._sources.tobytes()

    def _count(self, sources: npt.NDArray[np.int16]) -> IntArray:
        # (rows,) to (sources,), a source without rows included
        return np.bincount(sources, minlength=len(self._weights)).astype(np.int64)
