"""Make long rows fit: take from the prompt first, from the answer only when nothing else is left."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from lm_tuning.text.masks import TokenizedRow, inner_span
from lm_tuning.text.rendering import Message, RenderedRow, RowRefused
from lm_tuning.text.token_table import Span

PROMPT_SHORTENED = "prompt_shortened"
ANSWER_SHORTENED = "answer_shortened"
END_CUT = "end_cut"
OLD_TURNS_DROPPED = "old_turns_dropped"
TOO_LONG = "too_long"
NO_ANSWER_LEFT = "no_answer_left"


def shorten_row(
    row: TokenizedRow, rendered: RenderedRow, encoding: Any, *, limit: int, truncation: str
) -> tuple[TokenizedRow, str]:
    """Cut a row that is longer than the limit.

    ``truncate_prompt`` takes tokens from the start of the longest prompt content, then of the next longest; the
    beginning-of-text token, the roles' scaffolding and the whole answer stay. When the answer alone leaves no room,
    the prompt keeps at most half of the limit and the answer loses its end, and with it its end token.
    ``truncate_end`` keeps the first tokens.

    Args:
        row: a row of more than ``limit`` tokens.
        rendered: the same row as text.
        encoding: the tokens of the text.
        limit: tokens that may stay.
        truncation: ``truncate_prompt``, ``truncate_end``, ``drop`` or ``error``.

    Returns:
        The shorter row, and the count that it goes into.

    Raises:
        RowRefused: the row is to be dropped, or no learned token would be left.
    """
    if truncation in ("drop", "error"):
        raise RowRefused(TOO_LONG)
    if truncation == "truncate_end" or not rendered.prompts:
        return _cut_end(row, limit), END_CUT
    prompts = [inner_span(encoding, chars, len(rendered.text)) for chars in rendered.prompts]
    excess = len(row.ids) - limit
    num_prompt = sum(end - start for start, end in prompts)
    if excess <= num_prompt:
        return _cut_end(_cut_prompts(row, prompts, encoding, excess), limit), PROMPT_SHORTENED
    row = _cut_prompts(row, prompts, encoding, num_prompt - min(num_prompt, limit // 2))
    return _cut_end(row, limit), ANSWER_SHORTENED


def later_exchanges(messages: list[Message], excess_fraction: float) -> list[Message] | None:
    """Leave out the oldest exchanges of a conversation that is too long, so that the later ones stay whole.

    Leading system messages stay. An exchange reaches from a user turn that follows another role to the next such turn.

    Args:
        messages: the conversation.
        excess_fraction: share of its tokens that has to go.

    Returns:
        A conversation that should fit, by the number of characters; at least the last exchange with an answer.
        ``None`` when there is no older one.
    """
    num_system = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    last_answer = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
    openings = [
        i
        for i in range(num_system + 1, last_answer)
        if messages[i]["role"] == "user" and messages[i - 1]["role"] != "user"
    ]
    if not openings:
        return None
    reached = [0, *accumulate(len(str(message.get("content") or "")) for message in messages)]
    wanted = excess_fraction * reached[-1]
    opening = next((i for i in openings if reached[i] - reached[num_system] >= wanted), openings[-1])
    return messages[:num_system] + messages[opening:]


def _cut_end(row: TokenizedRow, limit: int) -> TokenizedRow:
    spans = [(start, min(end, limit)) for start, end in row.spans if start < limit]
    if not any(end > max(start, 1) for start, end in spans):
        raise RowRefused(NO_ANSWER_LEFT)
    return TokenizedRow(row.ids[:limit], spans, row.num_prefixed)


def _cut_prompts(row: TokenizedRow, prompts: list[Span], encoding: Any, num_cut: int) -> TokenizedRow:
    """Remove tokens from the starts of the longest prompts, never half a character."""
    offsets = encoding.offsets
    keep = [1] * len(row.ids)
    for start, end in sorted(prompts, key=lambda span: span[0] - span[1]):
        if num_cut <= 0:
            break
        stop = min(start + num_cut, end)
        while stop < end and offsets[stop][0] < offsets[stop - 1][1]:
            stop += 1
        keep[start + row.num_prefixed : stop + row.num_prefixed] = [0] * (stop - start)
        num_cut -= stop - start
    place = [0, *accumulate(keep)]
    spans = [(place[start], place[end]) for start, end in row.spans]
    ids = [token for token, kept in zip(row.ids, keep, strict=True) if kept]
    return TokenizedRow(ids, spans, row.num_prefixed)
