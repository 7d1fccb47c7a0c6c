"""What a tuned model has to reach: ``evaluate.gate``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Literal

from pydantic import Field

GateBound = Annotated[float, Field(allow_inf_nan=False)] | Literal["better", "not_worse"]
"""A number that a score has to reach, or how it has to compare with the base's."""

Gate = Mapping[str, GateBound]

LOSS_SCORES = ("nats_per_token", "perplexity")
ANSWER_SCORES = ("rouge_l", "rouge_1", "rouge_2")
CLASS_SCORES = ("accuracy", "macro_f1", "nats_per_row")
NO_ROWS = frozenset({"perplexity"})
"""Figures that are no score of rows, so that nothing can be said beyond chance; their bound is a number."""


def find_gate_problems(gate: Gate, scores: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
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
