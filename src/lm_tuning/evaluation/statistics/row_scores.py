"""List the score of every row under both models, as one long table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from lm_tuning.evaluation.statistics.outcomes import ScoredPairs
from lm_tuning.evaluation.statistics.scored_rows import ScoredRows

if TYPE_CHECKING:
    from pandas import DataFrame

COLUMNS = ("row_id", "model", "model_digest", "score", "value")


def tabulate_rows(scored: ScoredPairs, *, base_digest: str, tuned_digest: str) -> DataFrame:
    """Build the table of ``COLUMNS``.

    Args:
        scored: of both models.
        base_digest: names the weights of the base.
        tuned_digest: names those of the tuned model.

    Returns:
        One line for each row, model and score. What is no finite number, such as a loss of a damaged model, is missing.
    """
    from pandas import Categorical, DataFrame, concat

    def frame(rows: ScoredRows, model: str, digest: str) -> DataFrame:
        values = rows.row_values
        # Categories: a name in each of a million lines costs a byte, not eighty.
        constants = {"model": model, "model_digest": digest, "score": rows.name}
        columns = {
            name: Categorical.from_codes(np.zeros(len(values), dtype=np.int8), [text])
            for name, text in constants.items()
        }
        return DataFrame({"row_id": rows.row_ids, **columns, "value": np.where(np.isfinite(values), values, np.nan)})

    def frames() -> Iterator[DataFrame]:
        for base, tuned in scored.values():
            yield frame(base, "base", base_digest)
            yield frame(tuned, "tuned", tuned_digest)

    tables = list(frames())
    return concat(tables, ignore_index=True)[list(COLUMNS)] if tables else DataFrame(columns=list(COLUMNS))
