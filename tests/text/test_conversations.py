"""Whatever is said in a conversation, the model learns its answers with their ends, and nothing else."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_tuning.text.records import TokenRow
from lm_tuning.text.render.chat import ChatRenderer
from lm_tuning.text.render.plain import TOOLS_LEFT_OUT, RowRefused
from tests.support import templates
from tests.support.tiny import CHAT_TEMPLATE, make_tokenizer
from tests.text.conftest import make_byte_tokenizer, tokenize_rows

TYPED = ["<|end|>", "<|assistant|>", "<bos>", "<pad>", "<|end", "|>"]
VERBATIM = {
    "tiny": CHAT_TEMPLATE,
    "chatml": templates.CHATML,
    "chatml-system": templates.CHATML_WITH_DEFAULT_SYSTEM,
    "marked": templates.MARKED,
    "reasoning": templates.REASONING,
    "phi": templates.PHI,
}
TRIMMING = {"llama3": templates.LLAMA3, "gemma": templates.GEMMA}
ALL = {**VERBATIM, **TRIMMING}


def contents(alphabet: str) -> st.SearchStrategy[str]:
    chunk = st.text(alphabet=alphabet, max_size=6) | st.sampled_from([*TYPED, " ", "\n", "\n\n", "  x"])
    return st.lists(chunk, max_size=5).map("".join)


def conversations(alphabet: str, *, with_system: bool) -> st.SearchStrategy[list[dict[str, str]]]:
    exchange = st.tuples(contents(alphabet), contents(alphabet))

    def write(system: str | None, exchanges: list[tuple[str, str]]) -> list[dict[str, str]]:
        turns = [{"role": "system", "content": system}] if system is not None else []
        for question, answer in exchanges:
            turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return turns

    systems = st.none() | contents(alphabet) if with_system else st.none()
    return st.builds(write, systems, st.lists(exchange, min_size=1, max_size=3))


@functools.cache
def tokenizer_for(name: str, kind: str) -> Any:
    if kind == "bytes":
        return make_byte_tokenizer(chat_template=ALL[name])
    return make_tokenizer(chat_template=ALL[name])


def spell(tokenizer: Any, ids: Any) -> str:
    return str(tokenizer.backend_tokenizer.decode([int(index) for index in ids], skip_special_tokens=False))


def spoken(tokenizer: Any, row: TokenRow) -> list[str]:
    return [spell(tokenizer, row.input_ids[start:end]) for start, end in row.spans]


def controls(tokenizer: Any, row: TokenRow) -> int:
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return sum(int(index) in special for index in row.input_ids)


# Characters that each tokenizer can spell: one token a printable character, and any bytes.
ALPHABETS = {"characters": "ab ~?<|", "bytes": "ab <|é값😀\u0301"}
CASES = [(name, kind) for name in ALL for kind in ALPHABETS]


@pytest.mark.parametrize(("name", "kind"), CASES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_exactly_the_answers_and_their_ends_are_supervised(name, kind, data):
    alphabet = ALPHABETS[kind].replace("~", "") if name == "reasoning" else ALPHABETS[kind]
    turns = conversations(alphabet, with_system=name != "gemma")
    rows = data.draw(st.lists(turns, min_size=1, max_size=3))
    tokenizer = tokenizer_for(name, kind)
    stored = [(json.dumps(row), None) for row in rows]
    made, counts = tokenize_rows(tokenizer, "messages", stored)
    assert len(made) == len(rows)
    assert not counts.counts["not_round_trip"]
    for row, messages in zip(made, rows, strict=True):
        said = [turn["content"] for turn in messages if turn["role"] == "assistant"]
        if name in TRIMMING:
            said = [content.strip() for content in said]
        assert spoken(tokenizer, row) == [content + "<|end|>" for content in said]
        empty = [{**turn, "content": ""} for turn in messages]
        [bare], _ = tokenize_rows(tokenizer, "messages", [(json.dumps(empty), None)])
        assert controls(tokenizer, row) == controls(tokenizer, bare), "none of the typed tokens is one"
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
        assert spell(tokenizer, row.input_ids) == rendered.removesuffix("\n")
    alone = [tokenize_rows(tokenizer, "messages", [row])[0][0] for row in stored]
    assert [row.input_ids.tolist() for row in alone] == [row.input_ids.tolist() for row in made]
    assert [row.spans for row in alone] == [row.spans for row in made]


@pytest.mark.parametrize(("name", "kind"), CASES)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_cut_takes_from_prompts_and_old_exchanges_before_the_last_answer(name, kind, data):
    alphabet = ALPHABETS[kind].replace("~", "")
    messages = data.draw(conversations(alphabet, with_system=name != "gemma"))
    tokenizer = tokenizer_for(name, kind)
    stored = [(json.dumps(messages), None)]
    [whole], _ = tokenize_rows(tokenizer, "messages", stored)
    limit = data.draw(st.integers(min_value=1, max_value=len(whole.input_ids)))
    made, counts = tokenize_rows(tokenizer, "messages", stored, max_length_tokens=limit)
    for row in made:
        assert len(row.input_ids) <= limit
        assert row.num_supervised > 0
        if not counts.counts["answer_shortened"]:
            answers = spoken(tokenizer, whole)
            assert spoken(tokenizer, row) == answers[len(answers) - len(row.spans) :]
    assert len(made) + counts.counts["no_answer_left"] == 1


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_tokens_placed_by_bytes_are_those_placed_by_the_library(data):
    name = data.draw(st.sampled_from(sorted(ALL)))
    tokenizer = tokenizer_for(name, "bytes")
    turns = conversations(ALPHABETS["bytes"], with_system=name != "gemma")
    rows = [(json.dumps(row), None) for row in data.draw(st.lists(turns, min_size=1, max_size=3))]
    options = {
        "max_length_tokens": data.draw(st.sampled_from([12, 30, 4096])),
        "loss_on": data.draw(st.sampled_from(["assistant", "completion", "all"])),
    }
    fast, counts = tokenize_rows(tokenizer, "messages", rows, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_tuning.text.tokenizers.causal_lm.build_byte_table", lambda backend: None)
        slow, slow_counts = tokenize_rows(tokenizer, "messages", rows, **options)
    assert [(row.row_id, row.input_ids.tolist(), row.spans) for row in fast] == [
        (row.row_id, row.input_ids.tolist(), row.spans) for row in slow
    ]
    assert counts.counts == slow_counts.counts
    assert counts.endings == slow_counts.endings


REASONED = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "<think>\nso\n</think>\n\nd"},
]


def test_reasoning_is_supervised_in_the_last_answer_alone():
    tokenizer = make_byte_tokenizer(chat_template=templates.QWEN3)
    [row], counts = tokenize_rows(tokenizer, "messages", [(json.dumps(REASONED), None)])
    assert spell(tokenizer, row.input_ids) == (
        "<|user|>\na<|end|>\n<|assistant|>\nb<|end|>\n<|user|>\nc<|end|>\n<|assistant|>\n<think>\nso\n</think>\n\nd<|end|>"
    )
    assert spoken(tokenizer, row) == ["<think>\nso\n</think>\n\nd<|end|>"]
    assert dict(counts.counts) == {"answer_not_learned": 1, "earlier_answer_shortened": 1}


def test_an_empty_thought_of_the_template_is_scaffolding():
    tokenizer = make_byte_tokenizer(chat_template=templates.QWEN3)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    [row], counts = tokenize_rows(tokenizer, "messages", [(json.dumps(turns), None)])
    assert spoken(tokenizer, row) == ["b<|end|>"]
    assert spell(tokenizer, row.input_ids).endswith("<think>\n\n</think>\n\nb<|end|>")
    assert not counts.counts


def test_an_empty_thought_of_the_template_is_not_supervised_with_a_tool_call_either():
    template = templates.QWEN3.replace("{{ '<|end|>\n' }}", "{{ message.tool_calls | string }}{{ '<|end|>\n' }}")
    tokenizer = make_byte_tokenizer(chat_template=template.replace("message['content'] %}", "message.content or '' %}"))
    call = {"role": "assistant", "content": "b", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    brought = {"role": "assistant", "content": "<think>\n\n</think>\n\nb", "thinking": "so"}
    question = {"role": "user", "content": "a"}
    rows, _ = tokenize_rows(
        tokenizer, "messages", [(json.dumps([question, answer]), None) for answer in (call, brought)]
    )
    assert spoken(tokenizer, rows[0])[0].startswith("b[{")
    assert spoken(tokenizer, rows[1])[0].startswith("<think>\n\n</think>\n\nb")


def test_tools_stand_in_the_prompt_and_rows_with_others_are_told_apart():
    tokenizer = make_byte_tokenizer(chat_template=templates.QWEN3)
    turns = json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    tools = [{"name": "add"}], [{"name": "sub"}]
    rows, counts = tokenize_rows(
        tokenizer, "messages", [(turns, json.dumps(tools[0])), (turns, None), (turns, json.dumps(tools[1]))]
    )
    shown = [spell(tokenizer, row.input_ids) for row in rows]
    assert shown[0].startswith('<|system|>Tools: {"name": "add"}<|end|>\n<|user|>')
    assert shown[1].startswith("<|user|>")
    assert shown[2].startswith('<|system|>Tools: {"name": "sub"}<|end|>\n<|user|>')
    assert [spoken(tokenizer, row) for row in rows] == [["b<|end|>"]] * 3
    assert not counts.counts


def test_tools_that_a_template_does_not_show_are_found_out():
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    call = {"role": "assistant", "content": "I call", "tool_calls": [{"function": {"name": "weather"}}]}
    plain = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    called = [plain[0], call, {"role": "tool", "content": "sunny"}, plain[1]]
    shows_tools = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT_TEMPLATE
    for template, expected in ((CHAT_TEMPLATE, True), (shows_tools, False)):
        tokenizer = make_tokenizer()
        tokenizer.chat_template = template
        renderer = ChatRenderer(tokenizer)
        assert (TOOLS_LEFT_OUT in renderer.render(plain, tools).notes) == expected
    assert TOOLS_LEFT_OUT in ChatRenderer(make_tokenizer()).render(called).notes
    assert TOOLS_LEFT_OUT not in ChatRenderer(make_tokenizer()).render(plain).notes


def test_a_tool_call_without_content_is_named_when_the_template_fails_on_it():
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "weather"}}]}
    turns = [{"role": "user", "content": "q"}, call]
    tokenizer = make_tokenizer()
    tokenizer.chat_template = templates.PHI
    with pytest.raises(RowRefused) as caught:
        ChatRenderer(tokenizer).render(turns)
    assert caught.value.reason == "refused_by_template"
    assert "(turn 2 calls a tool and has no content, which the template does not know)" in caught.value.detail
