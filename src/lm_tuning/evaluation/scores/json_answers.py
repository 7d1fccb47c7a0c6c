"""Check whether answers are JSON, and whether they fit a JSON schema."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from lm_tuning.errors import UserError
from lm_tuning.evaluation.scores.answered import Answered
from lm_tuning.evaluation.statistics.scored_rows import ScoredRows, mean_of_rows

_KEY = "evaluate.scores.json_schema_path"
_NUM_DIGEST_CHARACTERS = 12


def parse_json(text: str) -> Any:
    """Return what a JSON text says.

    Args:
        text: the text, with white space around it or not.

    Raises:
        ValueError: it is no JSON as RFC 8259 has it, or nested too deep to be read.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _refuse_constant(name: str) -> NoReturn:
    # NaN and Infinity, which Python reads and no other parser does.
    raise ValueError(f"{name} is no JSON")


class JsonAnswers:
    """Share of the answers that are JSON, and share that fit a schema; a fence of Markdown around it is no JSON."""

    def __init__(self, names: Sequence[str], schema_path: str | None) -> None:
        """Read the schema.

        Args:
            names: of ``json_valid`` and ``json_schema``.
            schema_path: file of the schema; ``None`` without ``json_schema``.

        Raises:
            UserError: see :func:`read_schema`.
        """
        self.names = names
        self._validator: Any = None
        self._schema_signature = ""
        if schema_path is not None:
            self._validator, self._schema_signature = read_schema(Path(schema_path))

    def score(self, rows: Answered) -> dict[str, ScoredRows]:
        """Return the scores of one model; references are not looked at."""
        valid, fitting = zip(*map(self._judge, rows.answers), strict=True) if rows.answers else ((), ())
        found = {
            "json_valid": ("Valid JSON", valid, "rfc8259|version:1"),
            "json_schema": ("JSON by the schema", fitting, self._schema_signature),
        }
        return {
            name: mean_of_rows(name, values, rows.ids, title=title, unit="0 to 1", signature=signature)
            for name, (title, values, signature) in found.items()
            if name in self.names
        }

    def _judge(self, answer: str) -> tuple[bool, bool]:
        try:
            value = parse_json(answer)
        except ValueError:
            return False, False
        return True, self._validator is not None and self._fits(value)

    def _fits(self, value: Any) -> bool:
        try:
            return bool(self._validator.is_valid(value))
        except RecursionError:
            return False


def read_schema(path: Path) -> tuple[Any, str]:
    """Read a JSON schema.

    Args:
        path: its file.

    Returns:
        What validates, and the signature: draft, digest and version of the library.

    Raises:
        UserError: the file is missing, no JSON or no schema, or refers to what lies outside of it.
    """
    import jsonschema
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    try:
        content = path.read_bytes()
        schema = parse_json(content.decode("utf-8-sig"))
    except OSError as error:
        raise UserError(f"{_KEY} = {path}: the file cannot be read ({error.strerror or error}).") from error
    except ValueError as error:
        raise UserError(f"{_KEY} = {path}: the file is no JSON ({error}).") from error
    if not isinstance(schema, (dict, bool)):
        raise UserError(f"{_KEY} = {path}: a schema is an object, and this is {type(schema).__name__}.")
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        where = "/".join(map(str, error.absolute_path)) or "its top level"
        raise UserError(f"{_KEY} = {path}: it is no JSON schema: at {where}, {error.message}.") from error
    # An empty registry: the library would otherwise fetch references over the network.
    validator = kind(schema, registry=Registry())
    resolver = Registry().resolver_with_root(DRAFT202012.create_resource(schema))
    problems = []
    for reference in _references(schema):
        try:
            resolver.lookup(reference)
        except Unresolvable:
            problems.append(f"{_KEY} = {path}: {reference!r} is not in this file, and no other one is read.")
    if problems:
        raise UserError(problems)
    digest = hashlib.sha256(content).hexdigest()[:_NUM_DIGEST_CHARACTERS]
    return validator, f"schema:{digest}|draft:{kind.__name__}|version:jsonschema-{version('jsonschema')}"


def _references(node: Any) -> Iterator[str]:
    """Yield what a schema refers to, at any depth."""
    if isinstance(node, list):
        for item in node:
            yield from _references(item)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key in ("$ref", "$dynamicRef") and isinstance(value, str):
                yield value
            # What stands under these is data and may hold any key.
            elif key not in ("const", "enum", "default", "examples"):
                yield from _references(value)
