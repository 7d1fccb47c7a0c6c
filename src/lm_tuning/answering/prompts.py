"""Read the files of prompts, check every row, and write the good ones as tokens into one file."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from lm_tuning.answering.records import PromptsRecord, PromptsWritten
from lm_tuning.answering.tokenizing import PromptTokenizer
from lm_tuning.answering.wording import Wording
from lm_tuning.data.check.account import find_refusals, log_skipped, spell_out
from lm_tuning.data.check.findings import MAX_REPORTED, RowPositions, RowProblem
from lm_tuning.data.format.columns import ColumnMapping, describe_mapping, template_columns
from lm_tuning.data.format.examples import Example
from lm_tuning.data.format.nested import parse_path
from lm_tuning.data.format.prompts import check_prompt_columns, choose_prompt_mapping, prompt_of, prompt_reader
from lm_tuning.data.readers.base import ReadSettings, RowSource
from lm_tuning.data.readers.open import open_rows
from lm_tuning.data.records import FileRows, Row, SourceFile
from lm_tuning.data.store import RowWriter
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import DataParameters
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.text.tokenizers.counts import CHANGED, DROPPED, SHORTENED, SplitCounts

logger = logging.getLogger(__name__)

PROMPT_SCHEMA = pa.schema(
    [
        ("row_id", pa.int64()),
        ("file", pa.int32()),
        ("row", pa.int64()),
        ("prompt", pa.string()),  # as JSON
        ("input_ids", pa.list_(pa.int32())),
    ]
)

_CHUNK_ROWS = 512


@dataclass(frozen=True)
class PromptSource:
    """What is read, and how.

    Attributes:
        files: the files of prompts.
        data: the ``data`` parameters, with ``columns`` and ``template`` of the prompts.
        group: the group that these two are from, for messages.
        max_rows: rows read of each file; ``None`` for all.
    """

    files: Sequence[SourceFile]
    data: DataParameters
    group: str = "data"
    max_rows: int | None = None


def write_prompts(
    path: Path, source: PromptSource, tokenizer: Any, wording: Wording, *, on_progress: OnProgress = ignore_progress
) -> PromptsWritten:
    """Read, check and tokenize prompts; a few hundred of them are in memory at a time.

    Args:
        path: the file to write.
        source: what is read.
        tokenizer: of the model that is asked.
        wording: how prompts are written for it.
        on_progress: told how much of each file was read.

    Raises:
        UserError: everything that is wrong with files, columns and rows.
    """
    rows, data = _open_files(source), source.data
    mapping = choose_prompt_mapping(
        rows[0].header, data, task=wording.task, tuned_on=wording.tuned_on, group=source.group
    )
    _check_others(rows[1:], mapping, source.group)
    with PromptTokenizer(tokenizer, wording, mapping) as prompts, RowWriter(path, PROMPT_SCHEMA) as writer:
        collector = _Collector(mapping, prompts, writer, data)
        for opened in rows:
            collector.read(opened, on_progress)
    collector.settle(data)
    record: PromptsRecord = {
        "num_read": sum(file["rows_read"] for file in collector.files),
        "num_prompts": writer.num_rows,
        "num_skipped": sum(sum(file["rows_skipped"].values()) for file in collector.files),
        "num_shortened": sum(collector.counts.counts[reason] for reason in SHORTENED),
    }
    return PromptsWritten(
        path, collector.files, record, describe_mapping(mapping), mapping.format, collector.reference_ids
    )


def read_prompt_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the prompts in the order of the files, a few thousand at a time, memory-mapped.

    Args:
        path: what :func:`write_prompts` wrote.
    """
    reader = pa.ipc.open_file(pa.memory_map(str(path), "r"))
    return (reader.get_batch(index) for index in range(reader.num_record_batches))


def _open_files(source: PromptSource) -> list[RowSource]:
    data, problems, opened = source.data, [], []
    settings = ReadSettings(source.max_rows, data.max_row_bytes, data.delimiter)
    named = [*data.columns.model_dump(exclude_none=True).values(), *_columns_of(data.template)]
    for file in source.files:
        # What training files hold inside an object may be a plain list here: only a file that has it is read by it.
        described: SourceFile = {"field": data.field, **file} if data.field and file["format"] == "json" else file
        try:
            rows = open_rows(described, settings=settings)
            if lists := _lists_in(rows, data.explode):
                rows.explode(lists)
        except UserError as error:
            problems += error.problems
            continue
        rows.add_paths(dict.fromkeys(named))
        opened.append(rows)
    if problems:
        raise UserError(problems)
    return opened


def _lists_in(rows: RowSource, explode: str | list[str] | None) -> list[str]:
    """Return the lists whose elements are rows of their own in training rows, where this file has them as well."""
    lists = [explode] if isinstance(explode, str) else [*(explode or ())]
    roots = [steps[0] for name in lists if (steps := parse_path(name))]
    return lists if lists and str(roots[0]) in rows.columns else []


def _columns_of(template: str | None) -> list[str]:
    """Name the columns of a template; none where it does not parse, which is told elsewhere."""
    try:
        return template_columns(template) if template else []
    except ValueError:
        return []


def _check_others(others: Sequence[RowSource], mapping: ColumnMapping, group: str) -> None:
    problems: list[str] = []
    for rows in others:
        try:
            check_prompt_columns(mapping, rows.header, group=group)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)


@dataclass
class _Collector:
    """Turns rows into prompts, some hundred at a time, and keeps account of all of them."""

    mapping: ColumnMapping
    tokenizer: PromptTokenizer
    writer: RowWriter
    data: DataParameters
    files: list[FileRows] = field(default_factory=list)
    bad_lines: list[list[str]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    counts: SplitCounts = field(default_factory=SplitCounts)
    reference_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._read: Callable[[Row], Example] = prompt_reader(self.mapping, normalize=self.data.normalize == "nfc")
        self._waiting: list[tuple[int, Example]] = []
        self._last_id = 0

    def read(self, rows: RowSource, on_progress: OnProgress) -> None:
        """Add the prompts of one file."""
        first_id = self._last_id + 1
        facts: FileRows = {
            "path": rows.path,
            "split": "test",
            "source": -1,
            "first_row_id": first_id,
            "rows_read": 0,
            "rows_kept": 0,
            "rows_skipped": {},
        }
        self.files.append(facts)
        self.bad_lines.append([])
        what, num_before = f"Reading {rows.name}", self.writer.num_appended
        rows.select(column for column in self.mapping.used_columns if column in rows.columns)
        on_progress(what, 0, rows.progress()[1], rows.progress()[2])
        try:
            for number, row in rows:
                facts["rows_read"] += 1
                # By its number, which goes on over blank lines: ids and row numbers stay in step.
                self._last_id = first_id + number - 1
                self._add(self._last_id, row)
                if len(self._waiting) == _CHUNK_ROWS:
                    self._flush()
                    done, total, unit = rows.progress()
                    on_progress(what, min(done, total - 1), total, unit)
        except UserError as error:  # the other files are read all the same, so that all is reported at once
            self.broken += [*spell_out(facts, self.bad_lines[-1]), *error.problems]
        self._flush()
        facts["rows_kept"] = self.writer.num_appended - num_before
        _, total, unit = rows.progress()
        on_progress(what, total, total, unit)

    def settle(self, data: DataParameters) -> None:
        """Tell of rows that cannot be asked, and refuse to go on where that is not allowed.

        Raises:
            UserError: every such row.
        """
        positions = RowPositions(self.files)
        for reason in CHANGED:
            if self.counts.counts[reason]:
                logger.warning("Prompts changed: %s", self.counts.describe(reason, positions))
        if self.broken:
            raise UserError(self.broken)
        refused = find_refusals(self.files, self.bad_lines, data, classes=None)
        if refused:
            raise UserError(refused)
        log_skipped(self.files, self.bad_lines)

    def _add(self, row_id: int, row: Row | RowProblem) -> None:
        try:
            if isinstance(row, RowProblem):
                raise row
            self._waiting.append((row_id, self._read(row)))
        except RowProblem as problem:
            self._note_bad(row_id, problem.kind, problem.reason)

    def _note_bad(self, row_id: int, kind: str, reason: str) -> None:
        file = self.files[-1]
        file["rows_skipped"][kind] = file["rows_skipped"].get(kind, 0) + 1
        if len(self.bad_lines[-1]) < MAX_REPORTED:
            self.bad_lines[-1].append(f"{file['path']}, row {row_id - file['first_row_id'] + 1}: {reason}")

    def _flush(self) -> None:
        """Tokenize the rows that wait, and write those that can be asked."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        counts = SplitCounts()
        tokenized = self.tokenizer.tokenize(waiting, counts)
        for reason in DROPPED:
            for row_id in counts.rows(reason):
                self._note_bad(row_id, reason, counts.detail(reason, row_id) or f"{DROPPED[reason]}.")
        for reason in CHANGED:
            for row_id in counts.rows(reason):
                self.counts.add(reason, row_id, counts.detail(reason, row_id))
        examples, file = dict(waiting), self.files[-1]
        for prompt in tokenized:
            self.reference_ids = self.reference_ids or prompt.reference_ids
            read = prompt_of(examples[prompt.row_id].values, self.mapping.format)
            text, number = json.dumps(read, ensure_ascii=False), prompt.row_id - file["first_row_id"] + 1
            self.writer.append_row((prompt.row_id, len(self.files) - 1, number, text, prompt.input_ids))
