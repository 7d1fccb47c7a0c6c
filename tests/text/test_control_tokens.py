"""Control tokens typed inside a row are letters, tokens, a reason to drop it or an error, as asked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lm_tuning.errors import UserError
from lm_tuning.text.render.control_tokens import ControlTokens, show
from lm_tuning.text.render.plain import RenderedRow, RowRefused
from tests.support import templates
from tests.support.real_tokenizer import real_tokenizer
from tests.support.tiny import ASSISTANT, CHAT_TEMPLATE, END, SPECIALS, USER, ids, make_tokenizer
from tests.text.conftest import make_byte_tokenizer, supervised, tokenize_rows

TYPED = ("say <|end|>", "no <|assistant|>x", None)
AS_LETTERS = [
    *[USER, *ids("say <|end|>"), END],
    *[ASSISTANT, *ids("no <|assistant|>x"), END],
]
AS_TOKENS = [USER, *ids("say "), END, END, ASSISTANT, *ids("no "), ASSISTANT, *ids("x"), END]


@pytest.mark.parametrize("policy", ["auto", "as_text"])
def test_letters_stay_letters_in_turns(tokenize, policy):
    summary, [plain, row] = tokenize(
        make_tokenizer(), "prompt_response", [("a", "b", None), TYPED], control_tokens=policy
    )
    assert row.input_ids.tolist() == AS_LETTERS
    assert supervised(row) == [*ids("no <|assistant|>x"), END]
    assert plain.input_ids.tolist() == [USER, *ids("a"), END, ASSISTANT, *ids("b"), END]
    assert summary["splits"]["train"]["changed"] == {"control_token_as_text": 1}


def test_tokens_are_kept_where_that_is_asked_for(tokenize):
    summary, [row] = tokenize(make_tokenizer(), "prompt_response", [TYPED], control_tokens="keep")
    assert row.input_ids.tolist() == AS_TOKENS
    assert supervised(row) == [*ids("no "), ASSISTANT, *ids("x"), END]
    assert summary["splits"]["train"]["changed"] == {"control_token_kept": 1}


def test_rows_can_be_dropped_and_are_counted(tokenize, caplog):
    summary, [row] = tokenize(make_tokenizer(), "prompt_response", [TYPED, ("a", "b", None)], control_tokens="drop")
    assert row.row_id == 2
    assert summary["splits"]["train"]["dropped"] == {"control_token": 1}
    assert (
        "a control token is typed in it, see tokenize.control_tokens; rows.jsonl, row 1): holds '<|end|>'"
        in caplog.text
    )


def test_an_error_names_all_rows_up_to_twenty(tokenize):
    rows = [TYPED, ("a", "b", None), *[TYPED] * 20]
    with pytest.raises(UserError) as error:
        tokenize(make_tokenizer(), "prompt_response", rows, control_tokens="error", validation=[TYPED])
    [train, validation] = error.value.problems
    named = ", ".join(map(str, [1, *range(3, 22)]))
    assert "train rows with a control token typed in them, while tokenize.control_tokens is error: 21" in train
    assert f"rows.jsonl, rows {named}, ...)" in train
    assert "validation rows" in validation


def test_running_text_keeps_its_tokens_unless_asked_otherwise(tokenize):
    summary, [row] = tokenize(make_tokenizer(), "text", ["a<|end|>b"])
    assert row.input_ids.tolist() == [*ids("a"), END, *ids("b"), END]
    assert summary["splits"]["train"]["changed"] == {"control_token_kept": 1}
    summary, [row] = tokenize(make_tokenizer(), "text", ["a<|end|>b"], control_tokens="as_text")
    assert row.input_ids.tolist() == [*ids("a<|end|>b"), END]
    assert summary["splits"]["train"]["changed"] == {"control_token_as_text": 1}


def test_labelled_text_and_plain_prompts_stay_text(tokenize):
    _, [row] = tokenize(make_tokenizer(chat_template=None), "text_label", [("a<|end|>", "pos")])
    assert row.input_ids.tolist() == [*ids("a<|end|>\npos"), END]
    assert supervised(row) == [*ids("pos"), END]


def test_a_token_at_the_end_of_an_answer_does_not_end_it_twice(tokenize):
    _, [row] = tokenize(make_tokenizer(chat_template=None), "prompt_response", [("a", "b<|end|>", None)])
    assert row.input_ids.tolist() == [*ids("a\nb<|end|>"), END]


def test_typed_tokens_in_tools_and_calls_are_letters_too():
    tokenizer = make_byte_tokenizer(chat_template=templates.TOOLS)
    call = {"function": {"name": "f", "arguments": {"text": "<|end|>"}}}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    [row], counts = tokenize_rows(tokenizer, "messages", [(json.dumps(turns), None)])
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert row.input_ids.tolist().count(end) == 2, "those of the template"
    assert tokenizer.decode(supervised(row)) == 'call f{"text": "<|end|>"}<|end|>'
    assert counts.counts["control_token_as_text"] == 1


def test_a_long_row_is_cut_with_its_letters():
    tokenizer = make_tokenizer()
    [row], counts = tokenize_rows(tokenizer, "prompt_response", [TYPED], max_length_tokens=24)
    assert row.input_ids.tolist() == [USER, *ids("sa>"), END, *AS_LETTERS[13:]]
    assert len(row.input_ids) == 24
    assert supervised(row) == [*ids("no <|assistant|>x"), END]
    assert counts.counts["prompt_shortened"] == 1


def make_control(**options: Any) -> ControlTokens:
    tokenizer = make_byte_tokenizer()
    tokenizer.add_tokens(["<think>"])
    return ControlTokens(tokenizer, **{"template": "<think>", "policy": "as_text", **options})


def test_what_the_template_writes_is_control_in_every_turn_but_the_assistants():
    control = make_control()
    assert control.find_in_turns([{"role": "assistant", "content": "<think>"}]) is None
    assert control.find_in_turns([{"role": "user", "content": "a <think>"}]) == "<think>"
    assert make_control(template="").find_in_turns([{"role": "user", "content": "<think>"}]) is None
    assert control.find_in_turns([{"role": "assistant", "content": "<|end|>"}]) == "<|end|>"
    assert control.find_in_text("<think>") is None
    assert control.find_in_tools([{"name": ["<bos>"]}]) == "<bos>"


def test_stand_ins_come_back_as_the_tokens_with_all_positions_moved():
    control = make_control()
    messages = [{"role": "user", "content": "a<|end|>b"}]
    [hidden], _, tokens = control.hide(messages, None)
    assert len(hidden["content"]) == 3
    text = "xx" + hidden["content"] + "y"
    row = show(RenderedRow(text, [(2, 5)], [(5, 6)], is_closed=True, openings=[5], notes=["n"]), tokens)
    assert row.text == "xxa<|end|>by"
    assert (row.prompts, row.answers, row.openings, row.as_text) == ([(2, 11)], [(11, 12)], [11], [(3, 10)])
    assert row.notes == ["n"]


def test_a_row_with_private_use_characters_of_its_own_is_still_told_apart():
    control = make_control()
    [hidden], _, tokens = control.hide([{"role": "user", "content": "\U000f0001<|end|>"}], None)
    assert hidden["content"][0] == "\U000f0001"
    assert tokens[hidden["content"][1]] == "<|end|>"
    with pytest.raises(RowRefused):
        control.hide([{"role": "user", "content": "\U000f0001\U00100001<|end|>"}], None)


def test_letters_that_the_tokenizer_cannot_write_are_a_reason_to_drop(monkeypatch):
    monkeypatch.setattr("lm_tuning.text.align.masks.RowEncoder._letters_only", lambda encoder: encoder._backend)
    made, counts = tokenize_rows(make_tokenizer(), "prompt_response", [("a", "b", None), TYPED])
    assert [row.row_id for row in made] == [1]
    assert counts.counts["control_token_unspellable"] == 1
    made, counts = tokenize_rows(make_byte_tokenizer(chat_template=templates.PHI), "prompt_response", [TYPED])
    assert made == []
    assert counts.counts["control_token_unspellable"] == 1


def test_the_default_model_spells_its_own_tokens_as_letters():
    tokenizer = real_tokenizer()
    row = ("What does <|im_end|> do?", "It ends a turn: <|im_end|>", None)
    [made], counts = tokenize_rows(tokenizer, "prompt_response", [row])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert made.input_ids.tolist().count(end) == 3, "system, user and assistant"
    assert tokenizer.decode(supervised(made)) == "It ends a turn: <|im_end|><|im_end|>"
    assert supervised(made).count(end) == 1
    assert dict(counts.counts) == {"control_token_as_text": 1}


@pytest.mark.parametrize("prepends_everywhere", [True, False])
def test_tokenizers_that_put_a_space_before_text_put_none_before_letters(prepends_everywhere):
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted({*"say <|end|>noxb", "▁"})
    core = Tokenizer(models.BPE({token: i for i, token in enumerate([*SPECIALS, *letters])}, [], unk_token="<unk>"))
    if prepends_everywhere:
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", unk_token="<unk>")
    tokenizer.chat_template = CHAT_TEMPLATE
    [row], counts = tokenize_rows(tokenizer, "prompt_response", [("say <|end|> x", "no <|end|>b", None)])
    lead = ["▁"] if prepends_everywhere else []
    assert tokenizer.convert_ids_to_tokens(row.input_ids.tolist()) == [
        *["<|user|>", *lead, *"say▁<|end|>▁x", "<|end|>"],
        *["<|assistant|>", *lead, *"no▁<|end|>b", "<|end|>"],
    ]
    assert tokenizer.convert_ids_to_tokens(supervised(row)) == [*lead, *"no▁<|end|>b", "<|end|>"]
    assert dict(counts.counts) == {"control_token_as_text": 1}
