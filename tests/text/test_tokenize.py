"""Whole splits become exactly the ids and labels that can be written by hand."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lm_tuning.data.store import ExampleWriter
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import TokenizeParameters
from lm_tuning.text.store.table import IGNORE_INDEX, labels_of, open_split
from lm_tuning.text.tokenize import read_token_summary, write_tokens
from tests.support import templates
from tests.support.tiny import ASSISTANT, BOS, CHAT_TEMPLATE, END, EOS, SYSTEM, UNK, USER, ids, make_tokenizer
from tests.text.conftest import store_examples, supervised

NO = IGNORE_INDEX

LIMIT = TokenizeParameters(max_length_tokens=100)


def test_a_prompt_and_its_response_become_one_turn_each(tokenize):
    summary, [row] = tokenize(make_tokenizer(), "prompt_response", [("2+2?", "4", None)])
    assert row.row_id == 1
    assert row.input_ids.tolist() == [USER, *ids("2+2?"), END, ASSISTANT, *ids("4"), END]
    assert labels_of(row).tolist() == [NO, NO, NO, NO, NO, NO, NO, *ids("4"), END]
    assert summary["rendering"] == "chat template"
    assert summary["end_token_ids"] == [END]


def test_a_system_column_becomes_a_system_turn(tokenize):
    _, [row] = tokenize(make_tokenizer(), "prompt_response", [("q", "a", "s")])
    assert row.input_ids.tolist() == [SYSTEM, *ids("s"), END, USER, *ids("q"), END, ASSISTANT, *ids("a"), END]
    assert supervised(row) == [*ids("a"), END]


TWO_TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "bc"},
    {"role": "user", "content": "d"},
    {"role": "assistant", "content": "e"},
]
TWO_TURNS_IDS = [
    *[USER, *ids("a"), END, ASSISTANT, *ids("bc"), END],
    *[USER, *ids("d"), END, ASSISTANT, *ids("e"), END],
]


@pytest.mark.parametrize(
    ("loss_on", "labels"),
    [
        ("assistant", [NO, NO, NO, NO, *ids("bc"), END, NO, NO, NO, NO, *ids("e"), END]),
        ("completion", [NO] * 11 + [*ids("e"), END]),
        ("all", [NO, *TWO_TURNS_IDS[1:]]),
    ],
)
@pytest.mark.parametrize("template", [None, templates.MARKED], ids=["without markers", "with markers"])
def test_two_turns_are_supervised_as_asked_with_or_without_markers(tokenize, template, loss_on, labels):
    tokenizer = make_tokenizer(chat_template=template) if template else make_tokenizer()
    _, [row] = tokenize(tokenizer, "messages", [TWO_TURNS], loss_on=loss_on)
    assert row.input_ids.tolist() == TWO_TURNS_IDS
    assert labels_of(row).tolist() == labels


def test_an_empty_answer_teaches_its_end(tokenize):
    messages = [*TWO_TURNS[:3], {"role": "assistant", "content": ""}]
    _, [row] = tokenize(make_tokenizer(), "messages", [messages])
    assert row.input_ids.tolist() == [*TWO_TURNS_IDS[:7], USER, *ids("d"), END, ASSISTANT, END]
    assert labels_of(row).tolist() == [NO] * 4 + [*ids("bc"), END] + [NO] * 4 + [END]


@pytest.mark.parametrize("adds_bos", [True, False], ids=["tokenizer adds it", "tokenizer does not"])
@pytest.mark.parametrize("template", [templates.LLAMA3, templates.CHATML], ids=["template writes it", "does not"])
def test_there_is_one_beginning_of_text_token_where_there_is_any(tokenize, template, adds_bos):
    tokenizer = make_tokenizer(chat_template=template, adds_bos=adds_bos)
    _, [row] = tokenize(tokenizer, "prompt_response", [("a", "b", None)])
    expected = 1 if adds_bos or template is templates.LLAMA3 else 0
    assert row.input_ids.tolist().count(BOS) == expected
    assert row.input_ids[:1].tolist() == [BOS if expected else USER]
    assert supervised(row) == [*ids("b"), END]


def test_without_a_chat_template_the_eos_follows_the_response(tokenize):
    tokenizer = make_tokenizer(chat_template=None, eos_token="<eos>", adds_bos=True)
    summary, rows = tokenize(tokenizer, "prompt_response", [("a", "b", None), ("a: ", "b", "s")])
    assert rows[0].input_ids.tolist() == [BOS, *ids("a\nb"), EOS]
    assert supervised(rows[0]) == [*ids("b"), EOS]
    assert rows[1].input_ids.tolist() == [BOS, *ids("s\n\na: b"), EOS]
    assert supervised(rows[1]) == [*ids("b"), EOS]
    assert summary["rendering"] == "plain text"


def test_text_is_supervised_whole_and_its_end_is_taught(tokenize):
    summary, [row] = tokenize(make_tokenizer(adds_bos=True), "text", ["abc"], loss_on="assistant")
    assert row.input_ids.tolist() == [BOS, *ids("abc"), END]
    assert labels_of(row).tolist() == [NO, *ids("abc"), END]
    assert summary["rendering"] == "plain text"


def test_a_label_is_the_answer_to_its_text(tokenize):
    _, [row] = tokenize(make_tokenizer(), "text_label", [("good", "pos")])
    assert row.input_ids.tolist() == [USER, *ids("good"), END, ASSISTANT, *ids("pos"), END]
    assert supervised(row) == [*ids("pos"), END]


@pytest.mark.parametrize("pad_token", ["<|end|>", "<pad>"])
def test_the_end_is_taught_when_pad_equals_eos(tokenize, pad_token):
    _, rows = tokenize(make_tokenizer(pad_token=pad_token), "prompt_response", [("a", "b", None), ("a", "bcd", None)])
    assert [supervised(row) for row in rows] == [[*ids("b"), END], [*ids("bcd"), END]]


def test_trailing_turns_are_cut_and_rows_without_an_answer_reported_by_number(tokenize, caplog):
    rows = [
        [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "thanks"},
        ],
        [{"role": "user", "content": "hello?"}],
    ]
    summary, [row] = tokenize(make_tokenizer(), "messages", rows, on_bad_row="skip")
    assert row.input_ids.tolist() == [USER, *ids("2+2?"), END, ASSISTANT, *ids("4"), END]
    assert supervised(row) == [*ids("4"), END]
    train = summary["splits"]["train"]
    assert train["changed"] == {"trailing_turns_cut": 1}
    assert train["dropped"] == {"no_assistant_turn": 1}
    assert (train["num_rows_read"], train["num_rows"]) == (2, 1)
    assert "train rows dropped: 1 (no assistant turn that is supervised; rows.jsonl, row 2)" in caplog.text
    assert "train rows changed: 1 (turns after the last supervised answer cut; rows.jsonl, row 1)" in caplog.text


def test_content_that_the_template_trims_is_counted(tokenize, caplog):
    tokenizer = make_tokenizer(chat_template=templates.LLAMA3)
    rows = [("a", "b", None), ("a", "    return 1\n", None)]
    summary, [_, row] = tokenize(tokenizer, "prompt_response", rows)
    assert supervised(row) == [*ids("return 1"), END]
    assert summary["splits"]["train"]["changed"] == {"content_not_verbatim": 1}
    assert "the chat template changes the content (for example trims it); rows.jsonl, row 2" in caplog.text


# Four tokens of scaffolding; the first row has 20 + 4 + 3 tokens, the second 5 + 4 + 3.
LONG_AND_SHORT = [("0123456789abcdefghij", "yes", None), ("01234", "yes", None)]


def test_a_long_prompt_gives_way_to_its_answer(tokenize, caplog):
    summary, [long, short] = tokenize(make_tokenizer(), "prompt_response", LONG_AND_SHORT, max_length_tokens=16)
    assert long.input_ids.tolist() == [USER, *ids("01234ghij"), END, ASSISTANT, *ids("yes"), END]
    assert supervised(long) == supervised(short) == [*ids("yes"), END]
    assert summary["splits"]["train"]["changed"] == {"prompt_shortened": 1}
    assert "part of the prompt cut to fit; rows.jsonl, row 1" in caplog.text


def test_long_rows_can_be_dropped(tokenize):
    summary, [row] = tokenize(
        make_tokenizer(), "prompt_response", LONG_AND_SHORT, max_length_tokens=16, truncation="drop"
    )
    assert row.row_id == 2
    assert summary["splits"]["train"]["dropped"] == {"too_long": 1}


def test_a_row_without_a_supervised_token_never_reaches_training(tokenize):
    summary, rows = tokenize(
        make_tokenizer(), "prompt_response", LONG_AND_SHORT, max_length_tokens=16, truncation="truncate_end"
    )
    assert [row.row_id for row in rows] == [2]
    assert summary["splits"]["train"]["dropped"] == {"no_answer_left": 1}


def test_long_rows_can_be_an_error_that_counts_them(tokenize):
    with pytest.raises(
        UserError, match=r"max_length_tokens = 16: 1 \(longer than .*; rows\.jsonl, row 1\).*truncate_prompt"
    ):
        tokenize(make_tokenizer(), "prompt_response", LONG_AND_SHORT, max_length_tokens=16, truncation="error")


def test_no_row_left_is_an_error_that_names_the_limit(tokenize):
    with pytest.raises(UserError, match=r"No training row is left.*max_length_tokens = 4\..*no supervised token"):
        tokenize(make_tokenizer(), "prompt_response", [("0123456789", "yes", None)] * 3, max_length_tokens=4)


def test_the_oldest_exchange_of_a_long_conversation_goes_whole(tokenize):
    messages = [{"role": "system", "content": "s"}, *TWO_TURNS]
    summary, [row] = tokenize(make_tokenizer(), "messages", [messages], max_length_tokens=12)
    assert row.input_ids.tolist() == [SYSTEM, *ids("s"), END, USER, *ids("d"), END, ASSISTANT, *ids("e"), END]
    assert supervised(row) == [*ids("e"), END]
    assert summary["splits"]["train"]["changed"] == {"old_turns_dropped": 1}


def test_an_answer_that_the_tokenizer_cannot_spell_is_counted(tokenize):
    summary, [row] = tokenize(make_tokenizer(), "prompt_response", [("a", "값", None)])
    assert supervised(row) == [UNK, END]
    assert summary["splits"]["train"]["changed"] == {"not_round_trip": 1}


def test_messages_need_a_chat_template(tokenize):
    with pytest.raises(UserError, match="no chat template"):
        tokenize(make_tokenizer(chat_template=None), "messages", [TWO_TURNS])


def test_rows_keep_their_order_and_ids_over_many_chunks(tokenize, monkeypatch):
    monkeypatch.setattr("lm_tuning.text.tokenize._CHUNK_ROWS", 7)
    rows = [(f"{number}?", f"{number}", None) for number in range(50)]
    summary, table = tokenize(make_tokenizer(), "prompt_response", rows)
    assert [row.row_id for row in table] == list(range(1, 51))
    assert [supervised(row) for row in table] == [[*ids(str(number)), END] for number in range(50)]
    lengths = [len(row.input_ids) for row in table]
    assert summary["splits"]["train"]["num_tokens"] == sum(lengths)


def test_every_split_is_written_summed_up_and_previewed(tmp_path: Path):
    rows = [("a", "bcd", None), ("a", "b", None), ("abcd", "b", None)]
    examples = store_examples(tmp_path / "examples", "prompt_response", rows, validation=[("x", "y", None)])
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    seen = []
    summary = write_tokens(tokens, examples, make_tokenizer(), LIMIT, on_progress=lambda *call: seen.append(call))
    assert summary == read_token_summary(tokens)
    train = summary["splits"]["train"]
    assert train["num_rows"] == 3
    assert train["num_supervised_tokens"] == 8
    assert train["supervised_fraction"] == 8 / 23
    assert {name: train["length_tokens"][name] for name in ("min", "p50", "max", "mean")} == {
        "min": 6,
        "p50": 8,
        "max": 9,
        "mean": pytest.approx(23 / 3),
    }
    assert summary["splits"]["test"]["length_tokens"] is None
    assert len(open_split(tokens, "validation")) == 1
    assert len(open_split(tokens, "test")) == 0
    assert summary["tokenizer"]["pad_token_id"] != summary["tokenizer"]["eos_token_id"] == END
    preview = json.loads((tokens / "preview.json").read_text())
    assert preview["columns"] == ["split", "row_id", "length", "num_supervised", "text"]
    assert preview["data"][0] == ["train", 1, 8, 4, "<|user|>a<|end|><|assistant|>⟦bcd<|end|>⟧"]
    assert [line[0] for line in preview["data"]] == ["train"] * 3 + ["validation"]
    assert seen[0] == ("Tokenizing", 0, 4, "rows")
    assert seen[-1] == ("Tokenizing", 4, 4, "rows")


def test_the_tokenizer_works_in_parallel_and_the_setting_is_put_back(tokenize, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    seen = []

    def look(*_: object) -> None:
        seen.append(os.environ.get("TOKENIZERS_PARALLELISM"))

    tokenize(make_tokenizer(), "text", ["abc"], on_progress=look)
    assert seen[-1] == "true"
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_a_limit_beyond_the_model_is_warned_about(tokenize, caplog):
    tokenize(make_tokenizer(), "text", ["abc"], max_length_tokens=513)
    assert "max_length_tokens is 513, but the model is made for 512" in caplog.text


def test_one_beginning_of_text_where_template_and_tokenizer_both_write_it(tokenize):
    tokenizer = make_tokenizer(chat_template="{{ bos_token }}" + CHAT_TEMPLATE, adds_bos=True)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    _, [row] = tokenize(tokenizer, "messages", [turns])
    assert row.input_ids.tolist() == [BOS, USER, *ids("a"), END, ASSISTANT, *ids("b"), END]
    start = row.spans[0][0]
    prompt = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert row.input_ids[:start].tolist() == tokenizer(prompt, add_special_tokens=False)["input_ids"]


def test_an_answer_of_weight_0_is_not_supervised(tokenize):
    turns = [{**turn, "weight": weight} for turn, weight in zip(TWO_TURNS, (1, 0, 1, 1), strict=True)]
    summary, [row] = tokenize(make_tokenizer(), "messages", [turns])
    assert row.input_ids.tolist() == TWO_TURNS_IDS
    assert labels_of(row).tolist() == [NO] * 11 + [*ids("e"), END]
    assert summary["splits"]["train"]["changed"] == {"answer_of_weight_0": 1}
    turns = [{**turn, "weight": weight} for turn, weight in zip(TWO_TURNS, (1, 1, 1, 0), strict=True)]
    summary, [row] = tokenize(make_tokenizer(), "messages", [turns])
    assert row.input_ids.tolist() == TWO_TURNS_IDS[:7]
    assert supervised(row) == [*ids("bc"), END]
    assert summary["splits"]["train"]["changed"] == {"answer_of_weight_0": 1, "trailing_turns_cut": 1}


def test_altered_content_can_be_an_error_that_names_the_first_row(tokenize):
    tokenizer = make_tokenizer(chat_template=templates.LLAMA3)
    rows = [("a", "b", None), ("a", "    return 1\n", None), ("a", " c", None)]
    with pytest.raises(UserError, match=r"on_altered_content is error: 2 \(.*; rows\.jsonl, rows 2, 3\)"):
        tokenize(tokenizer, "prompt_response", rows, on_altered_content="error")


def test_lengths_before_the_cut_are_told(tokenize):
    options = {"max_length_tokens": 16, "truncation": "truncate_prompt"}
    rows = [("0" * 20, "yes", None), ("0" * 40, "yes", None)]
    summary, _ = tokenize(make_tokenizer(), "prompt_response", rows, **options)
    expected = {"num_rows": 2, "max_length_tokens": 47, "rows_over": {"32": 1}, "tokens_over": {"32": 15}}
    assert summary["splits"]["train"]["too_long"] == {**expected, "tokens_over_limit": 27 - 16 + 47 - 16}
    summary, _ = tokenize(make_tokenizer(), "text", ["0" * 46], **options)
    assert summary["splits"]["train"]["too_long"] == {**expected, "num_rows": 1, "tokens_over_limit": 47 - 16}


@pytest.mark.parametrize(
    ("truncation", "kept", "reason"),
    [("truncate_prompt", [1, 2], "end_cut"), ("truncate_end", [1, 2], "end_cut"), ("drop", [2], "too_long")],
)
def test_long_running_text_loses_its_end_or_is_dropped(tokenize, truncation, kept, reason):
    summary, rows = tokenize(make_tokenizer(), "text", ["abcdef", "ab"], max_length_tokens=4, truncation=truncation)
    assert [row.row_id for row in rows] == kept
    expected = {1: ids("abcd"), 2: [*ids("ab"), END]}
    assert [row.input_ids.tolist() for row in rows] == [expected[row_id] for row_id in kept]
    assert [row.spans for row in rows] == [[(1, len(row.input_ids))] for row in rows]
    train = summary["splits"]["train"]
    assert train["changed"] | train["dropped"] == {reason: 1}
    assert summary["end_token_ids"] == [END]


def test_running_text_with_unknown_characters_is_counted(tokenize):
    summary, [_, row] = tokenize(make_tokenizer(), "text", ["ab", "a값"])
    assert row.input_ids.tolist() == [*ids("a"), UNK, END]
    assert summary["splits"]["train"]["changed"] == {"not_round_trip": 1}


def test_every_row_keeps_its_source(tmp_path: Path):
    examples = store_examples(tmp_path / "examples", "text", [])
    with ExampleWriter(examples / "train.arrow", "text") as writer:
        for row_id, source in enumerate([0, 2, 1], 1):
            writer.append(row_id, ("abc",), source=source)
    with ExampleWriter(examples / "test.arrow", "text") as writer:
        writer.append(4, ("abc",), source=-1)
    facts = json.loads((examples / "summary.json").read_text())
    facts["sources"] = [{"path": path, "weight": 1.0, "num_rows": 1} for path in "abc"]
    facts["label_map"] = {"no": 0, "yes": 1}
    (examples / "summary.json").write_text(json.dumps(facts))
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    summary = write_tokens(tokens, examples, make_tokenizer(), LIMIT)
    assert open_split(tokens, "train").sources.tolist() == [0, 2, 1]
    assert open_split(tokens, "test").sources.tolist() == [-1]
    assert summary["sources"] == facts["sources"]
    assert summary["label_map"] == {"no": 0, "yes": 1}


def test_chunks_are_cut_by_bytes_too(tokenize, monkeypatch):
    monkeypatch.setattr("lm_tuning.text.tokenize._CHUNK_BYTES", 10)
    _, rows = tokenize(make_tokenizer(), "text", ["a" * length for length in (4, 4, 4, 30, 1, 2, 3)])
    assert [len(row.input_ids) for row in rows] == [5, 5, 5, 31, 2, 3, 4]


def test_splits_that_do_not_know_where_their_columns_stand_are_refused(tmp_path):
    examples = store_examples(tmp_path / "examples", "prompt_response", [("Sum up: a", "b", None)])
    summary = json.loads((examples / "summary.json").read_text())
    (examples / "summary.json").write_text(json.dumps({**summary, "template": "Sum up: {text}"}))
    (tmp_path / "tokens").mkdir()
    with pytest.raises(UserError, match=r"made by an earlier version.*--pipelines=split"):
        write_tokens(tmp_path / "tokens", examples, make_tokenizer(), LIMIT)
