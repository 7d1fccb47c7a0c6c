"""Check chat messages and write them as compact JSON, with the keys that the row had and no others."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable
from typing import Any

from lm_tuning.data.problems import RowProblem, describe_value

ROLES = ("system", "user", "assistant", "tool")

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
Message = dict[str, Any]


def read_messages(value: Any, *, column: str) -> list[Message]:
    """Check the shape of one conversation.

    Keys whose value is null are dropped: they mean the same as a missing key, and templates would print them. A
    trailing user turn is no mistake here; what is trained on is decided when the rows are tokenized.

    Args:
        value: a list of objects, or that list as JSON text (as a CSV cell holds it).
        column: the column name, for messages.

    Returns:
        The messages.

    Raises:
        RowProblem: it is no list of objects with a known ``role`` and a ``content`` of text, or no assistant turn says
            anything.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = "text"
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else describe_value(value)
        raise RowProblem("wrong_type", f"column {column!r} holds {found}, where a list of messages is wanted.")
    messages = [_read_message(message, place) for place, message in enumerate(value, 1)]
    turns = [message for message in messages if message["role"] == "assistant"]
    if not turns:
        raise RowProblem("no_assistant_turn", "no assistant turn is in it, so there is nothing to train on.")
    if not any(turn.get("content", "").strip() or turn.get("tool_calls") for turn in turns):
        raise RowProblem("empty", "every assistant turn is empty, so there is nothing to train on.")
    return messages


def write_messages(messages: list[Message], *, normalize: bool) -> str:
    """Write messages as compact JSON.

    Args:
        messages: what ``read_messages`` returned.
        normalize: bring every text in them to NFC.

    Raises:
        RowProblem: a value in them cannot be written as JSON, such as NaN.
    """
    try:
        text = _encode(messages)
        if normalize and not unicodedata.is_normalized("NFC", text):
            text = _encode(_normalized(messages))
    except (ValueError, TypeError, RecursionError) as error:
        raise RowProblem("wrong_type", f"the messages cannot be written as JSON ({error}).") from error
    return text


def comparable_messages(messages: list[Message]) -> Iterable[str]:
    """Return what makes two conversations copies of each other: the messages with trimmed contents."""
    for message in messages:
        yield _encode({**message, "content": message["content"].strip()} if "content" in message else message)


def _read_message(message: Any, place: int) -> Message:
    if not isinstance(message, dict):
        raise RowProblem("wrong_type", f"message {place} is {describe_value(message)}, where an object is wanted.")
    kept: Message = {key: value for key, value in message.items() if value is not None}
    role = kept.get("role")
    if role not in ROLES:
        found = repr(role) if isinstance(role, str) else describe_value(role)
        raise RowProblem("wrong_role", f"message {place} has the role {found}; roles are {', '.join(ROLES)}.")
    content = kept.get("content")
    calls_tool = role == "assistant" and bool(kept.get("tool_calls"))
    if not isinstance(content, str) and not (content is None and calls_tool):
        raise RowProblem(
            "wrong_type",
            f"the content of message {place} ({role}) is {describe_value(content)}, where text is wanted.",
        )
    return kept


def _normalized(value: Any) -> Any:
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value)
    if isinstance(value, dict):
        return {key: _normalized(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_normalized(inner) for inner in value]
    return value
