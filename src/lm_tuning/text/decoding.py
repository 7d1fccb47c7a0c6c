"""Turn token ids back into text, tell where it is another than it was, and find what begins and ends answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lm_tuning.data.format.columns import CAUSAL_LM, SEQUENCE_CLASSIFICATION
from lm_tuning.data.records import SPLITS
from lm_tuning.text.align.masks import Encoded, Encoding, token_span
from lm_tuning.text.records import CharRange, Span, TokenPreview, TokenRow
from lm_tuning.text.render.plain import RenderedRow, RowRefused
from lm_tuning.text.store.table import TokenTable, open_split
from lm_tuning.wording import SUPERVISED_MARKS

_NUM_PREVIEW_ROWS = 5
# Characters of a text in a message.
_NUM_SHOWN = 80


def decode(tokenizer: Any, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
    """Return the text of tokens, with every space that they hold.

    Some tokenizers tidy what they decode: ``p != q , r ?`` becomes ``p!= q, r?``. That is another text than the row
    had, so an answer and its reference would be shown, stored and scored as something that nobody wrote.

    Args:
        tokenizer: a transformers tokenizer with a backend of ``tokenizers``.
        ids: token ids, ``(tokens,)``.
        skip_special_tokens: leave control tokens out.
    """
    # transformers tidies by itself as well, unless it is told not to.
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
    # The decoder is the tokenizer's own and shared, so it is switched back.
    decoder.cleanup = False
    try:
        yield
    finally:
        decoder.cleanup = True


def mark_supervised_text(tokenizer: Any, row: TokenRow) -> str:
    """Decode a row with the supervised parts between ``⟦`` and ``⟧``.

    Args:
        tokenizer: the tokenizer that made it.
        row: a row of a token table.
    """
    opening, closing = SUPERVISED_MARKS
    parts: list[str] = []
    at = 0
    for start, end in row.spans:
        parts.append(decode(tokenizer, row.input_ids[at:start]))
        parts.append(f"{opening}{decode(tokenizer, row.input_ids[start:end])}{closing}")
        at = end
    return "".join([*parts, decode(tokenizer, row.input_ids[at:])])


def preview_tokens(
    folder: Path, tokenizer: Any, *, task: str = CAUSAL_LM, label_map: Mapping[str, int] | None = None
) -> TokenPreview:
    """Return the first rows of each split as a table.

    Args:
        folder: tokenized splits.
        tokenizer: the tokenizer that made them.
        task: the ``task`` parameter; rows with classes show theirs in place of the supervised tokens.
        label_map: id by name of the classes.
    """
    names = {label: name for name, label in (label_map or {}).items()}
    has_classes = task == SEQUENCE_CLASSIFICATION
    data: list[list[str | int]] = []
    for split in SPLITS:
        table = open_split(folder, split)
        for index in range(min(_NUM_PREVIEW_ROWS, len(table))):
            row = table[index]
            supervised = names[row.label] if has_classes else int(table.num_supervised[index])
            data.append([split, row.row_id, len(row.input_ids), supervised, mark_supervised_text(tokenizer, row)])
    columns = ["split", "row_id", "length", "label" if has_classes else "num_supervised", "text"]
    return {"columns": columns, "data": data}


TURN_ENDING_TOKENS = 2
"""How many tokens from an answer's end its end-of-turn token is looked for (a newline may follow it)."""

MAX_ROWS = 4096
"""Rows that are looked at, evenly spread over a larger table."""

MIN_FRACTION = 0.01
"""Share of the answers that a token must end. An answer that was cut may end anywhere, also just behind ``<think>``."""


@dataclass(frozen=True)
class AnswerEnds:
    """What the answers of a table have in common.

    Attributes:
        stop_ids: control tokens at which answers end, ascending.
        first_id: the control token that all answers begin with; ``None`` when they begin with text or differently.
    """

    stop_ids: list[int]
    first_id: int | None


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of all control tokens, any of which may end a turn.

    Args:
        tokenizer: a transformers tokenizer.
    """
    # Templates end turns with added tokens that are none of the named ones, such as <|im_end|>.
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(int(index) for index, token in added if token.special)}


def end_of_answer(answer: Sequence[int], special: set[int]) -> int | None:
    """Return the control token at which an answer ends, ``None`` when it ends in text.

    Args:
        answer: token ids, ``(answer tokens,)``.
        special: see :func:`special_ids`.
    """
    return next((int(token) for token in reversed(answer[-TURN_ENDING_TOKENS:]) if int(token) in special), None)


def common_first_id(answers: Iterable[Sequence[int]], special: set[int], *, stop_ids: Iterable[int]) -> int | None:
    """Find the control token that all answers begin with, such as BART's ``<s>``.

    Args:
        answers: token ids of each answer.
        special: see :func:`special_ids`.
        stop_ids: EOS tokens of an answer, which no answer is made to begin with.

    Returns:
        The token id; ``None`` when the answers begin with different tokens or with ordinary ones.
    """
    # One odd answer is enough to say nothing: a forced first token would be wrong for it.
    firsts = {int(answer[0]) for answer in answers} - set(stop_ids)
    return firsts.pop() if len(firsts) == 1 and firsts <= special else None


def supervised_ends(table: TokenTable, tokenizer: Any) -> AnswerEnds:
    """Look at the answers that a model learns.

    Args:
        table: training rows with spans that carry loss.
        tokenizer: the tokenizer that made them.
    """
    special = special_ids(tokenizer)
    # Evenly spread, since neighbours often come from one file; (rows looked at,)
    chosen = np.linspace(0, max(len(table) - 1, 0), min(len(table), MAX_ROWS)).astype(int)
    rows = (table[index] for index in chosen)
    answers = [row.input_ids[start:end].tolist() for row in rows for start, end in row.spans]
    counts = Counter(end for answer in answers if (end := end_of_answer(answer, special)) is not None)
    # Rare ends are answers that a limit has cut behind some control token; generation must not stop at those.
    stop_ids = sorted(token for token, count in counts.items() if count >= MIN_FRACTION * len(answers))
    return AnswerEnds(stop_ids, common_first_id(answers, special, stop_ids=stop_ids))


def find_unlike(backend: Any, rows: list[RenderedRow], encodings: dict[int, Encoded]) -> dict[int, str]:
    """Decode every answer and compare it with the text, so that a mask at the wrong positions cannot pass.

    Args:
        backend: lent by ``bare_backend``.
        rows: rows as text.
        encodings: of some of them by index; refusals are passed over.

    Returns:
        By index, what did not come back as it was.
    """
    chunks: list[list[int]] = []
    origins: list[tuple[int, Encoding, str, CharRange, Span]] = []
    for position, encoding in encodings.items():
        if isinstance(encoding, RowRefused):
            continue
        ids, text = encoding.ids, rows[position].text
        for chars in rows[position].answers:
            span = token_span(encoding, chars, len(text))
            # All answers are decoded in one call, which the library spreads over the cores.
            chunks.append(ids[span[0] : span[1]])
            origins.append((position, encoding, text, chars, span))
    failed: dict[int, str] = {}
    decoded = backend.decode_batch(chunks, skip_special_tokens=False)
    for got, (position, encoding, text, chars, span) in zip(decoded, origins, strict=True):
        if got != text[slice(*chars)]:
            unlike = describe_unlike(text[slice(*_covered(encoding, chars, span))], got)
            if unlike:
                failed.setdefault(position, unlike)
    return failed


def describe_unlike(wanted: str, got: str) -> str:
    """Describe how tokens decode to another text than they were made of; empty where only white space differs.

    Args:
        wanted: the text.
        got: what its tokens decode to.
    """
    # Decoders of other kinds than bytes put spaces between words by rules of their own.
    if got == wanted or "".join(got.split()) == "".join(wanted.split()):
        return ""
    return f"{wanted[:_NUM_SHOWN]!r} comes back as {got[:_NUM_SHOWN]!r}"


def _covered(encoding: Encoding, chars: CharRange, span: Span) -> CharRange:
    """Return the characters of some tokens: those that lie across an edge bring others along."""
    first, after = span
    if first == after:
        return chars
    return min(chars[0], encoding.token_to_chars(first)[0]), max(chars[1], encoding.token_to_chars(after - 1)[1])
