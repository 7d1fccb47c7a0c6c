from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import yaml

from lm_tuning.parameters.base import join_words
from lm_tuning.parameters.schema import accepts, editor_schema, find_entry, render_reference, walk_keys

from .conftest import REPOSITORY

YAML_FILES = sorted(path for path in (REPOSITORY / "conf").glob("*/parameters*.yml") if path.parent.name != "local")


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft7Validator:
    schema = json.loads(editor_schema())
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


def test_the_committed_schema_and_reference_are_current() -> None:
    folder = REPOSITORY / "docs" / "reference"
    assert (folder / "parameters.schema.json").read_text(encoding="utf-8") == editor_schema(), "run: kedro schema"
    assert (folder / "parameters.md").read_text(encoding="utf-8") == render_reference(), "run: kedro schema"


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_parameter_file_is_wired_to_the_schema_and_passes_it(path: Any, validator: Any) -> None:
    first_line = path.read_text(encoding="utf-8").splitlines()[0]
    prefix = "# yaml-language-server: $schema="
    assert first_line.startswith(prefix), first_line
    assert (path.parent / first_line.removeprefix(prefix)).resolve().name == "parameters.schema.json"
    assert (path.parent / first_line.removeprefix(prefix)).is_file()
    assert list(validator.iter_errors(yaml.safe_load(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    "parameters",
    [
        {"trian": {}},
        {"train": {"max_steps": 0}},
        {"train": {"max_steps": "3"}},
        {"train": {"learning_rate": 0}},
        {"train": {"lora": {"dropout": 1}}},
        {"train": {"trainer": {"bf16": True}}},
        {"split": {"validation": 1.5}},
        {"output": "a/b"},
        {"model": {"revision": 1}},
    ],
)
def test_the_schema_refuses_what_validation_refuses(parameters: dict[str, Any], validator: Any) -> None:
    assert list(validator.iter_errors(parameters))


@pytest.mark.parametrize(
    "parameters",
    [{}, {"seed": 1}, {"train": {"max_steps": None}}, {"output": "${globals:output}"}, {"split": {"validation": 3}}],
)
def test_the_schema_takes_a_file_with_some_of_the_keys(parameters: dict[str, Any], validator: Any) -> None:
    assert list(validator.iter_errors(parameters)) == []


def test_the_schema_describes_every_key_for_completion() -> None:
    schema = json.loads(editor_schema())
    for path, _ in walk_keys():
        node = schema
        for part in path:
            node = node["properties"][part]
        assert node["description"], path
        assert "title" not in node and "required" not in node, path


def test_the_reference_has_a_line_for_every_key() -> None:
    page = render_reference()
    for path, entry in walk_keys():
        line = f"## {'.'.join(path)}\n" if "properties" in entry else f"| `{path[-1]}` |"
        assert line in page, path
    assert "| `max_steps` | an integer of at least 1, or null | `null` | Steps after which" in page


@pytest.mark.parametrize(
    ("path", "value", "accepted"),
    [
        ("train.max_steps", 3, True),
        ("train.max_steps", None, True),
        ("train.max_steps", True, False),
        ("train.max_steps", "3", False),
        ("train.learning_rate", 3, True),
        ("train.method", "lora", True),
        ("train.method", "other", False),
        ("train.qlora.bits", 4, True),
        ("train.qlora.bits", "4", False),
        ("train.qlora.bits", True, False),
        ("train.class_weights", "balanced", True),
        ("train.class_weights.a", 2.5, True),
        ("train.health.severity.some-code", "off", True),
        ("train.health.severity.some-code", "loud", False),
        ("train.resume", False, True),
        ("train.resume", 0, False),
        ("model.revision", "01", True),
        ("model.revision", 1, False),
        ("train.trainer.lr_scheduler_kwargs.num_cycles", 2, True),
    ],
)
def test_accepts_goes_by_the_declared_type(path: str, value: object, accepted: bool) -> None:
    entry = find_entry(path.split("."))
    assert entry is not None
    assert accepts(entry, value) is accepted


def test_alternatives_read_as_prose() -> None:
    assert [join_words(words) for words in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a or b", "a, b or c"]
