from __future__ import annotations

from typing import Any

import numpy as np

from lm_tuning.preflight.rows import compare_limits, draw_histogram, measure_lengths

NOTHING_LONG = {"num_rows": 0, "max_length_tokens": None, "tokens_over_limit": 0, "rows_over": {}, "tokens_over": {}}


def tokens(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


def compare(lengths: Any, limit: int, *, num_dropped: int = 0, **beyond: Any) -> list[dict[str, Any]]:
    return compare_limits(lengths, present=limit, beyond={**NOTHING_LONG, **beyond}, num_dropped=num_dropped)


def summary(**changes: Any) -> dict[str, Any]:
    return {"changed": {}, "dropped": {}, "too_long": NOTHING_LONG, **changes}


def test_rows_prompts_and_answers_are_measured():
    facts = measure_lengths(
        tokens(10, 20, 30, 100), tokens(2, 5, 10, 50), max_length_tokens=100, summary=summary(changed={"end_cut": 1})
    )
    assert facts["quantiles"]["row"] == {
        "min": 10, "p50": 30, "p90": 100, "p95": 100, "p99": 100, "max": 100, "mean": 40.0
    }  # fmt: skip
    assert facts["quantiles"]["prompt"]["max"] == 50
    assert facts["quantiles"]["answer"]["min"] == 2
    assert (facts["num_tokens"], facts["num_supervised_tokens"]) == (160, 67)
    assert facts["supervised_fraction"] == 67 / 160
    assert (facts["num_rows_at_limit"], facts["at_limit_fraction"]) == (1, 0.25)
    assert facts["num_rows_cut"] == {
        "old_turns_dropped": 0, "prompt_shortened": 0, "prompt_emptied": 0, "answer_shortened": 0, "end_cut": 1
    }  # fmt: skip


def test_bins_have_equal_widths_and_hold_every_row():
    few = draw_histogram({"row": tokens(1, 2, 2, 5), "answer": tokens(0, 1, 1, 3)})
    assert few == {"edges": [0, 1, 2, 3, 4, 5, 6], "row": [0, 1, 2, 0, 0, 1], "answer": [1, 2, 0, 1, 0, 0]}
    many = draw_histogram({"row": tokens(1, 599, 600), "answer": tokens(1, 1, 600)})
    assert len(many["edges"]) == 56
    assert set(np.diff(many["edges"])) == {11}
    assert sum(many["row"]) == sum(many["answer"]) == 3
    assert many["row"][-1] == 2


def test_a_lower_limit_cuts_what_reaches_beyond_it():
    choices = compare(tokens(60, 60, 70, 200), 512)
    by_limit = {choice["limit"]: choice for choice in choices}
    assert by_limit[64] == {
        "limit": 64,
        "named": [],
        "rows_over": 2,
        "rows_fraction": 0.5,
        "tokens_over": 6 + 136,
        "tokens_fraction": 142 / 390,
    }
    assert by_limit[200]["named"] == ["p95", "p99", "p99.9", "longest"]
    assert (by_limit[200]["rows_over"], by_limit[200]["tokens_over"]) == (0, 0)
    assert (by_limit[512]["named"], by_limit[512]["rows_over"]) == (["now"], 0)
    assert list(by_limit) == sorted(by_limit)


def test_a_higher_limit_is_judged_by_what_was_cut():
    beyond = {
        "num_rows": 3,
        "max_length_tokens": 300,
        "tokens_over_limit": 400,
        "rows_over": {"128": 2, "256": 1},
        "tokens_over": {"128": 200, "256": 44},
    }
    # Two of the three long rows were cut to the limit, one was dropped.
    choices = compare(tokens(50, 100, 100), 100, num_dropped=1, **beyond)
    shown = [(choice["limit"], choice["rows_over"], choice["tokens_over"]) for choice in choices]
    assert shown == [(100, 3, 400), (128, 2, 200), (256, 1, 44), (300, 0, 0)]
    assert choices[0]["rows_fraction"] == 3 / 4
    assert choices[0]["tokens_fraction"] == 400 / 750
    assert choices[-1]["named"] == ["longest"]


def test_rows_cut_now_are_cut_by_every_lower_limit_too():
    choices = compare(tokens(20, 64), 64, num_rows=1, max_length_tokens=90, tokens_over_limit=26)
    shown = [(choice["limit"], choice["rows_over"], choice["tokens_over"]) for choice in choices]
    assert shown == [(32, 1, 32 + 26), (64, 1, 26), (90, 0, 0)]


def test_dropped_rows_count_with_all_their_tokens():
    beyond = {"num_rows": 2, "max_length_tokens": 90, "tokens_over_limit": 30}
    choices = compare(tokens(20, 20), 64, num_dropped=2, **beyond)
    shown = [(choice["limit"], choice["rows_over"], choice["tokens_over"]) for choice in choices]
    assert shown == [(20, 2, 2 * 44 + 30), (32, 2, 2 * 32 + 30), (64, 2, 30), (90, 0, 0)]
    assert choices[0]["tokens_fraction"] == 118 / (40 + 2 * 64 + 30)


def test_all_rows_that_a_limit_dropped_are_known_to_the_table():
    beyond = {**NOTHING_LONG, "num_rows": 2, "max_length_tokens": 90, "tokens_over_limit": 30}
    dropped = {"too_long": 1, "no_answer_left": 1, "refused_by_template": 7}
    facts = measure_lengths(
        tokens(20, 20), tokens(2, 2), max_length_tokens=64, summary=summary(too_long=beyond, dropped=dropped)
    )
    assert facts["limits"] == compare(tokens(20, 20), 64, num_dropped=2, **beyond)


def test_rows_with_classes_have_no_parts():
    facts = measure_lengths(
        tokens(10, 20, 100),
        tokens(1, 1, 1),
        max_length_tokens=100,
        summary=summary(changed={"end_cut": 1}),
        task="sequence_classification",
    )
    assert list(facts["quantiles"]) == ["row"]
    assert set(facts["histogram"]) == {"edges", "row"}
    assert facts["supervised_fraction"] is None
    assert facts["num_supervised_tokens"] is None
    assert facts["num_rows_cut"] == {"text_shortened": 0, "prompt_emptied": 0, "end_cut": 1}
    assert (facts["num_tokens"], facts["num_rows_at_limit"]) == (130, 1)
    assert "target_limits" not in facts


def test_sources_and_targets_have_limits_of_their_own():
    targets_long = {**NOTHING_LONG, "num_rows": 1, "max_length_tokens": 9, "tokens_over_limit": 4}
    facts = measure_lengths(
        tokens(12, 25, 35),
        tokens(2, 5, 5),
        max_length_tokens=30,
        summary=summary(changed={"target_cut": 1}, targets_too_long=targets_long),
        task="seq2seq_lm",
        max_target_tokens=5,
    )
    assert {name: of["max"] for name, of in facts["quantiles"].items()} == {"row": 35, "source": 30, "target": 5}
    assert set(facts["histogram"]) == {"edges", "source", "target"}
    assert facts["supervised_fraction"] == 12 / 72
    assert (facts["num_rows_at_limit"], facts["num_targets_at_limit"]) == (1, 2)
    assert facts["num_rows_cut"] == {"source_cut": 0, "prompt_emptied": 0, "target_cut": 1}
    shown = [(one["limit"], one["rows_over"], one["tokens_over"]) for one in facts["target_limits"]]
    assert shown == [(5, 1, 4), (9, 0, 0)]
    assert [one["rows_over"] for one in facts["limits"] if one["limit"] == 30] == [0]
