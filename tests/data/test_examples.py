"""Rows become examples: checked by type, brought to NFC, otherwise unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lm_tuning.data.check.findings import RowProblem
from lm_tuning.data.format.columns import ColumnMapping
from lm_tuning.data.format.examples import Example, example_reader

TEXT = ColumnMapping("text", {"text": "text"})
PAIR = ColumnMapping("prompt_response", {"prompt": "q", "response": "a", "system": "s"})
LABEL = ColumnMapping("text_label", {"text": "text", "label": "label"})
CHAT = ColumnMapping("messages", {"messages": "messages"})
COMPOSED, DECOMPOSED = "\uac12", "\u1100\u1161\u11b9"


def read(mapping: ColumnMapping, row: dict[str, Any], *, normalize: bool = True) -> Example:
    return example_reader(mapping, normalize=normalize)(row)


def reason_of(mapping: ColumnMapping, row: dict[str, Any]) -> str:
    with pytest.raises(RowProblem) as caught:
        read(mapping, row)
    return caught.value.reason


def chat(*turns: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content, **more} for role, content in turns]}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (42, "a number (42)"),
        (None, "null"),
        (["a", "b"], "a list"),
        (True, "a boolean (true)"),
        ({"a": 1}, "an object"),
        (b"a", "binary data"),
    ],
)
def test_text_of_another_type_is_named(value, found):
    assert reason_of(TEXT, {"text": value}) == f"column 'text' holds {found}, where text is wanted."


@pytest.mark.parametrize("value", ["", " \n\t", "\u3000"])
def test_blank_text_is_no_text(value):
    assert reason_of(TEXT, {"text": value}) == "column 'text' is empty."


def test_a_missing_key_is_not_null():
    assert reason_of(TEXT, {"other": 1}) == "has no column 'text'."


def test_half_a_surrogate_pair_is_reported():
    assert "\\ud83d" in reason_of(TEXT, {"text": "a \ud83d b"})
    assert "\\ud83d" in reason_of(LABEL, {"text": "a", "label": "\ud83d"})


def test_text_is_brought_to_nfc_unless_told_otherwise_and_never_trimmed():
    assert read(TEXT, {"text": f" {DECOMPOSED}\n"}).values == (f" {COMPOSED}\n",)
    assert read(TEXT, {"text": DECOMPOSED}, normalize=False).values == (DECOMPOSED,)


@pytest.mark.parametrize("normalize", [True, False])
def test_copies_are_found_after_trimming_and_nfc(normalize):
    digests = {
        read(TEXT, {"text": text}, normalize=normalize).content_digest
        for text in (COMPOSED, f"{DECOMPOSED} ", f"\n{COMPOSED}\t")
    }
    assert len(digests) == 1
    assert read(TEXT, {"text": "a b"}).content_digest != read(TEXT, {"text": "a  b"}).content_digest


def test_where_prompt_ends_and_response_begins_counts_for_copies():
    one = read(PAIR, {"q": "ab", "a": "c"})
    assert one.content_digest != read(PAIR, {"q": "a", "a": "bc"}).content_digest
    assert one.content_digest != read(PAIR, {"q": "ab", "a": "c", "s": "x"}).content_digest


@pytest.mark.parametrize("system", [{}, {"s": None}, {"s": ""}])
def test_a_system_prompt_is_optional_row_by_row(system):
    assert read(PAIR, {"q": "ask", "a": "answer", **system}).values == ("ask", "answer", None)
    assert read(PAIR, {"q": "ask", "a": "answer", "s": "be brief"}).values == ("ask", "answer", "be brief")


@pytest.mark.parametrize(
    ("value", "label"), [("01", "01"), (3, "3"), (True, "true"), (DECOMPOSED, COMPOSED), ("a ", "a")]
)
def test_labels_are_text_whatever_they_were(value, label):
    assert read(LABEL, {"text": "a", "label": value}).values == ("a", label)


@pytest.mark.parametrize("value", ["", " ", None])
def test_an_empty_label_makes_the_row_unlabelled(value):
    assert reason_of(LABEL, {"text": "a", "label": value}).startswith("unlabelled: column 'label'")


def test_a_label_that_became_a_float_is_refused():
    assert "a number (1.0)" in reason_of(LABEL, {"text": "a", "label": 1.0})


def test_copies_with_another_label_share_the_content_only():
    one, other = read(LABEL, {"text": "a", "label": "x"}), read(LABEL, {"text": "a ", "label": "y"})
    assert one.content_digest == other.content_digest
    assert one.whole_digest != other.whole_digest


def test_a_template_inserts_values_as_they_are():
    mapping = ColumnMapping("prompt_response", {"response": "a"}, "{{fixed}} {code}/{n}/{flag}/{gone}")
    values = read(mapping, {"code": "{x} {{y}} %s", "n": 1.5, "flag": True, "gone": None, "a": "b"}).values
    assert values == ("{fixed} {x} {{y}} %s/1.5/true/", "b", None)


def test_a_template_without_anything_to_insert_is_an_empty_row():
    mapping = ColumnMapping("prompt_response", {"response": "a"}, "Sum up: {x}{y}")
    assert reason_of(mapping, {"x": " ", "y": None, "a": "b"}) == "every column of the template is empty."
    assert "column 'x' holds a list" in reason_of(mapping, {"x": [1], "a": "b"})


def test_messages_keep_the_keys_that_the_row_had_and_no_others():
    call = {"id": "1", "function": {"name": "weather", "arguments": {"city": "Busan", "unit": None}}}
    row = {
        "messages": [
            {"role": "user", "content": "Rain?", "tool_calls": None, "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "no", "tool_call_id": "1"},
            {"role": "assistant", "content": "No.\n"},
        ]
    }
    text, tools = read(CHAT, row).values
    assert text is not None
    assert tools is None
    assert json.loads(text) == [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "no", "tool_call_id": "1"},
        {"role": "assistant", "content": "No.\n"},
    ]
    assert ": " not in text


def test_messages_may_be_json_text_as_in_a_csv():
    row = chat(("user", "a"), ("assistant", "b"))
    assert read(CHAT, {"messages": json.dumps(row["messages"])}).values == read(CHAT, row).values


def test_messages_are_normalized_inside_their_strings():
    # "\n" is written as a backslash and an n: a tilde after it must not join that n.
    text, _ = read(CHAT, chat(("user", DECOMPOSED), ("assistant", "\n\u0303x"))).values
    assert text is not None
    assert [turn["content"] for turn in json.loads(text)] == [COMPOSED, "\n\u0303x"]


def test_a_trailing_user_turn_is_no_mistake():
    row = chat(("user", "2+2?"), ("assistant", "4"), ("user", "thanks"))
    assert json.loads(read(CHAT, row).values[0] or "") == row["messages"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (chat(("user", "thanks")), "no assistant turn"),
        (chat(("user", "a"), ("assistant", " ")), "every assistant turn is empty"),
        (chat(("user", "a"), ("critic", "b")), "message 2 has the role 'critic'; roles are system, user, assistant"),
        (chat(("user", 1), ("assistant", "b")), "the content of message 1 (user) is a number (1)"),
        (chat(("user", "a"), ("assistant", None)), "the content of message 2 (assistant) is null"),
        ({"messages": []}, "an empty list"),
        ({"messages": "hello"}, "holds text, where a list of messages"),
        ({"messages": None}, "holds null"),
        ({"messages": ["a"]}, "message 1 is text, where an object"),
        ({}, "has no column 'messages'"),
        (chat(("user", "a"), ("assistant", "b"), score=float("nan")), "cannot be written as JSON"),
        (chat(("user", "a \ud83d"), ("assistant", "b")), "surrogate"),
    ],
)
def test_messages_of_another_shape_are_reported(row, expected):
    assert expected in reason_of(CHAT, row)


def test_conversations_are_copies_when_only_space_around_contents_differs():
    one = read(CHAT, chat(("user", "a "), ("assistant", "b")))
    assert one.content_digest == read(CHAT, chat(("user", "a"), ("assistant", "b\n"))).content_digest
    assert one.content_digest != read(CHAT, chat(("system", "a"), ("assistant", "b"))).content_digest


def test_a_system_column_goes_before_the_conversation_unless_it_says_the_same():
    mapping = ColumnMapping("messages", {"messages": "messages", "system": "s"})
    row = chat(("user", "a"), ("assistant", "b"))
    with_system = [{"role": "system", "content": "be brief"}, *row["messages"]]
    assert json.loads(read(mapping, {**row, "s": "be brief"}).values[0] or "") == with_system
    assert json.loads(read(mapping, {"messages": with_system, "s": "be brief "}).values[0] or "") == with_system
    assert json.loads(read(mapping, {**row, "s": ""}).values[0] or "") == row["messages"]
    assert "different system prompts" in reason_of(mapping, {"messages": with_system, "s": "be long"})


@pytest.mark.parametrize("empty", [{}, {"t": None}, {"t": ""}, {"t": []}, {"t": "[]"}])
def test_tools_are_stored_beside_the_conversation_as_json(empty):
    mapping = ColumnMapping("messages", {"messages": "messages", "tools": "t"})
    row = chat(("user", "a"), ("assistant", "b"))
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    written = '[{"type":"function","function":{"name":"weather","parameters":{}}}]'
    assert read(mapping, {**row, "t": tools}).values[1] == written
    assert read(mapping, {**row, "t": json.dumps(tools)}).values[1] == written
    assert read(mapping, {**row, **empty}).values[1] is None
    assert read(mapping, {**row, "t": tools}).content_digest != read(mapping, {**row, **empty}).content_digest


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ("weather", "column 't' holds text, where a list of tools is wanted"),
        ("[weather", "text that is not JSON"),
        (["weather"], "tool 1 is text, where an object is wanted"),
        ({"name": "weather"}, "holds an object, where a list of tools"),
    ],
)
def test_tools_of_another_shape_are_reported(tools, expected):
    mapping = ColumnMapping("messages", {"messages": "messages", "tools": "t"})
    assert expected in reason_of(mapping, {**chat(("user", "a"), ("assistant", "b")), "t": tools})


def test_a_second_column_goes_behind_the_prompt_where_a_row_has_any():
    mapping = ColumnMapping("prompt_response", {"prompt": "q", "response": "a"}, appended="more")
    assert read(mapping, {"q": "Add", "a": "3", "more": "1 and 2"}).values == ("Add\n\n1 and 2", "3", None)
    for empty in ({}, {"more": None}, {"more": " "}):
        assert read(mapping, {"q": "Add", "a": "3", **empty}).values == ("Add", "3", None)
    assert read(mapping, {"q": "Add", "a": "3", "more": DECOMPOSED}).values[0] == f"Add\n\n{COMPOSED}"
    assert "column 'more' holds a number (1)" in reason_of(mapping, {"q": "Add", "a": "3", "more": 1})


def test_whole_digests_of_labelled_text_are_equal_after_nfc_only_for_equal_labels():
    rows = [{"text": f"{DECOMPOSED} ", "label": DECOMPOSED}, {"text": COMPOSED, "label": COMPOSED}]
    one, other = (read(LABEL, row, normalize=False) for row in rows)
    assert one.whole_digest == other.whole_digest
    assert one.content_digest == other.content_digest != one.whole_digest


def test_columns_of_a_template_are_placed_in_the_composed_text():
    mapping = ColumnMapping("prompt_response", {"response": "answer"}, template="Sum up:\n{text} / {about}!")
    row = {"text": "e\u0301e\u0301", "about": 7, "answer": "x"}
    for normalize, text in ((True, "éé"), (False, row["text"])):
        example = example_reader(mapping, normalize=normalize)(row)
        prompt, edges = example.values[0], example.column_ranges
        assert [prompt[low:high] for low, high in zip(edges[::2], edges[1::2], strict=True)] == [text, "7"]
    whole = ColumnMapping("prompt_response", {"prompt": "text", "response": "answer"})
    assert example_reader(whole, normalize=True)(row).column_ranges == ()
    appended = ColumnMapping("prompt_response", {"prompt": "answer", "response": "answer"}, appended="text")
    example = example_reader(appended, normalize=True)(row)
    assert (example.values[0], example.column_ranges) == ("x\n\néé", (0, 1, 3, 5))
