"""Show rows as the model sees them: every token as text, supervised parts and control tokens told apart."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import numpy as np

from lm_tuning.data.check.findings import RowPositions
from lm_tuning.data.split.records import SplitsSummary
from lm_tuning.preflight.records import DecodedRow
from lm_tuning.reporting.document import Part
from lm_tuning.text.decoding import decode
from lm_tuning.text.records import NO_LABEL, TokenRow
from lm_tuning.text.store.table import TokenTable


def decode_examples(
    table: TokenTable,
    tokenizer: Any,
    split_summary: SplitsSummary,
    *,
    num_examples: int,
    label_map: Mapping[str, int] | None = None,
) -> list[DecodedRow]:
    """Decode the first rows.

    Args:
        table: tokenized training rows.
        tokenizer: the tokenizer that made them.
        split_summary: of the splits, for where rows stand in their files.
        num_examples: how many at most.
        label_map: id by name of the classes, for rows that have one.

    Returns:
        One record for each row; ``parts`` come from ``decode_parts``.
    """
    names = {index: name for name, index in (label_map or {}).items()}
    positions = RowPositions(split_summary["files"])
    special = {int(index) for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    examples: list[DecodedRow] = []
    for row in (table[index] for index in range(min(num_examples, len(table)))):
        file, number = positions.find(row.row_id)
        examples.append(
            {
                "row_id": row.row_id,
                "file": file,
                "row": number,
                "num_tokens": len(row.input_ids),
                "num_supervised": row.num_supervised,
                "parts": decode_parts(row, tokenizer, special),
                "label": names[row.label] if row.label != NO_LABEL else None,
                "label_id": row.label if row.label != NO_LABEL else None,
            }
        )
    return examples


def decode_parts(row: TokenRow, tokenizer: Any, special: set[int]) -> list[Part]:
    """Decode a row in segments that are supervised or not, and control tokens or not.

    Args:
        row: a row of a token table.
        tokenizer: the tokenizer that made it.
        special: ids of control tokens.

    Returns:
        The segments in order. A control token is a segment of its own.
    """
    supervised = np.zeros(len(row.input_ids), dtype=bool)  # (tokens,)
    for start, end in row.spans:
        supervised[start:end] = True
    tokens = [(int(token), bool(flag)) for token, flag in zip(row.input_ids, supervised, strict=True)]
    parts: list[Part] = []
    # Tokens are decoded in runs, not one by one: a character may be spread over several of them. The key of a control
    # token is its position, so that two in a row do not join.
    for (index, flag), group in groupby(
        enumerate(tokens), key=lambda item: (item[0] if item[1][0] in special else -1, item[1][1])
    ):
        text = decode(tokenizer, [token for _, (token, _) in group])
        parts.append({"text": text, "is_learned": flag, "is_control": index >= 0})
    return parts
