"""Answered rows, and what makes scores of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lm_tuning.evaluation.statistics.scored_rows import ScoredRows
from lm_tuning.text.store.table import Int64Array


@dataclass(frozen=True)
class Answered:
    """One model's answers beside what they are compared with.

    Attributes:
        row_ids: ids of the rows.
        prompts: what was asked, as text.
        references: the true answers.
        answers: the model's.
    """

    row_ids: Sequence[int]
    prompts: Sequence[str]
    references: Sequence[str]
    answers: Sequence[str]

    def head(self, num_rows: int) -> Answered:
        """Return the first rows.

        Args:
            num_rows: how many at most.
        """
        return Answered(
            self.row_ids[:num_rows], self.prompts[:num_rows], self.references[:num_rows], self.answers[:num_rows]
        )

    @property
    def ids(self) -> Int64Array:
        """The ids as an array, ``(rows,)``."""
        return np.asarray(self.row_ids, dtype=np.int64)


class Family(Protocol):
    """Scores that are made together, since they share the work."""

    @property
    def names(self) -> Sequence[str]:
        """Keys of the scores, in the order wanted."""

    def score(self, rows: Answered) -> dict[str, ScoredRows]:
        """Return the scores of one model by name.

        Args:
            rows: its answers.
        """


def counted(name: str, statistics: Any, rows: Answered, **more: Any) -> ScoredRows:
    """Return a score of what each row adds to it.

    Args:
        name: its key.
        statistics: ``(rows, k)``.
        rows: of one model.
        **more: further attributes of :class:`ScoredRows`.
    """
    return ScoredRows(name, np.asarray(statistics, dtype=np.float64), row_ids=rows.ids, **more)
