"""The JSON schema of the parameters, which editors check with, and the reference page that is made of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, TypedDict

from lm_tuning.json_types import JsonValue
from lm_tuning.parameters.base import join_words
from lm_tuning.parameters.groups import Parameters

# What pydantic writes of a value, references resolved; keys that are no identifiers ask for this way to declare it.
Schema = TypedDict(
    "Schema",
    {
        "type": str,
        "enum": list[JsonValue],
        "const": JsonValue,
        "anyOf": "list[Schema]",
        "items": "Schema",
        "properties": "dict[str, Schema]",
        "additionalProperties": "bool | Schema",
        "minimum": float,
        "maximum": float,
        "exclusiveMinimum": float,
        "exclusiveMaximum": float,
        "default": JsonValue,
        "description": str,
        "x-words": str,
    },
    total=False,
)

# What an editor must let pass in place of any text: OmegaConf fills it in when the file is read.
_INTERPOLATION = {"type": "string", "pattern": r"\$\{.+\}"}


# Messages look keys up by the dozen, and pydantic takes tens of milliseconds to write the schema.
@cache
def parameter_schema() -> Schema:
    """Return the schema with every reference resolved, as nested objects from the root down."""
    schema = Parameters.model_json_schema()
    definitions = schema.pop("$defs")

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(item) for item in node]
        if not isinstance(node, dict):
            return node
        # Keys beside a reference, such as the description of this very field, win over those of the class.
        if "$ref" in node:
            target = resolve(definitions[node["$ref"].rsplit("/", 1)[1]])
            return target | {key: value for key, value in node.items() if key != "$ref"}
        found = {key: resolve(value) for key, value in node.items() if key != "discriminator"}
        choices = found.pop("anyOf", []) + found.pop("oneOf", [])
        # A union in a union means the same as one union, and reads better: auto, or a number, or null.
        flat = [inner for choice in choices for inner in choice.get("anyOf", [choice])]
        return found | {"anyOf": flat} if flat else found

    resolved: Schema = resolve(schema)
    return resolved


def editor_schema() -> str:
    """Write the schema for editors, as JSON text.

    Each file under ``conf/`` holds some of the keys, so none is required, and interpolations are let through.
    """

    def adapt(node: Any, is_names: bool = False) -> Any:
        if isinstance(node, list):
            return [adapt(item) for item in node]
        if not isinstance(node, dict):
            return node
        kept = {
            key: value if key == "default" else adapt(value, key == "properties" and not is_names)
            for key, value in node.items()
            if is_names or (key not in {"title", "required"} and not key.startswith("x-"))
        }
        # "${globals:output}" matches no pattern of a name, and is what conf/base has there.
        if not is_names and "pattern" in kept:
            described = {key: kept.pop(key) for key in ("description", "default") if key in kept}
            return described | {"anyOf": [kept, _INTERPOLATION]}
        return kept

    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Parameters of LM Tuning"}
    return json.dumps(head | adapt(parameter_schema()), indent=2, ensure_ascii=False) + "\n"


def find_entry(path: Sequence[str | int]) -> Schema | None:
    """Return the schema of the value at a path, or None where no such key exists."""
    entry: Schema = parameter_schema()
    for part in path:
        found = _step(entry, part)
        if found is None:
            return None
        entry = found
    return entry


def _step(entry: Schema, part: str | int) -> Schema | None:
    """Go one key or list position down."""
    for choice in entry.get("anyOf", [entry]):
        if part in choice.get("properties", {}):
            return choice["properties"][str(part)]
        others = choice.get("additionalProperties")
        if isinstance(part, str) and isinstance(others, dict):
            return others
        if isinstance(part, str) and others is True:
            return {}  # any name, and any value
        if isinstance(part, int) and "items" in choice:
            return choice["items"]
    return None


def walk_keys(entry: Schema | None = None, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """Yield every key below an entry with its schema, groups before what they hold."""
    entry = parameter_schema() if entry is None else entry
    for name, child in entry.get("properties", {}).items():
        yield (*prefix, name), child
        yield from walk_keys(child, (*prefix, name))


def accepts(entry: Schema, value: object) -> bool:
    """Return whether a value with no keys of its own fits an entry; groups and lists are not looked into."""
    if "anyOf" in entry:
        return any(accepts(choice, value) for choice in entry["anyOf"])
    if "const" in entry or "enum" in entry:
        allowed = entry.get("enum", [entry.get("const")])
        # By type too: to Python, 1 equals True and 1.0.
        return any(type(value) is type(choice) and value == choice for choice in allowed)
    types: dict[str, type | tuple[type, ...]] = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "null": type(None),
    }
    wanted = types.get(entry.get("type", ""))
    if wanted is None:  # a mapping, a list, or an entry that allows anything
        return not isinstance(value, (str, int, float, bool, type(None))) or not entry
    return isinstance(value, wanted) and (isinstance(value, bool) == (entry["type"] == "boolean"))


def describe_allowed(entry: Schema) -> str:
    """Describe in words what an entry allows, such as ``auto, or an integer of at least 1``."""
    if "anyOf" in entry:
        return join_words([describe_allowed(choice) for choice in entry["anyOf"]], always_comma=True)
    # Of a pattern, words say more than the expression.
    if "x-words" in entry or "const" in entry:
        return str(entry.get("x-words", entry.get("const")))
    if "enum" in entry:
        return join_words([str(choice) for choice in entry["enum"]])
    if "properties" in entry:
        return f"a mapping of the keys {', '.join(entry['properties'])}"
    kind = entry.get("type")
    if kind in {"integer", "number"}:
        return " ".join(["an integer" if kind == "integer" else "a number", *_bounds(entry)])
    if kind == "array":
        return _describe_items(entry["items"])
    if kind == "object":
        return _describe_names(entry.get("additionalProperties", True))
    return {"string": "a string", "boolean": "true or false", "null": "null"}.get(str(kind), "any value")


def _describe_items(items: Schema) -> str:
    """Describe what a list allows for each of its items."""
    if "enum" in items:
        return f"a list of {join_words([str(choice) for choice in items['enum']])}"
    kinds = ["strings" if "properties" not in choice else "mappings" for choice in items.get("anyOf", [])]
    return "a list of " + (join_words(kinds) or ("strings" if items.get("type") == "string" else "values"))


def _describe_names(values: bool | Schema) -> str:
    """Describe what a group of freely chosen names allows for each."""
    if not isinstance(values, dict):
        return "a mapping of names and values"
    return f"a mapping of names, each with {'a string' if set(values) == {'type'} else describe_allowed(values)}"


def _bounds(entry: Schema) -> list[str]:
    """Describe the limits of a number, such as ``of at least 0`` and ``below 1``."""
    words: list[str] = []
    for bound, word in (
        (entry.get("minimum"), "of at least"),
        (entry.get("exclusiveMinimum"), "above"),
        (entry.get("maximum"), "of at most"),
        (entry.get("exclusiveMaximum"), "below"),
    ):
        if bound is not None:
            words += ["and"] * bool(words) + [f"{word} {bound}"]
    return words


_HEAD = """# Parameters

Every key of `conf/*/parameters*.yml`. The same keys work behind `--params`: `kedro run --params train.max_steps=10`.
Unknown keys and values of another type stop a run before anything is loaded.

This page is written by `kedro schema` from the classes in `src/lm_tuning/parameters/`. Defaults are those of the
classes; `conf/base/` sets some of them for the example.
"""


def render_reference() -> str:
    """Write the page as Markdown, one section for each group."""
    root = parameter_schema()
    return "\n".join([_HEAD, *_render_group("", root)])


def _render_group(name: str, group: Schema) -> Iterator[str]:
    """Yield the section of a group and then those of the groups inside."""
    keys = group["properties"]
    groups = {key: entry for key, entry in keys.items() if "properties" in entry}
    values = {key: entry for key, entry in keys.items() if key not in groups}
    if name:
        yield f"{'#' * (2 + name.count('.'))} {name}\n\n{group['description']}\n"
    else:
        yield "## Top level\n"
    yield "| key | takes | default | meaning |\n| --- | --- | --- | --- |"
    for key, entry in values.items():
        default = _write(entry["default"]) if "default" in entry else ""
        yield f"| `{key}` | {_cell(describe_allowed(entry))} | {default} | {_cell(entry['description'])} |"
    yield ""
    for key, entry in _groups_in_lists(values).items():
        yield from _render_group(f"{name}.{key}[]", entry)
    for key, entry in groups.items():
        yield from _render_group(f"{name}.{key}" if name else key, entry)


# The sources of data.path and its kin are the same group, which needs one section.
def _groups_in_lists(values: dict[str, Schema]) -> dict[str, Schema]:
    """Return the groups that stand in lists, by the first key that takes such a list."""
    found: dict[str, Schema] = {}
    for key, entry in values.items():
        for choice in entry.get("anyOf", []):
            for item in choice.get("items", {}).get("anyOf", []):
                if "properties" in item and item not in found.values():
                    found[key] = item
    return found


def _write(value: JsonValue) -> str:
    """Write a default as YAML would."""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _cell(text: str) -> str:
    """Keep text on the line of its cell, and a bar inside it."""
    return text.replace("\n", " ").replace("|", "\\|")
