"""Turn scored rows into what is stored and said: intervals, differences, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lm_tuning.evaluation.statistics.records import (
    DifferenceRecord,
    IntervalRecord,
    Outcome,
    ScoreMetrics,
    ScoreRecord,
)
from lm_tuning.evaluation.statistics.scored_rows import (
    FEW_ROWS,
    MIN_ROWS,
    Difference,
    Interval,
    ScoredRows,
    compare,
    interval,
)
from lm_tuning.wording import count_of

ScoredPairs = Mapping[str, tuple[ScoredRows, ScoredRows]]
"""By name of the score, its rows for the base and for the tuned model."""


def judge_scores(scored: ScoredPairs, *, seed: int) -> list[ScoreRecord]:
    """Give every score its intervals, and say for each whether the tuned model is better.

    Args:
        scored: in the order of the report; the first is the one that the verdict is about.
        seed: of the draws.
    """
    return [_judge(base, tuned, seed) for base, tuned in scored.values()]


def _judge(base: ScoredRows, tuned: ScoredRows, seed: int) -> ScoreRecord:
    difference = compare(base, tuned, seed)
    return {
        "name": tuned.name,
        "title": tuned.title or tuned.name,
        "unit": tuned.unit,
        "higher_is_better": tuned.higher_is_better,
        "signature": tuned.signature,
        "num_rows": tuned.num_rows,
        "base": record_interval(interval(base, seed)),
        "tuned": record_interval(interval(tuned, seed)),
        "difference": record_difference(difference),
        "outcome": outcome_of(difference, higher_is_better=tuned.higher_is_better),
    }


def outcome_of(difference: Difference, *, higher_is_better: bool) -> Outcome:
    """Name what a difference comes to.

    Args:
        difference: second model less first.
        higher_is_better: false for a loss.

    Returns:
        ``better`` or ``worse`` only where p is below 0.05 and the interval is without 0.
    """
    if not math.isfinite(difference.value):
        return "not measured"
    # Without an interval where most draws had nothing to divide by, as of rows that are nearly all empty.
    if math.isnan(difference.p_value) or math.isnan(difference.low):
        return "too few rows"
    if not difference.is_significant:
        return "no difference"
    return "better" if (difference.value > 0) is higher_is_better else "worse"


def score_metrics(records: Sequence[ScoreRecord]) -> dict[str, ScoreMetrics]:
    """Pick what MLflow gets of each score, by its name.

    Args:
        records: see :func:`judge_scores`.
    """
    return {
        record["name"]: {
            "tuned_low": record["tuned"]["low"],
            "tuned_high": record["tuned"]["high"],
            "difference_low": record["difference"]["low"],
            "difference_high": record["difference"]["high"],
            "p_value": record["difference"]["p_value"],
        }
        for record in records
    }


def write_verdict(record: ScoreRecord) -> str:
    """Write in a line whether the tuned model is better than the base.

    Args:
        record: the score that decides.
    """
    found = describe_score(record)
    return f"{found[0].upper()}{found[1:]}"


def describe_score(record: ScoreRecord) -> str:
    """Describe how the tuned model's score differs from the base's, see :func:`describe_difference`.

    Args:
        record: of the score.
    """
    return describe_difference(
        record["difference"],
        record["outcome"],
        title=record["title"],
        unit="" if record["higher_is_better"] else record["unit"],
        num_rows=record["num_rows"],
    )


def describe_difference(difference: DifferenceRecord, outcome: Outcome, *, title: str, unit: str, num_rows: int) -> str:
    """Describe a difference: ``better by 0.15 ROUGE-L, 95 % 0.11 to 0.19, p < 0.001 (48 rows)``.

    Args:
        difference: second model less first.
        outcome: what it comes to.
        title: of the score.
        unit: of a loss, whose fall is a gain: ``better by 0.31 nats per token (held-out loss)``; empty for scores.
        num_rows: rows that both were scored on.
    """
    title = _within_sentence(title)
    value = difference["value"]
    if outcome == "not measured" or value is None:
        return f"{title} was not measured, or is no finite number"
    if outcome == "too few rows":
        why = f"and at least {MIN_ROWS} are needed" if num_rows < MIN_ROWS else "of which hardly one counts"
        rows = f"{count_of(num_rows, 'row')}, {why}"
        return f"too few rows to judge {title}: {rows} (found {write_signed(value, None)})"
    low, high, p_value = difference["low"], difference["high"], difference["p_value"]
    assert low is not None and high is not None and p_value is not None, "a judged difference has an interval"
    decimals = decimals_for(low, high)
    few = ": few, so the interval is rough" if num_rows < FEW_ROWS else ""
    rows = f"({count_of(num_rows, 'row')}{few})"
    if outcome == "no difference":
        ends = f"{write_signed(low, decimals)} to {write_signed(high, decimals)}"
        found = f"no difference beyond chance in {title}: {write_signed(value, decimals)}"
        return f"{found}, 95 % {ends}, {write_p(p_value)} {rows}"
    # Written as a gain or a loss without a sign, whichever way the score counts.
    smallest, largest = sorted((abs(low), abs(high)))
    named = f"{unit} ({title})" if unit else title
    return (
        f"{outcome} by {abs(value):.{decimals}f} {named}, "
        f"95 % {smallest:.{decimals}f} to {largest:.{decimals}f}, {write_p(p_value)} {rows}"
    )


def write_interval(record: IntervalRecord) -> str:
    """Write a score with its interval, such as ``0.412 (0.37 to 0.46)``; the value alone where there is none.

    Args:
        record: of a score.
    """
    value, low, high = record["value"], record["low"], record["high"]
    if value is None:
        return "–"  # noqa: RUF001 - the sign that reports have for what cannot be said
    if low is None or high is None:
        return f"{value:.{decimals_for(value, value)}f}"
    decimals = decimals_for(low, high)
    return f"{value:.{decimals}f} ({low:.{decimals}f} to {high:.{decimals}f})"


def write_p(p_value: float) -> str:
    """Write a p-value: ``p < 0.001``, ``p = 0.023``.

    Args:
        p_value: above 0.
    """
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}" if p_value < 0.1 else f"p = {p_value:.2f}"


def write_signed(value: float, decimals: int | None) -> str:
    """Write a change with its sign.

    Args:
        value: any number.
        decimals: digits after the point; None for as many as the number needs.
    """
    return f"{value:+.{decimals_for(value, value) if decimals is None else decimals}f}"


def decimals_for(low: float, high: float) -> int:
    """Choose digits after the point: two that the interval leaves open, so 0.412 (0.370 to 0.455) but 41.2 (37 to 46).

    Args:
        low: lower end.
        high: upper end; with the lower one, the size of the number itself decides.
    """
    width = (high - low) / 2 or abs(low) / 10
    return min(max(1 - math.floor(math.log10(width)), 1), 5) if width > 0 else 3


def record_interval(found: Interval) -> IntervalRecord:
    """Return an interval as JSON holds it."""
    return {"value": _finite(found.value), "low": _finite(found.low), "high": _finite(found.high)}


def record_difference(found: Difference) -> DifferenceRecord:
    """Return a difference as JSON holds it."""
    return {
        "value": _finite(found.value),
        "low": _finite(found.low),
        "high": _finite(found.high),
        "p_value": _finite(found.p_value),
    }


def _within_sentence(title: str) -> str:
    """Return a title in small letters, unless it is an abbreviation such as BLEU."""
    return f"{title[0].lower()}{title[1:]}" if title[1:2].islower() else title


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
