"""Turn token ids back into the text that they stand for, and into no other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


def decode(tokenizer: Any, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
    """Return the text of tokens, with every space that they hold.

    Some tokenizers tidy what they decode: ``p != q , r ?`` becomes ``p!= q, r?``. That is another text than the row
    had, so an answer and its reference would be shown, stored and scored as something that nobody wrote.

    Args:
        tokenizer: a transformers tokenizer with a backend of ``tokenizers``.
        ids: token ids, ``(tokens,)``.
        skip_special_tokens: leave control tokens out.
    """
    with _without_cleanup(tokenizer):
        text = tokenizer.decode(
            [int(token) for token in ids], skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
    return str(text)


@contextmanager
def _without_cleanup(tokenizer: Any) -> Iterator[None]:
    """Switch off the tidying that a WordPiece decoder does by itself, whatever transformers is told."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if not getattr(decoder, "cleanup", False):
        yield
        return
    assert decoder is not None, "only a decoder has the switch"
    decoder.cleanup = False
    try:
        yield
    finally:
        decoder.cleanup = True
