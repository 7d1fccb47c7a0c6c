"""Find out about a chat template by rendering: how it wants the arguments of tool calls, and what it leaves out.

A name that is looked for in the text proves nothing: the tool ``add`` also stands in "address". So each part of a
conversation gets a mark that stands nowhere else, and what the template shows is what has its mark in the text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Literal, TypeAlias

from lm_tuning.json_types import JsonObject, JsonValue
from lm_tuning.text.records import Message, Tools
from lm_tuning.text.render import plain
from lm_tuning.text.render.chat_template import TemplateCall, attempt
from lm_tuning.wording import shorten

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
    raise plain.RowRefused("tool_arguments_not_json", f"its arguments are {shorten(arguments, 80)!r}")


def _as_text(arguments: JsonValue) -> JsonValue:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


REASONING_FIELDS: tuple[Literal["reasoning_content", "thinking", "reasoning"], ...] = (
    "reasoning_content",
    "thinking",
    "reasoning",
)
"""Keys of a turn that hold what was thought before its content was said; transformers takes them for one another."""

# Digits alone: JSON escapes none, capital letters leave them as they are, and nothing is trimmed or split at them.
_MARK = "9081726354{:06d}4536271809"


class Marks:
    """Hand out marks, and remember what each stands for."""

    def __init__(self) -> None:
        """Start without marks."""
        self.of_content: dict[int, str] = {}
        self.of_reasoning: dict[int, str] = {}
        self.of_tools: list[str] = []
        self._num = 0

    def new(self) -> str:
        """Return a mark that was not there before."""
        self._num += 1
        return _MARK.format(self._num)

    def for_tool(self) -> str:
        """Return a mark for a part of a tool or of its call."""
        self.of_tools.append(self.new())
        return self.of_tools[-1]


def mark_messages(messages: list[Message], marks: Marks) -> list[Message]:
    """Add a mark at the end of every content and reasoning, and into every tool call.

    Args:
        messages: the conversation, left as it is.
        marks: receives what the marks stand for.
    """
    marked = []
    for turn, given in enumerate(messages):
        message = given.copy()
        content = message.get("content", "")
        if content.strip():
            # At the end: a template that finds a thought in the content cuts its start off.
            marks.of_content[turn] = marks.new()
            message["content"] = content + marks.of_content[turn]
        thoughts = [key for key in REASONING_FIELDS if _says_something(message.get(key))]
        if thoughts:
            # One mark for all names of a thought: a template that shows any of them shows the thought.
            mark = marks.of_reasoning[turn] = marks.new()
            for key in thoughts:
                thought = message[key]
                message[key] = thought + mark if isinstance(thought, str) else mark
        if message.get("tool_calls"):
            message["tool_calls"] = [_mark_call(call, marks) for call in message["tool_calls"]]
        marked.append(message)
    return marked


def mark_tools(tools: Tools | None, marks: Marks) -> Tools | None:
    """Write marks into the name, the description and the parameters of every tool.

    Args:
        tools: as the chat template gets them, left as they are.
        marks: receives what the marks stand for.
    """
    return [_mark_tool(tool, marks) for tool in tools] if tools else tools


def find_alterations(call: TemplateCall, messages: list[Message], tools: Tools | None, text: str) -> list[str]:
    """Describe what a template does to one conversation.

    An earlier answer of which less is shown than the same template shows while it is the last one is no alteration:
    templates leave old reasoning out on purpose, when a model answers as well as here.

    Args:
        call: renders with the template.
        messages: the conversation.
        tools: what it may call.
        text: the conversation as text.

    Returns:
        Keys of the counts that the row goes into, each once.
    """
    marks = Marks()
    marked, marked_tools = mark_messages(messages, marks), mark_tools(tools, marks)
    # A second rendering, which only rows that no skeleton fits pay for.
    shown = attempt(call, marked, marked_tools)
    if not shown:  # the template judges what it is given, and what it shows cannot be told apart
        return []
    notes: dict[str, None] = {}
    # Renderings that end with an earlier answer, made when first asked for
    earlier: dict[int, str] = {}

    def is_left_out(turn: int, mark: str) -> bool:
        """Return whether a part is missing for another reason than that later turns follow."""
        if mark in shown:
            return False
        # Templates drop the reasoning of earlier answers; that is how the model is used, and no loss of the row.
        if messages[turn]["role"] == "assistant" and turn < len(messages) - 1:
            if turn not in earlier:
                earlier[turn] = attempt(call, marked[: turn + 1], marked_tools)
            if mark in earlier[turn]:
                notes[plain.EARLIER_SHORTENED] = None
                return False
        return True

    for turn, mark in marks.of_reasoning.items():
        if is_left_out(turn, mark):
            notes[plain.REASONING_LEFT_OUT] = None
    for turn, mark in marks.of_content.items():
        content = messages[turn]["content"]
        if is_left_out(turn, mark):
            notes[plain.TURN_LEFT_OUT] = None
        # Two proofs: the content as it is in the real text, and it right before its mark in the marked one. A short
        # content may stand in the text for another reason.
        elif content not in text or (mark in shown and content + mark not in shown):
            is_last = messages[turn]["role"] != "assistant" or turn == len(messages) - 1
            before = "" if is_last else attempt(call, messages[: turn + 1], tools)
            notes[plain.EARLIER_SHORTENED if content in before else plain.NOT_VERBATIM] = None
    if not all(mark in shown for mark in marks.of_tools):
        notes[plain.TOOLS_LEFT_OUT] = None
    return list(notes)


def find_hidden_tools(call: TemplateCall, messages: list[Message], tools: Tools) -> list[str]:
    """Return whether a template leaves out something of the tools that it is given.

    Args:
        call: renders with the template.
        messages: a conversation.
        tools: what it may call.

    Returns:
        Keys of the counts that such rows go into.
    """
    marks = Marks()
    shown = attempt(call, messages, mark_tools(tools, marks))
    return [plain.TOOLS_LEFT_OUT] if shown and not all(mark in shown for mark in marks.of_tools) else []


def _says_something(value: JsonValue) -> bool:
    return bool(value.strip() if isinstance(value, str) else value)


def _mark_call(call: JsonValue, marks: Marks) -> JsonValue:
    if not isinstance(call, dict):
        return call
    function = call.get("function")
    if isinstance(function, dict):
        return {**call, "function": _mark_call(function, marks)}
    marked = dict(call)
    name, arguments = marked.get("name"), marked.get("arguments")
    if isinstance(name, str):
        marked["name"] = name + marks.for_tool()
    if isinstance(arguments, dict) and arguments:
        mark = marks.for_tool()
        # A pair of its own, since a template may show the names alone or the values alone.
        marked["arguments"] = {**arguments, mark: mark}
    # Text behind JSON is no JSON any more; a template that parses it refuses, and then nothing is claimed.
    elif isinstance(arguments, str) and arguments.strip():
        marked["arguments"] = arguments + marks.for_tool()
    return marked


def _mark_tool(tool: JsonObject, marks: Marks) -> JsonObject:
    function = tool.get("function")
    if isinstance(function, dict):
        return {**tool, "function": _mark_tool(function, marks)}
    marked = dict(tool)
    for key in ("name", "description"):
        text = marked.get(key)
        if isinstance(text, str) and text.strip():
            marked[key] = text + marks.for_tool()
    parameters = marked.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    if isinstance(parameters, dict) and isinstance(properties, dict) and properties:
        mark = marks.for_tool()
        # The schema stays a valid one: a template may walk its properties by their types.
        marked["parameters"] = {**parameters, "properties": {**properties, mark: {"type": "string"}}}
    return marked
