"""List the score of every row under both models, as one long table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lm_tuning.evaluation.statistics.outcomes import ScoredPairs

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
    from pandas import Categorical, CategoricalDtype, DataFrame

    each = [rows for pair in scored.values() for rows in pair]  # base, tuned, base, tuned, …
    sizes = [rows.num_rows for rows in each]

    def column(values: list[str]) -> Categorical[Any]:
        # Categories: a name in each of a million lines costs a byte, not eighty.
        categories = list(dict.fromkeys(values))
        codes = np.repeat([categories.index(value) for value in values], sizes).astype(np.int8)
        return Categorical.from_codes(codes, dtype=CategoricalDtype(categories))

    models = [("base", base_digest), ("tuned", tuned_digest)] * len(scored)
    values = np.concatenate([rows.row_values for rows in each]) if each else np.zeros(0)
    return DataFrame(
        {
            "row_id": np.concatenate([rows.row_ids for rows in each]) if each else np.zeros(0, dtype=np.int64),
            "model": column([name for name, _ in models]),
            "model_digest": column([digest for _, digest in models]),
            "score": column([rows.name for rows in each]),
            "value": np.where(np.isfinite(values), values, np.nan),
        },
        columns=list(COLUMNS),
    )
