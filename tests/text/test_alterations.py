"""What a template leaves out is found in any part of a conversation, and only there."""

from __future__ import annotations

from typing import Any

import pytest

from lm_tuning.text.render.chat_template import TemplateCall
from lm_tuning.text.render.plain import merge_system_turns
from lm_tuning.text.render.probes import ToolArguments, find_alterations
from tests.support import templates
from tests.support.tiny import CHAT_TEMPLATE, make_tokenizer

WHOLE = "{% for m in messages %}{{ m | tojson }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "add an address"},
    {"role": "assistant", "content": "so", "tool_calls": [CALL], "reasoning": "add"},
    {"role": "tool", "content": "a", "name": "add"},
    {"role": "assistant", "content": "an address", "thinking": "so"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "an address",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def alterations(template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[str]:
    call = TemplateCall(make_tokenizer(chat_template=template))
    return find_alterations(call, messages, tools, call(messages, tools))


def test_a_template_that_shows_everything_alters_nothing():
    assert alterations(WHOLE, TURNS, [TOOL]) == []


@pytest.mark.parametrize(
    ("shown", "left_out"),
    [
        ("m.content if m.role != 'tool' else ''", ["reasoning_left_out", "turn_left_out", "tools_left_out"]),
        ("m.content ~ m.tool_calls", ["reasoning_left_out"]),
        ("m.content ~ m.reasoning_content ~ (m.tool_calls[0].function.name if m.tool_calls)", ["tools_left_out"]),
        ("m.content ~ m.reasoning_content ~ (m.tool_calls[0].function.arguments if m.tool_calls)", ["tools_left_out"]),
        ("m.content | trim ~ m.reasoning_content ~ m.tool_calls", []),
        ("m.content | upper ~ m.reasoning_content ~ m.tool_calls", ["content_not_verbatim"]),
    ],
)
def test_each_part_is_missed_although_its_words_stand_elsewhere(shown, left_out):
    assert alterations(f"{{% for m in messages %}}{{{{ {shown} }}}}{{% endfor %}}", TURNS) == left_out


@pytest.mark.parametrize(
    "shown", ["tool.function.name", "tool.function.name ~ tool.function.description", "tool.function.parameters"]
)
def test_a_tool_that_is_not_shown_whole_is_missed(shown):
    template = f"{{% for m in messages %}}{{{{ m | tojson }}}}{{% endfor %}}{{% for tool in tools %}}{{{{ {shown} }}}}"
    assert alterations(template + "{% endfor %}", TURNS, [TOOL]) == ["tools_left_out"]


def test_content_that_is_trimmed_is_changed():
    messages = [{"role": "user", "content": " a"}, {"role": "assistant", "content": "b "}]
    assert alterations(templates.LLAMA3, messages) == ["content_not_verbatim"]
    assert alterations(CHAT_TEMPLATE, messages) == []


def test_what_is_shown_of_the_last_answer_alone_is_no_loss():
    first = [TURNS[0], {"role": "assistant", "content": "hm~b"}]
    assert alterations(templates.REASONING, first) == []
    assert alterations(templates.REASONING, [*first, *first]) == ["earlier_answer_shortened"]
    only_last = (
        "{% for m in messages %}{% if loop.last %}{{ m.reasoning_content }}{% endif %}{{ m.content }}{% endfor %}"
    )
    plain = [TURNS[0], {"role": "assistant", "content": "b", "reasoning": "add"}]
    assert alterations(only_last, [*plain, *plain]) == ["earlier_answer_shortened"]
    assert alterations(CHAT_TEMPLATE, [*plain, *plain]) == ["reasoning_left_out"]


@pytest.mark.parametrize(
    ("roles", "merged"),
    [
        ("s1 u1 a1", ["user: s1\n\nu1", "assistant: a1"]),
        ("s1 s2 u1 a1", ["user: s1\n\ns2\n\nu1", "assistant: a1"]),
        ("u1 a1 s1 u2 a2", ["user: u1", "assistant: a1", "user: s1\n\nu2", "assistant: a2"]),
        ("u1 s1 a1", ["user: u1\n\ns1", "assistant: a1"]),
        ("s1 a1 u1 a2", ["user: s1", "assistant: a1", "user: u1", "assistant: a2"]),
        ("u1 a1 s1", ["user: u1", "assistant: a1", "user: s1"]),
    ],
)
def test_system_turns_are_merged_into_the_users(roles, merged):
    names = {"s": "system", "u": "user", "a": "assistant"}
    messages = [{"role": names[turn[0]], "content": turn} for turn in roles.split()]
    kept = [dict(message) for message in messages]
    assert [f"{turn['role']}: {turn['content']}" for turn in merge_system_turns(messages)] == merged
    assert messages == kept


def wants(shown: str, arguments: Any) -> Any:
    template = (
        f"{{% for m in messages %}}{{% for c in m.tool_calls or [] %}}{{{{ {shown} }}}}{{% endfor %}}{{% endfor %}}"
    )
    fitting = ToolArguments(TemplateCall(make_tokenizer(chat_template=template)))
    turn = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    [fitted] = fitting.fit([turn], None)
    return fitted["tool_calls"][0]["function"]["arguments"]


def test_arguments_are_given_in_the_form_that_becomes_json():
    shown = "c.function.arguments | tojson"
    assert wants(shown, '{"a": 1}') == {"a": 1}
    assert wants(shown, "") == {}
    assert wants("c.function.arguments", {"a": "é"}) == '{"a": "é"}'
    assert wants("c.function.arguments.items() | list", '{"a": 1}') == {"a": 1}
    either = "c.function.arguments if c.function.arguments is string else c.function.arguments | tojson"
    assert wants(either, '{"a": 1}') == '{"a": 1}'
    assert wants(either, {"a": 1}) == {"a": 1}
