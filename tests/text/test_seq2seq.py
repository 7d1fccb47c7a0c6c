"""Source and target become tokens each by itself, begin as the tokenizer has it, and end in the EOS token once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.errors import UserError
from lm_tuning.parameters.data import TokenizeParameters
from lm_tuning.text.records import TokenRow
from lm_tuning.text.store.table import IGNORE_INDEX, labels_of
from lm_tuning.text.tokenize import read_token_report, write_tokens
from tests.support.tiny import BOS, EOS, UNK, ids, make_tokenizer
from tests.text.conftest import add_around, make_bart_tokenizer, make_kobart_tokenizer, store_examples, supervised

PAIRS: dict[str, Any] = {"task": "seq2seq_lm"}


def bare() -> Any:
    """Write nothing around a text, as KoBART's tokenizer."""
    return make_tokenizer(eos_token="<eos>")


def around() -> Any:
    """Add a token before and one behind a text, as BART's tokenizer."""
    return add_around(bare(), "<bos> $A <eos>")


def source(row: TokenRow) -> list[int]:
    return row.input_ids[: row.spans[0][0]].tolist()


@pytest.mark.parametrize(
    ("tokenizer", "before"),
    [(bare(), []), (add_around(bare(), "$A <eos>"), []), (around(), [BOS])],
    ids=["nothing around", "end behind", "begin and end around"],
)
def test_both_sides_begin_as_the_tokenizer_has_it_and_end_once(tokenize, tokenizer, before):
    summary, [row] = tokenize(tokenizer, "prompt_response", [("abc", "de", None)], **PAIRS)
    first, second = [*before, *ids("abc"), EOS], [*before, *ids("de"), EOS]
    assert row.input_ids.tolist() == [*first, *second]
    assert row.spans == [(len(first), len(first) + len(second))]
    assert labels_of(row).tolist() == [*[IGNORE_INDEX] * len(first), *second]
    assert row.label == -1
    assert summary["rendering"] == "plain text", "a chat template is not used"
    assert summary["end_token_ids"] == [EOS]
    assert (summary["task"], summary["max_target_tokens"]) == ("seq2seq_lm", 128)
    assert "loss_on" not in summary


def test_a_system_message_goes_before_the_prompt(tokenize):
    _, [row] = tokenize(bare(), "prompt_response", [("q", "a", "s")], **PAIRS)
    assert source(row) == [*ids("s\n\nq"), EOS]
    assert supervised(row) == [*ids("a"), EOS]


def test_a_target_does_not_run_together_with_its_source(tokenize):
    _, [row] = tokenize(bare(), "prompt_response", [("q ", " a", None)], **PAIRS)
    assert (source(row), supervised(row)) == ([*ids("q "), EOS], [*ids(" a"), EOS])


def test_ids_are_those_that_a_bart_tokenizer_gives(tokenize):
    tokenizer = make_bart_tokenizer()
    rows = [("the long text", "a short summary", None), ("값 of\n a", "요약", None)]
    _, made = tokenize(tokenizer, "prompt_response", rows, **PAIRS)
    for (prompt, response, _), row in zip(rows, made, strict=True):
        assert source(row) == tokenizer(prompt)["input_ids"]
        assert supervised(row) == tokenizer(text_target=response)["input_ids"]


def test_a_kobart_tokenizer_gets_the_end_that_it_does_not_put_itself(tokenize):
    tokenizer = make_kobart_tokenizer()
    rows = [("한국어 문장 요약", "요약", None), ("요약  문장", "한국어 한국어", None)]
    summary, made = tokenize(tokenizer, "prompt_response", rows, **PAIRS)
    end = tokenizer.eos_token_id
    for (prompt, response, _), row in zip(rows, made, strict=True):
        assert tokenizer(prompt)["input_ids"][-1] != end
        assert source(row) == [*tokenizer(prompt)["input_ids"], end]
        assert supervised(row) == [*tokenizer(response)["input_ids"], end]
        assert tokenizer.bos_token_id not in row.input_ids
        assert tokenizer.decode(supervised(row), skip_special_tokens=True) == response
    assert summary["splits"]["train"]["changed"] == {}


def test_a_tokenizer_without_an_end_is_refused(tokenize):
    tokenizer = bare()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="needs a tokenizer with an EOS token"):
        tokenize(tokenizer, "prompt_response", [("a", "b", None)], **PAIRS)


def test_a_tokenizer_that_puts_something_else_behind_is_refused(tokenize):
    tokenizer = add_around(bare(), "<bos> $A <|end|>")
    with pytest.raises(UserError, match=r"puts '<\|end\|>' behind a text.*wants the EOS token '<eos>' alone"):
        tokenize(tokenizer, "prompt_response", [("a", "b", None)], **PAIRS)


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        ({"truncation": "truncate_end"}, ["abc", "abc", "abc", "abc"]),
        ({"truncation": "truncate_prompt"}, ["abc", "abd", "abc", "abh"]),
        ({"cut_prompt_at": "start"}, ["abc", "bcd", "abc", "fgh"]),
    ],
)
def test_long_sources_lose_what_the_parameters_say_and_targets_their_ends(tokenize, cut, kept):
    options = {**PAIRS, **cut, "max_length_tokens": 5, "max_target_tokens": 4}
    rows = [("abc", "de", None), ("abcd", "de", None), ("abc", "def", None), ("abcdefgh", "defghi", None)]
    summary, made = tokenize(around(), "prompt_response", rows, **options)
    assert [source(row) for row in made] == [[BOS, *ids(text), EOS] for text in kept]
    assert [supervised(row) for row in made] == [[BOS, *ids("de"), EOS]] * 4
    train = summary["splits"]["train"]
    assert train["changed"] == {"source_cut": 2, "target_cut": 2}
    assert (train["too_long"]["num_rows"], train["too_long"]["max_length_tokens"]) == (2, 10)
    assert train["too_long"]["tokens_over_limit"] == 1 + 5
    assert (train["targets_too_long"]["num_rows"], train["targets_too_long"]["max_length_tokens"]) == (2, 8)
    assert train["targets_too_long"]["tokens_over_limit"] == 1 + 4
    assert train["targets_too_long"]["rows_over"] == {}
    assert train["source_tokens"]["max"] == 5
    assert train["target_tokens"]["max"] == 4
    assert train["length_tokens"]["max"] == 9


def test_limits_count_what_a_tokenizer_without_additions_gets(tokenize):
    options = {**PAIRS, "max_length_tokens": 3, "max_target_tokens": 2}
    summary, made = tokenize(bare(), "prompt_response", [("ab", "d", None), ("abc", "de", None)], **options)
    assert [row.input_ids.tolist() for row in made] == [[*ids(text), EOS, *ids("d"), EOS] for text in ("ab", "ac")]
    assert summary["splits"]["train"]["changed"] == {"source_cut": 1, "target_cut": 1}


def test_long_rows_can_be_dropped_and_each_has_one_reason(tokenize):
    options = {**PAIRS, "truncation": "drop", "max_length_tokens": 3, "max_target_tokens": 3}
    rows = [("ab", "de", None), ("abc", "de", None), ("ab", "def", None), ("abc", "def", None)]
    summary, made = tokenize(bare(), "prompt_response", rows, **options)
    assert [row.row_id for row in made] == [1]
    train = summary["splits"]["train"]
    assert train["dropped"] == {"too_long": 2, "target_too_long": 1}
    assert train["num_rows_read"] == train["num_rows"] + sum(train["dropped"].values())


def test_long_rows_can_be_an_error_that_names_both_limits(tokenize):
    options = {**PAIRS, "truncation": "error", "max_length_tokens": 3, "max_target_tokens": 3}
    rows = [("ab", "de", None), ("abc", "de", None), ("ab", "def", None)]
    with pytest.raises(UserError) as caught:
        tokenize(bare(), "prompt_response", rows, **options)
    by_source, by_target = caught.value.problems
    assert "tokenize.max_length_tokens = 3: 1 (longer than tokenize.max_length_tokens; rows.jsonl, row 2)" in by_source
    assert "tokenize.max_target_tokens = 3: 1 (target longer than" in by_target
    assert "rows.jsonl, row 3)" in by_target


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_length_tokens": 2}, "no token of the text within tokenize.max_length_tokens"),
        ({"max_target_tokens": 1}, "no token of the target within tokenize.max_target_tokens"),
    ],
)
def test_limits_without_room_for_a_token_of_the_text_are_named(tokenize, limits, reason):
    with pytest.raises(UserError, match=f"No training row is left.*max_target_tokens = .*{reason}"):
        tokenize(around(), "prompt_response", [("abc", "de", None)], **PAIRS, **limits)


@pytest.mark.parametrize(
    ("policy", "first", "second"),
    [
        ("auto", [BOS, *ids("a<eos>"), EOS], [BOS, *ids("<bos>d"), EOS]),
        ("keep", [BOS, *ids("a"), EOS], [BOS, *ids("d"), EOS]),
    ],
)
def test_typed_control_tokens_are_letters_or_stand_for_those_that_are_put_there(tokenize, policy, first, second):
    rows = [("a<eos>", "<bos>d", None)]
    summary, [row] = tokenize(around(), "prompt_response", rows, **PAIRS, control_tokens=policy)
    assert (source(row), supervised(row)) == (first, second)
    note = "control_token_as_text" if policy == "auto" else "control_token_kept"
    assert summary["splits"]["train"]["changed"] == {note: 1}, "one row, though both sides hold one"


def test_a_cut_row_ends_in_the_eos_where_one_is_kept_inside(tokenize):
    rows = [("ab<eos>", "d", None)]
    _, [row] = tokenize(bare(), "prompt_response", rows, **PAIRS, control_tokens="keep", max_length_tokens=2)
    assert source(row) == [*ids("a"), EOS]


def test_a_target_that_does_not_come_back_is_counted(tokenize):
    rows = [("값", "b", None), ("a", "b값", None)]
    summary, [unread, row] = tokenize(bare(), "prompt_response", rows, **PAIRS)
    assert source(unread) == [UNK, EOS]
    assert supervised(row) == [*ids("b"), UNK, EOS]
    assert summary["splits"]["train"]["changed"] == {"not_round_trip": 1}, "what is only read does not count"


def test_rows_keep_their_order_over_many_chunks_with_some_of_them_dropped(tokenize, monkeypatch):
    monkeypatch.setattr("lm_tuning.text.tokenize._CHUNK_ROWS", 7)
    rows = [("x" * (1 + number % 9), str(number) * (1 + number % 4), None) for number in range(60)]
    options = {**PAIRS, "truncation": "drop", "max_length_tokens": 8, "max_target_tokens": 5}
    _, table = tokenize(bare(), "prompt_response", rows, **options)
    fitting = [position for position, (prompt, response, _) in enumerate(rows) if len(prompt) < 8 and len(response) < 5]
    assert 10 < len(fitting) < 60
    assert [row.row_id - 1 for row in table] == fitting
    assert [source(row) for row in table] == [[*ids(rows[position][0]), EOS] for position in fitting]
    assert [supervised(row) for row in table] == [[*ids(rows[position][1]), EOS] for position in fitting]


def test_a_target_limit_beyond_the_model_is_warned_about(tokenize, caplog):
    tokenize(bare(), "prompt_response", [("a", "b", None)], **PAIRS, max_target_tokens=513)
    assert "tokenize.max_target_tokens is 513, but the model is made for 512" in caplog.text
    caplog.clear()
    tokenize(bare(), "prompt_response", [("a", "b", None)], max_target_tokens=513)
    assert caplog.text == "", "other tasks have no targets"


def test_preview_and_report_tell_sources_and_targets_apart(tmp_path: Path):
    rows = [("abc", "de", None), ("abcdef", "d", None)]
    examples = store_examples(tmp_path / "examples", "prompt_response", rows)
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    write_tokens(tokens, examples, bare(), TokenizeParameters(max_length_tokens=5, max_target_tokens=9), **PAIRS)
    preview = json.loads((tokens / "preview.json").read_text())
    assert preview["data"][0] == ["train", 1, 7, 3, "abc<eos>⟦de<eos>⟧"]
    text = read_token_report(tokens)["markdown"]
    assert "at most 5 tokens per source and 9 per target (`truncate_prompt`), loss on the target." in text
    assert "| split | rows read | rows kept | tokens | source p50 | p90 | p99 | longest | target p50 | p90 |" in text
    assert "| train | 2 | 2 | 14 | 5 | 5 | 5 | 5 | 3 | 3 | 3 | 3 |" in text
    assert "- 1 in train: part of the source cut to fit `tokenize.max_length_tokens`.\n  - rows.jsonl, row 2" in text
