"""Conversations of every usual shape come out in one: a list of turns with role and content."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_tuning.data.check.findings import RowProblem
from lm_tuning.data.format.messages import (
    ROLE_OF_NAME,
    ROLES,
    comparable_messages,
    describe_oddities,
    read_messages,
    write_messages,
)

TURNS = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def read(value: Any) -> list[dict[str, Any]]:
    return read_messages(value, column="chat")


def problem_of(value: Any) -> RowProblem:
    with pytest.raises(RowProblem) as caught:
        read(value)
    return caught.value


def test_openai_and_sharegpt_rows_are_the_same_conversation():
    assert read(TURNS) == TURNS
    assert read([{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]) == TURNS
    assert read([{"role": "human", "value": "2+2?"}, {"from": "gpt", "content": "4"}]) == TURNS
    assert read(json.dumps(TURNS)) == TURNS


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("human", "user"),
        ("User ", "user"),
        ("prompter", "user"),
        ("GPT", "assistant"),
        ("bot", "assistant"),
        ("model", "assistant"),
        ("ChatGPT", "assistant"),
        ("ai", "assistant"),
        (" Assistant", "assistant"),
        ("developer", "system"),
        ("SYSTEM", "system"),
        ("function", "tool"),
        ("observation", "tool"),
        ("tool_response", "tool"),
    ],
)
def test_roles_are_known_by_other_names_whatever_their_case(name, role):
    messages = read([{"from": name, "value": "a"}, *TURNS])
    assert messages[0] == {"role": role, "content": "a"}


def test_a_tool_call_of_sharegpt_stays_as_text():
    messages = read([{"from": "human", "value": "Rain?"}, {"from": "function_call", "value": '{"name": "weather"}'}])
    assert messages[1] == {"role": "assistant", "content": '{"name": "weather"}'}


def test_a_tool_call_of_the_older_openai_shape_becomes_the_present_one():
    call = {"name": "weather", "arguments": '{"city": "Busan"}'}
    messages = read([TURNS[0], {"role": "assistant", "content": None, "function_call": call}])
    assert messages[1] == {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]}


def test_every_other_key_stays_as_it_was():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"n": 3}}}
    rows = [
        {"role": "user", "content": "a", "name": "Ann"},
        {"content": "", "tool_calls": [call], "role": "assistant", "weight": 0},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "assistant", "content": "b", "weight": 1},
    ]
    messages = read(rows)
    assert messages == rows
    assert [list(message)[:2] for message in messages] == [["role", "content"]] * 4


def test_extra_keys_of_tool_calls_never_leak_into_other_rows():
    weather = {"function": {"name": "weather", "arguments": {"city": "Busan"}}}
    add = {"function": {"name": "add", "arguments": {"n": 3}}}
    for call, arguments in ((weather, '"arguments":{"city":"Busan"}'), (add, '"arguments":{"n":3}')):
        text = write_messages(read([TURNS[0], {"role": "assistant", "tool_calls": [call]}]), normalize=True)
        assert arguments in text
        assert "null" not in text
        assert "None" not in text


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?", "image_url": None}]
    assert read([{"role": "user", "content": parts}, TURNS[1]]) == TURNS
    assert read([{"role": "user", "content": []}, TURNS[1]])[0] == {"role": "user", "content": ""}


@pytest.mark.parametrize(
    ("value", "kind", "reason"),
    [
        ([TURNS[0]], "no_assistant_turn", "no assistant turn is in it, so there is nothing to train on."),
        (
            [TURNS[0], {"role": "assistant", "content": "4", "weight": 0}],
            "no_assistant_turn",
            "every assistant turn has the weight 0, so there is nothing to train on.",
        ),
        (
            [TURNS[0], {"role": "assistant", "content": " \n"}],
            "empty",
            "every assistant turn is empty, so there is nothing to train on.",
        ),
        ([{"content": "a"}, *TURNS], "wrong_role", "message 1 has no role."),
        (
            [{"role": 3, "content": "a"}, *TURNS],
            "wrong_role",
            "message 1 has a number (3) as its role, where text is wanted.",
        ),
        (
            [*TURNS, {"role": "Critic", "content": "a"}],
            "wrong_role",
            f"message 3 has the role 'Critic'; roles are {', '.join(ROLE_OF_NAME)}.",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, TURNS[1]],
            "wrong_type",
            "the content of message 1 (user) holds a part of type 'image_url', where parts of text are wanted.",
        ),
        (
            [{"role": "user", "content": ["a"]}, TURNS[1]],
            "wrong_type",
            "the content of message 1 (user) holds text, where parts of text are wanted.",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": None}]}, TURNS[1]],
            "wrong_type",
            "a part of the content of message 1 (user) is null, where text is wanted.",
        ),
        (
            [TURNS[0], {"role": "assistant", "content": "4", "weight": 0.5}],
            "wrong_type",
            "message 2 has the weight 0.5; it is 1 for an answer that is supervised and 0 for one that is not.",
        ),
        (
            [TURNS[0], {"role": "assistant", "content": "4", "tool_calls": "weather"}],
            "wrong_type",
            "the tool_calls of message 2 are no list of objects.",
        ),
        ("[{'role': 'user'}]", "wrong_type", "column 'chat' holds text that is not JSON (Expecting property name"),
        ({"role": "user"}, "wrong_type", "column 'chat' holds an object, where a list of messages is wanted."),
    ],
)
def test_what_cannot_be_trained_on_is_told_by_kind_and_reason(value, kind, reason):
    problem = problem_of(value)
    assert problem.kind == kind
    assert problem.reason.startswith(reason)


def test_a_conversation_may_end_with_a_user_turn_but_needs_an_answer():
    thanks = [*TURNS, {"role": "user", "content": "thanks"}]
    assert read(thanks) == thanks
    assert problem_of([{"role": "user", "content": "thanks"}]).kind == "no_assistant_turn"


def test_turns_of_one_role_may_follow_each_other():
    turns = [TURNS[0], TURNS[0], TURNS[1], TURNS[1]]
    assert read(turns) == turns
    assert describe_oddities(turns) == ()


def test_odd_conversations_are_kept_and_noted_once_a_kind():
    turns = [
        TURNS[0],
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": " "},
        {"role": "assistant", "content": ""},
        TURNS[1],
    ]
    assert read(turns) == turns
    assert describe_oddities(turns) == (
        ("system_not_first", "message 2 is a system turn behind other turns."),
        ("empty_turn", "message 3 (user) is empty."),
    )
    assert describe_oddities([{"role": "assistant", "tool_calls": [{}]}]) == ()


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
ROLE_NAMES = st.sampled_from([*ROLE_OF_NAME, *(name.upper() for name in ROLE_OF_NAME), " User", "Assistant\n"])


@st.composite
def conversations(draw: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Draw a conversation in some shape, and what it should come out as."""
    shaped, canonical = [], []
    turns = [*draw(st.lists(st.tuples(ROLE_NAMES, TEXTS), max_size=5)), ("gpt", draw(TEXTS) + "x")]
    for name, text in draw(st.permutations(turns)):
        role_key, content_key = draw(st.sampled_from(["role", "from"])), draw(st.sampled_from(["content", "value"]))
        content: Any = text
        if draw(st.booleans()):
            cut = draw(st.integers(0, len(text)))
            content = [{"type": "text", "text": part} for part in (text[:cut], text[cut:])]
        more = draw(st.dictionaries(st.sampled_from(["name", "id"]), st.none() | TEXTS, max_size=2))
        shaped.append({**more, content_key: content, role_key: name})
        kept = {key: value for key, value in more.items() if value is not None}
        canonical.append({"role": ROLE_OF_NAME[name.strip().lower()], "content": text, **kept})
    return shaped, canonical


@given(conversations())
def test_a_conversation_of_any_shape_comes_back_with_the_same_turns(drawn):
    shaped, canonical = drawn
    assert read(shaped) == canonical
    assert read(json.dumps(shaped)) == canonical
    assert {message["role"] for message in canonical} <= set(ROLES)
    assert json.loads(write_messages(canonical, normalize=False)) == canonical
    assert read(json.loads(write_messages(canonical, normalize=False))) == canonical


@given(st.lists(TEXTS, min_size=1, max_size=3))
def test_both_encoders_write_the_same(texts):
    plain = [{"role": "assistant", "content": text} for text in texts]
    text = write_messages(plain, normalize=False)
    assert text == json.dumps(plain, ensure_ascii=False, separators=(",", ":"))
    padded = [{"role": "assistant", "content": f" {text}\n"} for text in texts]
    trimmed = [{"role": "assistant", "content": text.strip()} for text in texts]
    assert comparable_messages(padded, write_messages(padded, normalize=False)) == write_messages(
        trimmed, normalize=False
    )
