"""Turn rows of any format into token ids and supervised spans, about a thousand rows at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from lm_tuning.data.format.examples import FIELDS
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import TokenizeParameters
from lm_tuning.text.align.bytes import AlignedRows, RowAligner, build_byte_table
from lm_tuning.text.align.masks import Encoded, Encoding, TokenizedRow, added_around, tokenize_row
from lm_tuning.text.decoding import find_unlike
from lm_tuning.text.records import CharRange, Conversation, Message, Span, Tools
from lm_tuning.text.render.chat import ChatRenderer
from lm_tuning.text.render.chat_template import REFUSED, read_template
from lm_tuning.text.render.plain import (
    RenderedRow,
    RenderedRows,
    RowRefused,
    as_messages,
    merge_system_turns,
    render_plain,
    render_text,
)
from lm_tuning.text.store import columns
from lm_tuning.text.store.table import Int32Array, Int64Array, TokenColumns, columns_of, flatten_ids, scored_spans
from lm_tuning.text.tokenizers import truncation
from lm_tuning.text.tokenizers.base import NOT_ROUND_TRIP, TaskTokenizer
from lm_tuning.text.tokenizers.counts import KeptRows, SplitCounts

# Rows whose last token is not the end of an answer.
_LOSES_ITS_END = {truncation.ANSWER_SHORTENED, truncation.END_CUT}
_MERGED_IS_TAKEN = (
    "(it takes this row with tokenize.system_turn: merge_into_user, which puts the system turn before the user's words)"
)


class RowTokenizer(TaskTokenizer):
    """Turn rows of one format into ids and spans, for a model that predicts the next token."""

    def __init__(self, tokenizer: Any, settings: TokenizeParameters, format: str) -> None:
        """Choose how rows become text.

        Args:
            tokenizer: a fast transformers tokenizer; must not be used elsewhere inside the ``with`` block.
            settings: the ``tokenize`` parameters.
            format: ``text``, ``prompt_response``, ``messages`` or ``text_label`` (its label is the response).

        Raises:
            UserError: the format or an argument needs a chat template, and no template writes the rows; or the template
                reads no such argument.
        """
        has_template = bool(tokenizer.chat_template)
        if format == "messages" and not has_template:
            raise UserError(
                "The rows are messages, but the model's tokenizer has no chat template. Take the chat or instruct "
                "version of the model, put a chat_template.jinja into its folder, or give rows of prompt and response."
            )
        self.uses_template = has_template and format != "text"
        if settings.template_arguments and not self.uses_template:
            why = "the rows are running text" if has_template else "the model's tokenizer has no chat template"
            raise UserError(
                f"tokenize.template_arguments = {settings.template_arguments}: {why}, so no template reads them. Set "
                "tokenize.template_arguments: {}."
            )
        super().__init__(
            tokenizer,
            settings,
            # Running text may be made of control tokens; in turns a typed one would end the turn.
            auto_policy="keep" if format == "text" else "as_text",
            template=read_template(tokenizer) if self.uses_template else None,
        )
        self._chat = (
            ChatRenderer(tokenizer, self._control, template_arguments=settings.template_arguments)
            if self.uses_template
            else None
        )
        self._limit = settings.max_length_tokens
        self._loss_on = "all" if format == "text" else settings.loss_on
        self._merges_system = settings.system_turn == "merge_into_user"
        self._format = format
        self._render = self._renderer(format)
        self._prefix = added_around(tokenizer)[0]
        self._end_id: int | None = tokenizer.eos_token_id
        # Running text is supervised whole, so nothing has to be found in it.
        self._bytes = None if format == "text" else build_byte_table(tokenizer.backend_tokenizer)
        # Without a byte table only the library knows which characters a token holds, at the price of slower encoding.
        self._needs_offsets = format != "text" and self._bytes is None

    def render(self, batch: pa.RecordBatch, counts: SplitCounts) -> RenderedRows:
        """Write rows as text, with the chat template where there is one."""
        positions, made = self._render_each(batch, FIELDS[self._format], self._render, counts)
        conversations = [conversation for _, conversation in made]
        return self._collect(batch, positions, [row for row, _ in made], conversations=conversations)

    def encode(self, rendered: RenderedRows) -> list[Any]:
        """Tokenize rendered rows, with the characters of each token where those have to be known."""
        return self._encoder.encode(rendered.rows) if self._needs_offsets else super().encode(rendered)

    def finish(self, rendered: RenderedRows, encodings: list[Any], counts: SplitCounts) -> TokenColumns:
        """Find the supervised tokens and make long rows fit."""
        if self._format == "text":
            return self._finish_text(rendered, encodings, counts)
        others: dict[int, Encoded] = {}
        if self._bytes is None:
            others = dict(enumerate(encodings))
            # Positions of the library are not taken on trust: each answer has to decode to itself.
            unlike = find_unlike(self._backend, rendered.rows, others)
            return self._one_by_one(rendered, others, unlike, counts)[0]
        tokens: list[list[int]] = [encoding.ids for encoding in encodings]
        self._encoder.spell_typed(rendered.rows, tokens, others)
        aligned = RowAligner(self._backend, self._encoder, self._bytes).align(rendered.rows, tokens, others)
        return self._finish_aligned(rendered, aligned, others, counts)

    def _renderer(self, format: str) -> Callable[..., tuple[RenderedRow, Conversation | None]]:
        """Return a function from the fields of a row to its text and what that was rendered from."""
        if format == "text":
            return lambda text: (self._look_through(render_text(text)), None)
        if format == "messages":
            return lambda text, tools: self._render_chat(json.loads(text), json.loads(tools) if tools else None)
        if self.uses_template:
            return lambda *parts: self._render_chat(as_messages(*parts), None)
        return lambda *parts: (self._look_through(render_plain(*parts)), None)

    def _render_chat(self, messages: list[Message], tools: Tools | None) -> tuple[RenderedRow, Conversation]:
        assert self._chat is not None
        given = merge_system_turns(messages) if self._merges_system else messages
        try:
            return self._chat.render(given, tools), (messages, tools)
        except RowRefused as refusal:
            # Whether merging would help is tried with the row itself, so the message promises nothing that is not so.
            if refusal.reason != REFUSED or self._merges_system or not self._takes_merged(messages, tools):
                raise
            raise RowRefused(refusal.reason, f"{refusal.detail} {_MERGED_IS_TAKEN}") from refusal

    def _takes_merged(self, messages: list[Message], tools: Tools | None) -> bool:
        """Try whether the template takes a conversation that it refused when its system turns are merged."""
        assert self._chat is not None
        if all(message["role"] != "system" for message in messages):
            return False
        try:
            self._chat.render(merge_system_turns(messages), tools)
        except RowRefused:
            return False
        return True

    def _finish_text(self, rendered: RenderedRows, encodings: list[Any], counts: SplitCounts) -> TokenColumns:
        """Finish running text: every token of it is supervised, and a long row loses its end."""
        rows = KeptRows(rendered.row_ids, counts)
        tokens = self._spell(rendered.rows, encodings, rows)
        ids, offsets, _ = self._put_around(*flatten_ids(tokens), np.ones(len(tokens), dtype=np.bool_))
        lengths = np.diff(offsets)  # (rows,)
        is_cut = self._settle_long(
            lengths, rows, limit=self._limit, dropped_as=truncation.TOO_LONG, noted_in=counts.long_rows
        )
        # Nothing predicts the first token, so one alone teaches nothing.
        rows.drop(truncation.NO_ANSWER_LEFT, np.minimum(lengths, self._limit) <= 1)
        rows.note(truncation.END_CUT, is_cut)
        self._count_unknown(ids, offsets, rows)
        self._count_kept(rendered, rows, ids, offsets, is_whole=~is_cut)
        if is_cut.any():
            ids, offsets = columns.cut_ends(ids, offsets, self._limit)
            lengths = np.diff(offsets)
        owners = np.arange(len(tokens))
        spans = columns.score_spans(owners, np.zeros_like(owners), lengths, lengths)
        return columns.keep_rows(TokenColumns(rendered.row_ids, rendered.sources, ids, offsets, *spans), rows.mask)

    def _finish_aligned(
        self, rendered: RenderedRows, aligned: AlignedRows, others: dict[int, Encoded], counts: SplitCounts
    ) -> TokenColumns:
        """Finish rows whose tokens are placed in their texts, all at once but for those that need a closer look."""
        num_rows = len(rendered.rows)
        is_open = np.fromiter((not row.is_closed for row in rendered.rows), dtype=np.bool_, count=num_rows)
        ids, offsets, has_before = self._put_around(aligned.ids, aligned.offsets, is_open)
        lengths = np.diff(offsets)  # (rows,)
        # (rows,): rows that need no closer look
        regular = lengths <= self._limit
        regular[np.fromiter(others, dtype=np.int64)] = False
        if self._loss_on == "all":
            owners = np.arange(num_rows)
            first, after = np.zeros_like(owners), lengths
        else:
            answers = [row.answers[-1:] if self._loss_on == "completion" else row.answers for row in rendered.rows]
            owners = np.repeat(np.arange(num_rows), [*map(len, answers)])  # (answers,): the row of each
            edges = np.fromiter(chain.from_iterable(chain.from_iterable(answers)), np.int64, 2 * len(owners))
            known = regular[owners]
            owners = owners[known]
            first, after = aligned.spans(owners, edges[::2][known], edges[1::2][known])
            # (answers,): spans were found in the text, which the prefix is no part of
            shift = len(self._prefix) * has_before[owners]
            first, after = first + shift, after + shift
            if is_open.any() and len(owners):
                # The end is supervised with the answer that it ends, even when that answer is empty.
                is_last = np.append(owners[1:] != owners[:-1], True) & is_open[owners]
                after = np.where(is_last, lengths[owners], after)
        spans = columns.score_spans(owners, first, after, lengths)
        placed = TokenColumns(rendered.row_ids, rendered.sources, ids, offsets, *spans)
        rows = KeptRows(rendered.row_ids, counts, regular)
        rows.drop(truncation.NO_ANSWER_LEFT, np.diff(placed.span_offsets) == 0)
        self._count_kept(rendered, rows, ids, offsets)
        if rows.mask.all():
            return placed
        unlike = find_unlike(self._backend, rendered.rows, others)
        for position in np.flatnonzero(~regular).tolist():
            if position not in others:
                others[position] = aligned.row(position)
        added, positions = self._one_by_one(rendered, dict(sorted(others.items())), unlike, counts)
        chosen = np.flatnonzero(rows.mask)
        # Back in the order of the chunk, so that row order never depends on which rows were long.
        joined = columns.join_columns(columns.take_rows(placed, chosen), added)
        return columns.take_rows(joined, np.argsort(np.concatenate([chosen, positions]), kind="stable"))

    def _put_around(
        self, ids: Int32Array, offsets: Int64Array, is_open: columns.BoolArray
    ) -> tuple[Int32Array, Int64Array, columns.BoolArray]:
        """Add what belongs before every row and the end of open ones, each where it is not there already."""
        has_before = ~columns.begins_with(ids, offsets, self._prefix)
        ids, offsets = columns.put_around(
            ids, offsets, before=self._prefix, has_before=has_before, after=self._end_id, is_open=is_open
        )
        return ids, offsets, has_before

    def _count_kept(
        self,
        rendered: RenderedRows,
        rows: KeptRows,
        ids: Int32Array,
        offsets: Int64Array,
        *,
        is_whole: columns.BoolArray | None = None,
    ) -> None:
        """Count what was noted of the rows that are kept, and their EOS tokens."""
        rows.note_each(row.notes for row in rendered.rows)
        ends = offsets[1:][rows.mask if is_whole is None else rows.mask & is_whole]
        tokens, numbers = np.unique(ids[ends - 1], return_counts=True)
        rows.counts.endings.update(dict(zip(tokens.tolist(), numbers.tolist(), strict=True)))

    def _one_by_one(
        self, rendered: RenderedRows, encodings: dict[int, Encoded], unlike: dict[int, str], counts: SplitCounts
    ) -> tuple[TokenColumns, list[int]]:
        """Finish rows that need a closer look.

        Args:
            rendered: all rows.
            encodings: of these rows by index, or their refusals.
            unlike: what did not come back as it was, by index.
            counts: receives what happens to the rows.

        Returns:
            The rows that are kept, and their indices.
        """
        positions: list[int] = []
        tokens: list[list[int]] = []
        spans: list[list[Span]] = []
        for position, encoding in encodings.items():
            row_id = int(rendered.row_ids[position])
            try:
                if isinstance(encoding, RowRefused):
                    raise encoding
                row, notes = self._fit(rendered, position, encoding, counts)
                scored = scored_spans(row.spans, len(row.ids))
                if not scored:
                    raise RowRefused(truncation.NO_ANSWER_LEFT)
            except RowRefused as refusal:
                counts.add(refusal.reason, row_id, refusal.detail)
                continue
            for note in notes:
                counts.add(note, row_id)
            if position in unlike:
                counts.add(NOT_ROUND_TRIP, row_id, unlike[position])
            if not _LOSES_ITS_END.intersection(notes):
                counts.endings[row.ids[-1]] += 1
            positions.append(position)
            tokens.append(row.ids)
            spans.append(scored)
        return columns_of(rendered.row_ids[positions], rendered.sources[positions], tokens, spans), positions

    def _tokens(self, rendered: RenderedRow, encoding: Encoding) -> TokenizedRow:
        return tokenize_row(rendered, encoding, loss_on=self._loss_on, prefix=self._prefix, end_id=self._end_id)

    def _fit(
        self, all_rendered: RenderedRows, position: int, encoding: Encoding, counts: SplitCounts
    ) -> tuple[TokenizedRow, list[str]]:
        """Tokenize one row within the limit, and say what that took."""
        rendered = all_rendered.rows[position]
        row = self._tokens(rendered, encoding)
        notes = list(rendered.notes)
        if len(row.ids) <= self._limit:
            return row, notes
        # As it was before anything is cut: reports say how long rows are, not how long they became.
        counts.long_rows.add(np.array([len(row.ids)]), limit=self._limit)
        messages, tools = all_rendered.conversations[position] or (None, None)
        # By characters it should fit at once; tokens decide, so it may take another round.
        while messages and len(row.ids) > self._limit and self._settings.truncation == "truncate_prompt":
            later = truncation.later_exchanges(messages, 1 - self._limit / len(row.ids))
            if later is None:
                break
            messages = later
            rendered, _ = self._render_chat(messages, tools)
            [encoding] = self._encoder.encode([rendered])
            if isinstance(encoding, RowRefused):
                raise encoding
            row = self._tokens(rendered, encoding)
            notes = [*dict.fromkeys([*notes, *rendered.notes, "old_turns_dropped"])]
        if len(row.ids) > self._limit:
            row, found = truncation.shorten_row(
                row,
                rendered,
                encoding,
                limit=self._limit,
                truncation=self._settings.truncation,
                cut_prompt_at=self._settings.cut_prompt_at,
                yielding=self._yielding(rendered, messages, all_rendered, position),
            )
            notes += found
        return row, notes

    def _yielding(
        self, rendered: RenderedRow, messages: list[Message] | None, all_rendered: RenderedRows, position: int
    ) -> list[CharRange]:
        """Return the characters of a long row that may give way: its columns, or its turns."""
        if messages is None:
            return all_rendered.yielding(position)
        if self._format != "messages":
            prompt = messages[-2]["content"]
            return truncation.align_columns(rendered, prompt, all_rendered.columns_of(position) or [(0, len(prompt))])
        if self._merges_system:
            return truncation.split_off_systems(
                rendered, [turn["content"] for turn in messages if turn["role"] == "system"]
            )
        return rendered.prompts
