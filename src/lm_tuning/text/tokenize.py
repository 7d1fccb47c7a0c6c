"""Tokenize stored splits batch by batch: rows in, token ids and what is supervised of them out."""

from __future__ import annotations

import gc
import json
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lm_tuning.data.check.findings import RowPositions
from lm_tuning.data.format.conventions import CAUSAL_LM, SEQ2SEQ_LM, SEQUENCE_CLASSIFICATION, find_format_problem
from lm_tuning.data.store import ExampleTable, open_examples
from lm_tuning.errors import UserError
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.runtime.threads import tokenizer_parallelism
from lm_tuning.storage.atomic import write_json_atomic
from lm_tuning.text.records import Rendering, TokenizerFacts, TokenSummary
from lm_tuning.text.render.control_tokens import TYPED
from lm_tuning.text.render.plain import ALTERED, RenderedRows
from lm_tuning.text.render.template_bounds import describe_origin
from lm_tuning.text.report import REPORT_NAME, build_tokens_section
from lm_tuning.text.store.summary import preview_tokens, summarize_split
from lm_tuning.text.store.table import SPLITS, TokenColumns, TokenTableWriter, open_split, split_path
from lm_tuning.text.tokenizers.base import TaskTokenizer
from lm_tuning.text.tokenizers.causal_lm import RowTokenizer
from lm_tuning.text.tokenizers.classification import ClassTokenizer, refuse_unknown_classes
from lm_tuning.text.tokenizers.counts import DROPPED, SplitCounts
from lm_tuning.text.tokenizers.limit_losses import find_lost_classes, find_lost_splits
from lm_tuning.text.tokenizers.policy import find_template_fault, find_unusable
from lm_tuning.text.tokenizers.seq2seq import TARGET_TOO_LONG, PairTokenizer
from lm_tuning.text.tokenizers.truncation import TOO_LONG

logger = logging.getLogger(__name__)

TOKENS_VERSION = 4
"""Raise it when the same rows and settings give other tokens: stored tokens of another version are not reused."""

SUMMARY_NAME = "summary.json"
PREVIEW_NAME = "preview.json"
SPLITS_SUMMARY_NAME = "summary.json"

# Enough to keep every core busy, few enough that progress moves every second or so and memory stays small.
_CHUNK_ROWS = 1024
_CHUNK_BYTES = 1 << 19
# Chunks that are with the tokenizer while the main thread works on others.
_NUM_AHEAD = 2
_NUM_ROWS_NAMED = 20
# What transformers gives where a tokenizer's files name no longest text is about 1e30.
_NO_LIMIT = 10**12


def write_tokens(  # noqa: PLR0912, PLR0915
    folder: Path,
    examples: Path,
    tokenizer: Any,
    *,
    max_length_tokens: int,
    task: str = CAUSAL_LM,
    max_target_tokens: int = 128,
    truncation: str = "truncate_prompt",
    cut_prompt_at: str = "middle",
    loss_on: str = "assistant",
    on_altered_content: str = "warn",
    system_turn: str = "keep",
    template_arguments: Mapping[str, Any] | None = None,
    control_tokens: str = "auto",
    on_bad_row: str = "error",
    max_bad_fraction: float = 0.05,
    on_progress: OnProgress = ignore_progress,
) -> TokenSummary:
    """Write ``train.arrow``, ``validation.arrow``, ``test.arrow``, ``summary.json``, ``preview.json``, ``report.json``.

    Rows keep their order; some thousand of them are in memory at a time.

    Args:
        folder: an empty folder.
        examples: folder of stored splits.
        tokenizer: a fast transformers tokenizer with a pad token.
        max_length_tokens: tokens that a row may have; for ``seq2seq_lm`` its source.
        task: ``causal_lm`` (spans of tokens are supervised), ``sequence_classification`` (the class of each row, by the
            label map of the splits) or ``seq2seq_lm`` (the response, which follows the prompt's tokens as a span).
        max_target_tokens: tokens that the target of a row may have, for ``seq2seq_lm``.
        truncation: ``truncate_prompt``, ``truncate_end``, ``drop`` or ``error``, see ``shorten_row``; running text and
            targets lose their end by both ways to truncate.
        cut_prompt_at: where ``truncate_prompt`` cuts: ``middle``, ``end`` or ``start``.
        loss_on: what is supervised for ``causal_lm``: ``assistant`` (every answer), ``completion`` (the last one) or
            ``all``.
        on_altered_content: ``warn`` or ``error``: what happens when the chat template changes or leaves out what a row
            says.
        system_turn: ``keep`` or ``merge_into_user``: what the chat template gets of a system turn.
        template_arguments: further arguments of the chat template, by name.
        control_tokens: what happens to typed control tokens, see ``RowTokenizer``.
        on_bad_row: ``error`` or ``skip``: what happens when a row cannot be rendered or tokenized.
        max_bad_fraction: share of such rows that ``skip`` lets pass, with those that were skipped in reading.
        on_progress: receives rows done.

    Returns:
        The summary, as stored.

    Raises:
        UserError: the rows are of a format that the task cannot learn from, cannot be rendered, are too long, altered
            or hold control tokens and that is to be an error, a class is in no training row, the chat template does not
            know an argument, or no row of a split, or of all classes but one, is left.
    """
    tables = {split: open_examples(examples, split) for split in SPLITS}
    total = sum(len(table) for table in tables.values())
    options: dict[str, Any] = {
        "max_length_tokens": max_length_tokens,
        **({"max_target_tokens": max_target_tokens} if task == SEQ2SEQ_LM else {}),
        "truncation": truncation,
        "cut_prompt_at": cut_prompt_at,
        **({"loss_on": loss_on} if task == CAUSAL_LM else {}),
        "control_tokens": control_tokens,
    }
    for name in ("max_length_tokens", "max_target_tokens"):
        if options.get(name, 0) > tokenizer.model_max_length:
            logger.warning(
                "tokenize.%s is %d, but the model is made for %d tokens at most.",
                name,
                options[name],
                tokenizer.model_max_length,
            )
    format = tables["train"].format
    if task == CAUSAL_LM:
        options |= {"system_turn": system_turn, "template_arguments": dict(template_arguments or {})}
    format_problem = find_format_problem(format, task=task, path=str(examples))
    if format_problem:
        raise UserError(format_problem)
    splits = json.loads((examples / SPLITS_SUMMARY_NAME).read_text(encoding="utf-8"))
    if splits.get("template") and not tables["train"].is_composed:
        raise UserError(
            f"The stored splits in {examples} were made by an earlier version, which did not note where the columns of "
            "data.template stand in the text. Make them again: kedro run --pipelines=split"
        )
    positions = RowPositions(splits["files"])
    label_map = splits.get("label_map")
    if task == SEQUENCE_CLASSIFICATION:
        refuse_unknown_classes(tables, label_map, positions, max_rows=splits.get("max_rows"))
    counts = {split: SplitCounts() for split in SPLITS}
    done = 0
    on_progress("Tokenizing", 0, total, "rows")
    with (
        tokenizer_parallelism(enabled=True),
        _heap_set_aside(),
        _row_tokenizer(tokenizer, format, task=task, label_map=label_map, **options) as row_tokenizer,
    ):
        for split in SPLITS:
            with TokenTableWriter(split_path(folder, split)) as writer:
                for num_rows, columns in _tokenized(tables[split], row_tokenizer, counts[split]):
                    writer.append_columns(columns)
                    done += num_rows
                    on_progress("Tokenizing", done, total, "rows")
        rendering: Rendering = "chat template" if row_tokenizer.uses_template else "plain text"
    for split in SPLITS:
        counts[split].warn(split, positions)
    written = {split: open_split(folder, split) for split in SPLITS}
    fault = find_template_fault(counts, positions, template=describe_origin(tokenizer))
    problems = fault or find_unusable(counts, splits["files"], on_bad_row=on_bad_row, max_bad_fraction=max_bad_fraction)
    problems += _find_errors(counts, positions, on_altered_content=on_altered_content, **options)
    max_positions = tokenizer.model_max_length if tokenizer.model_max_length < _NO_LIMIT else None
    lost = find_lost_splits(counts, written, positions, max_positions=max_positions, **options)
    lost_classes, warnings = find_lost_classes(tables["train"], written["train"], label_map, task=task, **options)
    for warning in warnings:
        logger.warning("%s", warning)
    problems += [*lost, *lost_classes]
    if not len(written["train"]) and not lost and not fault:
        problems.append(_describe_nothing_left(counts["train"], positions, **options))
    if problems:
        raise UserError(problems)
    endings = counts["train"].endings + counts["validation"].endings + counts["test"].endings
    summary: TokenSummary = {
        "task": task,
        "format": format,
        "rendering": rendering,
        "max_length_tokens": max_length_tokens,
        "truncation": truncation,
        "cut_prompt_at": cut_prompt_at,
        "control_tokens": control_tokens,
        "tokenizer": _describe_tokenizer(tokenizer),
        "end_token_ids": [token for token, _ in endings.most_common()],
        "sources": splits["sources"],
        "label_map": label_map,
        "splits": {
            split: summarize_split(written[split], counts[split], task=task, label_map=label_map) for split in SPLITS
        },
    }
    if task == CAUSAL_LM:
        summary["loss_on"] = loss_on
        summary["system_turn"] = system_turn
        summary["template_arguments"] = dict(template_arguments or {})
    elif task == SEQ2SEQ_LM:
        summary["max_target_tokens"] = max_target_tokens
    write_json_atomic(folder / SUMMARY_NAME, summary)
    write_json_atomic(folder / PREVIEW_NAME, preview_tokens(folder, tokenizer, task=task, label_map=label_map))
    write_json_atomic(folder / REPORT_NAME, build_tokens_section(summary, counts, positions))
    return summary


def read_token_summary(folder: Path) -> TokenSummary:
    """Return the summary of a stored folder of tokens.

    Args:
        folder: what the tokenize pipeline stored.
    """
    summary: TokenSummary = json.loads((Path(folder) / SUMMARY_NAME).read_text(encoding="utf-8"))
    return summary


def read_token_report(folder: Path) -> dict[str, Any]:
    """Return the section of the data report that tells what tokenizing did.

    Args:
        folder: what the tokenize pipeline stored.
    """
    return dict(json.loads((Path(folder) / REPORT_NAME).read_text(encoding="utf-8")))


def _row_tokenizer(
    tokenizer: Any, format: str, *, task: str, label_map: dict[str, int] | None, **options: Any
) -> TaskTokenizer:
    """Choose what turns the rows of a task into tokens."""
    if task == SEQUENCE_CLASSIFICATION:
        return ClassTokenizer(tokenizer, label_map or {}, **options)
    if task == SEQ2SEQ_LM:
        return PairTokenizer(tokenizer, **options)
    return RowTokenizer(tokenizer, format, **options)


def _tokenized(
    table: ExampleTable, row_tokenizer: TaskTokenizer, counts: SplitCounts
) -> Iterator[tuple[int, TokenColumns]]:
    """Yield tokenized chunks; some are rendered and finished while the tokenizer works on others."""
    running: deque[tuple[int, RenderedRows, Future[list[Any]]]] = deque()

    def finish_first() -> tuple[int, TokenColumns]:
        num_rows, rendered, encoded = running.popleft()
        return num_rows, row_tokenizer.finish(rendered, encoded.result(), counts)

    with ThreadPoolExecutor(max_workers=1) as pool:
        for chunk in _chunks(table):
            rendered = row_tokenizer.render(chunk, counts)
            running.append((chunk.num_rows, rendered, pool.submit(row_tokenizer.encode, rendered)))
            if len(running) > _NUM_AHEAD:
                yield finish_first()
        while running:
            yield finish_first()


@contextmanager
def _heap_set_aside() -> Iterator[None]:
    """Let the garbage collector look at new objects only: millions of rows trigger it often, and the heap is large."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _chunks(table: ExampleTable) -> Iterator[pa.RecordBatch]:
    """Cut the rows into chunks of some number of rows and bytes."""
    for batch in table.batches():
        sizes = np.zeros(batch.num_rows, dtype=np.int64)
        for column in batch.columns:
            if pa.types.is_string(column.type):
                sizes += pc.binary_length(column).fill_null(0).to_numpy(zero_copy_only=False)
        reached = np.cumsum(sizes)
        start = 0
        while start < batch.num_rows:
            before = int(reached[start - 1]) if start else 0
            fitting = int(np.searchsorted(reached, before + _CHUNK_BYTES, side="right"))
            end = min(max(fitting, start + 1), start + _CHUNK_ROWS, batch.num_rows)
            yield batch.slice(start, end - start)
            start = end


def _find_errors(
    counts: dict[str, SplitCounts],
    positions: RowPositions,
    *,
    max_length_tokens: int,
    truncation: str,
    on_altered_content: str,
    control_tokens: str,
    max_target_tokens: int | None = None,
    **_: Any,
) -> list[str]:
    """Return one sentence for each kind of rows that must not be there, by the parameters."""
    is_altered = on_altered_content == "error"
    errors = {
        TOO_LONG: (
            truncation == "error",
            f"longer than tokenize.max_length_tokens = {max_length_tokens}",
            "Raise the limit, or set tokenize.truncation to truncate_prompt, truncate_end or drop.",
        ),
        TARGET_TOO_LONG: (
            truncation == "error",
            f"with a target longer than tokenize.max_target_tokens = {max_target_tokens}",
            "Raise the limit, or set tokenize.truncation to truncate_end or drop.",
        ),
        **{
            reason: (is_altered, f"{what}, while tokenize.on_altered_content is error", advice)
            for reason, (what, advice) in ALTERED.items()
        },
        TYPED: (
            control_tokens == "error",
            "with a control token typed in them, while tokenize.control_tokens is error",
            "Change those rows, or set tokenize.control_tokens to auto, as_text, keep or drop.",
        ),
    }
    return [
        f"{split} rows {what}: {counts[split].describe(reason, positions, num_named=_NUM_ROWS_NAMED)}. {advice}"
        for reason, (is_error, what, advice) in errors.items()
        for split in SPLITS
        if is_error and counts[split].counts[reason]
    ]


def _describe_nothing_left(
    counts: SplitCounts,
    positions: RowPositions,
    *,
    max_length_tokens: int,
    max_target_tokens: int | None = None,
    **_: Any,
) -> str:
    reasons = "; ".join(counts.describe(reason, positions) for reason in DROPPED if counts.counts[reason])
    limits = f"tokenize.max_length_tokens = {max_length_tokens}"
    if max_target_tokens is not None:
        limits += f" and tokenize.max_target_tokens = {max_target_tokens}"
    return f"No training row is left after tokenizing with {limits}. Dropped: {reasons or 'there are none'}."


def _describe_tokenizer(tokenizer: Any) -> TokenizerFacts:
    return {
        "num_tokens": len(tokenizer),
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token": tokenizer.pad_token,
        "pad_token_id": tokenizer.pad_token_id,
    }
