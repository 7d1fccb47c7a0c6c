"""Check a result against the bounds of ``evaluate.gate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lm_tuning.evaluation.statistics.outcomes import describe_score, write_interval
from lm_tuning.evaluation.statistics.records import GateCount, GateRecord, ScoreRecord

LOWER_IS_BETTER = frozenset({"nats_per_token", "nats_per_row", "perplexity", "bits_per_byte", "calibration_error"})
"""Figures that may have no rows of their own and are losses or errors."""


def check_gate(
    gate: Mapping[str, float | str], scores: Sequence[ScoreRecord], figures: Mapping[str, object]
) -> list[GateRecord]:
    """Check each bound.

    Args:
        gate: bound by name of the score: a number that the tuned model must reach, ``better`` (than the base, beyond
            chance) or ``not_worse`` (than the base, beyond chance).
        scores: of both models.
        figures: of the tuned model by name, for what is no score of rows, such as perplexity.

    Returns:
        One record for each bound, in the order of the gate. What was not measured is not reached.
    """
    by_name = {record["name"]: record for record in scores}
    return [_check(name, bound, by_name.get(name), figures.get(name)) for name, bound in gate.items()]


def count_gate(records: Sequence[GateRecord]) -> GateCount:
    """Count the bounds, for MLflow.

    Args:
        records: see :func:`check_gate`.
    """
    return {"num_bounds": len(records), "num_not_reached": sum(not record["is_reached"] for record in records)}


def _check(name: str, bound: float | str, record: ScoreRecord | None, figure: object) -> GateRecord:
    value = record["tuned"]["value"] if record else figure if isinstance(figure, int | float) else None
    if value is None or (isinstance(bound, str) and record is None):
        message = f"evaluate.gate.{name} = {bound}: it was not measured, or is no finite number."
        return {"score": name, "bound": bound, "value": value, "is_reached": False, "message": message}
    if isinstance(bound, str):
        assert record is not None
        return _check_outcome(record, bound)
    falls = not record["higher_is_better"] if record else name in LOWER_IS_BETTER
    is_reached = value <= bound if falls else value >= bound
    found = write_interval(record["tuned"]) if record else f"{value:.4g}"
    asked = f"{'at most' if falls else 'at least'} {bound:g} is asked for"
    word = "reached" if is_reached else "not reached"
    message = f"evaluate.gate.{name} {word}: {record['title'] if record else name} is {found}, {asked}."
    return {"score": name, "bound": bound, "value": value, "is_reached": is_reached, "message": message}


def _check_outcome(record: ScoreRecord, bound: str) -> GateRecord:
    outcome = record["outcome"]
    # Too few rows show neither: a gate that lets everything pass on two rows is none.
    is_reached = outcome == "better" or (bound == "not_worse" and outcome == "no difference")
    word = "reached" if is_reached else "not reached"
    asked = "better than the base" if bound == "better" else "not worse than the base"
    return {
        "score": record["name"],
        "bound": bound,
        "value": record["tuned"]["value"],
        "is_reached": is_reached,
        "message": f"evaluate.gate.{record['name']} {word}: {asked} is asked for; found: {describe_score(record)}.",
    }
