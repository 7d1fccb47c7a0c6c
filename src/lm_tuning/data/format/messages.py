"""Bring conversations of any usual shape to one: a list of turns with role and content, written as compact JSON."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from typing import TypeAlias

import orjson

from lm_tuning.data.check.findings import RowProblem, describe_value, wrong_type
from lm_tuning.data.records import Cell
from lm_tuning.wording import shorten

ROLES = ("system", "user", "assistant", "tool")

ROLE_OF_NAME: Mapping[str, str] = {
    **{role: role for role in ROLES},
    "developer": "system",
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
}
"""Role by the names that data sets use for it, in lower case."""

_TEXT_PARTS = ("text", "input_text", "output_text")

# Made once: json.dumps with arguments builds an encoder at each call.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
Message: TypeAlias = dict[str, Cell]
"""A turn, with whatever keys beside ``role`` and ``content`` it came with; or a tool."""


def read_messages(value: Cell, *, column: str) -> list[Message]:
    """Check one conversation and bring it to the canonical shape.

    A turn is an object with ``role`` (or ``from``) and ``content`` (or ``value``); see ``ROLE_OF_NAME`` for roles. A
    content that comes as parts is joined. Every other key stays as it is, but keys whose value is null are dropped:
    they mean the same as a missing key, and templates would print them. A trailing user turn is no mistake here; what
    is trained on is decided when the rows are tokenized.

    Args:
        value: a list of objects, or that list as JSON text (as a CSV cell holds it).
        column: the column name, for messages.

    Returns:
        The turns, each with ``role``, ``content`` (missing where an assistant only calls tools) and what else it had.

    Raises:
        RowProblem: it is no list of objects with a known role and a content of text, or no assistant turn says
            anything that is supervised.
    """
    messages = [_read_message(message, index) for index, message in enumerate(_read_list(value, column, "messages"), 1)]
    if not messages:
        raise RowProblem("wrong_type", f"column {column!r} holds an empty list, where a list of messages is wanted.")
    turns = [message for message in messages if message["role"] == "assistant"]
    if not turns:
        raise RowProblem("no_assistant_turn", "no assistant turn is in it, so there is nothing to train on.")
    spoken = [turn for turn in turns if _says_something(turn)]
    if not spoken:
        raise RowProblem("empty", "every assistant turn is empty, so there is nothing to train on.")
    if all(turn.get("weight") == 0 for turn in spoken):
        raise RowProblem("no_assistant_turn", "every assistant turn has the weight 0, so there is nothing to train on.")
    return messages


def read_tools(value: Cell, *, column: str) -> list[Message] | None:
    """Check the tools that a conversation may call.

    Args:
        value: a list of objects, or that list as JSON text; null and an empty one mean none.
        column: the column name, for messages.

    Raises:
        RowProblem: it is something else.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    tools: list[Message] = []
    for index, tool in enumerate(_read_list(value, column, "tools"), 1):
        if not isinstance(tool, dict):
            raise wrong_type(f"tool {index} is", tool, "an object")
        tools.append(tool)
    return tools or None


def add_system(messages: list[Message], system: str) -> list[Message]:
    """Prepend the system prompt of a column to a conversation.

    Args:
        messages: what ``read_messages`` returned.
        system: the prompt.

    Raises:
        RowProblem: the conversation begins with another one.
    """
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if _content_of(messages[0]).strip() != system.strip():
        raise RowProblem("two_systems", "its system column and its first turn are different system prompts.")
    return messages


def write_messages(messages: list[Message], *, normalize: bool) -> str:
    """Write messages, or tools, as compact JSON.

    Args:
        messages: what ``read_messages`` or ``read_tools`` returned.
        normalize: bring every text in them to NFC.

    Raises:
        RowProblem: a value in them cannot be written as JSON, such as NaN.
    """
    try:
        # The two write plain messages byte for byte alike, so stored rows and digests do not tell which one it was.
        text = _encode_plain(messages) or _encode(messages)
        # One look at the whole text; JSON's own characters are ASCII, so it is normalized when all its strings are.
        if normalize and not unicodedata.is_normalized("NFC", text):
            text = _encode([_normalized(message) for message in messages])
    except (ValueError, TypeError, RecursionError) as error:
        raise RowProblem("wrong_type", f"the messages cannot be written as JSON ({error}).") from error
    return text


def comparable_messages(messages: list[Message], text: str) -> str:
    """Return what makes two conversations copies of each other: the messages with trimmed contents, as JSON.

    Args:
        messages: what ``read_messages`` returned.
        text: the same as ``write_messages`` wrote it, which is the answer where there is nothing to trim.
    """
    contents = [_content_of(message) for message in messages]
    if all(content == content.strip() for content in contents):
        return text
    return _encode(
        [
            {**message, "content": content.strip()} if content else message
            for message, content in zip(messages, contents, strict=True)
        ]
    )


def describe_oddities(messages: list[Message]) -> tuple[tuple[str, str], ...]:
    """Return kind and reason of what is unusual in a conversation that can be used.

    Args:
        messages: what ``read_messages`` returned.
    """
    found: dict[str, str] = {}
    for index, message in enumerate(messages, 1):
        if index > 1 and message["role"] == "system":
            found.setdefault("system_not_first", f"message {index} is a system turn behind other turns.")
        if not _says_something(message):
            found.setdefault("empty_turn", f"message {index} ({message['role']!s}) is empty.")
    return tuple(found.items())


def _encode_plain(messages: list[Message]) -> str | None:
    """Write messages of role and content alone, for which the faster encoder writes the same; None for others."""
    if not all(len(message) == 2 and "content" in message for message in messages):
        return None
    try:
        return orjson.dumps(messages).decode()
    except TypeError:  # half of a surrogate pair: the other encoder writes it, so that the row can be named
        return None


def _content_of(message: Message) -> str:
    """Return the text of a checked turn, empty where an assistant only calls tools."""
    content = message.get("content", "")
    assert isinstance(content, str), "a turn with another content is a bad row"
    return content


def _says_something(message: Message) -> bool:
    content = _content_of(message)
    return bool(content and not content.isspace()) or bool(message.get("tool_calls"))


def _read_list(value: Cell, column: str, what: str) -> list[Cell]:
    """Return a list that may have been written as JSON text."""
    found, text = "", value
    if isinstance(text, str):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            found = f"text that is not JSON ({shorten(str(error), 80)})" if text.lstrip()[:1] in ("[", "{") else "text"
    if found or not isinstance(value, list):
        raise RowProblem(
            "wrong_type", f"column {column!r} holds {found or describe_value(value)}, where a list of {what} is wanted."
        )
    return value


def _read_message(message: Cell, index: int) -> Message:
    if not isinstance(message, dict):
        raise wrong_type(f"message {index} is", message, "an object")
    # Arrow gives every message of a column all keys, with null for those that it did not have.
    rest: Message = {key: value for key, value in message.items() if value is not None}
    # ShareGPT's names of the two keys.
    name = rest.pop("role" if "role" in rest else "from", None)
    content = rest.pop("content" if "content" in rest else "value", None)
    role = ROLE_OF_NAME.get(name) if isinstance(name, str) else None
    if role is None:
        role = _find_role(name, index)
    if role == "assistant" and rest:
        _check_assistant(rest, index)
    if isinstance(content, list):
        content = _join_parts(content, index, role)
    if isinstance(content, str):
        return {"role": role, "content": content, **rest}
    if content is None and rest.get("tool_calls"):
        return {"role": role, **rest}
    raise wrong_type(f"the content of message {index} ({role}) is", content, "text")


def _find_role(name: Cell, index: int) -> str:
    if name is None:
        raise RowProblem("wrong_role", f"message {index} has no role.")
    if not isinstance(name, str):
        raise RowProblem("wrong_role", f"message {index} has {describe_value(name)} as its role, where text is wanted.")
    role = ROLE_OF_NAME.get(name.strip().lower())
    if role is None:
        raise RowProblem(
            "wrong_role", f"message {index} has the role {shorten(name)!r}; roles are {', '.join(ROLE_OF_NAME)}."
        )
    return role


def _check_assistant(rest: Message, index: int) -> None:
    """Check the keys that mean something in an answer; the older form of a tool call becomes the present one."""
    # OpenAI's convention: a weight of 0 keeps an answer out of the loss.
    if "weight" in rest and rest["weight"] not in (0, 1):
        raise RowProblem(
            "wrong_type",
            f"message {index} has the weight {shorten(repr(rest['weight']))}; it is 1 for an answer that is supervised "
            "and 0 for one that is not.",
        )
    call = rest.get("function_call")
    if isinstance(call, dict) and "tool_calls" not in rest:
        del rest["function_call"]
        rest["tool_calls"] = [{"type": "function", "function": call}]
    calls = rest.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise RowProblem("wrong_type", f"the tool_calls of message {index} are no list of objects.")


def _join_parts(parts: list[Cell], index: int, role: str) -> str:
    """Join the parts of a content; only text can be trained on."""
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind not in _TEXT_PARTS:
            found = f"a part of type {shorten(str(kind))!r}" if kind is not None else describe_value(part)
            raise RowProblem(
                "wrong_type", f"the content of message {index} ({role}) holds {found}, where parts of text are wanted."
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise wrong_type(f"a part of the content of message {index} ({role}) is", text, "text")
        texts.append(text)
    return "".join(texts)


def _normalized(value: Cell) -> Cell:
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value)
    if isinstance(value, dict):
        return {key: _normalized(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_normalized(inner) for inner in value]
    return value
