"""Report how sure the scores are: the verdict, every score with its interval, and what the gate asked for."""

from __future__ import annotations

from collections.abc import Iterator

from lm_tuning.evaluation.records import EvaluationRecord
from lm_tuning.evaluation.statistics.earlier_runs import write_earlier
from lm_tuning.evaluation.statistics.outcomes import decimals_for, write_interval, write_p, write_signed
from lm_tuning.evaluation.statistics.records import IntervalRecord, ScoreRecord
from lm_tuning.evaluation.statistics.scored_rows import FEW_ROWS
from lm_tuning.findings import Issue
from lm_tuning.reporting.document import (
    Block,
    Code,
    Intervals,
    Issues,
    Item,
    Items,
    Paragraph,
    Section,
    Strong,
    Table,
    Words,
)
from lm_tuning.reporting.text import NOTHING


def verdict_blocks(result: EvaluationRecord) -> Iterator[Block]:
    """Yield what stands first: better or not, against the base and the best earlier model, and the gate.

    Args:
        result: of an evaluation.
    """
    if "verdict" in result:
        yield Paragraph(Strong(result["verdict"]))
    if earlier := write_earlier_line(result):
        yield Paragraph(earlier)
    bounds = result.get("gate", [])
    if bounds:
        yield Issues(
            [
                Issue("note" if bound["is_reached"] else "warn", "gate", bound["message"])
                for bound in sorted(bounds, key=lambda bound: bound["is_reached"])
            ]
        )


def write_earlier_line(result: EvaluationRecord) -> str:
    """Write the comparison with the best earlier model; empty where there is none.

    Args:
        result: of an evaluation.
    """
    earlier = result.get("earlier_run")
    if earlier is None:
        return ""
    (score,) = [score for score in result["scores"] if score["name"] == earlier["score"]]
    return write_earlier(earlier, score)


def score_sections(result: EvaluationRecord) -> Iterator[Section]:
    """Yield the sections on scores, where there are any.

    Args:
        result: of an evaluation.
    """
    scores = result.get("scores", [])
    if not scores:
        return
    base = "Majority class" if result["task"] == "sequence_classification" else "Base"
    table = Table(
        "",
        ("Score", base, "Tuned", "Difference", "p", "Rows", "Tuned"),
        [_row(score) for score in scores],
        text_columns=(0, 6),
    )
    yield Section("intervals", "Scores with 95 % intervals", [table])
    yield Section("certainty", "How sure the scores are", list(_certainty(scores, base)), is_brief=False)


def _certainty(scores: list[ScoreRecord], base: str) -> Iterator[Block]:
    """Yield how the table is to be read, the intervals as a drawing, and how each score is computed."""
    yield Paragraph(_explain(scores))
    yield from (_draw(score, base) for score in scores if score["tuned"]["low"] is not None)
    signed = [score for score in scores if score["signature"]]
    if signed:
        yield Paragraph("Signatures, which say how each score is computed:")
        items: list[tuple[Words, ...]] = [(f"{score['title']}: ", Code(score["signature"])) for score in signed]
        yield Items([Item(item) for item in items])


def _row(score: ScoreRecord) -> tuple[str | int, ...]:
    return (
        _name(score),
        write_interval(score["base"]),
        write_interval(score["tuned"]),
        _write_difference(score),
        NOTHING
        if score["difference"]["p_value"] is None
        else write_p(score["difference"]["p_value"]).removeprefix("p ").removeprefix("= "),
        score["num_rows"],
        score["outcome"],
    )


def _write_difference(score: ScoreRecord) -> str:
    value, low, high = (score["difference"][key] for key in ("value", "low", "high"))
    if value is None:
        return NOTHING
    if low is None or high is None:
        return write_signed(value, None)
    decimals = decimals_for(low, high)
    return f"{value:+.{decimals}f} ({low:+.{decimals}f} to {high:+.{decimals}f})"


def _explain(scores: list[ScoreRecord]) -> str:
    said = (
        "Each model's own interval is over the draw of the rows. The difference is that of the same rows, which is why "
        "it can be sure where the two intervals overlap: its interval is a paired bootstrap's, its p is how often a "
        "difference as large comes about when the two results of each row are swapped by a coin."
    )
    if len(scores) > 1:
        said += (
            f" With {len(scores)} scores one may pass by chance: choose the one that decides before you look. The "
            "verdict is about the first."
        )
    if any(score["num_rows"] < FEW_ROWS for score in scores):
        said += f" Intervals of fewer than {FEW_ROWS} rows are rough."
    return said


def _draw(score: ScoreRecord, base: str) -> Intervals:
    def ends(record: IntervalRecord) -> tuple[float, float, float]:
        value = record["value"] or 0.0
        low, high = record["low"], record["high"]
        return (value if low is None else low, value, value if high is None else high)

    models = [(base, score["base"]), ("Tuned", score["tuned"])]
    known = [(name, record) for name, record in models if record["value"] is not None]
    return Intervals(
        _name(score) if score["higher_is_better"] else f"{_name(score)}, lower is better",
        [name for name, _ in known],
        [ends(record) for _, record in known],
        [write_interval(record) for _, record in known],
    )


def _name(score: ScoreRecord) -> str:
    return f"{score['title']} ({score['unit']})" if score["unit"] else score["title"]
