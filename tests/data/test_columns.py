"""The format follows from what the user names, or from names that mean only one thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lm_tuning.data.columns import choose_mapping
from lm_tuning.errors import UserError

PATH = Path("rows.jsonl")


def choose(available: list[str], **settings: Any) -> tuple[str, dict[str, str]]:
    mapping = choose_mapping(available, path=PATH, **settings)
    return mapping.format, mapping.columns


def problems_of(available: list[str], *, path: Path = PATH, **settings: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        choose_mapping(available, path=path, **settings)
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


def test_names_that_tell_nothing_are_listed_with_the_ways_out():
    (problem,) = problems_of(["instruction", "input", "output"])
    assert "'instruction', 'input', 'output'" in problem
    assert "data.columns.prompt and data.columns.response" in problem


def test_a_needed_part_may_bear_its_own_name():
    assert choose(["q", "response"], columns={"prompt": "q"})[1] == {"prompt": "q", "response": "response"}


def test_a_template_takes_the_place_of_the_prompt():
    mapping = choose_mapping(["a", "b", "c"], path=PATH, columns={"response": "c"}, template="{a}: {b} {a} {{x}}")
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
        ({"columns": {"response": "b"}, "template": "{}"}, "place holder is empty"),
        ({"columns": {"response": "b"}, "template": "{c:>10}"}, "more than a column name"),
        ({"columns": {"response": "b"}, "template": "{c!r}"}, "more than a column name"),
        ({"format": "messages"}, "no usual names of the format 'messages'"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, expected):
    assert any(expected in problem for problem in problems_of(["a", "b", "c"], **settings))


def test_a_csv_without_header_or_with_other_separators_gets_a_hint():
    columns = {"text": "text"}
    assert "lacks a header" in problems_of(["hello there", "pos"], path=Path("a.csv"), columns=columns)[0]
    assert "separated by ';'" in problems_of(["body;class"], path=Path("a.csv"), columns=columns)[0]
