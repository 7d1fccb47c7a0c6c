"""JSON is what RFC 8259 says, and a schema is read from its file alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.errors import UserError
from lm_tuning.evaluation.scores.json_answers import read_schema
from tests.evaluation.scores.answers import scores_of, value_of

SCHEMA = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/age"}},
    "$defs": {"age": {"type": "integer", "minimum": 0}},
}


@pytest.mark.parametrize(
    ("answer", "is_valid"),
    [
        ('{"a": [1, null]}', True),
        (" 3 \n", True),
        ("{'a': 1}", False),
        ('{"a": 1,}', False),
        ("NaN", False),
        ('{"a": Infinity}', False),
        ('```json\n{"a": 1}\n```', False),
        ("", False),
        ("[" * 100_000, False),
    ],
)
def test_valid_json(answer: str, is_valid: bool) -> None:
    assert value_of("", answer, "json_valid") == float(is_valid)


def test_a_schema_is_stricter_than_json(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    answers = ['{"name": "a", "age": 3}', '{"name": "a", "age": -3}', '{"age": 3}', "[]", "no JSON"]
    found = scores_of([""] * 5, answers, "json_valid", "json_schema", json_schema_path=str(path))
    assert found["json_valid"].row_values.tolist() == [1, 1, 1, 1, 0]
    assert found["json_schema"].row_values.tolist() == [1, 0, 0, 0, 0]
    assert "draft:Draft202012Validator" in found["json_schema"].signature
    path.write_text(json.dumps({**SCHEMA, "required": []}))
    other = scores_of([""], ["1"], "json_schema", json_schema_path=str(path))
    assert other["json_schema"].signature != found["json_schema"].signature


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (None, "cannot be read"),
        ("{", "no JSON"),
        ([], "a schema is an object"),
        ({"type": "word"}, "no JSON schema"),
        ({"$ref": "https://example.org/schema.json"}, "'https://example.org/schema.json' is not in this file"),
        ({"properties": {"a": {"$ref": "#/$defs/missing"}}}, "'#/$defs/missing' is not in this file"),
    ],
)
def test_a_file_that_is_no_schema_is_named(tmp_path: Path, content: Any, wanted: str) -> None:
    path = tmp_path / "schema.json"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError) as caught:
        read_schema(path)
    assert wanted in str(caught.value)
    assert f"evaluate.scores.json_schema_path = {path}" in str(caught.value)
