"""Give a chat template the arguments of tool calls in the form that it writes as JSON: as an object or as text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeAlias

from lm_tuning.json_types import JsonValue
from lm_tuning.text.records import Message, Tools
from lm_tuning.text.render.plain import RowRefused
from lm_tuning.text.render.template_call import TemplateCall, attempt
from lm_tuning.wording import shorten

NOT_JSON = "tool_arguments_not_json"

_KEY, _VALUE = "zqkeyqz", "zqvalueqz"
_MAX_SHAPES = 4096

Turn: TypeAlias = tuple[str, int, bool]
"""What a template may tell turns apart by: role, number of tool calls, whether there is a content."""


class ToolArguments:
    """Find out by rendering which form a template wants, once for each shape of conversation."""

    def __init__(self, call: TemplateCall) -> None:
        """Choose the template that is tried.

        Args:
            call: renders with it.
        """
        self._call = call
        self._wanted: dict[tuple[tuple[Turn, ...], bool], str] = {}

    def fit(self, messages: list[Message], tools: Tools | None) -> list[Message]:
        """Return a conversation whose tool calls have arguments in the form that the template wants.

        A template that takes both forms gets them as they are.

        Args:
            messages: the conversation, left as it is.
            tools: what it may call.

        Raises:
            RowRefused: the template wants objects, and some arguments are text that is no JSON object.
        """
        shape = tuple([(turn["role"], len(turn.get("tool_calls") or ()), "content" in turn) for turn in messages])
        key = shape, bool(tools)
        if key not in self._wanted:
            if len(self._wanted) >= _MAX_SHAPES:
                self._wanted.clear()
            self._wanted[key] = self._find_wanted(messages, tools)
        wanted = self._wanted[key]
        if wanted == "object":
            return _with_arguments(messages, _as_object)
        return _with_arguments(messages, _as_text) if wanted == "text" else messages

    def _find_wanted(self, messages: list[Message], tools: Tools | None) -> str:
        """Render the conversation with arguments of both forms: ``object``, ``text`` or ``any``."""
        given: JsonValue = {_KEY: _VALUE}
        by_object = attempt(self._call, _with_arguments(messages, lambda _: given), tools)
        by_text = attempt(self._call, _with_arguments(messages, lambda _: json.dumps(given)), tools)
        takes_object = _KEY in by_object and _VALUE in by_object and f"'{_KEY}': '{_VALUE}'" not in by_object
        takes_text = f'"{_KEY}"' in by_text and f'\\"{_KEY}\\"' not in by_text
        if takes_object == takes_text:
            return "any"
        return "object" if takes_object else "text"


def _with_arguments(messages: list[Message], change: Callable[[JsonValue], JsonValue]) -> list[Message]:
    """Replace the arguments of every tool call."""

    def changed(call: JsonValue) -> JsonValue:
        if not isinstance(call, dict):
            return call
        function = call.get("function")
        if isinstance(function, dict):
            return {**call, "function": changed(function)}
        return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call

    return [
        {**turn, "tool_calls": [changed(call) for call in turn["tool_calls"]]} if turn.get("tool_calls") else turn
        for turn in messages
    ]


def _as_object(arguments: JsonValue) -> JsonValue:
    """Parse text; what was written as JSON text twice is parsed twice."""
    parsed = arguments
    for _ in range(2):
        if not isinstance(parsed, str):
            break
        try:
            parsed = json.loads(parsed) if parsed.strip() else {}
        except (ValueError, RecursionError):
            break
    if isinstance(parsed, dict) or not isinstance(arguments, str):
        return parsed
    raise RowRefused(NOT_JSON, f"its arguments are {shorten(arguments, 80)!r}")


def _as_text(arguments: JsonValue) -> JsonValue:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
