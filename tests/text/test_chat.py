"""Answers are found in what any style of chat template writes, and a row that cannot be traced is refused."""

from __future__ import annotations

from typing import Any

import pytest

from lm_tuning.text.render.chat import ChatRenderer
from lm_tuning.text.render.plain import RenderedRow, RowRefused
from tests.support import templates
from tests.support.tiny import CHAT_TEMPLATE, make_tokenizer

USER_A = {"role": "user", "content": "a"}
TWO_TURNS = [
    USER_A,
    {"role": "assistant", "content": "bc"},
    {"role": "user", "content": "bc?"},
    {"role": "assistant", "content": "d"},
]


def render(template: str, messages: list[dict[str, Any]], **tokenizer_options: Any) -> RenderedRow:
    return ChatRenderer(make_tokenizer(chat_template=template, **tokenizer_options)).render(messages)


def answers(row: RenderedRow) -> list[str]:
    return [row.text[start:end] for start, end in row.answers]


def prompts(row: RenderedRow) -> list[str]:
    return [row.text[start:end] for start, end in row.prompts]


@pytest.mark.parametrize(
    ("template", "options", "expected_text", "expected_answers"),
    [
        (CHAT_TEMPLATE, {}, "<|user|>a<|end|><|assistant|>bc<|end|><|user|>bc?<|end|><|assistant|>d<|end|>", "<|end|>"),
        (
            templates.CHATML,
            {},
            "<|user|>a<|end|>\n<|assistant|>bc<|end|>\n<|user|>bc?<|end|>\n<|assistant|>d<|end|>",
            "<|end|>",
        ),
        (
            templates.CHATML_WITH_DEFAULT_SYSTEM,
            {},
            "<|system|>Be good.<|end|>\n<|user|>a<|end|>\n<|assistant|>bc<|end|>\n<|user|>bc?<|end|>\n"
            "<|assistant|>d<|end|>",
            "<|end|>",
        ),
        (
            templates.LLAMA3,
            {},
            "<bos><|user|>\n\na<|end|><|assistant|>\n\nbc<|end|><|user|>\n\nbc?<|end|><|assistant|>\n\nd<|end|>",
            "<|end|>",
        ),
        (
            templates.MISTRAL,
            {"eos_token": "<eos>"},
            "<bos>[INST] a [/INST] bc<eos>[INST] bc? [/INST] d<eos>",
            "<eos>",
        ),
        (
            templates.MARKED,
            {},
            "<|user|>a<|end|><|assistant|>bc<|end|><|user|>bc?<|end|><|assistant|>d<|end|>",
            "<|end|>",
        ),
    ],
    ids=["tiny", "chatml", "chatml-system", "llama3", "mistral", "marked"],
)
def test_both_answers_and_their_ends_are_found_in_two_turns(template, options, expected_text, expected_answers):
    row = render(template, TWO_TURNS, **options)
    assert row.text == expected_text
    assert answers(row) == [f"bc{expected_answers}", f"d{expected_answers}"]
    assert prompts(row) == ["a", "bc?"]
    assert row.openings == [start - (template is templates.MISTRAL) for start, _ in row.answers]
    assert row.is_closed
    assert row.notes == []


def test_the_text_ends_with_the_last_answer_although_the_template_goes_on():
    row = render(templates.CHATML, [USER_A, {"role": "assistant", "content": "b"}])
    assert row.text.endswith("b<|end|>")


def test_markers_are_followed_and_the_end_of_turn_is_added_to_them():
    row = render(templates.MARKED_WITHOUT_END, TWO_TURNS)
    assert answers(row) == ["=> bc<|end|>", "=> d<|end|>"]


def test_a_template_without_special_tokens_leaves_the_row_open():
    row = render(templates.BARE, TWO_TURNS)
    assert row.text == "user: a\nassistant: bc\nuser: bc?\nassistant: d"
    assert answers(row) == ["bc", "d"]
    assert not row.is_closed, "the EOS token still has to be appended"


def test_a_beginning_of_text_token_is_no_end_of_turn():
    template = "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    row = render(template, TWO_TURNS)
    assert answers(row) == ["bc", "d"]
    assert not row.is_closed


def test_a_system_message_that_moves_is_followed():
    messages = [{"role": "system", "content": "s"}, *TWO_TURNS]
    row = render(templates.MISTRAL, messages, eos_token="<eos>")
    assert row.text == "<bos>[INST] a [/INST] bc<eos>[INST] s\n\nbc? [/INST] d<eos>"
    assert answers(row) == ["bc<eos>", "d<eos>"]
    assert prompts(row) == ["a", "s", "bc?"]


def test_generation_begins_before_what_the_prompt_of_the_template_leaves_out():
    row = render(templates.MISTRAL, TWO_TURNS, eos_token="<eos>")
    assert [row.text[position : position + 2] for position in row.openings] == [" b", " d"]
    row = render("{% if add_generation_prompt %}Go on: {% endif %}" + CHAT_TEMPLATE, TWO_TURNS)
    assert row.openings == [], "such a prompt is no beginning of the whole"


def test_an_answer_that_also_stands_in_the_prompt_is_not_confused_with_it():
    messages = [{"role": "user", "content": "say yes"}, {"role": "assistant", "content": "yes"}]
    row = render(CHAT_TEMPLATE, messages)
    assert answers(row) == ["yes<|end|>"]
    assert row.answers == [(len("<|user|>say yes<|end|><|assistant|>"), len(row.text))]


def test_contents_that_look_like_scaffolding_are_contents():
    messages = [{"role": "user", "content": "x<|end|><|assistant|>y"}, {"role": "assistant", "content": "z"}]
    row = render(CHAT_TEMPLATE, messages)
    assert answers(row) == ["z<|end|>"]
    assert prompts(row) == ["x<|end|><|assistant|>y"]


def test_an_empty_answer_is_its_end_alone():
    row = render(CHAT_TEMPLATE, [USER_A, {"role": "assistant", "content": ""}])
    assert answers(row) == ["<|end|>"]


def test_trimmed_content_is_found_and_noted():
    messages = [USER_A, {"role": "assistant", "content": "    return 1\n"}]
    row = render(templates.LLAMA3, messages)
    assert answers(row) == ["return 1<|end|>"]
    assert row.notes == ["content_not_verbatim"]
    assert render(CHAT_TEMPLATE, messages).notes == []


def test_turns_after_the_last_answer_are_cut_and_noted():
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "thanks"},
    ]
    row = render(CHAT_TEMPLATE, messages)
    assert row.text == "<|user|>2+2?<|end|><|assistant|>4<|end|>"
    assert row.notes == ["trailing_turns_cut"]


def test_a_conversation_without_an_answer_is_refused():
    with pytest.raises(RowRefused) as refusal:
        render(CHAT_TEMPLATE, [USER_A])
    assert refusal.value.reason == "no_assistant_turn"


def test_what_the_template_says_is_passed_on():
    messages = [USER_A, USER_A, {"role": "assistant", "content": "b"}]
    with pytest.raises(RowRefused) as refusal:
        render(templates.MISTRAL, messages, eos_token="<eos>")
    assert refusal.value.reason == "refused_by_template"
    assert "roles must alternate" in refusal.value.detail


def test_reasoning_in_the_last_answer_is_traced_by_its_beginnings():
    row = render(templates.REASONING, [USER_A, {"role": "assistant", "content": "hm~b"}])
    assert answers(row) == ["hm~b<|end|>"]


def test_an_answer_that_the_template_rewrites_later_is_not_supervised():
    messages = [
        USER_A,
        {"role": "assistant", "content": "hm~b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "so~d"},
    ]
    row = render(templates.REASONING, messages)
    assert row.text == "<|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>so~d<|end|>"
    assert answers(row) == ["so~d<|end|>"]
    assert prompts(row) == ["a", "c"]
    assert row.notes == ["answer_not_learned", "earlier_answer_shortened"]


def test_an_end_that_only_the_last_turn_has_does_not_hide_the_others():
    template = templates.TOOLS + "{% if not add_generation_prompt %}<eos>{% endif %}"
    messages: list[dict[str, Any]] = [
        USER_A,
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    assert answers(render(template, messages)) == ["call f{}<|end|>", "c<|end|>"]


def test_tool_calls_are_answers_and_print_only_the_keys_they_have():
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "warm?"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Busan"}}}]},
        {"role": "tool", "content": "20"},
        {"role": "assistant", "content": "Yes."},
    ]
    row = render(templates.TOOLS, messages)
    assert answers(row) == ['call weather{"city": "Busan"}<|end|>', "Yes.<|end|>"]
    assert "null" not in row.text
    assert "None" not in row.text


def test_a_template_that_drops_the_answer_is_refused():
    template = "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}{% endif %}{% endfor %}"
    with pytest.raises(RowRefused) as refusal:
        render(template, [USER_A, {"role": "assistant", "content": "zz"}])
    assert refusal.value.reason == "untraceable"


def test_every_shape_is_supervised_once(monkeypatch):
    tokenizer = make_tokenizer()
    renderer = ChatRenderer(tokenizer)
    rendered = 0
    call = renderer._call

    def counting(*args: Any, **kwargs: Any) -> str:
        nonlocal rendered
        rendered += 1
        return call(*args, **kwargs)

    counting.source = call.source
    monkeypatch.setattr(renderer, "_call", counting)
    for content in "abcde":
        renderer.render([USER_A, {"role": "assistant", "content": content}])
    assert rendered == 7, "five rows, one skeleton and its generation prompt"
