"""Place tokens in their texts by the bytes of every token, many rows at once, and prove that they spell them.

GPT-2, Llama 3, Qwen, SmolLM2 and most others are byte-level: each token stands for some bytes, and the bytes of a row's
tokens, end to end, are its text. That makes two things cheap for whole batches: proving that the tokens spell the text,
and finding the tokens that hold a range of it, without the character positions that the tokenizer would otherwise keep
for each token.
"""

from __future__ import annotations

from functools import cache
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lm_tuning.text.align.masks import AlignedTokens, Encoded, RowEncoder
from lm_tuning.text.render.plain import RenderedRow
from lm_tuning.text.store.table import Int32Array, Int64Array, flatten_ids

_CHECKED_AT_ONCE = 4096


class ByteTable:
    """Bytes of every token.

    Attributes:
        lengths: bytes of each token, ``(vocabulary,)``.
    """

    def __init__(self, tokens: list[bytes]) -> None:
        """Hold the bytes of every token in one array.

        Args:
            tokens: by id; empty where there is no token.
        """
        self._values = pa.array(tokens, type=pa.binary())
        self.lengths: Int32Array = np.fromiter(map(len, tokens), dtype=np.int32, count=len(tokens))

    def spell(self, ids: Int32Array) -> pa.Buffer:
        """Return the bytes of some tokens end to end.

        Args:
            ids: token ids, ``(tokens,)``.
        """
        # Arrow copies only the bytes, into one buffer, so no Python object is made for a token. Its third buffer has
        # the values; there is none without tokens.
        return self._values.take(pa.array(ids)).buffers()[2] or pa.py_buffer(b"")


def build_byte_table(backend: Any) -> ByteTable | None:
    """Build the table, and check every token of it against the tokenizer's own decoder.

    Args:
        backend: a tokenizer of the ``tokenizers`` library.

    Returns:
        The table; ``None`` where tokens are not bytes, or the decoder makes something else of any of them.
    """
    if not is_byte_level(backend):
        return None
    tokens = [backend.id_to_token(index) for index in range(backend.get_vocab_size(with_added_tokens=True))]
    # Ids without a token: they stay empty, and no row holds them.
    if None in tokens:  # a vocabulary with holes
        vocabulary = backend.get_vocab(with_added_tokens=True)
        tokens = [None] * (max(vocabulary.values()) + 1)
        for token, index in vocabulary.items():
            tokens[index] = token
    added = backend.get_added_tokens_decoder()
    letters = _byte_letters()
    # Added tokens are matched as text before anything is split, so they are not written in letters for bytes.
    values = [_bytes_of(token, letters) if token else b"" for token in tokens]
    for index, token in added.items():
        values[index] = token.content.encode()
    ids = [index for index, token in enumerate(tokens) if token is not None and index not in added]
    for start in range(0, len(ids), _CHECKED_AT_ONCE):
        some = ids[start : start + _CHECKED_AT_ONCE]
        # Many at once: decoding one by one takes seconds for a large vocabulary. Bytes that are no UTF-8 together are
        # replaced alike on both sides.
        wanted = b"".join([values[index] for index in some]).decode(errors="replace")
        if backend.decode(some, skip_special_tokens=False) != wanted:
            return None
    return ByteTable(values)


def _bytes_of(token: str, letters: dict[int, int]) -> bytes:
    try:
        return token.translate(letters).encode("latin-1")
    except UnicodeEncodeError:  # not written in letters for bytes: it stands for itself
        return token.encode()


def is_byte_level(backend: Any) -> bool:
    """Return whether tokens stand for bytes.

    Args:
        backend: a tokenizer of the ``tokenizers`` library.
    """
    from tokenizers import decoders

    return isinstance(backend.decoder, decoders.ByteLevel)


class AlignedRows:
    """Tokens of some rows, placed in their text to the byte.

    Attributes:
        ids: token ids of all rows end to end, ``(tokens,)``.
        offsets: ``(rows + 1,)``: where each row starts in ``ids``.
        proven: ``(rows,)``: whether the bytes of the tokens are those of the text; positions are right only if all
            are.
    """

    def __init__(self, table: ByteTable, texts: list[str], ids: Int32Array, offsets: Int64Array) -> None:
        """Compare tokens and texts.

        Args:
            table: the bytes of tokens.
            texts: one per row.
            ids: token ids of all rows end to end, ``(tokens,)``.
            offsets: ``(rows + 1,)``: where each row starts in ``ids``.
        """
        self.ids = ids
        self.offsets = offsets
        text = "".join(texts)
        data = text.encode()
        self._chars = np.cumsum([0, *map(len, texts)])
        # Where each character starts; not kept where every character is a byte.
        self._positions: Int64Array | None = None
        if len(data) != len(text):
            # A byte of UTF-8 begins a character unless its upper bits are 10.
            is_start = (np.frombuffer(data, dtype=np.uint8) & 0xC0) != 0x80
            self._positions = np.append(np.flatnonzero(is_start), len(data))
        # (rows + 1,): where each row starts in the bytes of all texts
        self._bytes = self._to_bytes(self._chars)
        lengths = table.lengths[ids]
        # (tokens,): bytes up to the end of each token
        self._ends = np.cumsum(lengths, dtype=np.int64)
        self._starts = self._ends - lengths
        # (rows + 1,): where each row would start by the bytes of its tokens
        spelled = np.concatenate([[0], self._ends])[offsets]
        buffer = table.spell(ids)
        self.proven: npt.NDArray[np.bool_]
        # One comparison of two buffers for a chunk of a thousand rows; row by row only where they differ.
        if np.array_equal(spelled, self._bytes) and buffer.equals(pa.py_buffer(data)):
            self.proven = np.ones(len(texts), dtype=np.bool_)
        else:
            got = buffer.to_pybytes()
            rows = zip(spelled[:-1], spelled[1:], self._bytes[:-1], self._bytes[1:], strict=True)
            self.proven = np.fromiter((got[a:b] == data[c:d] for a, b, c, d in rows), dtype=np.bool_, count=len(texts))

    def spans(self, rows: Int64Array, starts: Int64Array, ends: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Find the tokens that hold ranges of characters; one that lies across an edge is inside.

        Args:
            rows: row of each range, ``(ranges,)``.
            starts: first character in the text of the row, ``(ranges,)``.
            ends: character behind the range, ``(ranges,)``.

        Returns:
            First token of each range and the one behind it, counted from the start of the row, both ``(ranges,)``.
        """
        # (ranges,): the first character of each range's row in the text of all rows
        chars = self._chars[rows]
        # With its end at the first character a token is before it, with its start at the last edge behind.
        first = np.searchsorted(self._ends, self._to_bytes(chars + starts), side="right")
        after = np.searchsorted(self._starts, self._to_bytes(chars + ends), side="left")
        # An empty range holds no token, also where a token lies across it.
        after = np.where(ends > starts, after, first)
        tokens = self.offsets[rows]
        return first - tokens, after - tokens

    def are_crossed(self, rows: Int64Array, positions: Int64Array) -> npt.NDArray[np.bool_]:
        """Return at which positions a token reaches from one side to the other.

        Args:
            rows: row of each position, ``(positions,)``.
            positions: characters in the text of the row, ``(positions,)``.
        """
        if not len(rows):
            return np.zeros(0, dtype=np.bool_)
        at = self._to_bytes(self._chars[rows] + positions)
        token = np.searchsorted(self._ends, at, side="right")
        # At the edges of a row nothing can cross: its neighbour is another row.
        inside = (at > self._bytes[rows]) & (at < self._bytes[rows + 1])
        crossed: npt.NDArray[np.bool_] = inside & (self._starts[np.minimum(token, len(self.ids) - 1)] < at)
        return crossed

    def row(self, index: int) -> AlignedTokens:
        """Return the tokens of one row with the characters that they hold.

        Args:
            index: of the row.
        """
        part = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        starts, ends = self._starts[part], self._ends[part]
        if self._positions is not None:
            # Bytes to characters: an edge inside a character moves out, so that the token holds all of it.
            starts = np.searchsorted(self._positions, starts, side="right") - 1
            ends = np.searchsorted(self._positions, ends, side="left")
        base = self._chars[index]
        return AlignedTokens(self.ids[part].tolist(), starts - base, ends - base)

    def _to_bytes(self, chars: Int64Array) -> Int64Array:
        return chars if self._positions is None else self._positions[chars]


@cache
def _byte_letters() -> dict[int, int]:
    """Return the byte of each letter that byte-level vocabularies write bytes with.

    Printable characters of Latin-1 stand for themselves, the others follow each other from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    # GPT-2's alphabet: bytes that print nothing borrow the letters from U+0100 on, in order.
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    # What is not a letter of that alphabet must not pass for a byte.
    others = {byte: 0xFFFF for byte in hidden}
    return {**others, **{byte: byte for byte in printable}, **{0x100 + i: byte for i, byte in enumerate(hidden)}}


class RowAligner:
    """Place rows by the bytes of their tokens."""

    def __init__(self, backend: Any, encoder: RowEncoder, table: ByteTable) -> None:
        """Choose by which bytes and which encoder rows are placed.

        Args:
            backend: lent by ``bare_backend``.
            encoder: tokenizes rows that need care.
            table: bytes of its tokens.
        """
        self._backend = backend
        self._encoder = encoder
        self._table = table

    def align(self, rows: list[RenderedRow], tokens: list[list[int]], others: dict[int, Encoded]) -> AlignedRows:
        """Place tokens in their texts, with none across a position where generation begins.

        Rows whose tokens do not spell their text go to the others: a tokenizer may change text (bring it to NFC, say),
        and then only the library knows where its tokens came from.

        Args:
            rows: rows as text.
            tokens: token ids of each; those of rows that are cut are replaced.
            others: encodings or refusals, by index, of rows that are not placed.
        """
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
