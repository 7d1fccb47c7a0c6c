"""Find where an answer comes to a string that ends it, in its text and not by its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lm_tuning.text.decoding import decode

_SPARE_TOKENS = 8
"""Tokens without a text of their own, such as half a character, that a string may spread over beside one per byte."""


@dataclass(frozen=True)
class StringEnd:
    """Where an answer ends that came to a stop string.

    Attributes:
        num_tokens: tokens that lie wholly before the string.
        text: what stands before it, without special tokens.
    """

    num_tokens: int
    text: str


class StopStrings:
    """Strings at which answers end, for one tokenizer."""

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        """Note the strings.

        Args:
            tokenizer: of the model.
            strings: at least one, none of them empty. Special tokens may be named as they are written.
        """
        assert strings
        assert all(strings)
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        # A token has a byte at least, or hardly ever none.
        self._span = max(len(text.encode()) for text in strings) + _SPARE_TOKENS

    def may_have_come(self, ids: Sequence[int], num_new: int) -> bool:
        """Return whether a string seems to have come with the last tokens, from the end of the text alone.

        Args:
            ids: of the answer so far, ``(tokens,)``.
            num_new: tokens since this was asked last.
        """
        return self._first(decode(self._tokenizer, ids[-(self._span + num_new) :])) is not None

    def find(self, ids: Sequence[int]) -> StringEnd | None:
        """Return where the first string begins; ``None`` where none has come.

        Args:
            ids: of the answer, without an EOS token, ``(tokens,)``.
        """
        text = decode(self._tokenizer, ids)
        start = self._first(text)
        if start is None:
            return None
        low = _num_tokens_before(self._tokenizer, ids, text, start)
        kept = decode(self._tokenizer, ids[:low])
        rest = text[len(kept) : start]
        # The name of a special token is no part of a text, nor is a part of it.
        if rest and not decode(self._tokenizer, ids[low : low + 1], skip_special_tokens=True):
            rest = ""
        return StringEnd(low, decode(self._tokenizer, ids[:low], skip_special_tokens=True) + rest)

    def _first(self, text: str) -> int | None:
        """Return where the string begins that is complete first, in characters."""
        found = [(start + len(stop), start) for stop in self._strings if (start := text.find(stop)) >= 0]
        return min(found)[1] if found else None


def _num_tokens_before(tokenizer: Any, ids: Sequence[int], text: str, start: int) -> int:
    """Return the most tokens whose text is a start of ``text`` and ends at ``start`` or before."""
    low, high = 0, len(ids)
    # The number of characters grows with the tokens, so the first one that is too many is found by halving; from there
    # it is a few steps back to the end of a whole character.
    while low < high:
        middle = (low + high + 1) // 2
        if len(decode(tokenizer, ids[:middle])) <= start:
            low = middle
        else:
            high = middle - 1
    while low and not text.startswith(decode(tokenizer, ids[:low])):
        low -= 1
    return low
