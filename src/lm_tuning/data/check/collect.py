"""Read the files of a run into one Arrow file, checking every row on the way."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lm_tuning.data.arrays import Digests, Ints, Mask, find_repeats
from lm_tuning.data.check.account import ReadingBrokeOff, spell_out
from lm_tuning.data.check.findings import MAX_REPORTED, Findings, RowPositions, RowProblem, list_columns
from lm_tuning.data.check.values import TextLengths, find_odd_characters, number_values, value_writer
from lm_tuning.data.format.columns import ColumnMapping
from lm_tuning.data.format.examples import FIELDS, JSON_FIELDS, Example, digest_parts, example_reader, value_reader
from lm_tuning.data.format.labels import LabelTypes
from lm_tuning.data.readers.base import RowSource
from lm_tuning.data.records import FileRows, Row, SplitName, TextLength
from lm_tuning.data.store import ExampleTable, ExampleWriter, RowWriter
from lm_tuning.errors import UserError
from lm_tuning.progress import OnProgress, ignore_progress

logger = logging.getLogger(__name__)

_REPORT_EVERY_ROWS = 2048
# More files than this share one progress bar.
_MAX_BARS = 8
# In the place of a digest, for rows of held-out files without the column: keys are compared among training rows only.
_NO_KEY = bytes(16)
# Rows whose new columns are remembered: objects may use anything for keys.
_MAX_LATE_ROWS = 100


# Told how much of one file was read, of how much, in which unit.
_OnRead: TypeAlias = Callable[[int, int, str], None]


@dataclass(frozen=True)
class OpenedFile:
    """One file to read.

    Attributes:
        rows: its rows, opened.
        split: ``train``, ``validation`` or ``test``.
        source: index of the training source that it belongs to; -1 for a held-out file.
    """

    rows: RowSource
    split: SplitName
    source: int


@dataclass
class CollectedRows:
    """What reading found out, row by row as in ``CheckedRows``.

    Attributes:
        facts: arrays by name: ``files``, ``contents``, ``wholes`` and, with a key, ``keys``.
        values: number of the row's value by column.
        names: what these numbers stand for.
        files: what became of the rows of each file, in the order of reading.
        findings: every row that something is to be said about.
        bad_lines: by file, the first bad rows in full.
        label_types: how many good rows have a label of each JSON type.
        text_lengths: by field how long the texts of the good rows are, see ``TextLengths``.
    """

    facts: dict[str, npt.NDArray[Any]]
    values: dict[str, Ints]
    names: dict[str, pa.LargeStringArray]
    files: list[FileRows]
    findings: Findings
    bad_lines: list[list[str]]
    label_types: LabelTypes
    text_lengths: dict[str, TextLength]


def collect_rows(
    files: Sequence[OpenedFile],
    path: Path,
    *,
    mapping: ColumnMapping,
    numbered: Sequence[str],
    key: str | None,
    normalize: bool,
    on_progress: OnProgress = ignore_progress,
) -> CollectedRows:
    """Write every good row to one Arrow file and note what splitting needs to know of it.

    A row's ``row_id`` is its 1-based number in its file, plus the last number of the files before it. So ids are
    unique, those of the first file are its row numbers, and leaving rows out renumbers nothing.

    Memory grows by 34 bytes per row, 16 more with a key, 4 more per field and 8 more per numbered column, and by 8
    bytes per finding. Texts go to disk, and so do the values of numbered columns until they are numbered.

    Args:
        files: what to read, in this order; that each has the columns that it needs was checked before.
        path: the Arrow file to write.
        mapping: what the columns mean.
        numbered: columns to number the values of, see ``CheckedRows.values``.
        key: column whose value permanently identifies a training row; None for none.
        normalize: bring text to NFC.
        on_progress: told how much of each file was read.

    Returns:
        What is known of every good row, and what became of the others. Rows that repeat a key are among the bad ones.

    Raises:
        ReadingBrokeOff: a file cannot be read to its end; the bad rows before that position are named as well.
    """
    scratch = path.with_suffix(".values")
    problems: list[str] = []
    with value_writer(scratch, numbered) as values:
        collector = _Collector(mapping, numbered, key, values, normalize=normalize)
        used = dict.fromkeys([*mapping.used_columns, *numbered, *([key] if key else [])])
        with ExampleWriter(path, mapping.format, is_composed=mapping.is_composed, inspect=collector.inspect) as writer:
            for index, file in enumerate(files):
                file.rows.select(column for column in used if column in file.rows.columns)
                try:
                    collector.read(file, writer, _file_progress(files, index, on_progress))
                except UserError as error:  # the other files are read all the same, so that all is reported at once
                    problems += [*spell_out(collector.files[-1], collector.bad_lines[-1]), *error.problems]
    if problems:
        scratch.unlink()
        raise ReadingBrokeOff(problems, files=collector.files, findings=collector.findings)
    keep = collector.drop_repeats(path) if key else None
    numbers, names = number_values(scratch, numbered, keep)
    scratch.unlink()
    return CollectedRows(
        collector.facts(keep),
        numbers,
        names,
        collector.files,
        collector.findings,
        collector.bad_lines,
        collector.label_types,
        collector.text_lengths.describe(keep),
    )


def _file_progress(files: Sequence[OpenedFile], index: int, on_progress: OnProgress) -> _OnRead:
    """Return a function that is told how much of one file was read."""
    if len(files) <= _MAX_BARS:
        return partial(on_progress, f"Reading {files[index].rows.name}")

    def report(done: int, total: int, unit: str) -> None:
        on_progress(f"Reading {len(files):,} files", index + (done == total), len(files), "files")

    return report


class _Collector:
    """Arrays that grow row by row."""

    def __init__(
        self, mapping: ColumnMapping, numbered: Sequence[str], key: str | None, values: RowWriter, *, normalize: bool
    ) -> None:
        self.files: list[FileRows] = []
        self.findings = Findings()
        self.bad_lines: list[list[str]] = []
        self.label_types = LabelTypes()
        self.text_lengths = TextLengths(FIELDS[mapping.format])
        self._label = mapping.columns.get("label")
        self._read_example: Callable[[Row], Example] = example_reader(mapping, normalize=normalize)
        self._readers = {column: value_reader(column, normalize=normalize) for column in numbered}
        self._values = values
        self._key = key
        self._read_key = value_reader(key, normalize=normalize) if key else None
        self._json_fields = [(name, name in JSON_FIELDS) for name in FIELDS[mapping.format]]
        # Growing buffers of 2 + 16 + 16 bytes per row, and 16 more with a key, which numpy looks at without a copy; as
        # Python objects they would take several times as much.
        self._files = array("h")
        self._contents = bytearray()
        self._wholes = bytearray()
        self._keys = bytearray()
        self._last_id = 0

    def read(self, file: OpenedFile, writer: ExampleWriter, on_progress: _OnRead) -> None:
        """Add one file."""
        facts: FileRows = {
            "path": file.rows.path,
            "split": file.split,
            "source": file.source,
            "first_row_id": self._last_id + 1,
            "rows_read": 0,
            "rows_kept": 0,
            "rows_skipped": {},
        }
        self.files.append(facts)
        self.bad_lines.append([])
        num_before = writer.num_appended
        try:
            self._read_rows(file, facts, writer, on_progress)
        except UserError:
            # The rows before that position stay counted, for the report.
            facts["broke_off"] = True
            raise
        finally:
            # By what the writer took in: some of the rows still wait in its buffer.
            facts["rows_kept"] = writer.num_appended - num_before
            if file.rows.exploding:
                facts["exploded"] = file.rows.exploding.describe()
            self._files.extend([len(self.files) - 1] * facts["rows_kept"])
        _, total, unit = file.rows.progress()
        on_progress(total, total, unit)

    def _read_rows(self, file: OpenedFile, facts: FileRows, writer: ExampleWriter, on_progress: _OnRead) -> None:
        source, first_id, index = file.rows, self._last_id, file.source
        # Held-out files need none of the columns that training rows are divided by.
        readers = [reader if column in source.columns else None for column, reader in self._readers.items()]
        read_key = self._read_key if self._key in source.columns else None
        # Names of the loop: it runs for millions of rows, and looking up attributes takes a good part of its time.
        read_example, append, append_values = self._read_example, writer.append, self._values.append_row
        label, add_label = self._label, self.label_types.add
        contents, wholes, keys = self._contents, self._wholes, self._keys
        has_keys = self._read_key is not None
        known: set[str] = set(source.columns)
        late: dict[int, set[str]] = {}
        # Two counts: numbers of lines go on over blank ones, which are no rows.
        number = num_rows = 0
        _, total, unit = source.progress()
        on_progress(0, total, unit)
        try:
            for number, row in source:
                num_rows += 1
                if num_rows % _REPORT_EVERY_ROWS == 0:
                    done, total, unit = source.progress()
                    on_progress(min(done, total - 1), total, unit)  # the end comes with the end of the file
                try:
                    if isinstance(row, RowProblem):
                        raise row
                    example = read_example(row)
                    found = [reader(row) if reader else None for reader in readers]
                    # Everything is read before anything is kept, so that a row with one bad value leaves nothing behind
                    # in any buffer.
                    key = digest_parts(read_key(row)) if read_key else _NO_KEY
                except RowProblem as problem:
                    in_file = source.exploding.where if source.exploding else None
                    self._note_bad(first_id + number, number, problem, in_file=in_file)
                    continue
                # A set comparison that costs little where nothing is new, which is nearly every row.
                if not row.keys() <= known and len(late) < _MAX_LATE_ROWS:
                    late.setdefault(number, row.keys() - known)
                    known = known | row.keys()
                append(first_id + number, example.values, index, example.column_ranges)
                contents += example.content_digest
                wholes += example.whole_digest
                if label:
                    add_label(row[label])
                if found:
                    append_values(found)
                if has_keys:
                    keys += key
                for kind, reason in example.oddities:
                    self.findings.add(first_id + number, kind, reason, is_bad=False)
        finally:
            facts["rows_read"] = num_rows
            # By the last number, not by the rows: ids and row numbers stay in step.
            self._last_id += number
        _warn_of_late_columns(source.path, late)

    def inspect(self, batch: pa.RecordBatch) -> None:
        """Look for odd characters in rows that are about to be written, and note how long their texts are."""
        self.text_lengths.add(batch)
        noted: set[tuple[int, str]] = set()
        # Batch by batch: in the bytes of a column the search costs a fraction of what it would cost in texts.
        for name, is_json in self._json_fields:
            for index, kind, reason in find_odd_characters(batch.column(name), is_json=is_json):
                # Two fields of one row may have the same finding; a row is counted once for each kind.
                if (index, kind) not in noted:
                    noted.add((index, kind))
                    row_id = batch.column("row_id")[index].as_py()
                    self.findings.add(row_id, kind, f"{name} {reason}", is_bad=False)

    def drop_repeats(self, path: Path) -> Mask | None:
        """Remove from the file the rows whose key an earlier training row has; return which stay, None for all."""
        table = ExampleTable(path)
        digests = _digests(self._keys)
        is_train = np.array([file["split"] == "train" for file in self.files])
        files = np.frombuffer(self._files, dtype=np.int16)
        repeats, originals = find_repeats(digests, is_train[files])
        if not len(repeats):
            return None
        row_ids = table.row_ids()  # (rows,)
        positions = RowPositions(self.files)
        for repeat, original in zip(repeats.tolist(), originals.tolist(), strict=True):
            name, number = positions.find(int(row_ids[original]))
            file = int(files[repeat])
            self.files[file]["rows_kept"] -= 1
            row_id = int(row_ids[repeat])
            reason = f"column {self._key!r} (split.key) holds the value that row {number} of {name} has."
            problem = RowProblem("repeated_key", reason)
            self._note_bad(row_id, row_id - self.files[file]["first_row_id"] + 1, problem, file)
        # (rows,)
        keep = np.ones(len(files), dtype=bool)
        keep[repeats] = False
        kept_path = path.with_suffix(".kept")
        start = 0
        with ExampleWriter(kept_path, table.format, is_composed=table.is_composed) as writer:
            for batch in table.batches():
                writer.append_batch(batch.filter(pa.array(keep[start : start + batch.num_rows])))
                start += batch.num_rows
        # The old file is still mapped; on POSIX its content stays until the mapping goes.
        kept_path.replace(path)
        return keep

    def facts(self, keep: Mask | None) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of the rows that stay."""
        found: dict[str, npt.NDArray[Any]] = {
            "files": np.frombuffer(self._files, dtype=np.int16),
            "contents": _digests(self._contents),
            "wholes": _digests(self._wholes),
        }
        if self._key:
            found["keys"] = _digests(self._keys)
        return found if keep is None else {name: values[keep] for name, values in found.items()}

    def _note_bad(
        self, row_id: int, number: int, problem: RowProblem, file: int = -1, *, in_file: str | None = None
    ) -> None:
        """Note a row that cannot be used.

        Args:
            row_id: its id in the run.
            number: its number in its file, from 1.
            problem: what is wrong with it.
            file: index of its file; -1 is the file that is being read, which is the last one.
            in_file: where an exploded row stands in its file; None for other rows.
        """
        reason = f"{problem.reason} (In the file: {in_file}.)" if in_file else problem.reason
        self.findings.add(row_id, problem.kind, reason, is_bad=True)
        counts = self.files[file]["rows_skipped"]
        counts[problem.kind] = counts.get(problem.kind, 0) + 1
        if len(self.bad_lines[file]) < MAX_REPORTED:
            self.bad_lines[file].append(f"{self.files[file]['path']}, {in_file or f'row {number}'}: {problem.reason}")


def _warn_of_late_columns(path: str, late: Mapping[int, set[str]]) -> None:
    """Tell of columns that were not there yet when the columns of a file were looked at."""
    if late:
        names = sorted(name for columns in late.values() for name in columns)
        logger.warning(
            "%s: columns that first appear in row %d or later are not used: %s. To use them, let a row among the first "
            "1,000 have them.",
            path,
            min(late),
            list_columns(names),
        )


def _digests(digests: bytearray) -> Digests:
    """Return digests of 16 bytes as pairs of numbers, ``(rows, 2)``, without copying them."""
    return np.frombuffer(digests, dtype=np.uint64).reshape(-1, 2)
