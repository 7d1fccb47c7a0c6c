"""Show rows as the model sees them: every token as text, supervised parts and control tokens told apart."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import numpy as np

from lm_tuning.data.check.findings import RowPositions
from lm_tuning.text.decoding import decode
from lm_tuning.text.records import NO_LABEL, TokenRow
from lm_tuning.text.store.table import TokenTable


def decode_examples(
    table: TokenTable,
    tokenizer: Any,
    split_summary: Mapping[str, Any],
    *,
    num_examples: int,
    label_map: Mapping[str, int] | None = None,
) -> list[dict[str, Any]]:
    """Decode the first rows.

    Args:
        table: tokenized training rows.
        tokenizer: the tokenizer that made them.
        split_summary: of the splits, for where rows stand in their files.
        num_examples: how many at most.
        label_map: id by name of the classes, for rows that have one.

    Returns:
        For each row ``row_id``, ``file`` and ``row`` (from 1), ``num_tokens``, ``num_supervised``, ``parts``: see
        ``decode_parts``, and ``label`` and its ``label_id``, which are None for rows without a class.
    """
    names = {index: name for name, index in (label_map or {}).items()}
    positions = RowPositions(split_summary["files"])
    special = {int(index) for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    examples = []
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


def decode_parts(row: TokenRow, tokenizer: Any, special: set[int]) -> list[dict[str, Any]]:
    """Decode a row in segments that are supervised or not, and control tokens or not.

    Args:
        row: a row of a token table.
        tokenizer: the tokenizer that made it.
        special: ids of control tokens.

    Returns:
        ``text``, ``is_learned`` and ``is_control`` of each segment, in order. A control token is a segment of its own.
    """
    supervised = np.zeros(len(row.input_ids), dtype=bool)
    for start, end in row.spans:
        supervised[start:end] = True
    tokens = [(int(token), bool(flag)) for token, flag in zip(row.input_ids, supervised, strict=True)]
    parts = []
    for (index, flag), group in groupby(
        enumerate(tokens), key=lambda item: (item[0] if item[1][0] in special else -1, item[1][1])
    ):
        text = decode(tokenizer, [token for _, (token, _) in group])
        parts.append({"text": text, "is_learned": flag, "is_control": index >= 0})
    return parts
