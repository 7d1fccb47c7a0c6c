"""Turn rows of any format into token ids and loss spans, some hundred rows at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import pyarrow as pa

from lm_tuning.errors import UserError
from lm_tuning.text.chat import ChatRenderer
from lm_tuning.text.masks import TokenizedRow, added_prefix, bare_backend, encode_rows, token_span, tokenize_row
from lm_tuning.text.rendering import CharRange, Message, RenderedRow, RowRefused, as_messages, render_plain, render_text
from lm_tuning.text.summary import SplitCounts
from lm_tuning.text.token_table import Span, scored_spans
from lm_tuning.text.truncation import (
    ANSWER_SHORTENED,
    END_CUT,
    NO_ANSWER_LEFT,
    OLD_TURNS_DROPPED,
    later_exchanges,
    shorten_row,
)

NOT_ROUND_TRIP = "not_round_trip"

_FIELDS = {
    "text": ("text",),
    "prompt_response": ("prompt", "response", "system"),
    "messages": ("messages",),
    "text_label": ("text", "label"),
}

# Rows whose last token is not the end of an answer.
_LOSES_ITS_END = {ANSWER_SHORTENED, END_CUT}
# Characters of an answer in a message.
_NUM_SHOWN = 80

_Source = tuple[RenderedRow, list[Message] | None]
PendingRow = tuple[int, _Source]


class RowTokenizer(AbstractContextManager["RowTokenizer"]):
    """Turn rows of one format into ids and spans; a context manager, since it borrows the tokenizer's backend."""

    def __init__(self, tokenizer: Any, format: str, *, max_length_tokens: int, truncation: str, loss_on: str) -> None:
        """Choose how rows become text.

        Args:
            tokenizer: a fast transformers tokenizer, for nothing else while the block lasts.
            format: ``text``, ``prompt_response``, ``messages`` or ``text_label`` (its label is the response).
            max_length_tokens: tokens that a row may have.
            truncation: what happens to longer rows, see ``shorten_row``.
            loss_on: ``assistant``, ``completion`` or ``all``.

        Raises:
            UserError: the format needs a chat template, and the tokenizer has none.
        """
        self._limit = max_length_tokens
        self._truncation = truncation
        self._loss_on = "all" if format == "text" else loss_on
        has_template = bool(tokenizer.chat_template)
        if format == "messages" and not has_template:
            raise UserError(
                "The rows are messages, but the model's tokenizer has no chat template. Take the chat or instruct "
                "version of the model, put a chat_template.jinja into its folder, or give rows of prompt and response."
            )
        self.uses_template = has_template and format != "text"
        self._chat = ChatRenderer(tokenizer) if self.uses_template else None
        self._fields = _FIELDS[format]
        self._render = self._renderer(format)
        self._prefix = added_prefix(tokenizer)
        self._end_id: int | None = tokenizer.eos_token_id
        self._backend_block = bare_backend(tokenizer)

    def __enter__(self) -> RowTokenizer:
        """Borrow the backend."""
        self._backend = self._backend_block.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Give the backend back."""
        self._backend_block.__exit__(*error)

    def render(self, batch: pa.RecordBatch, counts: SplitCounts) -> list[PendingRow]:
        """Write rows as text.

        Args:
            batch: rows of a stored split.
            counts: receives the rows that cannot be rendered.

        Returns:
            The others.
        """
        columns = batch.to_pydict()
        row_ids: list[int] = columns["row_id"]
        counts.num_read += len(row_ids)
        pending: list[PendingRow] = []
        fields: Iterable[tuple[Any, ...]] = zip(*(columns[name] for name in self._fields), strict=True)
        for row_id, values in zip(row_ids, fields, strict=True):
            try:
                pending.append((row_id, self._render(*values)))
            except RowRefused as refusal:
                counts.add(refusal.reason, row_id, refusal.detail)
        return pending

    def encode(self, pending: list[PendingRow]) -> tuple[list[Any], dict[int, str]]:
        """Tokenize rendered rows on all cores and decode their answers again; other threads go on meanwhile.

        Args:
            pending: what ``render`` returned.

        Returns:
            One encoding a row, and by row id what did not come back as it was.
        """
        encodings = encode_rows(self._backend, [rendered for _, (rendered, _) in pending])
        return encodings, self._prove(pending, encodings)

    def finish(
        self, pending: list[PendingRow], encoded: tuple[list[Any], dict[int, str]], counts: SplitCounts
    ) -> tuple[list[int], list[list[int]], list[list[Span]]]:
        """Find the learned tokens and make long rows fit.

        Args:
            pending: what ``render`` returned.
            encoded: what ``encode`` made of it.
            counts: receives what happens to the rows.

        Returns:
            Row ids, token ids and scored spans of the rows that are kept.
        """
        encodings, unlike = encoded
        for row_id, detail in unlike.items():
            counts.add(NOT_ROUND_TRIP, row_id, detail)
        kept_ids: list[int] = []
        tokens: list[list[int]] = []
        spans: list[list[Span]] = []
        for (row_id, source), encoding in zip(pending, encodings, strict=True):
            try:
                row, notes = self._fit(source, encoding)
                scored = scored_spans(row.spans, len(row.ids))
                if not scored:
                    raise RowRefused(NO_ANSWER_LEFT)
            except RowRefused as refusal:
                counts.add(refusal.reason, row_id, refusal.detail)
                continue
            for note in notes:
                counts.add(note, row_id)
            if not _LOSES_ITS_END.intersection(notes):
                counts.endings[row.ids[-1]] += 1
            kept_ids.append(row_id)
            tokens.append(row.ids)
            spans.append(scored)
        return kept_ids, tokens, spans

    def _renderer(self, format: str) -> Callable[..., _Source]:
        """Return a function from the fields of a row to its text."""
        if format == "text":
            return lambda text: (render_text(text), None)
        if format == "messages":
            return lambda text: self._render_chat(json.loads(text))
        if self.uses_template:
            return lambda *parts: self._render_chat(as_messages(*parts))
        return lambda *parts: (render_plain(*parts), None)

    def _render_chat(self, messages: list[Message]) -> _Source:
        assert self._chat is not None
        return self._chat.render(messages), messages

    def _tokens(self, rendered: RenderedRow, encoding: Any) -> TokenizedRow:
        return tokenize_row(rendered, encoding, loss_on=self._loss_on, prefix=self._prefix, end_id=self._end_id)

    def _fit(self, source: _Source, encoding: Any) -> tuple[TokenizedRow, list[str]]:
        """Tokenize one row within the limit, and say what that took."""
        rendered, messages = source
        row = self._tokens(rendered, encoding)
        notes = list(rendered.notes)
        while messages and len(row.ids) > self._limit and self._truncation == "truncate_prompt":
            messages = later_exchanges(messages, 1 - self._limit / len(row.ids))
            if messages is None:
                break
            rendered, _ = self._render_chat(messages)
            [encoding] = encode_rows(self._backend, [rendered])
            row = self._tokens(rendered, encoding)
            notes = [*dict.fromkeys([*notes, *rendered.notes, OLD_TURNS_DROPPED])]
        if len(row.ids) > self._limit:
            row, note = shorten_row(row, rendered, encoding, limit=self._limit, truncation=self._truncation)
            notes.append(note)
        return row, notes

    def _prove(self, pending: list[PendingRow], encodings: list[Any]) -> dict[int, str]:
        """Decode every answer and compare it with the text, so that a mask in the wrong place cannot pass."""
        pieces: list[list[int]] = []
        origins: list[tuple[int, Any, str, CharRange, Span]] = []
        for (row_id, (rendered, _)), encoding in zip(pending, encodings, strict=True):
            ids = encoding.ids
            for chars in rendered.answers:
                span = token_span(encoding, chars, len(rendered.text))
                pieces.append(ids[span[0] : span[1]])
                origins.append((row_id, encoding, rendered.text, chars, span))
        failed: dict[int, str] = {}
        decoded = self._backend.decode_batch(pieces, skip_special_tokens=False)
        for got, (row_id, encoding, text, chars, span) in zip(decoded, origins, strict=True):
            if got != text[slice(*chars)]:
                wanted = text[slice(*_covered(encoding, chars, span))]
                if "".join(got.split()) != "".join(wanted.split()):
                    failed.setdefault(row_id, f"{wanted[:_NUM_SHOWN]!r} comes back as {got[:_NUM_SHOWN]!r}")
        return failed


def _covered(encoding: Any, chars: CharRange, span: Span) -> CharRange:
    """Return the characters of some tokens: those that lie across an edge bring others along."""
    first, after = span
    if first == after:
        return chars
    return min(chars[0], encoding.token_to_chars(first)[0]), max(chars[1], encoding.token_to_chars(after - 1)[1])
