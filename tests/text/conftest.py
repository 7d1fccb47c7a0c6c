"""Rows as the split pipeline stores them, and the learned part of tokens as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.data.rows import ExampleWriter
from lm_tuning.text.token_table import TokenRow, open_split
from lm_tuning.text.tokenization import write_tokens

Tokenize = Callable[..., tuple[dict[str, Any], list[TokenRow]]]


def store_examples(folder: Path, format: str, train: Sequence[Any], **others: Sequence[Any]) -> Path:
    """Write splits; row ids count from 1. Messages may be given as lists."""
    folder.mkdir(parents=True, exist_ok=True)
    row_id = 0
    for split in ("train", "validation", "test"):
        with ExampleWriter(folder / f"{split}.arrow", format) as writer:
            for row in train if split == "train" else others.get(split, ()):
                row_id += 1
                values = (json.dumps(row),) if format == "messages" else row
                writer.append(row_id, (values,) if isinstance(values, str) else values)
    return folder


@pytest.fixture
def tokenize(tmp_path: Path) -> Tokenize:
    """Tokenize rows with a tokenizer; return the summary and the training rows."""
    runs = 0

    def run(tokenizer: Any, format: str, train: Sequence[Any], **options: Any) -> tuple[dict[str, Any], list[TokenRow]]:
        nonlocal runs
        runs += 1
        splits = {name: options.pop(name) for name in ("validation", "test") if name in options}
        examples = store_examples(tmp_path / f"examples{runs}", format, train, **splits)
        tokens = tmp_path / f"tokens{runs}"
        tokens.mkdir()
        summary = write_tokens(tokens, examples, tokenizer, **{"max_length_tokens": 100, **options})
        return summary, list(open_split(tokens, "train"))

    return run


def learned(row: TokenRow) -> list[int]:
    """Return the ids that the loss is taken of."""
    return [int(token) for start, end in row.spans for token in row.input_ids[start:end]]
