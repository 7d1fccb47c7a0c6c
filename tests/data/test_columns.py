"""The format follows from what the user names, or from names that mean only one thing."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from lm_tuning.data.format.columns import ColumnMapping, Header, check_mapping, choose_mapping, describe_mapping
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import DataParameters

PATH = "rows.jsonl"


def choose_from(
    available: list[str],
    *,
    path: str = PATH,
    task: str = "causal_lm",
    told: dict[str, Any] | None = None,
    **settings: Any,
) -> ColumnMapping:
    return choose_mapping(Header(available, path, **(told or {})), DataParameters(**settings), task=task)


def choose(available: list[str], **settings: Any) -> tuple[str, dict[str, str]]:
    mapping = choose_from(available, **settings)
    return mapping.format, mapping.columns


def problems_of(available: list[str], *, path: str = PATH, **settings: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        choose_from(available, path=path, **settings)
    return caught.value.problems


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"text": "a"}, "text"),
        ({"prompt": "a", "response": "b"}, "prompt_response"),
        ({"prompt": "a", "response": "b", "system": "c"}, "prompt_response"),
        ({"messages": "a"}, "messages"),
        ({"text": "a", "label": "b"}, "text_label"),
    ],
)
def test_the_format_follows_from_the_named_columns(columns, expected):
    everything = dict.fromkeys(["text", "prompt", "response", "system", "messages", "label"])
    assert choose(["a", "b", "c"], columns={**everything, **columns}) == (expected, columns)


@pytest.mark.parametrize(
    ("available", "expected"),
    [
        (["messages", "text"], ("messages", {"messages": "messages"})),
        (["prompt", "completion"], ("prompt_response", {"prompt": "prompt", "response": "completion"})),
        (["question", "answer", "id"], ("prompt_response", {"prompt": "question", "response": "answer"})),
        (
            ["prompt", "response", "system"],
            ("prompt_response", {"prompt": "prompt", "response": "response", "system": "system"}),
        ),
        (["text", "label"], ("text", {"text": "text"})),
    ],
)
def test_usual_names_need_no_parameters(available, expected):
    assert choose(available) == expected


def test_a_label_beside_text_is_the_class_when_classes_are_the_task():
    expected = ("text_label", {"text": "text", "label": "label"})
    assert choose(["text", "label"], task="sequence_classification") == expected
    assert choose(["text", "label"], format="text_label") == expected


def test_names_that_tell_nothing_are_listed_with_the_fix():
    (problem,) = problems_of(["chosen", "rejected"])
    assert "'chosen', 'rejected'" in problem
    assert "data.columns.prompt and data.columns.response" in problem


def test_a_needed_part_may_bear_its_own_name():
    assert choose(["q", "response"], columns={"prompt": "q"})[1] == {"prompt": "q", "response": "response"}


def test_a_template_takes_the_place_of_the_prompt():
    mapping = choose_from(["a", "b", "c"], columns={"response": "c"}, template="{a}: {b} {a} {{x}}")
    assert mapping.format == "prompt_response"
    assert mapping.used_columns == ["c", "a", "b"]


def test_missing_columns_are_reported_together_with_the_nearest_names():
    problems = problems_of(["question", "answer"], columns={"prompt": "qestion", "response": "anser"}, template=None)
    assert problems == [
        "data.columns.prompt names the column 'qestion', which rows.jsonl does not have. Did you mean 'question'? "
        "Its columns: 'question', 'answer'.",
        "data.columns.response names the column 'anser', which rows.jsonl does not have. Did you mean 'answer'? "
        "Its columns: 'question', 'answer'.",
    ]


def test_template_columns_are_checked():
    (problem,) = problems_of(["dialogue", "b"], columns={"response": "b"}, template="{dialog}")
    assert "data.template names the column 'dialog'" in problem
    assert "'dialogue'" in problem


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"columns": {"prompt": "a"}}, "needs data.columns.response"),
        ({"columns": {"text": "a"}, "format": "prompt_response"}, "data.columns.text has no use"),
        ({"columns": {"prompt": "a", "response": "b"}, "template": "{c}"}, "Set one of them to null"),
        ({"columns": {"messages": "a"}, "template": "{c}"}, "cannot be used with the format 'messages'"),
        ({"template": "{c}"}, "No format follows from data.template alone"),
        ({"columns": {"response": "b"}, "template": "{c"}, "data.template: expected '}'"),
        ({"columns": {"response": "b"}, "template": "{}"}, "placeholder is empty"),
        ({"columns": {"response": "b"}, "template": "{c:>10}"}, "more than a column name"),
        ({"columns": {"response": "b"}, "template": "{c!r}"}, "more than a column name"),
        ({"format": "messages"}, "no usual names of the format 'messages'"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, expected):
    assert any(expected in problem for problem in problems_of(["a", "b", "c"], **settings))


def test_what_a_file_says_of_a_missing_column_ends_the_message():
    problems = problems_of(["body"], columns={"text": "text"}, told={"explain": lambda column: f" No {column} here."})
    assert problems[0].endswith("Its columns: 'body'. No text here.")
    problems = problems_of(["x"], told={"inside": lambda: " Look inside."})
    assert "no usual names of a format are there. Look inside. Name the columns" in problems[0]


@pytest.mark.parametrize(
    ("available", "expected"),
    [
        (["conversations"], {"messages": "conversations"}),
        (["id", "conversation"], {"messages": "conversation"}),
        (["dialog", "tools", "system"], {"messages": "dialog", "system": "system", "tools": "tools"}),
    ],
)
def test_conversations_are_known_by_their_usual_names(available, expected):
    assert choose(available) == ("messages", expected)


@pytest.mark.parametrize("source", ["document", "article", "dialogue", "source", "input", "text"])
@pytest.mark.parametrize("target", ["summary", "highlights", "target"])
def test_summaries_are_known_by_their_usual_names(source, target):
    assert choose(["id", source, target]) == ("prompt_response", {"prompt": source, "response": target})


@pytest.mark.parametrize(
    ("available", "columns", "appended"),
    [
        (["instruction", "output"], {"prompt": "instruction", "response": "output"}, None),
        (["instruction", "input", "output", "text"], {"prompt": "instruction", "response": "output"}, "input"),
        (["instruction", "context", "response", "kind"], {"prompt": "instruction", "response": "response"}, "context"),
        (["Instruction", "Input", "Output"], {"prompt": "Instruction", "response": "Output"}, "Input"),
    ],
)
def test_instructions_take_their_input_along_and_the_log_says_so(available, columns, appended, caplog):
    caplog.set_level(logging.INFO)
    mapping = choose_from(available)
    assert (mapping.columns, mapping.appended) == (columns, appended)
    assert not appended or f"{appended!r} behind the prompt after an empty line" in caplog.text
    assert appended is None or appended in mapping.used_columns


def test_names_that_can_be_read_in_two_ways_are_listed_with_the_keys_to_set():
    (problem,) = problems_of(["input", "target", "output"])
    assert problem == (
        "rows.jsonl has the columns 'input', 'target', 'output', which can be read in 2 ways: 'input' as the prompt, "
        "'output' as the response (prompt_response); or 'input' as the prompt, 'target' as the response "
        "(prompt_response). Say which columns are meant: data.columns.prompt, data.columns.response."
    )
    assert choose(["input", "target", "output"], columns={"prompt": "input", "response": "target"})[0] == (
        "prompt_response"
    )
    assert "2 ways" in problems_of(["messages", "prompt", "response"])[0]


def test_unused_columns_are_logged_and_warned_of_when_a_model_should_see_them(caplog):
    caplog.set_level(logging.INFO)
    choose(["question", "answer", "id"])
    assert "not used: 'id'" in caplog.text
    assert caplog.records[0].levelno == logging.INFO
    choose(["question", "answer", "context"])
    assert caplog.records[1].levelno == logging.WARNING
    assert "If the model should see 'context', put it into a data.template" in caplog.text


def test_an_appended_column_may_be_missing_from_another_file():
    mapping = choose_from(["instruction", "input", "output"])
    check_mapping(mapping, Header(["output", "instruction"], "other.jsonl"))


def test_other_names_of_labels_count_when_classes_are_the_task():
    assert choose(["text", "category"], task="sequence_classification") == (
        "text_label",
        {"text": "text", "label": "category"},
    )
    assert choose(["text", "label", "label_text"], task="sequence_classification")[1]["label"] == "label"
    assert "2 ways" in problems_of(["text", "label", "intent"], task="sequence_classification")[0]
    assert choose(["text", "category"]) == ("text", {"text": "text"})


def test_a_system_or_tools_column_may_be_named_for_conversations():
    columns = {"messages": "m", "system": "s", "tools": "t"}
    assert choose(["m", "s", "t"], columns=columns) == ("messages", columns)
    assert any(
        "data.columns.tools has no use" in problem
        for problem in problems_of(["a", "b", "t"], columns={"prompt": "a", "response": "b", "tools": "t"})
    )


def test_a_mapping_is_described_in_words():
    mapping = choose_from(["a", "b", "c"], columns={"response": "c"}, template="{a} {b}")
    assert describe_mapping(mapping) == "prompt from the template with 'a', 'b', response from 'c'"
    mapping = choose_from(["instruction", "input", "output"])
    assert describe_mapping(mapping) == (
        "prompt from 'instruction', 'input' behind the prompt after an empty line, response from 'output'"
    )


def test_a_file_that_other_column_names_do_not_fit_is_told_where_they_were_read_off():
    mapping = choose_from(["prompt", "response"], path="a.jsonl")
    with pytest.raises(UserError) as caught:
        check_mapping(mapping, Header(["question", "answer"], "other.jsonl"))
    origin = "(read off the column names of a.jsonl) names the column"
    there = "which other.jsonl does not have. Its columns: 'question', 'answer'."
    assert caught.value.problems == [
        f"data.columns.prompt {origin} 'prompt', {there}",
        f"data.columns.response {origin} 'response', {there}",
    ]


@pytest.mark.parametrize(
    ("available", "settings", "expected"),
    [
        (["text", "kind", "summary"], {"columns": {"label": "kind"}}, {"text": "text", "label": "kind"}),
        (["body", "label"], {"columns": {"text": "body"}}, {"text": "body", "label": "label"}),
        (["a", "b", "label"], {"template": "{a} {b}"}, {"label": "label"}),
        (["text", "label", "summary"], {}, {"text": "text", "label": "label"}),
        (["messages", "text", "label"], {}, {"text": "text", "label": "label"}),
    ],
)
def test_classes_are_found_where_they_are_the_task(available, settings, expected):
    assert choose(available, task="sequence_classification", **settings) == ("text_label", expected)


@pytest.mark.parametrize(
    ("available", "settings", "expected"),
    [
        (["text", "summary"], {}, {"prompt": "text", "response": "summary"}),
        (["messages", "document", "summary"], {}, {"prompt": "document", "response": "summary"}),
        (["a", "b", "response"], {"template": "{a} {b}"}, {"response": "response"}),
        (["Q", "A"], {"columns": {"prompt": "Q", "response": "A"}}, {"prompt": "Q", "response": "A"}),
    ],
)
def test_pairs_are_found_where_they_are_the_task(available, settings, expected):
    assert choose(available, task="seq2seq_lm", **settings) == ("prompt_response", expected)


@pytest.mark.parametrize(
    ("task", "available", "settings", "kind"),
    [
        ("sequence_classification", ["messages"], {}, "conversations of the format 'messages'"),
        ("sequence_classification", ["prompt", "response"], {}, "rows of the format 'prompt_response'"),
        ("sequence_classification", ["text"], {}, "rows of the format 'text'"),
        ("sequence_classification", ["text", "label"], {"format": "text"}, "rows of the format 'text'"),
        ("seq2seq_lm", ["messages"], {}, "conversations of the format 'messages'"),
        ("seq2seq_lm", ["text"], {}, "rows of the format 'text'"),
        ("seq2seq_lm", ["text", "label"], {"columns": {"label": "label"}}, "rows of the format 'text_label'"),
    ],
)
def test_a_format_that_the_task_cannot_learn_from_is_refused_by_column_names_alone(task, available, settings, kind):
    (problem,) = problems_of(available, task=task, **settings)
    assert problem.startswith(f"rows.jsonl is read as {kind}, but task: {task} learns ")
    part = "data.columns.label" if task == "sequence_classification" else "data.columns.response"
    assert part in problem
    assert "data.format: " in problem


def test_a_class_column_that_is_missing_is_asked_for():
    (problem,) = problems_of(["body", "kind"], columns={"text": "body"}, task="sequence_classification")
    assert "needs data.columns.label: the column that holds the label" in problem
