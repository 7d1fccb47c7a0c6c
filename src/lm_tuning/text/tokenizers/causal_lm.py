"""Turn rows of any format into token ids and loss spans, some hundred rows at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from lm_tuning.data.format.examples import FIELDS
from lm_tuning.errors import UserError
from lm_tuning.text.align.bytes import AlignedRows, build_byte_table
from lm_tuning.text.align.masks import TokenizedRow, added_prefix, tokenize_row
from lm_tuning.text.align.rows import find_unlike
from lm_tuning.text.records import Span
from lm_tuning.text.render.chat import ChatRenderer
from lm_tuning.text.render.plain import (
    CharRange,
    Conversation,
    Message,
    RenderedRow,
    RenderedRows,
    RowRefused,
    Tools,
    as_messages,
    column_ranges_of,
    merge_system_turns,
    render_plain,
    render_text,
)
from lm_tuning.text.render.template_bounds import read_template
from lm_tuning.text.render.template_call import REFUSED
from lm_tuning.text.store.columns import (
    BoolArray,
    begins_with,
    columns_of,
    cut_ends,
    ends_with,
    flatten_ids,
    hold_token,
    join_columns,
    put_around,
    score_spans,
    take_rows,
)
from lm_tuning.text.store.table import Int32Array, Int64Array, TokenColumns, scored_spans
from lm_tuning.text.tokenizers.base import NOT_ROUND_TRIP, TaskTokenizer
from lm_tuning.text.tokenizers.counts import SplitCounts
from lm_tuning.text.tokenizers.truncation import (
    ANSWER_SHORTENED,
    END_CUT,
    NO_ANSWER_LEFT,
    OLD_TURNS_DROPPED,
    TOO_LONG,
    align_columns,
    later_exchanges,
    shorten_row,
    split_off_systems,
)

# Rows whose last token is not the end of an answer.
_LOSES_ITS_END = {ANSWER_SHORTENED, END_CUT}
_MERGED_IS_TAKEN = (
    "(it takes this row with tokenize.system_turn: merge_into_user, which puts the system turn before the user's words)"
)


class RowTokenizer(TaskTokenizer):
    """Turn rows of one format into ids and spans, for a model that predicts the next token."""

    def __init__(
        self,
        tokenizer: Any,
        format: str,
        *,
        max_length_tokens: int,
        truncation: str,
        cut_prompt_at: str = "middle",
        loss_on: str,
        system_turn: str = "keep",
        template_arguments: Mapping[str, Any] | None = None,
        control_tokens: str = "auto",
    ) -> None:
        """Choose how rows become text.

        Args:
            tokenizer: a fast transformers tokenizer, for nothing else while the block lasts.
            format: ``text``, ``prompt_response``, ``messages`` or ``text_label`` (its label is the response).
            max_length_tokens: tokens that a row may have.
            truncation: what happens to longer rows, see ``shorten_row``.
            cut_prompt_at: where ``truncate_prompt`` cuts: ``middle``, ``end`` or ``start``.
            loss_on: ``assistant``, ``completion`` or ``all``.
            system_turn: ``keep``, or ``merge_into_user`` to put its text before that of the user turn.
            template_arguments: further arguments of the chat template, by name.
            control_tokens: what happens to typed control tokens: ``as_text``, ``keep``, ``drop``, ``error``, or
                ``auto``, which is ``keep`` for running text and ``as_text`` for everything else.

        Raises:
            UserError: the format or an argument needs a chat template, and no template writes the rows; or the template
                reads no such argument.
        """
        self._limit = max_length_tokens
        self._loss_on = "all" if format == "text" else loss_on
        has_template = bool(tokenizer.chat_template)
        if format == "messages" and not has_template:
            raise UserError(
                "The rows are messages, but the model's tokenizer has no chat template. Take the chat or instruct "
                "version of the model, put a chat_template.jinja into its folder, or give rows of prompt and response."
            )
        self.uses_template = has_template and format != "text"
        if template_arguments and not self.uses_template:
            why = "the rows are running text" if has_template else "the model's tokenizer has no chat template"
            raise UserError(
                f"tokenize.template_arguments = {dict(template_arguments)}: {why}, so no template reads them. Set "
                "tokenize.template_arguments: {}."
            )
        if control_tokens == "auto" and format == "text":
            control_tokens = "keep"
        super().__init__(
            tokenizer,
            truncation=truncation,
            cut_prompt_at=cut_prompt_at,
            control_tokens=control_tokens,
            template=read_template(tokenizer) if self.uses_template else None,
        )
        self._chat = (
            ChatRenderer(tokenizer, self._control, template_arguments=template_arguments)
            if self.uses_template
            else None
        )
        self._merges_system = system_turn == "merge_into_user"
        self._format = format
        self._render = self._renderer(format)
        self._prefix = added_prefix(tokenizer)
        self._end_id: int | None = tokenizer.eos_token_id
        # Running text is supervised whole, so nothing has to be found in it.
        self._bytes = None if format == "text" else build_byte_table(tokenizer.backend_tokenizer)
        self._needs_offsets = format != "text" and self._bytes is None

    def render(self, batch: pa.RecordBatch, counts: SplitCounts) -> RenderedRows:
        """Write rows as text, with the chat template where there is one."""
        positions, made = self._render_each(batch, FIELDS[self._format], self._render, counts)
        return RenderedRows(
            batch.column("row_id").to_numpy()[positions],
            batch.column("source").to_numpy()[positions],
            [row for row, _ in made],
            [conversation for _, conversation in made],
            columns=column_ranges_of(batch, positions),
        )

    def encode(self, rendered: RenderedRows) -> list[Any]:
        """Tokenize rendered rows, with the characters of each token where those have to be known."""
        return self._encoder.encode(rendered.rows) if self._needs_offsets else super().encode(rendered)

    def finish(self, rendered: RenderedRows, encodings: list[Any], counts: SplitCounts) -> TokenColumns:
        """Find the supervised tokens and make long rows fit."""
        others: dict[int, Any] = {}
        if self._needs_offsets:
            others = dict(enumerate(encodings))
            unlike = find_unlike(self._backend, rendered.rows, others)
            return self._one_by_one(rendered, others, unlike, counts)[0]
        if self._format == "text":
            return self._finish_text(rendered, encodings, counts)
        tokens: list[list[int]] = [encoding.ids for encoding in encodings]
        self._aligner.spell_typed(rendered.rows, tokens, others)
        aligned = self._aligner.align(rendered.rows, tokens, others)
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
        try:
            return self._chat.render(self._as_given(messages), tools), (messages, tools)
        except RowRefused as refusal:
            if refusal.reason != REFUSED or self._merges_system or not self._takes_merged(messages, tools):
                raise
            raise RowRefused(refusal.reason, f"{refusal.detail} {_MERGED_IS_TAKEN}") from refusal

    def _as_given(self, messages: list[Message]) -> list[Message]:
        """Return what the template gets of a conversation."""
        if self._merges_system and any(message["role"] == "system" for message in messages):
            return merge_system_turns(messages)
        return messages

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
        row_ids = rendered.row_ids
        kept = np.ones(len(row_ids), dtype=np.bool_)
        tokens = self._spell(rendered.rows, encodings, row_ids, kept, counts)
        ids, offsets, _ = self._put_around(*flatten_ids(tokens), np.ones(len(tokens), dtype=np.bool_))
        lengths = np.diff(offsets)
        is_cut = self._settle_long(
            lengths, row_ids, kept, counts, limit=self._limit, dropped_as=TOO_LONG, noted_in=counts.long_rows
        )
        is_supervised = np.minimum(lengths, self._limit) > 1
        counts.add_rows(NO_ANSWER_LEFT, row_ids[kept & ~is_supervised])
        kept &= is_supervised
        counts.add_rows(END_CUT, row_ids[kept & is_cut])
        if self._unknown_id is not None:
            counts.add_rows(NOT_ROUND_TRIP, row_ids[kept & hold_token(ids, offsets, self._unknown_id)])
        self._count_kept(rendered, kept, ids, offsets, counts, is_whole=~is_cut)
        if is_cut.any():
            ids, offsets = cut_ends(ids, offsets, self._limit)
            lengths = np.diff(offsets)
        rows = np.arange(len(tokens))
        columns = TokenColumns(
            row_ids, rendered.sources, ids, offsets, *score_spans(rows, np.zeros_like(rows), lengths, lengths)
        )
        return columns if kept.all() else take_rows(columns, np.flatnonzero(kept))

    def _finish_aligned(
        self, rendered: RenderedRows, aligned: AlignedRows, others: dict[int, Any], counts: SplitCounts
    ) -> TokenColumns:
        """Finish rows whose tokens are placed in their texts, all at once but for those that need a closer look."""
        rows = rendered.rows
        num = len(rows)
        is_open = np.fromiter((not row.is_closed for row in rows), dtype=np.bool_, count=num)
        ids, offsets, has_before = self._put_around(aligned.ids, aligned.offsets, is_open)
        lengths = np.diff(offsets)
        regular = lengths <= self._limit
        regular[np.fromiter(others, dtype=np.int64)] = False
        if self._loss_on == "all":
            owners = np.arange(num)
            first, after = np.zeros_like(owners), lengths
        else:
            answers = [row.answers[-1:] if self._loss_on == "completion" else row.answers for row in rows]
            owners = np.repeat(np.arange(num), [*map(len, answers)])
            edges = np.fromiter(chain.from_iterable(chain.from_iterable(answers)), np.int64, 2 * len(owners))
            known = regular[owners]
            owners = owners[known]
            first, after = aligned.spans(owners, edges[::2][known], edges[1::2][known])
            shift = len(self._prefix) * has_before[owners]
            first, after = first + shift, after + shift
            if is_open.any() and len(owners):
                # The end is supervised with the answer that it ends, even when that answer is empty.
                is_last = np.append(owners[1:] != owners[:-1], True) & is_open[owners]
                after = np.where(is_last, lengths[owners], after)
        columns = TokenColumns(
            rendered.row_ids, rendered.sources, ids, offsets, *score_spans(owners, first, after, lengths)
        )
        kept = regular & (np.diff(columns.span_offsets) > 0)
        counts.add_rows(NO_ANSWER_LEFT, rendered.row_ids[regular & ~kept])
        self._count_kept(rendered, kept, ids, offsets, counts)
        if kept.all():
            return columns
        unlike = find_unlike(self._backend, rows, others)
        others.update(
            (position, aligned.row(position))
            for position in np.flatnonzero(~regular).tolist()
            if position not in others
        )
        added, positions = self._one_by_one(rendered, dict(sorted(others.items())), unlike, counts)
        chosen = np.flatnonzero(kept)
        joined = join_columns(take_rows(columns, chosen), added)
        return take_rows(joined, np.argsort(np.concatenate([chosen, positions]), kind="stable"))

    def _put_around(
        self, ids: Int32Array, offsets: Int64Array, is_open: BoolArray
    ) -> tuple[Int32Array, Int64Array, BoolArray]:
        """Add what belongs before every row and the end of open ones, each where it is not there already."""
        has_before = ~begins_with(ids, offsets, self._prefix) if self._prefix else np.zeros(len(is_open), np.bool_)
        has_after = np.zeros(len(is_open), np.bool_)
        if self._end_id is not None and is_open.any():
            has_after = is_open & ~ends_with(ids, offsets, self._end_id)
        ids, offsets = put_around(
            ids, offsets, before=self._prefix, has_before=has_before, after=self._end_id or 0, has_after=has_after
        )
        return ids, offsets, has_before

    def _count_kept(
        self,
        rendered: RenderedRows,
        kept: BoolArray,
        ids: Int32Array,
        offsets: Int64Array,
        counts: SplitCounts,
        *,
        is_whole: BoolArray | None = None,
    ) -> None:
        """Count what was noted of the rows that are kept, and their EOS tokens."""
        counts.add_notes([row.notes for row in rendered.rows], rendered.row_ids, kept)
        ends = offsets[1:][kept if is_whole is None else kept & is_whole]
        tokens, numbers = np.unique(ids[ends - 1], return_counts=True)
        counts.endings.update(dict(zip(tokens.tolist(), numbers.tolist(), strict=True)))

    def _one_by_one(
        self, rendered: RenderedRows, encodings: dict[int, Any], unlike: dict[int, str], counts: SplitCounts
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
                    raise RowRefused(NO_ANSWER_LEFT)
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
        row_ids = [int(rendered.row_ids[position]) for position in positions]
        sources = [int(rendered.sources[position]) for position in positions]
        return columns_of(row_ids, sources, tokens, spans), positions

    def _tokens(self, rendered: RenderedRow, encoding: Any) -> TokenizedRow:
        return tokenize_row(rendered, encoding, loss_on=self._loss_on, prefix=self._prefix, end_id=self._end_id)

    def _fit(
        self, all_rendered: RenderedRows, position: int, encoding: Any, counts: SplitCounts
    ) -> tuple[TokenizedRow, list[str]]:
        """Tokenize one row within the limit, and say what that took."""
        rendered = all_rendered.rows[position]
        row = self._tokens(rendered, encoding)
        notes = list(rendered.notes)
        if len(row.ids) <= self._limit:
            return row, notes
        counts.long_rows.add(np.array([len(row.ids)]), limit=self._limit)
        messages, tools = all_rendered.conversations[position] or (None, None)
        while messages and len(row.ids) > self._limit and self._truncation == "truncate_prompt":
            later = later_exchanges(messages, 1 - self._limit / len(row.ids))
            if later is None:
                break
            messages = later
            rendered, _ = self._render_chat(messages, tools)
            [encoding] = self._encoder.encode([rendered])
            if isinstance(encoding, RowRefused):
                raise encoding
            row = self._tokens(rendered, encoding)
            notes = [*dict.fromkeys([*notes, *rendered.notes, OLD_TURNS_DROPPED])]
        if len(row.ids) > self._limit:
            row, found = shorten_row(
                row,
                rendered,
                encoding,
                limit=self._limit,
                truncation=self._truncation,
                cut_prompt_at=self._cut_prompt_at,
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
            return align_columns(rendered, prompt, all_rendered.columns_of(position) or [(0, len(prompt))])
        if self._merges_system:
            return split_off_systems(rendered, [turn["content"] for turn in messages if turn["role"] == "system"])
        return rendered.prompts
