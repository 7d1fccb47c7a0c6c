"""What is planted among answers and losses is found, counted and shown with its text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_tuning.evaluation import answer_kinds as kinds
from lm_tuning.evaluation.answer_analysis import AnsweredRow, analyse_answers, list_hard_rows
from lm_tuning.evaluation.answer_kinds import kinds_of, script_of
from lm_tuning.evaluation.statistics.scored_rows import ScoredRows, mean_of_rows, ratio
from lm_tuning.text.store.table import TokenTable, open_split
from tests.support.stored import chat_row, publish_tokens
from tests.support.tiny import make_tokenizer

LONG = "The patient has been coughing for two weeks and comes back today with a fever of thirty-nine degrees."


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("", [kinds.EMPTY]),
        (" \n", [kinds.EMPTY]),
        ("Cough and fever since two weeks.", [kinds.EXACT]),
        ("Cough, fever for some two weeks.", []),
        (LONG, [kinds.COPIED, kinds.LONGER]),
        ("환자는 이주 동안 기침과 열이 있습니다 그리고 왔다", [kinds.OTHER_SCRIPT]),
        ("咳嗽和发烧已经两个星期了没有好转", [kinds.OTHER_SCRIPT]),
        ("Cough. " * 12, [kinds.REPEATING, kinds.LONGER]),
        ("Cough.", [kinds.SHORTER]),
    ],
)
def test_an_answer_is_of_its_kinds(answer: str, expected: list[str]) -> None:
    found = kinds_of(f"Summarize: {LONG}", "Cough and fever since two weeks.", answer)
    assert [kind for kind in found if kind != kinds.SHORTER or kind in expected] == expected


def test_what_the_reference_does_too_is_no_fault() -> None:
    passage = LONG[:60]
    assert kinds_of(f"Cite from: {LONG}", passage, LONG[5:66]) == [], "the task is to copy"
    song = "la la la la la la la la la la la la la"
    assert kinds.REPEATING not in kinds_of("Sing", song, f"{song} la la")
    assert kinds_of("Say nothing", "", "") == [kinds.EXACT]


def test_an_answer_at_the_limit_is_cut_off() -> None:
    assert kinds_of("p", "one two three", "one two", finish_reason="length") == [kinds.CUT_OFF]
    assert kinds_of("p", "one two three", "one two", finish_reason="stop") == []


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("hello there", "LATIN"),
        ("안녕하세요", "HANGUL"),
        ("こんにちは世界", "CJK"),
        ("привет мир", "CYRILLIC"),
        ("fullwidth words", "LATIN"),
        ("12345 !?", None),
        ("abc", None),
        ("abcd안녕하세", None),
    ],
)
def test_the_script_of_a_text(text: str, script: str | None) -> None:
    assert script_of(text) == script


def losses(values: Any, ids: Any) -> ScoredRows:
    tokens = np.full(len(values), 4.0)
    return ScoredRows("nats_per_token", np.stack([np.asarray(values) * tokens, tokens], 1), ratio, False, row_ids=ids)


def test_a_row_that_tuning_did_not_help_is_suspect_and_a_hard_one_is_not() -> None:
    generator = np.random.default_rng(0)
    base = generator.normal(3.0, 0.2, 40)
    tuned = base - 2.0 + generator.normal(0, 0.05, 40)
    tuned[7] = base[7] + 0.4  # contradicts what was learned from the others
    base[9], tuned[9] = 6.0, 4.0  # hard for both, and as much easier as the others
    tuned[11] = np.nan
    found = list_hard_rows(losses(base, np.arange(40)), losses(tuned, np.arange(40)))
    assert [(row["row_id"], row["is_suspect"]) for row in found[:2]] == [(9, False), (7, True)]
    assert not any(row["is_suspect"] for row in found[2:])
    assert len(found) == 10
    assert 11 not in [row["row_id"] for row in found]
    assert found[0]["tuned_nats_per_token"] == pytest.approx(4.0)
    assert list_hard_rows(losses([], np.arange(0)), losses([], np.arange(0))) == []


@pytest.fixture
def table(tmp_path: Path) -> TokenTable:
    rows = [chat_row(f"what is {number}?", f"it is {number}") for number in range(20)]
    return open_split(publish_tokens(tmp_path / "tokens", "key1", test=rows), "test")


def answered(num_rows: int) -> list[AnsweredRow]:
    return [
        AnsweredRow(100 + n, f"what is {n}?", f"it is {n}", "", f"it is {n}" if n % 2 else "no", "stop", "stop")
        for n in range(num_rows)
    ]


def scores(rows: list[AnsweredRow], **more: Any) -> tuple[ScoredRows, ScoredRows]:
    ids = [row.row_id for row in rows]
    base, tuned = (
        np.array([float(text == row.reference) for row in rows for text in [of(row)]])
        for of in (
            lambda row: row.base,
            lambda row: row.tuned,
        )
    )
    return tuple(mean_of_rows("exact_match", each, ids, **more) for each in (base, tuned))  # type: ignore[return-value]


def test_the_analysis_names_rows_with_their_text(table: TokenTable) -> None:
    rows = answered(12)
    ids = np.arange(100, 120)
    loss = np.linspace(1, 2, 20)
    analysis = analyse_answers(
        rows,
        {"exact_match": scores(rows), "nats_per_token": (losses(loss + 1, ids), losses(loss, ids))},
        table=table,
        tokenizer=make_tokenizer(),
        num_samples=2,
    )
    json.dumps(analysis, allow_nan=False)
    by_kind = {kind["kind"]: kind for kind in analysis["answer_kinds"]}
    assert (by_kind[kinds.EMPTY]["num_base"], by_kind[kinds.EMPTY]["num_tuned"]) == (12, 0)
    exact = by_kind[kinds.EXACT]
    assert (exact["num_tuned"], exact["tuned_score"], exact["row_ids"]) == (6, 1.0, [101, 103, 105])
    assert by_kind[kinds.SHORTER]["tuned_score"] == 0.0
    assert (analysis["worst_rows"], analysis["best_rows"]) == ([100, 102], [111, 109])
    assert [row["row_id"] for row in analysis["hard_rows"]][:2] == [119, 118]
    texts = {row["row_id"]: row for row in analysis["row_texts"]}
    assert texts[119] == {"row_id": 119, "prompt": "what is 19?", "reference": "it is 19"}, "not answered"
    assert (texts[111]["tuned"], texts[111]["tuned_score"], texts[111]["tuned_kinds"]) == ("it is 11", 1, [kinds.EXACT])
    named = {*analysis["best_rows"], *analysis["worst_rows"], *exact["row_ids"]}
    assert named <= texts.keys()
    lengths = [line for line in analysis["answer_lengths"] if line["of"] == "reference"]
    assert sum(line["num_rows"] for line in lengths) == 12
    assert sum(line["tuned"] * line["num_rows"] for line in lengths) == pytest.approx(6)
    loss_bins, length_bins = analysis["histograms"]
    assert [sum(counts) for counts in loss_bins["counts"].values()] == [20, 20]
    assert [sum(counts) for counts in length_bins["counts"].values()] == [12, 12, 12]


def test_the_lowest_is_the_best_of_a_score_that_counts_mistakes(table: TokenTable) -> None:
    rows = answered(12)
    analysis = analyse_answers(
        rows,
        {"mistakes": scores(rows, higher_is_better=False)},
        table=table,
        tokenizer=make_tokenizer(),
        num_samples=2,
    )
    assert {row_id % 2 for row_id in analysis["best_rows"]} == {0}
    assert {row_id % 2 for row_id in analysis["worst_rows"]} == {1}


def test_nothing_answered_is_nothing_analysed(table: TokenTable) -> None:
    analysis = analyse_answers([], {}, table=table, tokenizer=make_tokenizer(), num_samples=2)
    assert not any(analysis.values())
