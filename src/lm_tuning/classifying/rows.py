"""Read, check and tokenize the rows of a prediction, a few hundred at a time, before any weights are loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from lm_tuning.classifying.columns import RowReading, check_reading, choose_reading
from lm_tuning.data.check.account import find_refusals, log_skipped, spell_out
from lm_tuning.data.check.findings import MAX_REPORTED, RowPositions, RowProblem
from lm_tuning.data.format.columns import TEXT_LABEL, template_columns
from lm_tuning.data.format.examples import example_reader, value_reader
from lm_tuning.data.format.nested import parse_path
from lm_tuning.data.readers.base import ReadSettings, RowSource
from lm_tuning.data.readers.open import open_rows
from lm_tuning.data.records import FileRows, Row, SourceFile
from lm_tuning.data.store import RowWriter, example_schema
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import DataParameters
from lm_tuning.parameters.predict import PredictParameters
from lm_tuning.progress import OnProgress
from lm_tuning.text.records import NO_LABEL
from lm_tuning.text.render.plain import RenderedRows, render_text
from lm_tuning.text.store.table import TokenTable, TokenTableWriter
from lm_tuning.text.tokenizers.classification import ClassTokenizer
from lm_tuning.text.tokenizers.counts import CHANGED, DROPPED, SHORTENED, SplitCounts

logger = logging.getLogger(__name__)

ROW_SCHEMA = pa.schema(
    [("row_id", pa.int64()), ("file", pa.int32()), ("row", pa.int64()), ("text", pa.string()), ("label", pa.string())]
)

_ROWS_NAME, _TOKENS_NAME = "rows.arrow", "tokens.arrow"
_CHUNK_ROWS = 512


class TextTokenizer(ClassTokenizer):
    """Tokenize texts as those of training rows; a row needs no class, and may have one that the model does not know."""

    def render(self, batch: pa.RecordBatch, counts: SplitCounts) -> RenderedRows:
        """Render the texts, and number the classes that are known."""
        positions, rows = self._render_each(
            batch, ("text",), lambda text: self._look_through(render_text(text)), counts
        )
        labels = pc.index_in(batch.column("label"), value_set=self._names).fill_null(NO_LABEL)
        return self._collect(batch, positions, rows, labels=labels.to_numpy()[positions])


@dataclass(frozen=True)
class CheckedRows:
    """Rows that are ready to be predicted: texts and tokens in two files, row by row the same.

    Attributes:
        rows_path: texts and labels as they were read, in ``ROW_SCHEMA``.
        table: their tokens; the label of a row is that of a class which the model knows.
        files: what became of the rows of each file.
        reading: how they were read, in words.
        num_shortened: rows that lost a part to ``tokenize.max_length_tokens``.
    """

    rows_path: Path
    table: TokenTable
    files: list[FileRows]
    reading: str
    num_shortened: int

    def remove(self) -> None:
        """Remove both files; they are made again when they are wanted."""
        for path in (self.rows_path, self.table.path):
            path.unlink(missing_ok=True)


def write_rows(
    folder: Path,
    files: Sequence[SourceFile],
    data: DataParameters,
    predict: PredictParameters,
    tokenizer: TextTokenizer,
    *,
    on_progress: OnProgress,
) -> CheckedRows:
    """Read, check and tokenize all rows.

    Args:
        folder: where the two files go.
        files: what is read, see ``describe_named``.
        data: the ``data`` parameters.
        predict: the ``predict`` parameters.
        tokenizer: of the tuned model.
        on_progress: told how much of each file was read.

    Raises:
        UserError: everything that is wrong with files, columns and rows, as ``data.on_bad_row`` has it.
    """
    opened = _open_files(files, data, predict)
    reading = choose_reading(opened[0].header, data, predict)
    problems = [problem for rows in opened[1:] for problem in _column_problems(reading, rows)]
    if problems:
        raise UserError(problems)
    logger.info("Rows to predict: %s.", reading.describe())
    rows_path, tokens_path = folder / _ROWS_NAME, folder / _TOKENS_NAME
    with tokenizer, RowWriter(rows_path, ROW_SCHEMA) as rows_writer, TokenTableWriter(tokens_path) as tokens_writer:
        collector = _Collector(reading, tokenizer, rows_writer, tokens_writer, normalize=data.normalize == "nfc")
        for rows in opened:
            collector.read(rows, on_progress)
    collector.settle(data)
    num_shortened = sum(collector.counts.counts[reason] for reason in SHORTENED)
    return CheckedRows(rows_path, TokenTable(tokens_path), collector.files, reading.describe(), num_shortened)


def _open_files(files: Sequence[SourceFile], data: DataParameters, predict: PredictParameters) -> list[RowSource]:
    settings = ReadSettings(predict.max_rows, data.max_row_bytes, data.delimiter)
    given = [data.columns.text, data.columns.label, predict.columns.text, predict.columns.label]
    named = [name for name in given if name]
    for template in (data.template, predict.template):
        try:
            named += template_columns(template) if template else []
        except ValueError:
            continue  # choose_reading says what is wrong with it
    problems: list[str] = []
    opened: list[RowSource] = []
    for file in files:
        try:
            # Only a file that has them is read by the parameters on what lies inside the training files.
            within: SourceFile = {"field": data.field, **file} if data.field and file["format"] == "json" else file
            rows = open_rows(within, settings=settings)
            if lists := _lists_in(rows, data.explode):
                rows.explode(lists)
            rows.add_paths(dict.fromkeys(named))
            opened.append(rows)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)
    return opened


def _lists_in(rows: RowSource, explode: str | list[str] | None) -> list[str]:
    """Return the lists whose elements are rows of their own in training rows, where this file has them as well."""
    lists = [explode] if isinstance(explode, str) else [*(explode or ())]
    roots = [steps[0] for name in lists if (steps := parse_path(name))]
    return lists if roots and str(roots[0]) in rows.columns else []


def _column_problems(reading: RowReading, rows: RowSource) -> list[str]:
    try:
        check_reading(reading, rows.header)
    except UserError as error:
        return error.problems
    return []


@dataclass
class _Collector:
    """Reads rows and tokenizes them, some hundred at a time, and keeps account of all of them."""

    reading: RowReading
    tokenizer: TextTokenizer
    rows_writer: RowWriter
    tokens_writer: TokenTableWriter
    normalize: bool
    files: list[FileRows] = field(default_factory=list)
    bad_lines: list[list[str]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    counts: SplitCounts = field(default_factory=SplitCounts)

    def __post_init__(self) -> None:
        self._read_text = example_reader(self.reading.mapping, normalize=self.normalize)
        label = self.reading.label
        self._read_label = value_reader(label, normalize=self.normalize) if label else None
        self._is_composed = self.reading.mapping.is_composed
        self._schema = example_schema(TEXT_LABEL, is_composed=self._is_composed)
        # Id, text, label and column ranges of each row that waits.
        self._waiting: list[tuple[Any, ...]] = []
        self._last_id = 0

    def read(self, rows: RowSource, on_progress: OnProgress) -> None:
        """Add the rows of one file."""
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
        what = f"Reading {rows.name}"
        rows.select(self.reading.columns)
        on_progress(what, 0, *rows.progress()[1:])
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
        _, total, unit = rows.progress()
        on_progress(what, total, total, unit)

    def settle(self, data: DataParameters) -> None:
        """Tell of rows that lost something, and refuse to go on with bad ones where that is not allowed.

        Raises:
            UserError: every such row.
        """
        positions = RowPositions(self.files)
        for reason in CHANGED:
            if self.counts.counts[reason]:
                logger.warning("Rows changed: %s", self.counts.describe(reason, positions))
        refused = self.broken or find_refusals(self.files, self.bad_lines, data, classes=None)
        if refused:
            raise UserError(refused)
        log_skipped(self.files, self.bad_lines)

    def _add(self, row_id: int, row: Row | RowProblem) -> None:
        try:
            if isinstance(row, RowProblem):
                raise row
            example = self._read_text(row)
            # A row without a class is what predicting is for.
            has_label = self._read_label and row.get(str(self.reading.label)) not in (None, "")
            label = self._read_label(row) if self._read_label and has_label else None
            self._waiting.append((row_id, example.values[0], label, -1, example.column_ranges))
        except RowProblem as problem:
            self._note_bad(row_id, problem.kind, problem.reason)

    def _note_bad(self, row_id: int, kind: str, reason: str) -> None:
        file = self.files[-1]
        file["rows_skipped"][kind] = file["rows_skipped"].get(kind, 0) + 1
        if len(self.bad_lines[-1]) < MAX_REPORTED:
            self.bad_lines[-1].append(f"{file['path']}, row {row_id - file['first_row_id'] + 1}: {reason}")

    def _flush(self) -> None:
        """Tokenize the rows that wait, and write those that the model can be given."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        counts, file = SplitCounts(), self.files[-1]
        fields = zip(*(row[: len(self._schema)] for row in waiting), strict=True)
        columns = [pa.array(values, kind.type) for values, kind in zip(fields, self._schema, strict=True)]
        batch = pa.record_batch(columns, schema=self._schema)
        rendered = self.tokenizer.render(batch, counts)
        tokens = self.tokenizer.finish(rendered, self.tokenizer.encode(rendered), counts)
        for reason in DROPPED:
            for row_id in counts.rows(reason):
                self._note_bad(row_id, reason, counts.detail(reason, row_id) or f"{DROPPED[reason]}.")
        for reason in CHANGED:
            for row_id in counts.rows(reason):
                self.counts.add(reason, row_id, counts.detail(reason, row_id))
        self.tokens_writer.append_columns(tokens)
        kept = set(tokens.row_ids.tolist())
        file["rows_kept"] += len(kept)
        for row_id, text, label, *_ in waiting:
            if row_id in kept:
                number = row_id - file["first_row_id"] + 1
                self.rows_writer.append_row((row_id, len(self.files) - 1, number, text, label))
