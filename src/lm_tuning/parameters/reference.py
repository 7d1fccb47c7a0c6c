"""The reference page of the parameters, made from the classes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lm_tuning.parameters.schema import Schema, describe_allowed, parameter_schema

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


def _groups_in_lists(values: dict[str, Schema]) -> dict[str, Schema]:
    """Return the groups that stand in lists, by the first key that takes such a list."""
    found: dict[str, Schema] = {}
    for key, entry in values.items():
        for choice in entry.get("anyOf", []):
            for item in choice.get("items", {}).get("anyOf", []):
                if "properties" in item and item not in found.values():
                    found[key] = item
    return found


def _write(value: Any) -> str:
    """Write a default as YAML would."""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _cell(text: str) -> str:
    """Keep text on the line of its cell, and a bar inside it."""
    return text.replace("\n", " ").replace("|", "\\|")
