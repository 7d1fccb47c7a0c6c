"""Turn pairs of a source and a target into token ids for an encoder-decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from lm_tuning.errors import UserError
from lm_tuning.text.align.masks import added_around
from lm_tuning.text.render.plain import RenderedRow, RenderedRows, column_ranges_of, put_system, render_text
from lm_tuning.text.store.columns import (
    BoolArray,
    begins_with,
    cut_ends,
    ends_with,
    flatten_ids,
    join_sides,
    put_around,
    take_rows,
)
from lm_tuning.text.store.table import Int32Array, Int64Array, TokenColumns
from lm_tuning.text.tokenizers.base import NO_TEXT_LEFT, NOT_ROUND_TRIP, TaskTokenizer
from lm_tuning.text.tokenizers.counts import LongRows, SplitCounts
from lm_tuning.text.tokenizers.truncation import TOO_LONG

SOURCE_CUT = "source_cut"
TARGET_CUT = "target_cut"
TARGET_TOO_LONG = "target_too_long"
NO_TARGET_LEFT = "no_target_left"

# Characters of a target in a message.
_NUM_SHOWN = 80


@dataclass(frozen=True)
class Side:
    """How one of the two texts becomes tokens.

    Attributes:
        prefix: ids that belong before it.
        limit: tokens that it may have.
        too_long: count of rows dropped since it is longer.
        cut: count of rows in which it is shortened.
        nothing_left: count of rows dropped since no token of it fits.
    """

    prefix: list[int]
    limit: int
    too_long: str
    cut: str
    nothing_left: str


class PairTokenizer(TaskTokenizer):
    """Tokenize source and target each by itself, as the tokenizer does it, and end both with the EOS token.

    A row's ids are those of the source and then those of the target, which is what is supervised. A text that is too
    long is cut and keeps the EOS token.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_length_tokens: int,
        max_target_tokens: int,
        truncation: str,
        cut_prompt_at: str = "middle",
        control_tokens: str = "auto",
    ) -> None:
        """Keep a tokenizer.

        Args:
            tokenizer: see ``TaskTokenizer``.
            max_length_tokens: tokens that a source may have, special tokens included.
            max_target_tokens: the same of a target.
            truncation: see ``TaskTokenizer``; the source gives way as a prompt does, a target always loses its end.
            cut_prompt_at: see ``TaskTokenizer``.
            control_tokens: see ``TaskTokenizer``.

        Raises:
            UserError: the tokenizer has no EOS token, or puts something else behind a text.
        """
        super().__init__(tokenizer, truncation=truncation, cut_prompt_at=cut_prompt_at, control_tokens=control_tokens)
        if tokenizer.eos_token_id is None:
            raise UserError(
                "task: seq2seq_lm needs a tokenizer with an EOS token, since a target has to end; the tokenizer of "
                "this model has none. Set its eos_token."
            )
        self._end_id = int(tokenizer.eos_token_id)
        self._source = Side(
            _prefix(tokenizer, self._end_id, is_target=False), max_length_tokens, TOO_LONG, SOURCE_CUT, NO_TEXT_LEFT
        )
        self._target = Side(
            _prefix(tokenizer, self._end_id, is_target=True),
            max_target_tokens,
            TARGET_TOO_LONG,
            TARGET_CUT,
            NO_TARGET_LEFT,
        )

    def render(self, batch: pa.RecordBatch, counts: SplitCounts) -> RenderedRows:
        """Render the prompts, each behind its system message, and the responses."""
        positions, pairs = self._render_each(batch, ("prompt", "response", "system"), self._render_pair, counts)
        return RenderedRows(
            batch.column("row_id").to_numpy()[positions],
            batch.column("source").to_numpy()[positions],
            [source for source, _ in pairs],
            conversations=[None] * len(pairs),
            targets=[target for _, target in pairs],
            columns=column_ranges_of(batch, positions),
        )

    def finish(self, rendered: RenderedRows, encodings: list[Any], counts: SplitCounts) -> TokenColumns:
        """Join both sides of each row, within their limits."""
        rows, row_ids, targets = rendered.rows, rendered.row_ids, rendered.targets
        assert targets is not None
        num = len(rows)
        kept = np.ones(num, dtype=np.bool_)
        source_tokens = self._spell(rows, encodings[:num], row_ids, kept, counts)
        target_tokens = self._spell(targets, encodings[num:], row_ids, kept, counts)
        sides = (
            self._finish_side(self._source, source_tokens, rendered, kept, counts, noted_in=counts.long_rows),
            self._finish_side(self._target, target_tokens, rendered, kept, counts, noted_in=counts.long_targets),
        )
        for side, (_, _, is_cut) in zip((self._source, self._target), sides, strict=True):
            counts.add_rows(side.cut, row_ids[kept & is_cut])
        notes = [[*dict.fromkeys(row.notes + target.notes)] for row, target in zip(rows, targets, strict=True)]
        counts.add_notes(notes, row_ids, kept)
        self._count_unlike(targets, target_tokens, row_ids, kept, counts)
        counts.endings[self._end_id] += int(kept.sum())
        (source_ids, source_offsets, _), (target_ids, target_offsets, _) = sides
        ids, offsets = join_sides(source_ids, source_offsets, target_ids, target_offsets)
        spans = np.stack([np.diff(source_offsets), np.diff(offsets)], axis=1).astype(np.int32).reshape(-1)
        columns = TokenColumns(row_ids, rendered.sources, ids, offsets, spans, 2 * np.arange(num + 1))
        return columns if kept.all() else take_rows(columns, np.flatnonzero(kept))

    def _render_pair(self, prompt: str, response: str, system: str | None) -> tuple[RenderedRow, RenderedRow]:
        source, target = render_text(put_system(system, prompt)), render_text(response)
        end = len(source.text)
        source.prompts = [*([(0, len(system))] if system else []), (end - len(prompt), end)]
        return self._look_through(source), self._look_through(target)

    def _finish_side(
        self,
        side: Side,
        tokens: list[list[int]],
        rendered: RenderedRows,
        kept: BoolArray,
        counts: SplitCounts,
        *,
        noted_in: LongRows,
    ) -> tuple[Int32Array, Int64Array, BoolArray]:
        """Return ids and offsets of one side of all rows, and which were cut; what cannot be used leaves ``kept``."""
        row_ids = rendered.row_ids
        ids, offsets = flatten_ids(tokens)
        nowhere = np.zeros(len(tokens), dtype=np.bool_)
        has_before = ~begins_with(ids, offsets, side.prefix) if side.prefix else nowhere
        has_after = ~ends_with(ids, offsets, self._end_id)
        added = len(side.prefix) * has_before
        is_cut = self._settle_long(
            np.diff(offsets) + added + has_after,
            row_ids,
            kept,
            counts,
            limit=side.limit,
            dropped_as=side.too_long,
            noted_in=noted_in,
        )
        # What is cut makes room for what is put around it.
        room = np.where(is_cut, np.maximum(side.limit - added - 1, 0), np.diff(offsets))
        if side is self._source and is_cut.any():
            self._shorten_texts(rendered, tokens, room, is_cut, counts)
            ids, offsets = flatten_ids(tokens)
        ids, offsets = cut_ends(ids, offsets, room)
        has_text = np.diff(offsets) > 0
        counts.add_rows(side.nothing_left, row_ids[kept & ~has_text])
        kept &= has_text
        ids, offsets = put_around(
            ids,
            offsets,
            before=side.prefix,
            has_before=has_before,
            after=self._end_id,
            has_after=~ends_with(ids, offsets, self._end_id),
        )
        return ids, offsets, is_cut

    def _count_unlike(
        self,
        targets: list[RenderedRow],
        tokens: list[list[int]],
        row_ids: Int64Array,
        kept: BoolArray,
        counts: SplitCounts,
    ) -> None:
        """Decode the targets and count those that do not come back as they were, white space aside."""
        if self._is_byte_level:
            return
        for position, text in enumerate(self._backend.decode_batch(tokens, skip_special_tokens=False)):
            wanted = targets[position].text
            if kept[position] and text != wanted and "".join(text.split()) != "".join(wanted.split()):
                detail = f"{wanted[:_NUM_SHOWN]!r} comes back as {text[:_NUM_SHOWN]!r}"
                counts.add(NOT_ROUND_TRIP, int(row_ids[position]), detail)


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
