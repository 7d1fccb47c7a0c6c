"""Find what a chat template leaves out of a conversation or changes in it, by rendering it a second time with marks.

A name that is looked for in the text proves nothing: the tool ``add`` also stands in "address". So each part of a
conversation gets a mark that stands nowhere else, and what the template shows is what has its mark in the text.
"""

from __future__ import annotations

from typing import Literal

from lm_tuning.json_types import JsonObject, JsonValue
from lm_tuning.text.records import Message, Tools
from lm_tuning.text.render.plain import (
    EARLIER_SHORTENED,
    NOT_VERBATIM,
    REASONING_LEFT_OUT,
    TOOLS_LEFT_OUT,
    TURN_LEFT_OUT,
)
from lm_tuning.text.render.template_call import TemplateCall, attempt

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
                notes[EARLIER_SHORTENED] = None
                return False
        return True

    for turn, mark in marks.of_reasoning.items():
        if is_left_out(turn, mark):
            notes[REASONING_LEFT_OUT] = None
    for turn, mark in marks.of_content.items():
        content = messages[turn]["content"]
        if is_left_out(turn, mark):
            notes[TURN_LEFT_OUT] = None
        # Two proofs: the content as it is in the real text, and it right before its mark in the marked one. A short
        # content may stand in the text for another reason.
        elif content not in text or (mark in shown and content + mark not in shown):
            is_last = messages[turn]["role"] != "assistant" or turn == len(messages) - 1
            before = "" if is_last else attempt(call, messages[: turn + 1], tools)
            notes[EARLIER_SHORTENED if content in before else NOT_VERBATIM] = None
    if not all(mark in shown for mark in marks.of_tools):
        notes[TOOLS_LEFT_OUT] = None
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
    return [TOOLS_LEFT_OUT] if shown and not all(mark in shown for mark in marks.of_tools) else []


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
