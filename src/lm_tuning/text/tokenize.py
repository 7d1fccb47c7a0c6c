"""Make the stored tokens of a run, batch by batch: rows in, token ids and what is supervised of them out."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lm_tuning.data.check.findings import RowPositions
from lm_tuning.data.format.columns import CAUSAL_LM, SEQ2SEQ_LM, SEQUENCE_CLASSIFICATION, find_format_problem
from lm_tuning.data.records import SPLITS
from lm_tuning.data.split.folder import read_summary
from lm_tuning.data.store import ExampleTable, open_examples
from lm_tuning.errors import UserError
from lm_tuning.models.loading import load_tokenizer, read_config
from lm_tuning.models.record import BaseModelRecord, location_of
from lm_tuning.models.structure import longest_text, position_limit
from lm_tuning.parameters.data import DataParameters, TokenizeParameters
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.reporting.document import ReportSection
from lm_tuning.runtime.threads import heap_set_aside, tokenizer_parallelism
from lm_tuning.storage.atomic import write_json_atomic
from lm_tuning.storage.folders import SCHEMA_VERSION, read_manifest
from lm_tuning.text.decoding import preview_tokens
from lm_tuning.text.records import TokensFacts, TokenSources, TokenSummary
from lm_tuning.text.render.chat_template import describe_origin
from lm_tuning.text.render.plain import RenderedRows
from lm_tuning.text.store.origins import write_origins
from lm_tuning.text.store.table import TokenColumns, TokenTable, TokenTableWriter, open_split, split_path
from lm_tuning.text.summary import LENGTHS_NAME, REPORT_NAME, build_tokens_section, draw_lengths, summarize_split
from lm_tuning.text.tokenizers import refusals
from lm_tuning.text.tokenizers.base import TaskTokenizer
from lm_tuning.text.tokenizers.causal_lm import RowTokenizer
from lm_tuning.text.tokenizers.classification import ClassTokenizer, refuse_unknown_classes
from lm_tuning.text.tokenizers.counts import SplitCounts
from lm_tuning.text.tokenizers.seq2seq import PairTokenizer

logger = logging.getLogger(__name__)

TOKENS_VERSION = 4
"""Raise it when the same rows and settings give other tokens: stored tokens of another version are not reused."""

SUMMARY_NAME = "summary.json"
PREVIEW_NAME = "preview.json"

# Enough to keep every core busy, few enough that progress moves every second or so and memory stays small.
_CHUNK_ROWS = 1024
_CHUNK_BYTES = 1 << 19
# Chunks that are with the tokenizer while the main thread works on others.
_NUM_AHEAD = 2


def write_tokens(
    folder: Path,
    examples: Path,
    tokenizer: Any,
    settings: TokenizeParameters,
    *,
    task: str = CAUSAL_LM,
    on_bad_row: str = "error",
    max_bad_fraction: float = 0.05,
    on_progress: OnProgress = ignore_progress,
) -> TokenSummary:
    """Write a table for each split, ``summary.json``, ``preview.json``, ``report.json`` and ``origins.parquet``.

    Rows keep their order; a few thousand of them are in memory at a time.

    Args:
        folder: an empty folder.
        examples: folder of stored splits.
        tokenizer: a fast transformers tokenizer with a pad token.
        settings: the ``tokenize`` parameters.
        task: ``causal_lm`` (spans of tokens are supervised), ``sequence_classification`` (the class of each row, by the
            label map of the splits) or ``seq2seq_lm`` (the response, which follows the prompt's tokens as a span).
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
    tables: dict[str, ExampleTable] = {split: open_examples(examples, split) for split in SPLITS}
    splits = read_summary(examples)
    label_map: dict[str, int] | None = splits.get("label_map")
    positions = RowPositions(splits["files"])
    max_positions = longest_text(tokenizer)
    for name, limit in refusals.limits_of(settings, task=task).items():
        if max_positions is not None and limit > max_positions:
            logger.warning(
                "tokenize.%s is %d, but the model is made for %d tokens at most.", name, limit, max_positions
            )
    _refuse_unfit_rows(examples, tables["train"], task=task, has_template=bool(splits.get("template")))
    if task == SEQUENCE_CLASSIFICATION:
        refuse_unknown_classes(tables, label_map, positions, max_rows=splits.get("max_rows"))
    # Compiles the chat template and proves the byte table, so a template that cannot work is named before any row.
    row_tokenizer = _row_tokenizer(tokenizer, settings, tables["train"].format, task=task, label_map=label_map or {})
    counts = _write_tables(folder, tables, row_tokenizer, on_progress)
    for split in SPLITS:
        counts[split].warn(split, positions)
    written: dict[str, TokenTable] = {split: open_split(folder, split) for split in SPLITS}
    # A template that refuses every row is one fault, not a million bad rows.
    fault = refusals.find_template_fault(counts, positions, template=describe_origin(tokenizer))
    lost = refusals.find_lost_splits(counts, written, positions, settings, task=task, max_positions=max_positions)
    lost_classes, warnings = refusals.find_lost_classes(
        tables["train"], written["train"], label_map, settings, task=task
    )
    for warning in warnings:
        logger.warning("%s", warning)
    unusable = refusals.find_unusable(counts, splits["files"], on_bad_row=on_bad_row, max_bad_fraction=max_bad_fraction)
    problems = [
        *(fault or unusable),
        *refusals.find_errors(counts, positions, settings),
        *lost,
        *lost_classes,
    ]
    if not len(written["train"]) and not lost and not fault:
        reasons = counts["train"].describe_dropped(positions) or "there are none"
        limits = refusals.describe_limits(settings, task=task)
        problems.append(f"No training row is left after tokenizing with {limits}. Dropped: {reasons}.")
    if problems:
        raise UserError(problems)
    # Over all splits: generation stops at whatever ends an answer anywhere.
    endings = counts["train"].endings + counts["validation"].endings + counts["test"].endings
    summary: TokenSummary = {
        "task": task,
        "format": tables["train"].format,
        "rendering": "chat template" if row_tokenizer.uses_template else "plain text",
        "max_length_tokens": settings.max_length_tokens,
        "truncation": settings.truncation,
        "cut_prompt_at": settings.cut_prompt_at,
        "control_tokens": settings.control_tokens,
        "tokenizer": {
            "num_tokens": len(tokenizer),
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token": tokenizer.pad_token,
            "pad_token_id": tokenizer.pad_token_id,
        },
        "end_token_ids": [token for token, _ in endings.most_common()],
        "sources": splits["sources"],
        "label_map": label_map,
        "splits": {
            split: summarize_split(written[split], counts[split], task=task, label_map=label_map) for split in SPLITS
        },
    }
    if task == CAUSAL_LM:
        summary["loss_on"] = settings.loss_on
        summary["system_turn"] = settings.system_turn
        summary["template_arguments"] = settings.template_arguments
    elif task == SEQ2SEQ_LM:
        summary["max_target_tokens"] = settings.max_target_tokens
    write_json_atomic(folder / SUMMARY_NAME, summary)
    write_json_atomic(folder / PREVIEW_NAME, preview_tokens(folder, tokenizer, task=task, label_map=label_map))
    write_json_atomic(folder / REPORT_NAME, build_tokens_section(summary, counts, positions))
    write_origins(folder, examples, splits)
    return summary


def read_token_summary(folder: Path) -> TokenSummary:
    """Return the summary of a stored folder of tokens.

    Args:
        folder: what the tokenize pipeline stored.
    """
    summary: TokenSummary = json.loads((Path(folder) / SUMMARY_NAME).read_text(encoding="utf-8"))
    return summary


def read_token_report(folder: Path) -> ReportSection[TokensFacts]:
    """Return the section of the data report that tells what tokenizing did.

    Args:
        folder: what the tokenize pipeline stored.
    """
    section: ReportSection[TokensFacts] = json.loads((Path(folder) / REPORT_NAME).read_text(encoding="utf-8"))
    return section


def _refuse_unfit_rows(examples: Path, table: ExampleTable, *, task: str, has_template: bool) -> None:
    """Refuse rows that the task cannot learn from, and those that were stored without what tokenizing asks for."""
    format_problem = find_format_problem(table.format, task=task, path=str(examples))
    if format_problem:
        raise UserError(format_problem)
    if has_template and not table.is_composed:
        raise UserError(
            f"The stored splits in {examples} were made by an earlier version, which did not note where the columns of "
            "data.template stand in the text. Make them again: kedro run --pipelines=split"
        )


def _row_tokenizer(
    tokenizer: Any, settings: TokenizeParameters, format: str, *, task: str, label_map: Mapping[str, int]
) -> TaskTokenizer:
    """Choose what turns the rows of a task into tokens."""
    if task == SEQUENCE_CLASSIFICATION:
        return ClassTokenizer(tokenizer, settings, label_map)
    if task == SEQ2SEQ_LM:
        return PairTokenizer(tokenizer, settings)
    return RowTokenizer(tokenizer, settings, format)


def _write_tables(
    folder: Path, tables: Mapping[str, ExampleTable], row_tokenizer: TaskTokenizer, on_progress: OnProgress
) -> dict[str, SplitCounts]:
    """Tokenize all splits into their files; return what happened to their rows."""
    total = sum(map(len, tables.values()))
    counts: dict[str, SplitCounts] = {split: SplitCounts() for split in SPLITS}
    done = 0
    with tokenizer_parallelism(enabled=True), heap_set_aside(), row_tokenizer:
        on_progress("Tokenizing", 0, total, "rows")
        for split, table in tables.items():
            with TokenTableWriter(split_path(folder, split)) as writer:
                for num_rows, columns in _tokenized(table, row_tokenizer, counts[split]):
                    writer.append_columns(columns)
                    done += num_rows
                    on_progress("Tokenizing", done, total, "rows")
    return counts


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
            # Rendering holds the lock of Python, encoding does not: so both go on at once with a single further thread.
            running.append((chunk.num_rows, rendered, pool.submit(row_tokenizer.encode, rendered)))
            if len(running) > _NUM_AHEAD:
                yield finish_first()
        while running:
            yield finish_first()


def _chunks(table: ExampleTable) -> Iterator[pa.RecordBatch]:
    """Cut the rows into chunks of some number of rows and bytes."""
    for batch in table.batches():
        sizes = np.zeros(batch.num_rows, dtype=np.int64)
        # Rows of a long conversation and of a word differ a thousandfold, so chunks are bounded by bytes as well as by
        # rows.
        for column in batch.columns:
            if pa.types.is_string(column.type):
                sizes += pc.binary_length(column).fill_null(0).to_numpy(zero_copy_only=False)
        reached = np.cumsum(sizes)
        start = 0
        while start < batch.num_rows:
            before = int(reached[start - 1]) if start else 0
            fitting = int(np.searchsorted(reached, before + _CHUNK_BYTES, side="right"))
            # At least one row, however long.
            end = min(max(fitting, start + 1), start + _CHUNK_ROWS, batch.num_rows)
            yield batch.slice(start, end - start)
            start = end


def token_sources(
    splits: Path, base_model: BaseModelRecord, tokenize: TokenizeParameters, *, task: str
) -> TokenSources:
    """Return what the tokens of a run are made from.

    Args:
        splits: the stored folder of splits.
        base_model: whose tokenizer, see ``describe_base_model``.
        tokenize: the ``tokenize`` parameters.
        task: the ``task`` parameter.
    """
    # This one decides whether the tokens are taken, not which come out.
    left_out = {"max_lost_fraction"}
    # Left out where there are none: tokens of earlier versions keep their key.
    if not tokenize.template_arguments:
        left_out.add("template_arguments")
    return {
        "schema_version": SCHEMA_VERSION,
        "tokens_version": TOKENS_VERSION,
        "splits": read_manifest(splits)["key"],
        "tokenizer": base_model["tokenizer_digest"],
        "tokenize": tokenize.model_dump(exclude=left_out),
        "task": task,
    }


def make_tokens(
    folder: Path,
    *,
    splits: Path,
    base_model: BaseModelRecord,
    tokenize: TokenizeParameters,
    data: DataParameters,
    task: str,
    on_progress: OnProgress = ignore_progress,
) -> None:
    """Write tokens and a picture of their lengths.

    Args:
        folder: an empty folder.
        splits: the stored folder of splits.
        base_model: whose tokenizer, see ``describe_base_model``.
        tokenize: the ``tokenize`` parameters.
        data: the ``data`` parameters, of which bad rows are handled as in reading.
        task: the ``task`` parameter.
        on_progress: receives rows done.

    Raises:
        UserError: see ``write_tokens``; or the limits cut too many of the tokens away.
    """
    write_tokens(
        folder,
        splits,
        load_tokenizer(**location_of(base_model)),
        tokenize,
        task=task,
        on_bad_row=data.on_bad_row,
        max_bad_fraction=data.max_bad_fraction,
        on_progress=on_progress,
    )
    refuse_stored_losses(folder, base_model, tokenize)
    figure = draw_lengths(
        folder, task=task, max_length_tokens=tokenize.max_length_tokens, max_target_tokens=tokenize.max_target_tokens
    )
    # Kept with the tokens, so that a run that reuses them draws nothing.
    figure.savefig(folder / LENGTHS_NAME, dpi=120)


def refuse_stored_losses(folder: Path, base_model: BaseModelRecord, tokenize: TokenizeParameters) -> None:
    """Refuse tokens of which the limits have cut too large a part away.

    Args:
        folder: the folder of tokens.
        base_model: see ``describe_base_model``.
        tokenize: the ``tokenize`` parameters; the part that may be lost can be another than when tokens were made.

    Raises:
        UserError: see ``refuse_losses``.
    """
    refusals.refuse_losses(
        read_token_summary(folder),
        max_lost_fraction=tokenize.max_lost_fraction,
        max_positions=positions_of(base_model),
        model_name=base_model["name_or_path"],
    )


def read_outputs(folder: Path) -> tuple[TokenSummary, bytes, ReportSection[TokensFacts]]:
    """Return what stored tokens come with: their summary, a picture of the lengths, and a section of the data report.

    Args:
        folder: the folder of tokens.
    """
    return read_token_summary(folder), (folder / LENGTHS_NAME).read_bytes(), read_token_report(folder)


def positions_of(base_model: BaseModelRecord) -> int | None:
    """Return the positions in the model's config; ``None`` where it names none.

    Args:
        base_model: see ``describe_base_model``.
    """
    return position_limit(read_config(**location_of(base_model)))
