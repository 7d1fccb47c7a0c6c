"""Compare the tokenizer and the ids of all rows with what the model embeds, before a training is refused for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_tuning.text.store.table import SPLITS, open_split
from lm_tuning.training.health.table_reading import find_outside_ids, find_rows_with

_SHOWN = 5


def measure_vocabulary(tokens: Path, tokenizer: Any, *, num_embeddings: int | None) -> dict[str, Any]:
    """Count rows with token ids that the model does not embed.

    Args:
        tokens: folder of tokens.
        tokenizer: the tokenizer that made them.
        num_embeddings: token ids that the model embeds; ``None`` where its configuration does not say.

    Returns:
        ``num_tokens`` of the tokenizer, ``num_embeddings``, and of the rows of each split that hold other ids
        ``num_rows_beyond``, ``rows_beyond`` (the first row ids) and ``ids_beyond`` (ids with their tokens).
    """
    facts: dict[str, Any] = {"num_tokens": len(tokenizer), "num_embeddings": num_embeddings}
    beyond: dict[str, list[int]] = {split: [] for split in SPLITS}
    ids: set[int] = set()
    if num_embeddings is not None:
        for split in SPLITS:
            table = open_split(tokens, split)
            found = find_outside_ids(table, 0, num_embeddings)
            ids.update(found)
            if found:
                beyond[split] = find_rows_with(table, 0, num_embeddings)
    return facts | {
        "num_rows_beyond": {split: len(rows) for split, rows in beyond.items()},
        "rows_beyond": {split: rows[:_SHOWN] for split, rows in beyond.items()},
        "ids_beyond": {str(token_id): tokenizer.convert_ids_to_tokens(token_id) for token_id in sorted(ids)[:_SHOWN]},
    }
