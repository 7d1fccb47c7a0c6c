"""What a tuned model has to reach: ``evaluate.gate``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from lm_tuning.parameters.base import read_scientific

GateBound = (
    Annotated[float, Field(allow_inf_nan=False), BeforeValidator(read_scientific)] | Literal["better", "not_worse"]
)
"""A number that a score has to reach, or how it has to compare with the base's."""

Gate = dict[str, GateBound]

LANGUAGE_FIGURES = ("nats_per_token", "bits_per_byte", "token_accuracy", "perplexity")
CLASS_FIGURES = (
    "accuracy",
    "macro_f1",
    "micro_f1",
    "weighted_f1",
    "top_k_accuracy",
    "nats_per_row",
    "calibration_error",
)
"""What is measured of a language model whether it answers or not, and of a classifier."""

NO_ROWS = frozenset({"perplexity", "calibration_error"})
"""Figures that are no score of rows, so that nothing can be said beyond chance; their bound is a number."""


def scores_of_language(answer_scores: Sequence[str], *, num_generate_rows: int) -> dict[str, str | None]:
    """Return the scores of a language model, each with the reason why it will not be measured, None where it will.

    Args:
        answer_scores: the scores of answers that are asked for.
        num_generate_rows: rows that are answered.
    """
    reason = (
        "answers are left out by evaluate.num_generate_rows = 0. Set that to the rows to answer, or drop this bound."
    )
    return {
        **dict.fromkeys(answer_scores, reason if num_generate_rows == 0 else None),
        **dict.fromkeys(LANGUAGE_FIGURES),
    }


def find_gate_problems(gate: Mapping[str, GateBound], scores: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    """Yield what cannot be asked for: a score that will not be measured, or a comparison that cannot be made.

    Args:
        gate: bound by name of the score.
        scores: every score of the task, and why it will not be measured with these parameters; None where it will.

    Yields:
        The key and a sentence for the user.
    """
    known = [name for name, reason in scores.items() if reason is None]
    for name, bound in gate.items():
        key = f"evaluate.gate.{name}"
        if name not in scores:
            near = get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Scores of this run: {', '.join(known)}."
            yield key, f"{key}: there is no such score. {hint}"
        elif scores[name] is not None:
            yield key, f"{key} = {bound}: {scores[name]}"
        elif isinstance(bound, str) and name in NO_ROWS:
            yield key, f"{key} = {bound} is not allowed: it is no score of rows. It takes a number."
