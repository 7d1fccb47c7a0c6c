"""Find where a language model's answers go wrong: by kind, by length, and by the rows that are hardest for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lm_tuning.evaluation.analysis_records import (
    AnalysisRecord,
    HardRowRecord,
    HistogramRecord,
    KindRecord,
    LengthRecord,
    RowTextRecord,
)
from lm_tuning.evaluation.answer_kinds import KINDS, kinds_of
from lm_tuning.evaluation.records import LanguageAnswer
from lm_tuning.evaluation.statistics.outcomes import ScoredPairs
from lm_tuning.evaluation.statistics.scored_rows import MIN_ROWS, ScoredRows, dense
from lm_tuning.generation.generate import collect_prompts
from lm_tuning.text.decoding import decode
from lm_tuning.text.store.origins import Origins
from lm_tuning.text.store.table import TokenTable

FloatArray = npt.NDArray[np.float64]

NUM_EXAMPLES = 3
NUM_HARD_ROWS = 10
NUM_LENGTHS = 4

SUSPECT_DEVIATIONS = 3.0
"""How many standard deviations, by the median deviation, a loss lies above the median, and its fall below, to be
suspect."""

NUM_BINS = 24

LOSS = "nats_per_token"


@dataclass(frozen=True)
class AnsweredRow:
    """A row with both answers.

    Attributes:
        row_id: identity of the row.
        prompt: as text.
        reference: the true answer.
        base: answer of the base.
        tuned: answer of the tuned model.
        base_finish: why the base's generation ended; None where it is not known.
        tuned_finish: likewise of the tuned model.
    """

    row_id: int
    prompt: str
    reference: str
    base: str
    tuned: str
    base_finish: str | None = None
    tuned_finish: str | None = None

    @property
    def base_kinds(self) -> list[str]:
        """What the base's answer is."""
        return kinds_of(self.prompt, self.reference, self.base, finish_reason=self.base_finish)

    @property
    def tuned_kinds(self) -> list[str]:
        """What the tuned model's answer is."""
        return kinds_of(self.prompt, self.reference, self.tuned, finish_reason=self.tuned_finish)


def answered_rows(answers: Sequence[LanguageAnswer]) -> list[AnsweredRow]:
    """Return the rows of an evaluation's answers.

    Args:
        answers: of both models.
    """
    return [
        AnsweredRow(
            row_id=answer["row_id"],
            prompt=answer["prompt"],
            reference=answer["reference"],
            base=answer["base"],
            tuned=answer["tuned"],
            base_finish=answer["base_finish_reason"],
            tuned_finish=answer["tuned_finish_reason"],
        )
        for answer in answers
    ]


@dataclass(frozen=True)
class _Scores:
    """The first score of each answered row, by its id; nothing where no answers were scored."""

    base: Mapping[int, float]
    tuned: Mapping[int, float]
    higher_is_better: bool = True

    def worst_first(self) -> list[int]:
        """Return the ids, the worst answer of the tuned model first; of equally bad ones the lowest id."""
        sign = 1 if self.higher_is_better else -1
        return sorted(self.tuned, key=lambda row_id: (sign * self.tuned[row_id], row_id))


def analyse_answers(
    rows: Sequence[AnsweredRow],
    scored: ScoredPairs,
    *,
    table: TokenTable,
    tokenizer: Any,
    num_samples: int,
    origins: Origins | None = None,
) -> AnalysisRecord:
    """Analyse the answers and the losses of both models.

    Args:
        rows: all answered rows.
        scored: all scores; the first one of the answered rows orders them, the loss finds the hardest rows.
        table: the evaluated rows.
        tokenizer: the one that made them.
        num_samples: how many of the best and of the worst rows are shown.
        origins: where the rows came from; ``None`` where it was not noted.
    """
    scores = _first_score(rows, scored)
    kinds = [(row.base_kinds, row.tuned_kinds) for row in rows]
    by_score = scores.worst_first()
    # No row is among both.
    num_shown = min(num_samples, len(by_score) // 2)
    worst, best = by_score[:num_shown], by_score[::-1][:num_shown]
    hard = list_hard_rows(*scored[LOSS]) if LOSS in scored else []
    if origins is not None:
        for row in hard:
            row["where"] = origins.describe(row["row_id"])
    found_kinds = _count_kinds(rows, kinds, scores)
    named = [*best, *worst, *(row_id for kind in found_kinds for row_id in kind["row_ids"])]
    texts = _texts_of_answered(rows, kinds, scores, set(named) | {each["row_id"] for each in hard})
    texts |= _texts_of_others([each["row_id"] for each in hard if each["row_id"] not in texts], table, tokenizer)
    return {
        "answer_kinds": found_kinds,
        "answer_lengths": [*_by_length(rows, scores, "prompt"), *_by_length(rows, scores, "reference")],
        "hard_rows": hard,
        "best_rows": best,
        "worst_rows": worst,
        "row_texts": list(texts.values()),
        "histograms": list(_histograms(rows, scored)),
    }


def list_hard_rows(base: ScoredRows, tuned: ScoredRows) -> list[HardRowRecord]:
    """List the rows with the highest loss under the tuned model.

    A row whose loss is far above the usual one contradicts the others or is hard; where tuning has lowered it by far
    less than usual, too, it was not hard before: it may have a wrong answer, and is marked.

    Args:
        base: nats and supervised tokens of each row under the base.
        tuned: likewise under the tuned model.
    """
    before, after = base.row_values, tuned.row_values  # (rows,)
    tokens = dense(tuned.statistics)[:, 1]
    # What no number came out for is left out; a warning says it elsewhere.
    known = np.flatnonzero(np.isfinite(before) & np.isfinite(after))
    if not len(known):
        return []
    # Far above the usual loss, and far below the usual fall of it, which is far above the usual rise.
    limit, limit_of_rise = _limit_of_usual(after[known]), _limit_of_usual(after[known] - before[known])
    hardest = known[np.argsort(-after[known], kind="stable")][:NUM_HARD_ROWS]
    return [
        {
            "row_id": int(tuned.row_ids[index]),
            "num_tokens": int(tokens[index]),
            "base_nats_per_token": float(before[index]),
            "tuned_nats_per_token": float(after[index]),
            "is_suspect": bool(after[index] > limit and after[index] - before[index] > limit_of_rise),
        }
        for index in hardest
    ]


def _histograms(rows: Sequence[AnsweredRow], scored: ScoredPairs) -> Iterator[HistogramRecord]:
    """Yield how losses and lengths are spread."""
    if LOSS in scored:
        base, tuned = scored[LOSS]
        losses = {"base": base.row_values, "tuned": tuned.row_values}
        yield from _histogram(losses, title="Held-out loss by row", unit="nats per token")
    lengths = {
        "reference": np.array([len(row.reference) for row in rows]),
        "base": np.array([len(row.base) for row in rows]),
        "tuned": np.array([len(row.tuned) for row in rows]),
    }
    yield from _histogram(lengths, title="Length of answers", unit="characters")


def _histogram(
    values: Mapping[str, npt.NDArray[np.number[Any]]], *, title: str, unit: str
) -> Iterator[HistogramRecord]:
    finite = {name: each[np.isfinite(each)] for name, each in values.items()}
    everything = np.concatenate(list(finite.values())).astype(np.float64)
    if not len(everything) or everything.min() == everything.max():
        return  # one bar says nothing
    low, high = float(everything.min()), float(everything.max())
    edges: list[float]
    if all(np.issubdtype(each.dtype, np.integer) for each in finite.values()):
        # Integers in bins of integers, and written so.
        width = max(1, math.ceil((high - low + 1) / NUM_BINS))
        edges = [*range(int(low), int(high) + 1 + width, width)]
    else:
        edges = np.linspace(low, high, NUM_BINS + 1).tolist()
    counts = {name: np.histogram(each, bins=edges)[0].tolist() for name, each in finite.items()}
    yield {"title": title, "unit": unit, "edges": edges, "counts": counts}


def _limit_of_usual(values: FloatArray) -> float:
    """Return where values are no longer usual, by median and median deviation, which outliers do not move."""
    if len(values) < MIN_ROWS:
        return float("inf")
    median = float(np.median(values))
    # 1.4826 makes the median deviation that of a normal distribution's standard deviation.
    return median + SUSPECT_DEVIATIONS * 1.4826 * float(np.median(np.abs(values - median)))


def _first_score(rows: Sequence[AnsweredRow], scored: ScoredPairs) -> _Scores:
    """Return the first score that is of exactly the answered rows."""
    ids = [row.row_id for row in rows]
    for name, (base, tuned) in scored.items():
        if ids and name != LOSS and tuned.row_ids.tolist() == ids:
            return _Scores(
                dict(zip(ids, base.row_values.tolist(), strict=True)),
                dict(zip(ids, tuned.row_values.tolist(), strict=True)),
                tuned.higher_is_better,
            )
    return _Scores({}, {})


def _count_kinds(
    rows: Sequence[AnsweredRow], kinds: Sequence[tuple[list[str], list[str]]], scores: _Scores
) -> list[KindRecord]:
    """Count the answers of each kind that occurs."""
    records: list[KindRecord] = []
    for kind in KINDS:
        num_base = sum(kind in of_base for of_base, _ in kinds)
        ids = [row.row_id for row, (_, of_tuned) in zip(rows, kinds, strict=True) if kind in of_tuned]
        if num_base or ids:
            of_kind = [scores.tuned[row_id] for row_id in ids if row_id in scores.tuned]
            records.append(
                {
                    "kind": kind,
                    "num_base": num_base,
                    "num_tuned": len(ids),
                    "tuned_score": sum(of_kind) / len(of_kind) if of_kind else None,
                    "row_ids": ids[:NUM_EXAMPLES],
                }
            )
    return records


def _by_length(
    rows: Sequence[AnsweredRow], scores: _Scores, of: Literal["prompt", "reference"]
) -> Iterator[LengthRecord]:
    """Yield the mean score of rows by length in characters, in about equally many rows each."""
    rows = [row for row in rows if row.row_id in scores.tuned]
    if len(rows) < NUM_LENGTHS:
        return
    lengths = np.array([len(row.prompt if of == "prompt" else row.reference) for row in rows])  # (rows,)
    # Rows of one length are never parted, so there may be fewer stretches.
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, NUM_LENGTHS + 1)[1:], method="higher"))
    which = np.searchsorted(edges, lengths)
    for part in range(len(edges)):
        members = np.flatnonzero(which == part)
        if len(members):
            ids = [rows[index].row_id for index in members]
            yield {
                "of": of,
                "low": int(lengths[members].min()),
                "high": int(lengths[members].max()),
                "num_rows": len(members),
                "base": float(np.mean([scores.base[row_id] for row_id in ids])),
                "tuned": float(np.mean([scores.tuned[row_id] for row_id in ids])),
            }


def _texts_of_answered(
    rows: Sequence[AnsweredRow], kinds: Sequence[tuple[list[str], list[str]]], scores: _Scores, wanted: set[int]
) -> dict[int, RowTextRecord]:
    texts: dict[int, RowTextRecord] = {}
    for row, (of_base, of_tuned) in zip(rows, kinds, strict=True):
        if row.row_id in wanted:
            text = RowTextRecord(row_id=row.row_id, prompt=row.prompt, reference=row.reference)
            text |= {"base": row.base, "tuned": row.tuned, "base_kinds": of_base, "tuned_kinds": of_tuned}
            if row.row_id in scores.tuned:
                text |= {"base_score": scores.base[row.row_id], "tuned_score": scores.tuned[row.row_id]}
            texts[row.row_id] = text
    return texts


def _texts_of_others(row_ids: Sequence[int], table: TokenTable, tokenizer: Any) -> dict[int, RowTextRecord]:
    """Decode rows that were not answered; one without a prompt is all reference."""
    texts: dict[int, RowTextRecord] = {}
    for row_id in row_ids:
        (index, *_) = np.flatnonzero(table.row_ids == row_id).tolist()
        prompts = collect_prompts(table, [index])
        asked, said = (
            (prompts[0].input_ids, prompts[0].reference_ids) if prompts else ([], table[index].input_ids.tolist())
        )
        texts[row_id] = {
            "row_id": row_id,
            "prompt": decode(tokenizer, asked, skip_special_tokens=True),
            "reference": decode(tokenizer, said, skip_special_tokens=True),
        }
    return texts
