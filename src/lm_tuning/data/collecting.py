"""Read the files of a run into one Arrow file, checking every row on the way."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lm_tuning.data.columns import ColumnMapping, check_mapping, missing_column
from lm_tuning.data.examples import Example, example_reader, value_reader
from lm_tuning.data.problems import RowProblem, RowProblems
from lm_tuning.data.reading import RowSource
from lm_tuning.data.rows import ExampleWriter
from lm_tuning.errors import UserError
from lm_tuning.progress import OnProgress, ignore_progress

logger = logging.getLogger(__name__)

_REPORT_EVERY_ROWS = 2048


@dataclass
class CollectedRows:
    """What is known of each row once its text lies on disk. All arrays are ``(rows,)`` in the order of writing.

    Attributes:
        files: place of the row's file, in the order of reading.
        contents: two 64-bit halves a row, ``(rows, 2)``: equal for equal content.
        wholes: the same with the label.
        values: number of the row's value by column, for group and stratum; -1 where the file has no such column.
        names: what the numbers of ``values`` stand for.
        sources: by file: ``first_row_id``, ``rows_read``, ``rows_kept`` and ``rows_skipped`` by kind.
    """

    files: npt.NDArray[np.int8]
    contents: npt.NDArray[np.uint64]
    wholes: npt.NDArray[np.uint64]
    values: dict[str, npt.NDArray[np.int64]]
    names: dict[str, list[str]]
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)


def collect_rows(
    sources: Mapping[str, RowSource],
    path: Path,
    *,
    mapping: ColumnMapping,
    keys: Mapping[str, str],
    skip_bad_rows: bool,
    normalize: bool,
    on_progress: OnProgress = ignore_progress,
) -> CollectedRows:
    """Write every good row to one Arrow file and note what splitting needs to know of it.

    A row's ``row_id`` is its 1-based number in its file, plus the last number of the files before it. So ids are
    unique, those of the first file are its row numbers, and leaving rows out renumbers nothing.

    Args:
        sources: rows by name, the training file first.
        path: the Arrow file to write.
        mapping: what the columns mean.
        keys: columns to number the values of, with the parameter that names each; the training file must have them.
        skip_bad_rows: leave bad rows out and count them; else they are errors.
        normalize: bring text to NFC.
        on_progress: told how much of each file was read.

    Raises:
        UserError: columns are not there; bad rows, up to 20 of a file in full; or no good row is left in a file.
    """
    _check_columns(sources, mapping, keys)
    collector = _Collector(example_reader(mapping, normalize=normalize), keys, normalize=normalize)
    problems: list[str] = []
    with ExampleWriter(path, mapping.format) as writer:
        for name, source in sources.items():
            source.select([*mapping.used_columns, *(key for key in keys if key in source.columns)])
            bad = RowProblems(source.path)
            try:
                collector.read(name, source, writer, bad, on_progress)
            except UserError as error:
                problems += [*bad.lines(), *error.problems]
                continue
            if len(bad) and skip_bad_rows:
                _log_skipped(source.path, bad)
            elif len(bad):
                problems += bad.lines()
            if not collector.sources[name]["rows_kept"] and (skip_bad_rows or not len(bad)):
                problems.append(f"{source.path} has no rows that can be used.")
    if problems:
        hint = "Mend these rows, or leave them out and have them counted with data.on_bad_row: skip."
        raise UserError(problems if skip_bad_rows or not collector.num_bad else [*problems, hint])
    return collector.result()


def _check_columns(sources: Mapping[str, RowSource], mapping: ColumnMapping, keys: Mapping[str, str]) -> None:
    problems: list[str] = []
    for place, source in enumerate(sources.values()):
        try:
            check_mapping(mapping, source.columns, path=source.path)
        except UserError as error:
            problems += error.problems
        if not place:
            problems += [
                missing_column(parameter, column, source.columns, path=source.path)
                for column, parameter in keys.items()
                if column not in source.columns
            ]
    if problems:
        raise UserError(problems)


def _log_skipped(path: Path, bad: RowProblems) -> None:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in bad.counts.most_common())
    logger.warning("%s: %d skipped (%s).\n%s", path, len(bad), kinds, "\n".join(bad.lines()))


class _Collector:
    """Arrays that grow row by row."""

    def __init__(
        self, read_example: Callable[[Mapping[str, Any]], Example], keys: Iterable[str], *, normalize: bool
    ) -> None:
        self.sources: dict[str, dict[str, Any]] = {}
        self.num_bad = 0
        self._read_example = read_example
        self._readers = {key: value_reader(key, normalize=normalize) for key in keys}
        self._numbers: dict[str, dict[str, int]] = {key: {} for key in keys}
        self._values = {key: array("q") for key in keys}
        self._files = array("b")
        self._contents = bytearray()
        self._wholes = bytearray()
        self._last_id = 0

    def read(
        self, name: str, source: RowSource, writer: ExampleWriter, bad: RowProblems, on_progress: OnProgress
    ) -> None:
        """Take in one file."""
        what = f"Reading {source.path.name}"
        first_id = self._last_id
        num_before = writer.num_appended
        keyed = [
            (self._readers[key] if key in source.columns else None, self._numbers[key], self._values[key])
            for key in self._readers
        ]
        read_example, append = self._read_example, writer.append
        contents, wholes = self._contents, self._wholes
        number = num_rows = 0
        _, total, unit = source.progress()
        on_progress(what, 0, total, unit)
        for number, row in source:
            num_rows += 1
            if num_rows % _REPORT_EVERY_ROWS == 0:
                done, total, unit = source.progress()
                on_progress(what, min(done, total - 1), total, unit)  # the end comes below
            try:
                if row.__class__ is not dict:
                    raise row  # type: ignore[misc]
                example = read_example(row)
                found = [reader(row) if reader else None for reader, _, _ in keyed]
            except RowProblem as problem:
                bad.add(number, problem)
                continue
            append(first_id + number, example.values)
            contents += example.content_digest
            wholes += example.whole_digest
            for value, (_, numbers, values) in zip(found, keyed, strict=True):
                values.append(-1 if value is None else numbers.setdefault(value, len(numbers)))
        on_progress(what, total, total, unit)
        num_kept = writer.num_appended - num_before
        self._files.extend([len(self.sources)] * num_kept)
        self._last_id += number
        self.num_bad += len(bad)
        self.sources[name] = {
            "first_row_id": first_id + 1,
            "rows_read": num_rows,
            "rows_kept": num_kept,
            "rows_skipped": dict(bad.counts),
        }

    def result(self) -> CollectedRows:
        """Return what was noted."""
        return CollectedRows(
            files=np.frombuffer(self._files, dtype=np.int8),
            contents=np.frombuffer(self._contents, dtype=np.uint64).reshape(-1, 2),
            wholes=np.frombuffer(self._wholes, dtype=np.uint64).reshape(-1, 2),
            values={key: np.frombuffer(values, dtype=np.int64) for key, values in self._values.items()},
            names={key: list(numbers) for key, numbers in self._numbers.items()},
            sources=self.sources,
        )
