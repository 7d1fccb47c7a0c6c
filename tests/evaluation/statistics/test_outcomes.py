"""What is said of two models is what their scores show, with the score's own direction and unit."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from lm_tuning.evaluation.statistics.gate import check_gate, count_gate
from lm_tuning.evaluation.statistics.outcomes import judge_scores, score_metrics, write_interval, write_p, write_verdict
from lm_tuning.evaluation.statistics.records import ScoreRecord
from lm_tuning.evaluation.statistics.row_scores import COLUMNS, tabulate_rows
from lm_tuning.evaluation.statistics.scored_rows import ScoredRows, mean_of_rows, ratio
from lm_tuning.parameters.gate import NO_ROWS


def pair(gain: float, *, num_rows: int = 60, name: str = "rouge_l", **more: Any) -> tuple[ScoredRows, ScoredRows]:
    generator = np.random.default_rng(0)
    base = generator.beta(2, 4, num_rows)
    noise = generator.normal(0, 0.05, num_rows)
    tuned = base + noise - noise.mean() + gain
    rows = np.arange(num_rows)
    given = {"title": "ROUGE-L", "unit": "0 to 1", **more}
    return mean_of_rows(name, base, rows, **given), mean_of_rows(name, tuned, rows, **given)


def judged(*pairs: tuple[ScoredRows, ScoredRows]) -> list[ScoreRecord]:
    records = judge_scores({each[0].name: each for each in pairs}, seed=1)
    json.dumps(records, allow_nan=False)
    return records


def test_a_gain_a_loss_and_chance_are_told_apart() -> None:
    (better,), (worse,), (same,) = (judged(pair(gain)) for gain in (0.15, -0.15, 0.004))
    assert (better["outcome"], worse["outcome"], same["outcome"]) == ("better", "worse", "no difference")
    assert write_verdict(better).startswith("Better by 0.150 ROUGE-L, 95 % 0.13")
    assert write_verdict(better).endswith(", p < 0.001 (60 rows)")
    assert write_verdict(worse).startswith("Worse by 0.150 ROUGE-L, 95 % 0.13")
    assert write_verdict(same).startswith(
        "No difference beyond chance in ROUGE-L: +0.004, 95 % -0.010 to +0.018, p = 0.57"
    )
    low, high = better["difference"]["low"], better["difference"]["high"]
    assert low is not None and high is not None and low < 0.15 < high


def test_a_loss_that_falls_is_better_and_is_said_in_its_unit() -> None:
    (fallen,) = judged(
        pair(-0.3, name="nats_per_token", title="Held-out loss", unit="nats per token", higher_is_better=False)
    )
    assert fallen["outcome"] == "better"
    assert write_verdict(fallen).startswith("Better by 0.300 nats per token (held-out loss), 95 % 0.2")


def test_few_rows_are_said_to_be_few() -> None:
    (none,) = judged(pair(0.15, num_rows=6))
    assert none["outcome"] == "too few rows"
    assert write_verdict(none) == "Too few rows to judge ROUGE-L: 6 rows, and at least 10 are needed (found +0.150)"
    (rough,) = judged(pair(0.15, num_rows=20))
    assert write_verdict(rough).endswith("(20 rows: few, so the interval is rough)")


def test_a_score_that_is_no_number_is_not_judged() -> None:
    base, tuned = pair(0.1)
    tuned.statistics[3, 0] = np.nan
    (record,) = judged((base, tuned))
    assert (record["outcome"], record["tuned"]["value"]) == ("not measured", None)
    assert write_verdict(record) == "ROUGE-L was not measured, or is no finite number"


def test_rows_of_which_hardly_one_counts_are_too_few() -> None:
    counts = np.zeros(12)
    counts[3] = 5.0
    base, tuned = (
        ScoredRows("bits_per_byte", np.stack([counts * each, counts], 1), ratio, row_ids=np.arange(12))
        for each in (1.0, 2.0)
    )
    (record,) = judged((base, tuned))
    assert (record["tuned"]["value"], record["tuned"]["low"], record["outcome"]) == (2.0, None, "too few rows")
    assert "12 rows, of which hardly one counts" in write_verdict(record)


def test_digits_follow_the_interval() -> None:
    assert write_interval({"value": 0.41234, "low": 0.3702, "high": 0.4551}) == "0.412 (0.370 to 0.455)"
    assert write_interval({"value": 41.234, "low": 37.02, "high": 45.51}) == "41.2 (37.0 to 45.5)"
    assert write_interval({"value": 0.5, "low": None, "high": None}) == "0.500"
    assert write_interval({"value": 0.0, "low": 0.0, "high": 0.0}) == "0.000 (0.000 to 0.000)"
    assert [write_p(value) for value in (0.0001, 0.0234, 0.5)] == ["p < 0.001", "p = 0.023", "p = 0.50"]


def test_the_gate_holds_numbers_and_comparisons() -> None:
    loss = pair(-0.3, name="nats_per_token", title="Held-out loss", unit="nats per token", higher_is_better=False)
    scores = judged(pair(0.15), loss)
    value = scores[0]["tuned"]["value"]
    assert value is not None
    reached = check_gate(
        {"rouge_l": value, "nats_per_token": "better", "perplexity": 30.0}, scores, {"perplexity": 20.0}
    )
    assert [each["is_reached"] for each in reached] == [True, True, True]
    missed = check_gate(
        {"rouge_l": 0.9, "nats_per_token": 0.001, "perplexity": 10.0, "bleu": 3.0, "chrf": "better"},
        scores,
        {"perplexity": 20.0},
    )
    assert [each["is_reached"] for each in missed] == [False] * 5
    assert missed[0]["message"].startswith("evaluate.gate.rouge_l not reached: ROUGE-L is 0.")
    assert missed[0]["message"].endswith("at least 0.9 is asked for.")
    assert missed[1]["message"].endswith("at most 0.001 is asked for.")
    assert "perplexity is 20, at most 10" in missed[2]["message"]
    assert missed[3]["message"] == "evaluate.gate.bleu = 3.0: it was not measured, or is no finite number."
    assert count_gate([*reached, *missed]) == {"num_bounds": 8, "num_not_reached": 5}


@pytest.mark.parametrize("name", sorted(NO_ROWS))
def test_a_figure_that_is_no_score_of_rows_has_a_direction(name: str) -> None:
    low, high = (check_gate({name: 0.1}, [], {name: value})[0] for value in (0.05, 0.2))
    assert (low["is_reached"], high["is_reached"]) == (True, False)
    assert high["message"].endswith("at most 0.1 is asked for.")


@pytest.mark.parametrize(
    ("gain", "num_rows", "better", "not_worse"),
    [(0.15, 60, True, True), (0.0, 60, False, True), (-0.15, 60, False, False), (0.15, 6, False, False)],
)
def test_the_gate_asks_for_more_than_chance(gain: float, num_rows: int, better: bool, not_worse: bool) -> None:
    scores = judged(pair(gain, num_rows=num_rows))
    found = [check_gate({"rouge_l": bound}, scores, {})[0]["is_reached"] for bound in ("better", "not_worse")]
    assert found == [better, not_worse], "two rows of luck pass no gate"


def test_metrics_have_intervals_and_p() -> None:
    (record,) = judged(pair(0.15))
    metrics = score_metrics([record])["rouge_l"]
    assert set(metrics) == {"tuned_low", "tuned_high", "difference_low", "difference_high", "p_value"}
    assert metrics["p_value"] == record["difference"]["p_value"]


def test_every_row_has_a_line_for_each_model_and_score() -> None:
    first, (base, tuned) = pair(0.1, num_rows=12), pair(0.2, num_rows=12, name="nats_per_token")
    tokens = ScoredRows("nats_per_token", base.statistics * 3, ratio, row_ids=base.row_ids)
    table = tabulate_rows({"rouge_l": first, "nats_per_token": (tokens, tuned)}, base_digest="aa", tuned_digest="bb")
    assert tuple(table.columns) == COLUMNS
    assert len(table) == 48
    of_base = table[(table.model == "base") & (table.score == "nats_per_token")]
    assert of_base["value"].tolist() == pytest.approx(tokens.row_values.tolist())
    assert set(zip(table.model, table.model_digest, strict=True)) == {("base", "aa"), ("tuned", "bb")}
    assert tabulate_rows({}, base_digest="", tuned_digest="").columns.tolist() == list(COLUMNS)
