"""What a row looks like as text, before it becomes tokens: which characters are content, and which are supervised."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from lm_tuning.text.records import CharRange, Conversation, Message
from lm_tuning.text.store.table import Int16Array, Int32Array, Int64Array

NOT_VERBATIM = "content_not_verbatim"
TURN_LEFT_OUT = "turn_left_out"
REASONING_LEFT_OUT = "reasoning_left_out"
TOOLS_LEFT_OUT = "tools_left_out"
EARLIER_SHORTENED = "earlier_answer_shortened"

_OR_WARN = "or set tokenize.on_altered_content to warn"
ALTERED = {
    NOT_VERBATIM: ("with content that the chat template changes", f"Change those rows, {_OR_WARN}."),
    TURN_LEFT_OUT: (
        "with a turn that the chat template leaves out",
        "Where that is the system turn, tokenize.system_turn: merge_into_user puts its text before that of the user; "
        f"else take a model whose template shows it, {_OR_WARN}.",
    ),
    REASONING_LEFT_OUT: (
        "with reasoning that the chat template does not show",
        "Take a model whose template shows it (some want an argument, see tokenize.template_arguments), put the "
        f"reasoning into the content as the model writes it, take it out of the rows, {_OR_WARN}.",
    ),
    TOOLS_LEFT_OUT: (
        "with tools or tool calls that the chat template does not show whole",
        f"Take a model whose template knows tools, {_OR_WARN}.",
    ),
}
"""What a template may do to a row that ``tokenize.on_altered_content`` is about: in words, and how to fix it."""


class RowRefused(Exception):
    """Report that one row cannot be trained on.

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
        is_closed: whether the text ends with the EOS token of the turn; else the EOS token is appended.
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
        sources: index of each row's source, ``(rows,)``.
        rows: as text.
        conversations: what each was rendered from, ``None`` where no template was used; none at all for rows that no
            template can write.
        labels: class of each row, ``(rows,)``; ``None`` for rows without classes.
        targets: the text that is to follow each row, for rows of two texts; else ``None``.
        columns: start and end of each column in the prompt or text of each row, end to end; ``None`` where those are
            one column by themselves.
    """

    row_ids: Int64Array
    sources: Int16Array
    rows: list[RenderedRow]
    conversations: list[Conversation | None] = field(default_factory=list)
    labels: Int32Array | None = None
    targets: list[RenderedRow] | None = None
    columns: pa.ListArray | None = None

    def columns_of(self, position: int) -> list[CharRange]:
        """Return the character ranges of the columns in the prompt or text of a row; empty where that is one column.

        Args:
            position: of the row.
        """
        edges = (self.columns[position].as_py() if self.columns is not None else None) or []
        return list(zip(edges[::2], edges[1::2], strict=True))

    def yielding(self, position: int) -> list[CharRange]:
        """Return the characters that may give way in a row that no chat template wrote: columns, or whole prompts.

        Args:
            position: of the row.
        """
        row, columns = self.rows[position], self.columns_of(position)
        prompts = row.prompts or [(0, len(row.text))]
        if not columns:
            return prompts
        # Columns are counted from the start of the prompt, which is the last of the ranges.
        start = prompts[-1][0]
        return [*prompts[:-1], *((start + low, start + high) for low, high in columns)]


def render_text(text: str) -> RenderedRow:
    """Render a row of plain text: all of it is supervised.

    Args:
        text: the row.
    """
    return RenderedRow(text, prompts=[], answers=[(0, len(text))], is_closed=False)


def put_system(system: str | None, prompt: str) -> str:
    """Add a system message before a prompt, an empty line between.

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
    end = len(before)
    # Else question and answer would be one word, and a token could lie across them.
    if before and response and not before[-1].isspace() and not response[0].isspace():
        before += "\n"
    text, start = before + response, len(before)
    # Most vocabularies join a space with the word behind it. A cut there would split what every text has in one token.
    word_follows_space = before[-1:] == " " and not response[:1].isspace()
    return RenderedRow(
        text,
        prompts=[*([(0, len(system))] if system else []), (end - len(prompt), end)],
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
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def merge_system_turns(messages: list[Message]) -> list[Message]:
    """Write every system turn into a user turn, an empty line between: the next one, or else the one before it.

    A system turn with no user turn beside it becomes one itself.

    Args:
        messages: the conversation, left as it is.
    """
    merged: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "system":
            waiting.append(message.get("content") or "")
            continue
        if waiting:
            system = "\n\n".join(waiting)
            waiting = []
            # Not into a tool's or the assistant's turn: only the user's words come before what is to be answered.
            if message["role"] == "user":
                merged.append({**message, "content": put_system(system, message.get("content") or "")})
                continue
            _append_user(merged, system)
        merged.append(message)
    if waiting:
        _append_user(merged, "\n\n".join(waiting))
    return merged


def _append_user(messages: list[Message], text: str) -> None:
    """Add words of the user, to the last turn where that is the user's."""
    if messages and messages[-1]["role"] == "user":
        messages[-1] = {**messages[-1], "content": put_system(messages[-1].get("content"), text)}
    else:
        messages.append({"role": "user", "content": text})
