"""Value types of the parameters on a classifier's scores, and what they need beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import BeforeValidator, Field

from lm_tuning.parameters.base import AutoOrCount, read_scientific

TopK = AutoOrCount
"""The k of top-k accuracy."""

Threshold = Annotated[float, Field(gt=0, lt=1), BeforeValidator(read_scientific)]
"""A probability below which no answer is given. At 0 all rows would be answered, at 1 none."""


def find_class_score_problems(
    top_k: int | str, abstain_below: float | None, *, task: str
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Find settings of a classifier's scores beside a language model, where they would do nothing.

    Args:
        top_k: ``evaluate.top_k``.
        abstain_below: ``evaluate.abstain_below``.
        task: the ``task`` parameter.

    Yields:
        The keys that take part, and the sentence for the user.
    """
    if task == "sequence_classification":
        return
    if top_k != "auto":
        yield (
            ("evaluate.top_k", "task"),
            f"evaluate.top_k = {top_k} is about the classes of a classifier, but task = {task}. For the "
            "tokens that answers are drawn from set evaluate.generation.top_k; else set evaluate.top_k = auto.",
        )
    if abstain_below is not None:
        yield (
            ("evaluate.abstain_below", "task"),
            f"evaluate.abstain_below = {abstain_below:g} is about the classes of a classifier, but task = "
            f"{task}: set evaluate.abstain_below = null.",
        )
