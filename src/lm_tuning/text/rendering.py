"""What a row looks like as text, before it becomes tokens: which characters are content, and which are learned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lm_tuning.text.token_table import Int16Array, Int32Array, Int64Array

CharRange = tuple[int, int]
Message = dict[str, Any]
Tools = list[dict[str, Any]]
Conversation = tuple[list[Message], Tools | None]

NOT_VERBATIM = "content_not_verbatim"
TOOLS_LEFT_OUT = "tools_left_out"


class RowRefused(Exception):
    """Say that one row cannot be trained on.

    Attributes:
        reason: key of the count that the row goes into.
        detail: what happened, for the log; may be empty.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        """Name the reason.

        Args:
            reason: key of the count that the row goes into.
            detail: what happened, for the log; may be empty.
        """
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}" if detail else reason)


@dataclass(slots=True)
class RenderedRow:
    """One row as text.

    Attributes:
        text: what gets tokenized; it ends where the last answer ends.
        prompts: half-open character ranges of what was said to the model, scaffolding left out; truncation may take
            from them.
        answers: half-open character ranges of what the model has to say, each with its end-of-turn token if it has
            one; ascending.
        openings: characters at which generation would begin, so that no token may lie across them.
        is_closed: whether the text ends with a token that ends the turn; else the end token is appended.
        notes: keys of further counts that the row goes into.
        as_text: half-open character ranges of typed control tokens, whose letters must not become the token; ascending.
    """

    text: str
    prompts: list[CharRange]
    answers: list[CharRange]
    is_closed: bool
    openings: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    as_text: list[CharRange] = field(default_factory=list)


@dataclass(slots=True)
class RenderedRows:
    """Rows as text.

    Attributes:
        row_ids: identity of each row, ``(rows,)``.
        sources: place of each row's source, ``(rows,)``.
        rows: as text.
        conversations: what each was rendered from; ``None`` where no template was used.
        labels: class of each row, ``(rows,)``; ``None`` for rows without classes.
        targets: the text that is to follow each row, for rows of two texts; else ``None``.
    """

    row_ids: Int64Array
    sources: Int16Array
    rows: list[RenderedRow]
    conversations: list[Conversation | None]
    labels: Int32Array | None = None
    targets: list[RenderedRow] | None = None


def render_text(text: str) -> RenderedRow:
    """Take a row of plain text: all of it is learned.

    Args:
        text: the row.
    """
    return RenderedRow(text, prompts=[], answers=[(0, len(text))], is_closed=False)


def put_system(system: str | None, prompt: str) -> str:
    """Put a system message before a prompt, an empty line between.

    Args:
        system: ``None`` or empty for none.
        prompt: what follows.
    """
    return f"{system}\n\n{prompt}" if system else prompt


def render_plain(prompt: str, response: str, system: str | None = None) -> RenderedRow:
    """Join prompt and response for a tokenizer without a chat template.

    A line break goes between two parts that would otherwise run together; it belongs to the prompt. A space at the
    prompt's end may become one token with the response's first word, as in all the text that models were trained on.

    Args:
        prompt: what the model reads.
        response: what it learns to answer.
        system: put before the prompt, an empty line between; ``None`` or empty for none.
    """
    before = put_system(system, prompt)
    if before and response and not before[-1].isspace() and not response[0].isspace():
        before += "\n"
    text, start = before + response, len(before)
    word_follows_space = before[-1:] == " " and not response[:1].isspace()
    return RenderedRow(
        text,
        prompts=[(0, start)],
        answers=[(start, len(text))],
        is_closed=False,
        openings=[] if word_follows_space else [start],
    )


def as_messages(prompt: str, response: str, system: str | None = None) -> list[Message]:
    """Write a prompt and a response as a conversation.

    Args:
        prompt: the user's turn.
        response: the assistant's.
        system: the system message; ``None`` or empty leaves it to the chat template's default.
    """
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def lacks_tools(text: str, messages: list[Message], tools: Tools | None) -> bool:
    """Say whether a tool that a conversation offers or calls is not named in its text.

    Many chat templates know no tools and render such a conversation without them, and without a word.

    Args:
        text: the conversation as text.
        messages: its turns.
        tools: what it may call.
    """
    calls = [call for message in messages for call in message.get("tool_calls") or [] if isinstance(call, dict)]
    for tool in [*(tools or []), *calls]:
        function = tool.get("function")
        name = (function if isinstance(function, dict) else tool).get("name")
        if isinstance(name, str) and name not in text:
            return True
    return False
