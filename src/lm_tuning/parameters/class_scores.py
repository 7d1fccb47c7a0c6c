"""Value types of the parameters on a classifier's scores, and what they need beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, Field

from lm_tuning.parameters.base import AutoOrCount, read_scientific

if TYPE_CHECKING:
    from lm_tuning.parameters.evaluate import EvaluateParameters

TopK = AutoOrCount
"""The k of top-k accuracy."""

Threshold = Annotated[float, Field(gt=0, lt=1), BeforeValidator(read_scientific)]
"""A probability below which no answer is given. At 0 all rows would be answered, at 1 none."""


def find_class_score_problems(evaluate: EvaluateParameters, task: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Find settings of a classifier's scores beside a language model, where they would do nothing.

    Args:
        evaluate: the ``evaluate`` parameters.
        task: the ``task`` parameter.

    Yields:
        The keys that take part, and the sentence for the user.
    """
    if task == "sequence_classification":
        return
    if evaluate.top_k != "auto":
        yield (
            ("evaluate.top_k", "task"),
            f"evaluate.top_k = {evaluate.top_k} is about the classes of a classifier, but task = {task}. For the "
            "tokens that answers are drawn from set evaluate.generation.top_k; else set evaluate.top_k = auto.",
        )
    if evaluate.abstain_below is not None:
        yield (
            ("evaluate.abstain_below", "task"),
            f"evaluate.abstain_below = {evaluate.abstain_below:g} is about the classes of a classifier, but task = "
            f"{task}: set evaluate.abstain_below = null.",
        )
