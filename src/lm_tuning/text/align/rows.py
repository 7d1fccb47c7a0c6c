"""Place the tokens of many rows in their texts, and prove that they spell them."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import numpy as np

from lm_tuning.text.align.bytes import AlignedRows, ByteTable
from lm_tuning.text.align.masks import Encoded, RowEncoder
from lm_tuning.text.render.plain import RenderedRow, RowRefused
from lm_tuning.text.store.columns import flatten_ids


class RowAligner:
    """Place rows by the bytes of their tokens."""

    def __init__(self, backend: Any, encoder: RowEncoder, table: ByteTable | None) -> None:
        """Choose by which bytes and which encoder rows are placed.

        Args:
            backend: lent by ``bare_backend``.
            encoder: tokenizes rows that need care.
            table: bytes of its tokens; ``None`` if rows are not to be placed.
        """
        self._backend = backend
        self._encoder = encoder
        self._table = table

    def spell_typed(self, rows: list[RenderedRow], tokens: list[list[int]], others: dict[int, Encoded]) -> None:
        """Tokenize rows with typed control tokens again, as letters.

        Args:
            rows: rows as text.
            tokens: token ids of each; those of rows that are tokenized again are replaced.
            others: receives the refusals of rows for which that cannot be done, by index.
        """
        # Hardly ever any: the rows of a chunk are tokenized once, and only these again.
        typed = [position for position, row in enumerate(rows) if row.as_text]
        if not typed:
            return
        for position, encoding in zip(typed, self._encoder.encode([rows[position] for position in typed]), strict=True):
            if isinstance(encoding, RowRefused):
                others[position] = encoding
            else:
                tokens[position] = encoding.ids

    def align(self, rows: list[RenderedRow], tokens: list[list[int]], others: dict[int, Encoded]) -> AlignedRows:
        """Place tokens in their texts, with none across a position where generation begins.

        Rows whose tokens do not spell their text go to the others: a tokenizer may change text (bring it to NFC, say),
        and then only the library knows where its tokens came from.

        Args:
            rows: rows as text.
            tokens: token ids of each; those of rows that are cut are replaced.
            others: encodings or refusals, by index, of rows that are not placed.
        """
        assert self._table is not None
        # Once is enough: tokens of chunks that end at the openings cross none of them.
        may_cut = True
        while True:
            # A row that the library aligns is empty here, so it keeps its index and proves nothing wrong.
            texts = ["" if position in others else row.text for position, row in enumerate(rows)]
            aligned = AlignedRows(
                self._table,
                texts,
                *flatten_ids([[] if position in others else ids for position, ids in enumerate(tokens)]),
            )
            if not aligned.proven.all():
                # Encoded once more by the library, with the characters of each token: slower, for a few rows as a rule.
                unproven = np.flatnonzero(~aligned.proven).tolist()
                others.update(
                    zip(unproven, self._encoder.encode([rows[position] for position in unproven]), strict=True)
                )
            elif not may_cut or not self._cut_crossed(rows, tokens, others, aligned):
                return aligned
            else:
                may_cut = False

    def _cut_crossed(
        self, rows: list[RenderedRow], tokens: list[list[int]], others: dict[int, Encoded], aligned: AlignedRows
    ) -> bool:
        """Tokenize rows in chunks where a token crosses the position where generation begins; return if any does."""
        assert self._table is not None
        openings = [[] if position in others else row.openings for position, row in enumerate(rows)]
        # (openings,): the row of each
        owners = np.repeat(np.arange(len(rows)), [*map(len, openings)])
        positions = np.fromiter(chain.from_iterable(openings), dtype=np.int64, count=len(owners))
        crossed = aligned.are_crossed(owners, positions)
        if not crossed.any():
            return False
        # By row, ascending, as the openings are
        cuts: dict[int, list[int]] = {}
        for row, position in zip(owners[crossed].tolist(), positions[crossed].tolist(), strict=True):
            cuts.setdefault(row, []).append(position)
        chunks: list[str] = []
        for row, at in cuts.items():
            text = rows[row].text
            chunks += [text[start:end] for start, end in pairwise([0, *at, len(text)])]
        # One call for the chunks of all rows; they come back in the same order.
        encoded = iter(self._backend.encode_batch_fast(chunks, add_special_tokens=False))
        again: list[list[int]] = []
        for row, at in cuts.items():
            parts = [next(encoded).ids for _ in range(len(at) + 1)]
            typed = bool(rows[row].as_text)
            again.append(self._encoder.encode_in_chunks(rows[row], at).ids if typed else [*chain.from_iterable(parts)])
        # A tokenizer that puts a space before each chunk spells another text; such a row keeps its crossing token.
        trial = AlignedRows(self._table, [rows[row].text for row in cuts], *flatten_ids(again))
        for row, ids, proven in zip(cuts, again, trial.proven.tolist(), strict=True):
            if proven:
                tokens[row] = ids
        return True
