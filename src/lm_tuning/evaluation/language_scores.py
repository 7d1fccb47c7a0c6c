"""Scores and figures of a language model, made of what was measured: no model is needed any more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lm_tuning.batching.row_sums import RowSums
from lm_tuning.evaluation.base import Measurement, finite
from lm_tuning.evaluation.records import LanguageFigures, LanguageImprovement
from lm_tuning.evaluation.scores.answered import Answered
from lm_tuning.evaluation.scores.score import ScoredAnswers, Scorer, count_empty
from lm_tuning.evaluation.statistics.scored_rows import FloatArray, ScoredRows, ratio
from lm_tuning.text.store.table import Int64Array

LOSS = "nats_per_token"
BITS_PER_BYTE = "bits_per_byte"
ACCURACY = "token_accuracy"
_SIGNATURES = {
    LOSS: "supervised tokens|version:1",
    BITS_PER_BYTE: "supervised tokens|bytes:utf-8 of their text without special tokens|version:1",
    ACCURACY: "supervised tokens|teacher forcing|version:1",
}


@dataclass(frozen=True)
class LossRows:
    """The rows whose loss was measured.

    Attributes:
        row_ids: ``(rows,)``.
        num_bytes: UTF-8 bytes of the supervised text of each, ``(rows,)``.
    """

    row_ids: Int64Array
    num_bytes: Int64Array


@dataclass(frozen=True)
class LanguageScores:
    """Two models' scores and figures.

    Attributes:
        base: figures of the base model.
        tuned: figures of the tuned one.
        scored: by name, base and tuned; scores of the answers first, then those of the loss.
        failed: why a score is missing, by its name.
    """

    base: LanguageFigures
    tuned: LanguageFigures
    scored: dict[str, tuple[ScoredRows, ScoredRows]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def of_rows(self, name: str, *, num_rows: int) -> tuple[list[float | None], list[float | None]]:
        """Return a score of each row of base and tuned model; ``None`` for each where there is no such score.

        Args:
            name: the score.
            num_rows: rows that were answered.
        """
        if name not in self.scored:
            return [None] * num_rows, [None] * num_rows
        base, tuned = self.scored[name]
        return base.row_values.tolist(), tuned.row_values.tolist()

    @property
    def signatures(self) -> dict[str, str]:
        """How each score is computed, by its name."""
        return {name: tuned.signature for name, (_, tuned) in self.scored.items()}

    @property
    def improvement(self) -> LanguageImprovement:
        """What tuning changed; positive is better."""
        base, tuned = self.base, self.tuned
        improvement = LanguageImprovement(
            nats_per_token_fraction=fall(base["nats_per_token"], tuned["nats_per_token"]),
            perplexity_fraction=fall(base["perplexity"], tuned["perplexity"]),
            bits_per_byte_fraction=fall(base["bits_per_byte"], tuned["bits_per_byte"]),
            # None where there is no such score.
            rouge_l_difference=None,
        )
        further = {
            f"{name}_difference": finite((after.value - before.value) * (1 if after.higher_is_better else -1))
            for name, (before, after) in self.scored.items()
            if name not in (LOSS, BITS_PER_BYTE)
        }
        improvement.update(further)  # type: ignore[typeddict-item]
        return improvement


def fall(before: float | None, after: float | None) -> float | None:
    """Return by what share of the first figure the second is lower; ``None`` where one is missing, or the first is 0.

    A share says the same of a loss of 4 and of one of 0.4.
    """
    return (before - after) / before if before and after is not None else None


def score_language_models(
    scorer: Scorer, before: Measurement, after: Measurement, *, asked: Answered, rows: LossRows
) -> LanguageScores:
    """Score what two models did on the same rows.

    Args:
        scorer: the scores of the answers.
        before: what was measured of the base model.
        after: what was measured of the tuned one.
        asked: the answered rows; its answers are not looked at.
        rows: the rows of the loss.
    """
    base_answers, tuned_answers = (_with_answers(asked, measured.answers) for measured in (before, after))
    # Of no answer there is no score, and a function of the project's own need not be made for that.
    answers = scorer.score(base_answers, tuned_answers) if asked.row_ids else ScoredAnswers()
    scored = dict(answers.scored)
    if before.by_row is not None and after.by_row is not None:
        base_loss, tuned_loss = (score_loss(measured, rows) for measured in (before.by_row, after.by_row))
        scored |= {name: (base_loss[name], tuned_loss[name]) for name in base_loss}
    sides = [{name: pair[side] for name, pair in scored.items()} for side in (0, 1)]
    return LanguageScores(
        base=describe_language_model(before, sides[0], scorer, rows=rows),
        tuned=describe_language_model(after, sides[1], scorer, rows=rows),
        scored=scored,
        failed=answers.failed,
    )


def score_nothing(scorer: Scorer, nothing: Measurement) -> LanguageScores:
    """Return the figures of a split without rows, all of them missing.

    Args:
        scorer: the scores of the answers.
        nothing: the measurement of no row.
    """
    rows = LossRows(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    figures = describe_language_model(nothing, {}, scorer, rows=rows)
    return LanguageScores(figures, figures)


def _with_answers(asked: Answered, answers: Sequence[str]) -> Answered:
    return Answered(asked.row_ids, asked.prompts, asked.references, answers)


def describe_language_model(
    measured: Measurement, scores: Mapping[str, ScoredRows], scorer: Scorer, *, rows: LossRows
) -> LanguageFigures:
    """Return the figures of one model, ``None`` where there is nothing to measure or no finite number.

    Args:
        measured: its loss and answers.
        scores: its scores by name.
        scorer: what made them.
        rows: the rows of the loss.
    """
    loss = measured.loss
    values = {name: finite(score.value) for name, score in scores.items()}
    num_bytes = int(rows.num_bytes.sum())
    figures = LanguageFigures(
        nats_per_token=finite(loss.mean_nats),
        perplexity=finite(loss.perplexity),
        # Of the sums and not of the rows, which a measurement of an earlier version does not have.
        bits_per_byte=finite(loss.nats / math.log(2) / num_bytes) if num_bytes else None,
        token_accuracy=values.get(ACCURACY),
        rouge_l=values.get("rouge_l"),
        rouge_1=values.get("rouge_1"),
        rouge_2=values.get("rouge_2"),
        num_tokens=loss.num_supervised,
        num_bytes=num_bytes,
        num_generated=len(measured.answers),
        num_empty=count_empty(measured.answers),
    )
    further = {name: value for name, value in values.items() if name not in figures}
    figures.update(further)  # type: ignore[typeddict-item]
    num_without = None if scorer.exact_match is None else scorer.exact_match.count_without(measured.answers)
    if num_without is not None:
        figures["num_without_answer"] = num_without
    return figures


def score_loss(by_row: RowSums, rows: LossRows) -> dict[str, ScoredRows]:
    """Return the scores that come of a model's loss.

    Args:
        by_row: sums of each row.
        rows: the same rows.
    """
    return {
        LOSS: ScoredRows(
            LOSS,
            np.stack([by_row.nats, by_row.num_supervised], axis=1).astype(np.float64),
            ratio,
            higher_is_better=False,
            signature=_SIGNATURES[LOSS],
            row_ids=rows.row_ids,
            title="Held-out loss",
            unit="nats per token",
        ),
        BITS_PER_BYTE: ScoredRows(
            BITS_PER_BYTE,
            np.stack([by_row.nats, rows.num_bytes], axis=1).astype(np.float64),
            bits_per_byte,
            higher_is_better=False,
            signature=_SIGNATURES[BITS_PER_BYTE],
            row_ids=rows.row_ids,
            title="Bits per byte",
            unit="bits",
        ),
        ACCURACY: ScoredRows(
            ACCURACY,
            np.stack([by_row.num_right, by_row.num_supervised], axis=1).astype(np.float64),
            ratio,
            signature=_SIGNATURES[ACCURACY],
            row_ids=rows.row_ids,
            title="Token accuracy",
            unit="0 to 1",
        ),
    }


def bits_per_byte(sums: FloatArray) -> FloatArray:
    """Turn nats and bytes into bits per byte.

    Args:
        sums: ``(…, 2)``.

    Returns:
        ``(…)``; NaN without bytes.
    """
    return ratio(sums) / math.log(2)
