"""Turn pairs of a source and a target into token ids for an encoder-decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from lm_tuning.errors import UserError
from lm_tuning.parameters.data import TokenizeParameters
from lm_tuning.text.align.masks import added_around
from lm_tuning.text.decoding import describe_unlike
from lm_tuning.text.render.plain import RenderedRow, RenderedRows, put_system, render_text
from lm_tuning.text.store.columns import BoolArray, begins_with, cut_ends, ends_with, join_sides, keep_rows, put_around
from lm_tuning.text.store.table import Int32Array, Int64Array, TokenColumns, flatten_ids
from lm_tuning.text.tokenizers.base import NO_TEXT_LEFT, NOT_ROUND_TRIP, TaskTokenizer
from lm_tuning.text.tokenizers.counts import KeptRows, LongRows, SplitCounts
from lm_tuning.text.tokenizers.truncation import TOO_LONG

TARGET_TOO_LONG = "target_too_long"


@dataclass(frozen=True)
class Side:
    """How one of the two texts becomes tokens.

    Attributes:
        prefix: ids that belong before it.
        limit: tokens that it may have.
        too_long: count of rows dropped since it is longer.
        nothing_left: count of rows dropped since no token of it fits.
    """

    prefix: list[int]
    limit: int
    too_long: str
    nothing_left: str


class PairTokenizer(TaskTokenizer):
    """Tokenize source and target each by itself, as the tokenizer does it, and end both with the EOS token.

    A row's ids are those of the source and then those of the target, which is what is supervised. A text that is too
    long is cut and keeps the EOS token.
    """

    def __init__(self, tokenizer: Any, settings: TokenizeParameters) -> None:
        """Keep a tokenizer.

        Args:
            tokenizer: see ``TaskTokenizer``.
            settings: the ``tokenize`` parameters; limits count special tokens. The source gives way as a prompt does, a
                target always loses its end.

        Raises:
            UserError: the tokenizer has no EOS token, or puts something else behind a text.
        """
        super().__init__(tokenizer, settings)
        if tokenizer.eos_token_id is None:
            raise UserError(
                "task: seq2seq_lm needs a tokenizer with an EOS token, since a target has to end; the tokenizer of "
                "this model has none. Set its eos_token."
            )
        self._end_id = int(tokenizer.eos_token_id)
        prefix, target_prefix = (_prefix(tokenizer, self._end_id, is_target=is_target) for is_target in (False, True))
        self._source = Side(prefix, settings.max_length_tokens, TOO_LONG, NO_TEXT_LEFT)
        self._target = Side(target_prefix, settings.max_target_tokens, TARGET_TOO_LONG, "no_target_left")

    def render(self, batch: pa.RecordBatch, counts: SplitCounts) -> RenderedRows:
        """Render the prompts, each behind its system message, and the responses."""
        positions, pairs = self._render_each(batch, ("prompt", "response", "system"), self._render_pair, counts)
        sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
        return self._collect(batch, positions, sources, targets=targets)

    def finish(self, rendered: RenderedRows, encodings: list[Any], counts: SplitCounts) -> TokenColumns:
        """Join both sides of each row, within their limits."""
        sources, targets = rendered.rows, rendered.targets
        assert targets is not None
        num = len(sources)
        rows = KeptRows(rendered.row_ids, counts)
        source_tokens = self._spell(sources, encodings[:num], rows)
        target_tokens = self._spell(targets, encodings[num:], rows)
        source_ids, source_offsets, is_source_cut = self._finish_side(
            self._source, source_tokens, rendered, rows, noted_in=counts.long_rows
        )
        target_ids, target_offsets, is_target_cut = self._finish_side(
            self._target, target_tokens, rendered, rows, noted_in=counts.long_targets
        )
        # Only now: a row whose target is dropped is not one whose source was cut.
        rows.note("source_cut", is_source_cut)
        rows.note("target_cut", is_target_cut)
        rows.note_each({*source.notes, *target.notes} for source, target in zip(sources, targets, strict=True))
        self._count_unlike(targets, target_tokens, rows)
        counts.endings[self._end_id] += int(rows.mask.sum())
        ids, offsets = join_sides(source_ids, source_offsets, target_ids, target_offsets)
        # The target of a row is its one span: from the end of the source to the end of the row.
        spans = np.stack([np.diff(source_offsets), np.diff(offsets)], axis=1).astype(np.int32).reshape(-1)
        columns = TokenColumns(rendered.row_ids, rendered.sources, ids, offsets, spans, 2 * np.arange(num + 1))
        return keep_rows(columns, rows.mask)

    def _render_pair(self, prompt: str, response: str, system: str | None) -> tuple[RenderedRow, RenderedRow]:
        source, target = render_text(put_system(system, prompt)), render_text(response)
        end = len(source.text)
        source.prompts = [*([(0, len(system))] if system else []), (end - len(prompt), end)]
        return self._look_through(source), self._look_through(target)

    def _finish_side(
        self, side: Side, tokens: list[list[int]], rendered: RenderedRows, rows: KeptRows, *, noted_in: LongRows
    ) -> tuple[Int32Array, Int64Array, BoolArray]:
        """Return ids and offsets of one side of all rows, and which were cut; rows without a usable one are dropped."""
        ids, offsets = flatten_ids(tokens)
        lengths = np.diff(offsets)  # (rows,), as are all arrays below but the ids and offsets
        has_before = ~begins_with(ids, offsets, side.prefix)
        num_before = len(side.prefix) * has_before
        is_cut = self._settle_long(
            lengths + num_before + ~ends_with(ids, offsets, self._end_id),
            rows,
            limit=side.limit,
            dropped_as=side.too_long,
            noted_in=noted_in,
        )
        # What is cut makes room for what is put around it: the prefix where it is missing, and the EOS token.
        room = np.where(is_cut, np.maximum(side.limit - num_before - 1, 0), lengths)
        if side is self._source and is_cut.any():
            self._shorten_texts(rendered, tokens, room, is_cut, rows.counts)
            ids, offsets = flatten_ids(tokens)
        ids, offsets = cut_ends(ids, offsets, room)
        rows.drop(side.nothing_left, np.diff(offsets) == 0)
        ids, offsets = put_around(ids, offsets, before=side.prefix, has_before=has_before, after=self._end_id)
        return ids, offsets, is_cut

    def _count_unlike(self, targets: list[RenderedRow], tokens: list[list[int]], rows: KeptRows) -> None:
        """Decode the targets and count those that do not come back as they were, white space aside."""
        if self._is_byte_level:
            return
        for position, text in enumerate(self._backend.decode_batch(tokens, skip_special_tokens=False)):
            if unlike := describe_unlike(targets[position].text, text):
                rows.count(NOT_ROUND_TRIP, position, unlike)


def _prefix(tokenizer: Any, end_id: int, *, is_target: bool) -> list[int]:
    """Return what the tokenizer puts before a text, having seen that nothing but the EOS token is put behind it."""
    before, behind = added_around(tokenizer, is_target=is_target)
    if behind not in ([], [end_id]):
        found = " ".join(map(str, tokenizer.convert_ids_to_tokens(behind)))
        raise UserError(
            f"The tokenizer puts {found!r} behind a text, where task: seq2seq_lm wants the EOS token "
            f"{tokenizer.eos_token!r} alone. Take a model whose tokenizer ends texts with its EOS token, such as one "
            "of the BART or T5 families."
        )
    return before
