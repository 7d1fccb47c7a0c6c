"""Answers beside references, and single scores of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_tuning.evaluation.scores.answered import Answered
from lm_tuning.evaluation.scores.score import Scorer
from lm_tuning.evaluation.statistics.scored_rows import ScoredRows
from lm_tuning.parameters.scores import ScoreParameters


def answered(references: Sequence[str], answers: Sequence[str]) -> Answered:
    row_ids = range(10, 10 + len(references))
    return Answered(row_ids, [f"prompt {row}" for row in row_ids], references, answers)


def scores_of(references: Sequence[str], answers: Sequence[str], *names: str, **settings: Any) -> dict[str, ScoredRows]:
    """Score answers by the parameters of the same name; what comes for the tuned model."""
    scorer = Scorer(ScoreParameters(names=[*names], **settings))
    rows = answered(references, answers)
    found = scorer.score(rows, rows)
    assert not found.failed, found.failed
    return {name: tuned for name, (_, tuned) in found.scored.items()}


def value_of(reference: str, answer: str, name: str, **settings: Any) -> float:
    """Score one answer."""
    return scores_of([reference], [answer], name, **settings)[name].value
