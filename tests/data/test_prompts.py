"""Prompts are found by the columns and the template of training rows, and wait for their answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lm_tuning.data.check.findings import RowProblem
from lm_tuning.data.format.columns import ColumnMapping, Header
from lm_tuning.data.format.prompts import PLACEHOLDER, choose_prompt_mapping, prompt_of, prompt_reader
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import DataParameters

PATH = "prompts.jsonl"


def choose(available: list[str], *, task: str = "causal_lm", tuned_on: str | None = None, **data: Any) -> ColumnMapping:
    return choose_prompt_mapping(Header(available, PATH), DataParameters(**data), task=task, tuned_on=tuned_on)


def problems_of(available: list[str], **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        choose(available, **settings)
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize(
    ("available", "columns", "appended"),
    [
        (["prompt"], {"prompt": "prompt"}, None),
        (["id", "Question"], {"prompt": "Question"}, None),
        (["instruction", "input"], {"prompt": "instruction"}, "input"),
        (["instruction", "input", "output"], {"prompt": "instruction"}, "input"),
        (["instruction"], {"prompt": "instruction"}, None),
        (["prompt", "response"], {"prompt": "prompt"}, None),
        (["prompt", "system"], {"prompt": "prompt", "system": "system"}, None),
        (["text", "summary"], {"prompt": "text"}, None),
        (["document", "title"], {"prompt": "document"}, None),
    ],
)
def test_usual_names_are_found_with_and_without_answers(
    available: list[str], columns: dict[str, str], appended: str | None
) -> None:
    mapping = choose(available)
    assert (mapping.format, mapping.columns, mapping.appended) == ("prompt_response", columns, appended)


def test_conversations_come_before_the_prompt_that_they_begin_with() -> None:
    mapping = choose(["prompt", "messages", "tools"])
    assert (mapping.format, mapping.columns) == ("messages", {"messages": "messages", "tools": "tools"})


@pytest.mark.parametrize(
    ("tuned_on", "task", "expected"),
    [
        (None, "causal_lm", "text"),
        ("text", "causal_lm", "text"),
        ("messages", "causal_lm", "prompt_response"),
        (None, "seq2seq_lm", "prompt_response"),
    ],
)
def test_text_alone_is_what_the_model_was_tuned_on(tuned_on: str | None, task: str, expected: str) -> None:
    assert choose(["text"], tuned_on=tuned_on, task=task).format == expected


@pytest.mark.parametrize(
    ("format", "available", "expected"),
    [
        ("text", ["text"], ("text", {"text": "text"})),
        ("text", ["prompt"], ("text", {"text": "prompt"})),
        ("text_label", ["sentence"], ("prompt_response", {"prompt": "sentence"})),
        ("text_label", ["text", "label"], ("prompt_response", {"prompt": "text"})),
        ("messages", ["prompt", "messages"], ("messages", {"messages": "messages"})),
        ("prompt_response", ["prompt", "messages"], ("prompt_response", {"prompt": "prompt"})),
    ],
)
def test_the_format_of_the_training_rows_decides(format: str, available: list[str], expected: Any) -> None:
    mapping = choose(available, format=format)
    assert (mapping.format, mapping.columns) == expected


def test_what_was_tuned_on_text_goes_on_with_a_prompt() -> None:
    mapping = choose(["prompt"], tuned_on="text")
    assert (mapping.format, mapping.columns) == ("text", {"text": "prompt"})
    assert "running text" in problems_of(["messages"], tuned_on="text")


def test_a_template_and_named_columns_count_as_for_training_rows() -> None:
    mapping = choose(["dialogue"], template="Summarize:\n{dialogue}", columns={"response": "section"})
    assert (mapping.format, mapping.columns, mapping.template) == ("prompt_response", {}, "Summarize:\n{dialogue}")
    mapping = choose(["q", "a"], columns={"prompt": "q", "response": "a"})
    assert mapping.columns == {"prompt": "q"}
    assert choose(["turns"], columns={"messages": "turns"}).format == "messages"
    labelled = choose(["utterance"], columns={"text": "utterance", "label": "intent"})
    assert (labelled.format, labelled.columns) == ("prompt_response", {"prompt": "utterance"})


@pytest.mark.parametrize(
    ("available", "settings", "words"),
    [
        (["body"], {}, ["prompts.jsonl has the columns 'body'", "generate.columns"]),
        (["document", "question"], {}, ["may be", "'document'", " or ", "'question'"]),
        (["dialog"], {"template": "{dialogue}"}, ["data.template names the column 'dialogue'", "'dialog'"]),
        (["text"], {"columns": {"prompt": "question"}}, ["data.columns.prompt names the column 'question'"]),
        (["x"], {"columns": {"response": "a"}}, ["data.columns.prompt is to name", "'x'"]),
        (["x"], {"template": "{x"}, ["data.template:"]),
        (["q"], {"template": "{q}", "columns": {"prompt": "q"}}, ["both say what the prompt is"]),
        (["messages"], {"task": "seq2seq_lm", "columns": {"messages": "messages"}}, ["an encoder-decoder reads one"]),
    ],
)
def test_what_cannot_be_read_is_told_with_the_keys_that_help(
    available: list[str], settings: dict[str, Any], words: list[str]
) -> None:
    told = problems_of(available, **settings)
    assert all(word in told for word in words), told


def test_a_prompt_gets_a_placeholder_for_its_answer() -> None:
    mapping = choose(["prompt", "response", "system"])
    example = prompt_reader(mapping, normalize=True)({"prompt": "cafe\u0301?", "response": 7, "system": "Be brief."})
    assert example.values == ("café?", PLACEHOLDER, "Be brief.")
    assert prompt_of(example.values, mapping.format) == "café?"


@pytest.mark.parametrize("as_text", [False, True])
def test_a_conversation_is_cut_behind_the_last_turn_that_waits_for_an_answer(as_text: bool) -> None:
    turns = [
        {"from": "human", "value": "one"},
        {"from": "gpt", "value": "1"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "2"},
    ]
    mapping = choose(["messages"])
    value: Any = json.dumps(turns) if as_text else turns
    example = prompt_reader(mapping, normalize=True)({"messages": value})
    read = json.loads(str(example.values[0]))
    assert read[-1] == {"role": "assistant", "content": PLACEHOLDER}
    assert prompt_of(example.values, mapping.format) == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two"},
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([{"role": "system", "content": "x"}], "no turn to answer"),
        ([{"role": "assistant", "content": "x"}], "no turn to answer"),
        ([], "empty list"),
        (None, "where a list of messages is wanted"),
        ("no list", "where a list of messages is wanted"),
        ([{"role": "alien", "content": "x"}], "alien"),
        ([{"role": "user", "content": 3}], "message 1 (user)"),
    ],
)
def test_a_conversation_that_cannot_be_answered_is_a_bad_row(value: Any, words: str) -> None:
    read = prompt_reader(choose(["messages"]), normalize=True)
    with pytest.raises(RowProblem) as caught:
        read({"messages": value})
    assert words in caught.value.reason
