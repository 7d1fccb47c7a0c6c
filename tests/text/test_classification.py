"""A labelled text becomes its own tokens, with the id of its class beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.errors import UserError
from lm_tuning.parameters.data import TokenizeParameters
from lm_tuning.text.store.table import open_split
from lm_tuning.text.tokenize import read_token_report, write_tokens
from tests.support.tiny import BOS, END, UNK, ids, make_tokenizer
from tests.text.conftest import add_around, make_bart_tokenizer, make_byte_tokenizer, store_examples

LABELS = {"neg": 0, "pos": 1}
CLASSIFY: dict[str, Any] = {"task": "sequence_classification", "label_map": LABELS}
ROWS = [("good", "pos"), ("bad", "neg"), ("fine", "pos")]


def test_ids_are_those_of_the_text_and_the_class_stands_beside_them(tokenize):
    summary, rows = tokenize(make_tokenizer(), "text_label", ROWS, **CLASSIFY)
    assert [row.input_ids.tolist() for row in rows] == [ids("good"), ids("bad"), ids("fine")], "no template, no end"
    assert [row.label for row in rows] == [1, 0, 1]
    assert [row.spans for row in rows] == [[], [], []]
    assert [row.num_supervised for row in rows] == [1, 1, 1]
    assert (summary["task"], summary["rendering"]) == ("sequence_classification", "plain text")
    assert summary["label_map"] == LABELS
    assert summary["end_token_ids"] == []
    assert "loss_on" not in summary


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (make_tokenizer(adds_bos=True), [BOS, *ids("good")]),
        (add_around(make_tokenizer(), "<bos> $A <eos>"), [BOS, *ids("good")]),
        (add_around(make_tokenizer(), "$A <eos>"), ids("good")),
    ],
    ids=["bos", "bos and eos", "eos"],
)
def test_what_the_tokenizer_puts_before_a_text_is_kept_and_what_follows_is_not(tokenize, tokenizer, expected):
    _, [row] = tokenize(tokenizer, "text_label", ROWS[:1], **CLASSIFY)
    assert row.input_ids.tolist() == expected


@pytest.mark.parametrize("make", [make_byte_tokenizer, make_bart_tokenizer])
def test_tokens_of_byte_level_tokenizers_are_their_own(tokenize, make):
    tokenizer = make()
    texts = ["the short summary", " 값 ", "a\n\nb"]
    _, rows = tokenize(tokenizer, "text_label", [(text, "pos") for text in texts], **CLASSIFY)
    for text, row in zip(texts, rows, strict=True):
        wanted = tokenizer(text)["input_ids"]
        assert row.input_ids.tolist() == (wanted[:-1] if wanted[-1] == tokenizer.eos_token_id else wanted)


@pytest.mark.parametrize(
    ("options", "kept", "reason"),
    [
        ({"truncation": "truncate_end"}, ["goo", "bad", "fin"], "end_cut"),
        ({"truncation": "truncate_prompt"}, ["god", "bad", "fie"], "text_shortened"),
        ({"cut_prompt_at": "end"}, ["goo", "bad", "fin"], "text_shortened"),
        ({"cut_prompt_at": "start"}, ["ood", "bad", "ine"], "text_shortened"),
    ],
)
def test_a_long_text_loses_what_the_parameters_say(tokenize, options, kept, reason):
    options = {**CLASSIFY, "max_length_tokens": 4, **options}
    summary, rows = tokenize(make_tokenizer(adds_bos=True), "text_label", ROWS, **options)
    assert [row.input_ids.tolist() for row in rows] == [[BOS, *ids(text)] for text in kept]
    assert [row.label for row in rows] == [1, 0, 1]
    train = summary["splits"]["train"]
    assert train["changed"] == {reason: 2}
    assert (train["too_long"]["num_rows"], train["too_long"]["max_length_tokens"]) == (2, 5)
    assert train["too_long"]["tokens_over_limit"] == 2


def test_long_texts_can_be_dropped_and_the_others_keep_their_class(tokenize):
    given = [*ROWS, ("ok", "pos")]
    summary, rows = tokenize(make_tokenizer(), "text_label", given, **CLASSIFY, max_length_tokens=3, truncation="drop")
    assert [(row.row_id, row.label) for row in rows] == [(2, 0), (4, 1)]
    assert summary["splits"]["train"]["dropped"] == {"too_long": 2}
    assert summary["splits"]["train"]["rows_by_class"] == {"neg": 1, "pos": 1}


def test_long_texts_can_be_an_error(tokenize):
    with pytest.raises(UserError, match=r"max_length_tokens = 3: 2 \(longer than .*; rows\.jsonl, rows 1, 3\)"):
        tokenize(make_tokenizer(), "text_label", ROWS, **CLASSIFY, max_length_tokens=3, truncation="error")


def test_a_limit_that_leaves_no_token_of_any_text_is_named(tokenize):
    with pytest.raises(UserError, match=r"No training row is left.*no token of the text within"):
        tokenize(make_tokenizer(adds_bos=True), "text_label", ROWS, **CLASSIFY, max_length_tokens=1)


@pytest.mark.parametrize(
    ("policy", "expected", "note"),
    [
        ("auto", [*ids("a"), *ids("<|end|>"), *ids("b")], "control_token_as_text"),
        ("keep", [*ids("a"), END, *ids("b")], "control_token_kept"),
    ],
)
def test_typed_control_tokens_are_letters_unless_kept(tokenize, policy, expected, note):
    rows = [("fine", "pos"), ("a<|end|>b", "neg")]
    summary, [_, row] = tokenize(make_tokenizer(), "text_label", rows, **CLASSIFY, control_tokens=policy)
    assert (row.input_ids.tolist(), row.label) == (expected, 0)
    assert summary["splits"]["train"]["changed"] == {note: 1}


def test_rows_with_control_tokens_can_be_dropped_without_moving_the_classes(tokenize):
    rows = [("a<|end|>b", "neg"), *ROWS]
    summary, kept = tokenize(make_tokenizer(), "text_label", rows, **CLASSIFY, control_tokens="drop")
    assert [(row.row_id, row.label) for row in kept] == [(2, 1), (3, 0), (4, 1)]
    assert summary["splits"]["train"]["dropped"] == {"control_token": 1}


def test_a_beginning_that_is_typed_and_kept_comes_once(tokenize):
    tokenizer = make_tokenizer(adds_bos=True)
    _, [row] = tokenize(tokenizer, "text_label", [("<bos>a", "pos")], **CLASSIFY, control_tokens="keep")
    assert row.input_ids.tolist() == [BOS, *ids("a")]


def test_unknown_characters_are_counted(tokenize):
    summary, [row] = tokenize(make_tokenizer(), "text_label", [("a값", "pos")], **CLASSIFY)
    assert row.input_ids.tolist() == [*ids("a"), UNK]
    assert summary["splits"]["train"]["changed"] == {"not_round_trip": 1}


def test_classes_stay_with_their_rows_over_many_chunks(tokenize, monkeypatch):
    monkeypatch.setattr("lm_tuning.text.tokenize._CHUNK_ROWS", 7)
    labels = {str(number): number for number in range(13)}
    rows = [(f"{number}" * (1 + number % 5), str(number % 13)) for number in range(100)]
    _, table = tokenize(
        make_tokenizer(),
        "text_label",
        rows,
        task="sequence_classification",
        label_map=labels,
        max_length_tokens=6,
        truncation="drop",
    )
    fitting = [number for number, (text, _) in enumerate(rows) if len(text) <= 6]
    assert 20 < len(fitting) < 100
    assert [row.row_id - 1 for row in table] == fitting
    assert [row.label for row in table] == [number % 13 for number in fitting]


def test_held_out_rows_of_a_class_that_no_training_row_has_are_named(tokenize):
    held_out = {"validation": [("x", "neg")], "test": [("y", "neutral"), ("z", "Pos")]}
    with pytest.raises(UserError) as caught:
        tokenize(make_tokenizer(), "text_label", ROWS, **CLASSIFY, **held_out)
    *rows, advice = caught.value.problems
    assert rows == [
        "No training row has the class 'neutral' of 1 row of test, at rows.jsonl, row 5.",
        "No training row has the class 'Pos' of 1 row of test, at rows.jsonl, row 6.",
    ]
    assert "leave these rows out" in advice


def test_many_rows_of_unknown_classes_are_told_by_class_the_largest_first(tokenize):
    test = [("y", f"class {position}") for position in range(25) for _ in range(1 + (position == 7) * 40)]
    held_out = {"validation": [("x", "class 7")] * 2, "test": test}
    with pytest.raises(UserError) as caught:
        tokenize(make_tokenizer(), "text_label", ROWS, **CLASSIFY, **held_out)
    assert len(caught.value.problems) == 22
    assert caught.value.problems[0] == (
        "No training row has the class 'class 7' of 2 rows of validation and 41 rows of test, the first at rows.jsonl, "
        "row 4."
    )
    assert caught.value.problems[-2] == "5 more such classes with 5 rows."


def test_splits_without_classes_are_refused(tokenize):
    with pytest.raises(UserError, match="needs classes, and the stored splits have none"):
        tokenize(make_tokenizer(), "text_label", ROWS, task="sequence_classification")


@pytest.mark.parametrize(
    ("task", "format", "row"),
    [
        ("sequence_classification", "text", "a"),
        ("sequence_classification", "prompt_response", ("a", "b", None)),
        ("sequence_classification", "messages", [{"role": "user", "content": "a"}]),
        ("seq2seq_lm", "text", "a"),
        ("seq2seq_lm", "text_label", ("a", "b")),
        ("seq2seq_lm", "messages", [{"role": "user", "content": "a"}]),
    ],
)
def test_rows_that_the_task_cannot_learn_from_are_refused_before_tokenizing(tokenize, task, format, row):
    seen: list[Any] = []
    with pytest.raises(UserError) as caught:
        tokenize(make_tokenizer(), format, [row], task=task, on_progress=lambda *call: seen.append(call))
    [problem] = caught.value.problems
    assert f"of the format '{format}', but task: {task}" in problem
    part = "label" if task == "sequence_classification" else "response"
    assert f"data.columns.{part}" in problem
    assert "data.format" in problem
    assert seen == []


def test_preview_and_report_show_classes_in_place_of_supervised_tokens(tmp_path: Path):
    examples = store_examples(tmp_path / "examples", "text_label", ROWS, test=[("so so", "neg")], label_map=LABELS)
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    write_tokens(
        tokens, examples, make_tokenizer(), TokenizeParameters(max_length_tokens=100), task="sequence_classification"
    )
    preview = json.loads((tokens / "preview.json").read_text())
    assert preview["columns"] == ["split", "row_id", "length", "label", "text"]
    assert preview["data"][0] == ["train", 1, 4, "pos", "good"]
    assert preview["data"][3] == ["test", 4, 5, "neg", "so so"]
    assert open_split(tokens, "test").labels.tolist() == [0]
    report = read_token_report(tokens)
    text = report["markdown"]
    assert "as plain text; at most 100 tokens per row (`truncate_prompt`), each with one of 2 classes to learn." in text
    assert "| train | 3 | 3 | 11 | 2 | 66.7% | 4 | 4 | 4 | 4 |" in text
    assert (
        "| class | id | train | validation | test |\n| --- | ---: | ---: | ---: | ---: |\n| pos | 1 | 2 | 0 | 0 |"
        in text
    )
    assert "| neg | 0 | 1 | 0 | 1 |" in text
    assert "supervised" not in text
    assert report["metrics"]["data_train_majority_fraction"] == 2 / 3
    assert not [name for name in report["metrics"] if "supervised" in name]
    assert json.loads(json.dumps(report)) == report
