from __future__ import annotations

from typing import Any

import pytest

from lm_tuning.parameters.loading import parse_parameters, split_items


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("", {}),
        ("seed=7", {"seed": 7}),
        ("train.max_steps=3,train.resume=true", {"train": {"max_steps": 3, "resume": True}}),
        ("train.learning_rate=1e-4", {"train": {"learning_rate": 0.0001}}),
        ("train.max_steps=null", {"train": {"max_steps": None}}),
        ("split.validation=0.1,split.test=5", {"split": {"validation": 0.1, "test": 5}}),
    ],
)
def test_values_are_yaml(text: str, parsed: dict[str, Any]) -> None:
    assert parse_parameters(text) == parsed


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("model.revision=01", {"model": {"revision": "01"}}),
        ("model.revision=1e5", {"model": {"revision": "1e5"}}),
        ("model.revision=null", {"model": {"revision": None}}),
        ("data.columns.label=no", {"data": {"columns": {"label": "no"}}}),
        ("data.columns.label='no'", {"data": {"columns": {"label": "no"}}}),
        ("output=007", {"output": "007"}),
        ("environment.variables.NCCL_DEBUG=1", {"environment": {"variables": {"NCCL_DEBUG": "1"}}}),
    ],
)
def test_a_key_that_wants_text_keeps_what_was_typed(text: str, parsed: dict[str, Any]) -> None:
    assert parse_parameters(text) == parsed


def test_text_is_not_kept_where_another_type_is_wanted() -> None:
    parsed = parse_parameters("train.max_steps=no,train.method=no,unknown=01")
    assert parsed == {"train": {"max_steps": False, "method": False}, "unknown": 1}


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("train.lora.target_modules=[a,b],seed=1", {"train": {"lora": {"target_modules": ["a", "b"]}}}),
        ("data.columns={prompt: q, response: a},seed=1", {"data": {"columns": {"prompt": "q", "response": "a"}}}),
        ("data.template='Sum up, please: {text}',seed=1", {"data": {"template": "Sum up, please: {text}"}}),
        ('data.template="one,\\n{text}",seed=1', {"data": {"template": "one,\n{text}"}}),
        ('data.template="a \\"b\\", c",seed=1', {"data": {"template": 'a "b", c'}}),
        ("data.template=it's {text},seed=1", {"data": {"template": "it's {text}"}}),
    ],
)
def test_commas_inside_brackets_and_quotes_do_not_end_a_value(text: str, parsed: dict[str, Any]) -> None:
    assert parse_parameters(text) == parsed | {"seed": 1}


def test_items_are_split_at_commas_and_stripped() -> None:
    assert split_items(" a=1 , b=[1, [2, 3]] ,, c='x, y' ") == ["a=1", "b=[1, [2, 3]]", "c='x, y'"]


@pytest.mark.parametrize("text", ["train.max_steps", "=3", "train.lora.target_modules=q_proj,v_proj", "seed:3"])
def test_an_item_without_key_or_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not of the form key=value"):
        parse_parameters(text)


def test_a_value_that_is_not_yaml_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be read as YAML"):
        parse_parameters("data.template={x: [}")
