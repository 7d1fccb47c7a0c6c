"""What turning rows into tokens has in common, whatever the model is to learn of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, Self, TypeVar

import numpy as np
import pyarrow as pa

from lm_tuning.data.store import COLUMN_RANGES
from lm_tuning.parameters.data import TokenizeParameters
from lm_tuning.text.align.bytes import is_byte_level
from lm_tuning.text.align.masks import Encoded, RowEncoder, bare_backend, inner_span
from lm_tuning.text.render.control_tokens import TYPED_AS_TEXT, ControlTokens
from lm_tuning.text.render.plain import RenderedRow, RenderedRows, RowRefused
from lm_tuning.text.store.columns import BoolArray, hold_token
from lm_tuning.text.store.table import Int32Array, Int64Array, TokenColumns
from lm_tuning.text.tokenizers.counts import KeptRows, LongRows, SplitCounts
from lm_tuning.text.tokenizers.truncation import CUTTING, PROMPT_EMPTIED, choose_cuts, is_emptied

NOT_ROUND_TRIP = "not_round_trip"
NO_TEXT_LEFT = "no_text_left"

Rendered = TypeVar("Rendered")


class TaskTokenizer(AbstractContextManager["TaskTokenizer"], ABC):
    """Turn rows into ids and what is supervised of them; a context manager, since it borrows the tokenizer's backend.

    Rows go through ``render``, ``encode`` and ``finish``; ``encode`` may run in another thread.

    Attributes:
        uses_template: whether the chat template writes the rows.
    """

    uses_template = False

    def __init__(
        self, tokenizer: Any, settings: TokenizeParameters, *, auto_policy: str = "as_text", template: str | None = None
    ) -> None:
        """Keep a tokenizer.

        Args:
            tokenizer: a fast transformers tokenizer; must not be used elsewhere inside the ``with`` block.
            settings: the ``tokenize`` parameters.
            auto_policy: what ``control_tokens: auto`` stands for.
            template: source of the chat template that writes the rows; ``None`` without one.
        """
        self._settings = settings
        policy = auto_policy if settings.control_tokens == "auto" else settings.control_tokens
        self._control = ControlTokens(tokenizer, template=template, policy=policy)
        # Byte-level tokenizers can spell everything; SmolLM2's and others' unknown token is one for something else.
        self._is_byte_level = is_byte_level(tokenizer.backend_tokenizer)
        self._unknown_id: int | None = None if self._is_byte_level else tokenizer.unk_token_id
        self._backend_block = bare_backend(tokenizer)

    def __enter__(self) -> Self:
        """Borrow the backend."""
        self._backend = self._backend_block.__enter__()
        self._encoder = RowEncoder(self._backend, self._control.ids)
        return self

    def __exit__(self, *error: Any) -> None:
        """Give the backend back."""
        self._backend_block.__exit__(*error)

    @abstractmethod
    def render(self, batch: pa.RecordBatch, counts: SplitCounts) -> RenderedRows:
        """Write rows as text.

        Args:
            batch: rows of a stored split.
            counts: receives the rows that cannot be rendered.

        Returns:
            The others.
        """

    def encode(self, rendered: RenderedRows) -> list[Any]:
        """Tokenize rendered rows on all cores; other threads go on meanwhile.

        Args:
            rendered: what ``render`` returned.

        Returns:
            One encoding a row, and then one a target where rows have targets.
        """
        # The fast call keeps no positions of characters, which take as long again.
        texts = [row.text for row in [*rendered.rows, *(rendered.targets or [])]]
        return list(self._backend.encode_batch_fast(texts, add_special_tokens=False))

    @abstractmethod
    def finish(self, rendered: RenderedRows, encodings: list[Any], counts: SplitCounts) -> TokenColumns:
        """Join ids, find what is supervised and make long rows fit.

        Args:
            rendered: what ``render`` returned.
            encodings: what ``encode`` made of it.
            counts: receives what happens to the rows.

        Returns:
            The rows that are kept.
        """

    def _render_each(
        self, batch: pa.RecordBatch, fields: Sequence[str], render: Callable[..., Rendered], counts: SplitCounts
    ) -> tuple[list[int], list[Rendered]]:
        """Render rows from some of their fields; return the indices of those for which that goes, and what was made."""
        row_ids = batch.column("row_id")
        counts.num_read += batch.num_rows
        positions: list[int] = []
        made: list[Rendered] = []
        # Whole columns at once: a scalar of Arrow for each cell costs more than rendering it.
        values: Iterable[tuple[Any, ...]] = zip(*(batch.column(name).to_pylist() for name in fields), strict=True)
        for position, parts in enumerate(values):
            try:
                made.append(render(*parts))
            except RowRefused as refusal:
                counts.add(refusal.reason, row_ids[position].as_py(), refusal.detail)
                continue
            positions.append(position)
        return positions, made

    @staticmethod
    def _collect(batch: pa.RecordBatch, positions: list[int], rows: list[RenderedRow], **more: Any) -> RenderedRows:
        """Build the record of rendered rows; ``positions`` are theirs in the batch, ascending."""
        columns = None
        if COLUMN_RANGES in batch.schema.names:
            columns = batch.column(COLUMN_RANGES).take(pa.array(positions, pa.int64()))
        row_ids, sources = (batch.column(name).to_numpy()[positions] for name in ("row_id", "source"))
        return RenderedRows(row_ids, sources, rows, columns=columns, **more)

    def _look_through(self, row: RenderedRow) -> RenderedRow:
        """Settle what happens to control tokens typed in a text that no template writes."""
        found = self._control.find_in_text(row.text)
        if found:
            note = self._control.settle(found)
            row.notes.append(note)
            if note == TYPED_AS_TEXT:
                self._control.mark_text(row)
        return row

    def _spell(self, texts: list[RenderedRow], encodings: list[Any], rows: KeptRows) -> list[list[int]]:
        """Return the ids of texts, typed control tokens as letters; rows for which that cannot be done are refused."""
        refused: dict[int, Encoded] = {}
        tokens: list[list[int]] = [encoding.ids for encoding in encodings]
        self._encoder.spell_typed(texts, tokens, refused)
        for position, refusal in refused.items():
            assert isinstance(refusal, RowRefused), "typed tokens are spelled or refused"
            rows.count(refusal.reason, position, refusal.detail)
        return tokens

    def _settle_long(
        self, lengths: Int64Array, rows: KeptRows, *, limit: int, dropped_as: str, noted_in: LongRows
    ) -> BoolArray:
        """Return which rows lose a part, ``(rows,)``; long rows that are not to be cut are dropped."""
        is_long = rows.mask & (lengths > limit)
        noted_in.add(lengths[is_long], limit=limit)
        if self._settings.truncation in CUTTING:
            return is_long
        rows.drop(dropped_as, is_long)
        return np.zeros_like(is_long)

    def _count_unknown(self, ids: Int32Array, offsets: Int64Array, rows: KeptRows) -> None:
        """Count the rows that the unknown token stands in for something of."""
        if self._unknown_id is not None:
            rows.note(NOT_ROUND_TRIP, hold_token(ids, offsets, self._unknown_id))

    def _shorten_texts(
        self, rendered: RenderedRows, tokens: list[list[int]], room: Int64Array, is_cut: BoolArray, counts: SplitCounts
    ) -> None:
        """Cut long texts in place of their ends: the longest column first, none of the fixed text between columns.

        Args:
            rendered: the rows.
            tokens: token ids of each text; those of rows that are cut are replaced.
            room: ``(rows,)``: tokens that the text of each row may keep.
            is_cut: ``(rows,)``: which rows are cut.
            counts: receives rows of which a column, or all, goes.
        """
        if self._settings.truncation != "truncate_prompt":
            return
        for position in np.flatnonzero(is_cut & (room > 0)).tolist():
            row, num_kept = rendered.rows[position], int(room[position])
            # Once more and with the characters of each token, for the few rows that are cut.
            [encoding] = self._encoder.encode([row])
            spans = [inner_span(encoding, chars, len(row.text)) for chars in rendered.yielding(position)]
            # What yields may be less than what has to go.
            num_cut = min(len(tokens[position]) - num_kept, sum(end - start for start, end in spans))
            cuts = choose_cuts(spans, encoding.offsets, num_cut=num_cut, cut_at=self._settings.cut_prompt_at)
            if is_emptied(spans, cuts):
                counts.add(PROMPT_EMPTIED, int(rendered.row_ids[position]))
            # What is kept lies between the cuts, which are disjoint.
            edges = [0, *chain.from_iterable(sorted(cuts)), len(encoding.ids)]
            kept = [encoding.ids[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
            # Fixed text alone may be too long.
            tokens[position] = [*chain.from_iterable(kept)][:num_kept]
