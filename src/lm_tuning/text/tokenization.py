"""Tokenize stored splits batch by batch: rows in, token ids and loss spans out."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from lm_tuning.data.rows import ExampleTable, open_examples
from lm_tuning.errors import UserError
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.runtime.threads import tokenizer_parallelism
from lm_tuning.text.row_tokenizer import PendingRow, RowTokenizer
from lm_tuning.text.summary import DROPPED, SplitCounts, preview_tokens, summarize_split
from lm_tuning.text.token_table import (
    SPLITS,
    Span,
    TokenTableWriter,
    open_split,
    split_path,
)
from lm_tuning.text.truncation import TOO_LONG

logger = logging.getLogger(__name__)

TOKENS_VERSION = 1
"""Raise it when the same rows and settings give other tokens: stored tokens of another version are not reused."""

SUMMARY_NAME = "summary.json"
PREVIEW_NAME = "preview.json"

# Enough to keep every core busy, few enough that progress moves every second or so.
_CHUNK_ROWS = 512


def write_tokens(
    folder: Path,
    examples: Path,
    tokenizer: Any,
    *,
    max_length_tokens: int,
    truncation: str = "truncate_prompt",
    loss_on: str = "assistant",
    on_progress: OnProgress = ignore_progress,
) -> dict[str, Any]:
    """Write ``train.arrow``, ``validation.arrow``, ``test.arrow``, ``summary.json`` and ``preview.json``.

    Rows keep their order; one batch of them is in memory at a time.

    Args:
        folder: an empty folder.
        examples: folder of stored splits.
        tokenizer: a fast transformers tokenizer with a pad token.
        max_length_tokens: tokens that a row may have.
        truncation: ``truncate_prompt``, ``truncate_end``, ``drop`` or ``error``, see ``shorten_row``.
        loss_on: what is learned: ``assistant`` (every answer), ``completion`` (the last one) or ``all``.
        on_progress: receives rows done.

    Returns:
        The summary, as stored.

    Raises:
        UserError: rows are too long and ``truncation`` is ``error``, or no training row is left.
    """
    tables = {split: open_examples(examples, split) for split in SPLITS}
    total = sum(len(table) for table in tables.values())
    options: dict[str, Any] = {
        "max_length_tokens": max_length_tokens,
        "truncation": truncation,
        "loss_on": loss_on,
    }
    if max_length_tokens > tokenizer.model_max_length:
        logger.warning(
            "tokenize.max_length_tokens is %d, but the model is made for %d tokens at most.",
            max_length_tokens,
            tokenizer.model_max_length,
        )
    format = tables["train"].format
    counts = {split: SplitCounts() for split in SPLITS}
    done = 0
    on_progress("Tokenizing", 0, total, "rows")
    with (
        tokenizer_parallelism(enabled=True),
        _heap_set_aside(),
        RowTokenizer(tokenizer, format, **options) as row_tokenizer,
    ):
        for split in SPLITS:
            with TokenTableWriter(split_path(folder, split)) as writer:
                for num_rows, rows in _tokenized(tables[split], row_tokenizer, counts[split]):
                    _write(writer, *rows)
                    done += num_rows
                    on_progress("Tokenizing", done, total, "rows")
        rendering = "chat template" if row_tokenizer.uses_template else "plain text"
    for split in SPLITS:
        counts[split].warn(split)
    written = {split: open_split(folder, split) for split in SPLITS}
    _check(counts, {split: len(table) for split, table in written.items()}, options)
    endings = counts["train"].endings + counts["validation"].endings + counts["test"].endings
    summary = {
        "format": format,
        "rendering": rendering,
        **options,
        "tokenizer": _describe_tokenizer(tokenizer),
        "end_token_ids": [token for token, _ in endings.most_common()],
        "splits": {split: summarize_split(written[split], counts[split]) for split in SPLITS},
    }
    _write_json(folder / SUMMARY_NAME, summary)
    _write_json(folder / PREVIEW_NAME, preview_tokens(folder, tokenizer))
    return summary


def read_token_summary(folder: Path) -> dict[str, Any]:
    """Return the summary of a stored folder of tokens.

    Args:
        folder: what the tokenize pipeline stored.
    """
    return dict(json.loads((Path(folder) / SUMMARY_NAME).read_text(encoding="utf-8")))


def _tokenized(
    table: ExampleTable, row_tokenizer: RowTokenizer, counts: SplitCounts
) -> Iterator[tuple[int, tuple[list[int], list[list[int]], list[list[Span]]]]]:
    """Yield tokenized chunks; one is rendered and the one before it finished while the tokenizer works on another."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        running: tuple[int, list[PendingRow], Future[Any]] | None = None
        for chunk in chain(_chunks(table), [None]):
            before = running
            if chunk is None:
                running = None
            else:
                pending = row_tokenizer.render(chunk, counts)
                running = chunk.num_rows, pending, pool.submit(row_tokenizer.encode, pending)
            if before is not None:
                num_rows, pending, encoded = before
                yield num_rows, row_tokenizer.finish(pending, encoded.result(), counts)


@contextmanager
def _heap_set_aside() -> Iterator[None]:
    """Let the garbage collector look at new objects only: millions of rows trigger it often, and the heap is large."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _chunks(table: ExampleTable) -> Iterator[pa.RecordBatch]:
    for batch in table.batches():
        for start in range(0, batch.num_rows, _CHUNK_ROWS):
            yield batch.slice(start, _CHUNK_ROWS)


def _write(writer: TokenTableWriter, row_ids: list[int], tokens: list[list[int]], spans: list[list[Span]]) -> None:
    if not row_ids:
        return
    id_offsets = np.cumsum([0, *map(len, tokens)])
    span_offsets = np.cumsum([0, *(2 * len(row) for row in spans)])
    ids = np.fromiter(chain.from_iterable(tokens), dtype=np.int32, count=int(id_offsets[-1]))
    edges = chain.from_iterable(chain.from_iterable(spans))
    flat_spans = np.fromiter(edges, dtype=np.int32, count=int(span_offsets[-1]))
    writer.append_columns(row_ids, ids, id_offsets, flat_spans, span_offsets)


def _check(counts: dict[str, SplitCounts], num_rows: dict[str, int], options: dict[str, Any]) -> None:
    """Stop when rows were too long for ``error``, or when nothing is left to train on."""
    limit = options["max_length_tokens"]
    if options["truncation"] == "error":
        problems = [
            f"{split} rows longer than tokenize.max_length_tokens = {limit}: {counts[split].describe(TOO_LONG)}. Raise "
            "the limit, or set tokenize.truncation to truncate_prompt, truncate_end or drop."
            for split in SPLITS
            if counts[split].counts[TOO_LONG]
        ]
        if problems:
            raise UserError(problems)
    if not num_rows["train"]:
        train = counts["train"]
        reasons = "; ".join(train.describe(reason) for reason in DROPPED if train.counts[reason]) or "there are none"
        raise UserError(
            f"No training row is left after tokenizing with tokenize.max_length_tokens = {limit}. Dropped: {reasons}."
        )


def _describe_tokenizer(tokenizer: Any) -> dict[str, Any]:
    return {
        "num_tokens": len(tokenizer),
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token": tokenizer.pad_token,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
