"""Give a chat template the arguments of tool calls in the form that it writes as JSON: as an object or as text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from lm_tuning.data.check.findings import shorten
from lm_tuning.text.render.alterations import functions_of
from lm_tuning.text.render.plain import Message, RowRefused, Tools
from lm_tuning.text.render.template_call import TemplateCall

NOT_JSON = "tool_arguments_not_json"

_KEY, _VALUE = "zqkeyqz", "zqvalueqz"
_MAX_SHAPES = 4096


class ToolArguments:
    """Find out by rendering which form a template wants, once for each shape of conversation."""

    def __init__(self, call: TemplateCall) -> None:
        """Keep a template.

        Args:
            call: renders with it.
        """
        self._call = call
        self._wanted: dict[Any, str] = {}

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
        given = {_KEY: _VALUE}
        by_object = self._render(_with_arguments(messages, lambda _: given), tools)
        by_text = self._render(_with_arguments(messages, lambda _: json.dumps(given)), tools)
        takes_object = _KEY in by_object and _VALUE in by_object and f"'{_KEY}': '{_VALUE}'" not in by_object
        takes_text = f'"{_KEY}"' in by_text and f'\\"{_KEY}\\"' not in by_text
        if takes_object == takes_text:
            return "any"
        return "object" if takes_object else "text"

    def _render(self, messages: list[Message], tools: Tools | None) -> str:
        try:
            return self._call(messages, tools)
        except RowRefused:
            return ""


def _with_arguments(messages: list[Message], change: Callable[[Any], Any]) -> list[Message]:
    """Replace the arguments of every tool call."""

    def changed(call: Any) -> Any:
        for function in functions_of([call]):
            if "arguments" not in function:
                return call
            replaced = {**function, "arguments": change(function["arguments"])}
            return replaced if function is call else {**call, "function": replaced}
        return call

    return [
        {**turn, "tool_calls": [changed(call) for call in turn["tool_calls"]]} if turn.get("tool_calls") else turn
        for turn in messages
    ]


def _as_object(arguments: Any) -> Any:
    """Parse text; what was written as JSON text twice is parsed twice."""
    parsed = arguments
    for _ in range(2):
        if not isinstance(parsed, str):
            break
        try:
            parsed = json.loads(parsed) if parsed.strip() else {}
        except (ValueError, RecursionError):
            break
    if isinstance(parsed, dict):
        return parsed
    if parsed is arguments and not isinstance(arguments, str):
        return arguments
    raise RowRefused(NOT_JSON, f"its arguments are {shorten(str(arguments), 80)!r}")


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
