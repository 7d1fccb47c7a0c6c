"""Carry character ranges over to tokens: which positions are supervised, and which may be cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from lm_tuning.text.records import CharRange, Span
from lm_tuning.text.render.plain import RenderedRow, RowRefused
from lm_tuning.text.store.table import Int64Array


class Encoding(Protocol):
    """Tokens of one text with the characters that they hold: of the ``tokenizers`` library, or what answers like it."""

    @property
    def ids(self) -> list[int]:
        """Token ids, ``(tokens,)``."""

    @property
    def offsets(self) -> list[CharRange]:
        """The characters of every token."""

    def __len__(self) -> int:
        """Count the tokens."""

    def char_to_token(self, position: int, /) -> int | None:
        """Return the first token that holds a character; ``None`` where no token does."""

    def token_to_chars(self, token: int, /) -> CharRange:
        """Return the characters of a token."""


Encoded: TypeAlias = Encoding | RowRefused
"""The tokens of a row, or why it has none."""


class AlignedTokens:
    """Tokens of one row and the characters that they hold, as the tokenizers library would say it.

    It answers the same questions as that library's ``Encoding``. A token that holds a part of a character holds all of
    it.
    """

    def __init__(self, ids: list[int], starts: npt.ArrayLike, ends: npt.ArrayLike) -> None:
        """Set the ids and the characters that they hold.

        Args:
            ids: token ids, ``(tokens,)``.
            starts: first character of each token, ``(tokens,)``, ascending.
            ends: character behind each token, ``(tokens,)``, ascending.
        """
        self.ids = ids
        self._starts: Int64Array = np.asarray(starts, dtype=np.int64)
        self._ends: Int64Array = np.asarray(ends, dtype=np.int64)

    def __len__(self) -> int:
        """Count the tokens."""
        return len(self.ids)

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """Return the characters of every token, half-open."""
        return list(zip(self._starts.tolist(), self._ends.tolist(), strict=True))

    def char_to_token(self, position: int) -> int | None:
        """Return the first token that holds a character.

        Args:
            position: of the character; ``None`` comes back where no token holds it.
        """
        # The first whose end is behind the character; it holds that unless its start is behind it too.
        token = int(np.searchsorted(self._ends, position, side="right"))
        return token if token < len(self.ids) and self._starts[token] <= position else None

    def token_to_chars(self, token: int) -> tuple[int, int]:
        """Return the characters of a token, half-open.

        Args:
            token: its position.
        """
        return int(self._starts[token]), int(self._ends[token])


@dataclass(slots=True)
class TokenizedRow:
    """One row as tokens, before its length is looked at.

    Attributes:
        ids: token ids.
        spans: half-open token positions that are supervised.
        num_prefixed: ids in front that the text does not hold.
    """

    ids: list[int]
    spans: list[Span]
    num_prefixed: int


@contextmanager
def bare_backend(tokenizer: Any) -> Iterator[Any]:
    """Lend the Rust tokenizer without what it does after tokenizing.

    Post-processors add special tokens, which templates do themselves, and some shorten the character positions of
    tokens that begin with a space, so that the first token of an answer would seem to be missing.

    Args:
        tokenizer: a fast transformers tokenizer; it must not be used for anything else inside the block.
    """
    backend = tokenizer.backend_tokenizer
    # Settings of the one shared tokenizer, so they are put back even after an error.
    processor, truncation, padding = backend.post_processor, backend.truncation, backend.padding
    backend.post_processor = None
    backend.no_truncation()
    backend.no_padding()
    try:
        yield backend
    finally:
        backend.post_processor = processor
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)


def added_around(tokenizer: Any, *, is_target: bool = False) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer itself puts before and behind a text.

    Args:
        tokenizer: a transformers tokenizer.
        is_target: as for a text that an encoder-decoder is to write; some tokenizers begin it with another language.

    Returns:
        The ids before and those behind.
    """
    # A letter that every vocabulary can spell; what stands before and behind it in the full encoding was added.
    probe = "a"
    bare = tokenizer(probe, add_special_tokens=False)["input_ids"]
    whole = tokenizer(text_target=probe) if is_target else tokenizer(probe, add_special_tokens=True)
    full = whole["input_ids"]
    # A tokenizer that spells the letter otherwise inside the whole is taken to add nothing.
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return list(full[:start]), list(full[start + len(bare) :])
    return [], []


class RowEncoder:
    """Tokenize rows so that no token lies across the position where generation begins, and typed letters stay letters.

    A tokenizer may join the end of the scaffolding and the start of an answer (a line break and an indentation, say).
    A model that learned from such a token never sees it when it generates, since its prompt ends in between. Such
    rows are tokenized in chunks, unless that would change their text (some tokenizers put a space before each).
    """

    def __init__(self, backend: Any, control_ids: frozenset[int] = frozenset()) -> None:
        """Choose the tokenizer, and the tokens that typed letters must not become.

        Args:
            backend: lent by ``bare_backend``.
            control_ids: tokens that typed letters must not become.
        """
        self._backend = backend
        self._control_ids = control_ids
        # The same vocabulary without the added tokens, which are matched before anything else: made when first needed.
        self._letters: Any = None

    def encode(self, rows: list[RenderedRow]) -> list[Any]:
        """Tokenize rows and keep the characters of every token.

        Args:
            rows: rows as text.

        Returns:
            One encoding a row, or what answers like one. A row whose typed control token cannot be written as letters
            has its refusal instead.
        """
        encodings: list[Any] = list(self._backend.encode_batch([row.text for row in rows], add_special_tokens=False))
        for i, row in enumerate(rows):
            try:
                if row.as_text:
                    encodings[i] = self.encode_in_chunks(row, [])
                # Only those rows are tokenized twice.
                crossed = [position for position in row.openings if _is_crossed(encodings[i], position, len(row.text))]
                if crossed:
                    joined = self.encode_in_chunks(row, crossed)
                    # Some tokenizers put a space before each chunk, which would be another text than the row.
                    if self.decode(joined.ids) == self.decode(encodings[i].ids):
                        encodings[i] = joined
            except RowRefused as refusal:
                encodings[i] = refusal
        return encodings

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
        for position, encoding in zip(typed, self.encode([rows[position] for position in typed]), strict=True):
            if isinstance(encoding, RowRefused):
                others[position] = encoding
            else:
                tokens[position] = encoding.ids

    def encode_in_chunks(self, row: RenderedRow, cuts: list[int]) -> AlignedTokens:
        """Tokenize what lies between cuts, and typed control tokens, each for itself.

        Args:
            row: the row as text.
            cuts: characters that no token may lie across.

        Raises:
            RowRefused: a typed control token cannot be written as letters.
        """
        ids: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        typed = dict(row.as_text)
        # Both edges of a typed token are cuts too, so that its letters join with nothing around them.
        edges = sorted({0, len(row.text), *cuts, *(edge for chars in row.as_text for edge in chars)})
        # A cut inside the letters of a typed token would be no cut between contents.
        edges = [edge for edge in edges if not any(start < edge < end for start, end in row.as_text)]
        for start, end in pairwise(edges):
            chunk = row.text[start:end]
            if start in typed:
                found, positions = self._inside(self._letters_only(), chunk)
                # A vocabulary may hold the token as an ordinary entry, which letters alone spell.
                if not self._control_ids.isdisjoint(found):
                    raise RowRefused("control_token_unspellable", f"the tokenizer cannot write {chunk!r} as letters")
            # Not the first segment: at the start of a text the tokenizer may put a space before it, as in the whole
            # row.
            elif row.as_text and start:
                found, positions = self._inside(self._backend, chunk)
            else:
                encoding = self._backend.encode(chunk, add_special_tokens=False)
                found, positions = encoding.ids, encoding.offsets
            ids += found
            starts += [start + low for low, _ in positions]
            ends += [start + high for _, high in positions]
        return AlignedTokens(ids, starts, ends)

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens, control tokens included.

        Args:
            ids: token ids.
        """
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def _letters_only(self) -> Any:
        if self._letters is None:
            # Without its added tokens nothing is matched before the letters are split.
            self._letters = Tokenizer(self._backend.model)
            if self._backend.normalizer is not None:
                self._letters.normalizer = self._backend.normalizer
            if self._backend.pre_tokenizer is not None:
                self._letters.pre_tokenizer = self._backend.pre_tokenizer
        return self._letters

    @staticmethod
    def _inside(tokenizer: Any, chunk: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokenize a segment from the middle of a text: behind a line break no tokenizer puts a space before it."""
        # The line break has to come out as tokens of its own, else there is nothing to cut off.
        lead = tokenizer.encode("\n", add_special_tokens=False).ids
        encoding = tokenizer.encode("\n" + chunk, add_special_tokens=False)
        ids, positions = encoding.ids, encoding.offsets
        num = len(lead)
        if ids[:num] == lead and (len(ids) == num or positions[num][0] >= 1):
            return ids[num:], [(low - 1, high - 1) for low, high in positions[num:]]
        encoding = tokenizer.encode(chunk, add_special_tokens=False)
        return encoding.ids, encoding.offsets


def _is_crossed(encoding: Encoding, position: int, num_chars: int) -> bool:
    token = encoding.char_to_token(position) if 0 < position < num_chars else None
    return token is not None and encoding.token_to_chars(token)[0] < position


def token_span(encoding: Encoding, chars: CharRange, num_chars: int) -> Span:
    """Find the tokens that hold a range of characters.

    A token that lies across an edge counts as inside, so no character of an answer is ever left out.

    Args:
        encoding: of the ``tokenizers`` library, made by a bare backend.
        chars: half-open character range.
        num_chars: length of the text.

    Returns:
        Half-open token positions; empty for an empty range.
    """
    start, end = chars
    num_tokens = len(encoding)
    if end <= start:
        # An empty answer still has a position: its EOS token is supervised there.
        at = num_tokens if start >= num_chars else encoding.char_to_token(start)
        return (at, at) if at is not None else _span_by_offsets(encoding, chars)
    first = encoding.char_to_token(start)
    if end >= num_chars:
        return (first, num_tokens) if first is not None else _span_by_offsets(encoding, chars)
    after = encoding.char_to_token(end)
    if first is None or after is None:
        # A normalizer dropped that character, so no token stands for it.
        return _span_by_offsets(encoding, chars)
    # That token begins inside the range, so it is part of it.
    if encoding.token_to_chars(after)[0] < end:
        after += 1
    return first, after


def inner_span(encoding: Encoding, chars: CharRange, num_chars: int) -> Span:
    """Find the tokens that hold nothing but a range of characters, so that they can go without touching the rest.

    Args:
        encoding: of the ``tokenizers`` library, made by a bare backend.
        chars: half-open character range.
        num_chars: length of the text.

    Returns:
        Half-open token positions, possibly empty.
    """
    first, after = token_span(encoding, chars, num_chars)
    # A token that reaches out of the range holds something that has to stay.
    if first < after and encoding.token_to_chars(first)[0] < chars[0]:
        first += 1
    if first < after and encoding.token_to_chars(after - 1)[1] > chars[1]:
        after -= 1
    return first, after


def _span_by_offsets(encoding: Encoding, chars: CharRange) -> Span:
    start, end = chars
    offsets = encoding.offsets
    # By the positions alone, which a normalizer leaves ascending: slower, and right where a character has no token.
    first = next((i for i, (_, high) in enumerate(offsets) if high > start), len(offsets))
    after = next((i for i, (low, _) in enumerate(offsets) if low >= end), len(offsets))
    return first, max(first, after)


def tokenize_row(
    row: RenderedRow, encoding: Encoding, *, loss_on: str, prefix: list[int], end_id: int | None
) -> TokenizedRow:
    """Build ids and spans of one row.

    Args:
        row: the row as text.
        encoding: its tokens, made by a bare backend.
        loss_on: ``assistant`` for every answer, ``completion`` for the last one, ``all`` for everything.
        prefix: ids that belong before every text; left out when the text begins with them already.
        end_id: appended when no end-of-turn token closes the row; ``None`` when the tokenizer has no EOS token.

    Returns:
        The row as tokens.
    """
    num_chars = len(row.text)
    ids: list[int] = encoding.ids
    # Chat templates write the beginning-of-text token themselves; twice would be a start that the model never saw.
    num_prefixed = 0 if ids[: len(prefix)] == prefix else len(prefix)

    def shifted(chars: CharRange) -> Span:
        start, end = token_span(encoding, chars, num_chars)
        return start + num_prefixed, end + num_prefixed

    # The prefix is included: `scored_spans` drops position 0, which nothing predicts.
    if loss_on == "all":
        spans = [(0, num_prefixed + len(ids))]
    else:
        spans = [shifted(chars) for chars in (row.answers[-1:] if loss_on == "completion" else row.answers)]
    if num_prefixed:
        ids = [*prefix, *ids]
    if not row.is_closed and end_id is not None:
        # A row whose text ends with the token already is not ended twice.
        ids = ids if ids[-1:] == [end_id] else [*ids, end_id]
        # The end is supervised with the answer that it ends, even when that answer is empty.
        spans[-1] = (spans[-1][0], len(ids))
    return TokenizedRow(ids, spans, num_prefixed)
