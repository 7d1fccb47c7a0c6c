from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lm_tuning.preflight.tokens import inspect_special_tokens, judge_special_tokens
from tests.support.stored import Row, chat_row, write_rows
from tests.support.tiny import ASSISTANT, BOS, END, EOS, PAD, ids, make_tokenizer


def inspect(tmp_path: Path, rows: list[Row], **tokenizer: Any) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
    write_rows(rows, tmp_path / "train.arrow")
    facts = inspect_special_tokens(tmp_path, make_tokenizer(**tokenizer))
    judged = judge_special_tokens(facts)
    return facts, {item["question"].split()[-1]: (item["verdict"], item["answer"]) for item in judged}


def test_an_ordinary_chat_is_well(tmp_path):
    facts, judged = inspect(tmp_path, [chat_row("2+2?", "4"), chat_row("3+3?", "6")])
    assert facts["endings"] == [{"id": END, "token": "<|end|>", "num_rows": 2, "is_control": True}]
    assert facts["end_learned_fraction"] == 1
    assert {verdict for verdict, _ in judged.values()} == {"good"}
    assert judged["stop?"][1] == "100.0% of the rows end in a supervised <|end|>."
    assert judged["once?"][1] == "0 of 2 rows begin with <bos> (the tokenizer adds none)."


def test_a_chat_that_never_learns_its_end_is_bad(tmp_path):
    unended = [([ASSISTANT, *ids("ab"), END], [(1, 3)]), ([ASSISTANT, *ids("cb")], [(1, 3)])]
    facts, judged = inspect(tmp_path, unended)
    assert facts["endings"] == [{"id": ids("b")[0], "token": "b", "num_rows": 2, "is_control": False}]
    assert facts["end_learned_fraction"] == 0
    assert judged["stop?"][0] == "bad"
    assert "Of the others, most end in 'b'. From 100.0% of the rows the model learns to go on" in judged["stop?"][1]


def test_padding_with_the_eos_is_worth_a_note(tmp_path):
    facts, judged = inspect(tmp_path, [chat_row("a", "b")], pad_token="<|end|>")
    assert facts["pad"]["is_eos"]
    assert judged["end?"][0] == "note"
    assert "losses are taken by position" in judged["end?"][1]


def test_rows_that_begin_twice_are_counted(tmp_path):
    rows = [
        ([BOS, BOS, *ids("a"), EOS], [(2, 4)]),
        ([BOS, *ids("a"), EOS], [(1, 3)]),
        ([BOS, *ids("a"), BOS, EOS], [(1, 4)]),
        ([BOS], []),
        ([BOS, *ids("a"), PAD, EOS], [(1, 4)]),
    ]
    facts, judged = inspect(tmp_path, rows, eos_token="<eos>", adds_bos=True)
    bos = facts["bos"]
    assert bos["added_by_tokenizer"]
    assert (bos["num_rows_with"], bos["num_rows_beginning_with"]) == (5, 5)
    assert (bos["num_rows_beginning_with_two"], bos["num_rows_with_one_later"]) == (1, 2)
    assert (facts["pad"]["num_rows_with"], facts["eos"]["num_rows_with"]) == (1, 4)
    assert (facts["num_rows"], facts["num_end_learned"]) == (5, 4)
    assert judged["once?"][0] == "bad"
    assert "1 of 5 rows begins with <bos> twice (the tokenizer adds it)" in judged["once?"][1]


def test_a_beginning_that_the_model_expects_must_be_there(tmp_path):
    _, judged = inspect(tmp_path, [chat_row("a", "b")], adds_bos=True)
    assert judged["once?"] == (
        "bad",
        "0 of 1 row begin with <bos> (the tokenizer adds it). The model expects it at the beginning.",
    )


@pytest.mark.parametrize("batch_rows", [1, 2, 5])
def test_counts_do_not_depend_on_how_the_file_is_cut(tmp_path, monkeypatch, batch_rows):
    from lm_tuning.text.store import table as token_table

    rows = [chat_row("a" * index, "b" * (index % 3)) for index in range(5)]
    whole = inspect(tmp_path, rows)[0]
    with token_table.TokenTableWriter(tmp_path / "train.arrow", batch_rows=batch_rows) as writer:
        for index, (row_ids, spans) in enumerate(rows):
            writer.append(index, row_ids, spans)
    assert inspect_special_tokens(tmp_path, make_tokenizer()) == whole


def test_a_source_that_begins_twice_or_does_not_end_is_told(tmp_path):
    rows = [
        ([BOS, BOS, *ids("a"), EOS, BOS, *ids("b"), EOS], [(4, 7)]),
        ([BOS, *ids("a"), BOS, *ids("bc"), EOS], [(2, 6)]),
    ]
    write_rows(rows, tmp_path / "train.arrow")
    facts = inspect_special_tokens(tmp_path, make_tokenizer(eos_token="<eos>", adds_bos=True), task="seq2seq_lm")
    assert facts["bos"]["num_rows_beginning_with_two"] == 1
    assert facts["target_bos"]["num_rows_beginning_with_two"] == 0
    assert facts["num_sources_ended"] == 1
    judged = {item["question"]: item for item in judge_special_tokens(facts)}
    assert judged["Does each source begin once?"]["verdict"] == "bad"
    assert "1 of 2 sources begins with <bos> twice" in judged["Does each source begin once?"]["answer"]
    assert judged["Does each source end?"] == {
        "question": "Does each source end?", "answer": "1 of 2 sources ends in <eos>.", "verdict": "bad"
    }  # fmt: skip
    assert judged["Does each target begin once?"]["verdict"] == "good"
