"""Stream the rows of a file as dicts, each with its number, without ever guessing a type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lm_tuning.data.check.findings import NumberedRow, RowProblem, list_columns
from lm_tuning.data.format.columns import Header
from lm_tuning.data.format.nested import (
    Exploding,
    Step,
    explain_missing,
    fill_paths,
    names_reached,
    nested_names,
    parse_path,
    suggest_path,
)
from lm_tuning.data.records import Row
from lm_tuning.data.sources.opening import RawFile
from lm_tuning.errors import UserError
from lm_tuning.wording import count_of

MAX_ROW_BYTES = 1 << 26
"""Bytes of a row that are read where nobody says otherwise: 64 MiB."""

MAX_COLUMNS = 10_000
"""Columns that a file may name: more are values that were taken for names."""

# Rows that tell the columns of a file without a header. Looking at all of them would read the file twice.
_PEEKED_ROWS = 1000
_SHOWN_PROBLEMS = 20


@dataclass(frozen=True)
class ReadSettings:
    """How files are read; what one kind of file does not know has no effect on it.

    Attributes:
        max_rows: reading stops after that many rows of a file; None reads all.
        max_row_bytes: a row of more bytes, unpacked, is a bad row.
        delimiter: what stands between the fields of CSV and TSV; ``auto`` finds it out.
        explode: paths of lists of which every element makes a row, outermost first.
    """

    max_rows: int | None = None
    max_row_bytes: int = MAX_ROW_BYTES
    delimiter: str = "auto"
    explode: tuple[str, ...] = ()


DEFAULT_SETTINGS = ReadSettings()
"""What is done where nobody says otherwise."""


class RowSource(ABC):
    """Rows of one file; iterating starts from the first row each time.

    Attributes:
        path: path, address or hub name of the file, for messages.
        name: a short name for progress.
        format: ``jsonl``, ``json``, ``csv``, ``tsv``, ``parquet``, ``arrow`` or ``hub``.
        columns: the column names, in the order of the file, then those by path that ``add_paths`` found. For JSON,
            those seen in the first 1,000 rows.
        max_rows: reading stops after that many rows; None reads all.
        settings: how it is read.
        exploding: where exploded rows came from; None where rows are those of the file.
    """

    def __init__(self, raw: RawFile, file_format: str, settings: ReadSettings = DEFAULT_SETTINGS) -> None:
        """Remember the file; subclasses read its column names.

        Args:
            raw: the file.
            file_format: how it is read.
            settings: limits, and what is to be known about its form.
        """
        self.raw = raw
        self.path = raw.path
        self.name = raw.name
        self.format = file_format
        self.columns: list[str] = []
        self.max_rows: int | None = None
        self.settings = settings
        self.exploding: Exploding | None = None
        self._paths: dict[str, tuple[Step, ...]] = {}
        self._selected: list[str] | None = None
        self._taken = 0
        self._has_ended = False

    def __iter__(self) -> Iterator[NumberedRow]:
        """Yield each row with its 1-based number.

        Rows are lines for JSON Lines (blank ones are counted and left out) and records elsewhere; a CSV header is not
        counted. A row that cannot be read is yielded as its problem, and reading goes on.

        Raises:
            UserError: nothing after this position can be read.
        """
        # In this order: the limit counts rows of the file, and a path may begin at an exploded element.
        rows = self._rows() if self.max_rows is None else self._first_rows(self.max_rows)
        if self.exploding:
            rows = self.exploding.explode(rows)
        return fill_paths(rows, self._paths) if self._paths else rows

    @abstractmethod
    def _rows(self) -> Iterator[NumberedRow]:
        """Yield all rows."""

    def _first_rows(self, num_rows: int) -> Iterator[NumberedRow]:
        # Kept for progress: only the end of the file tells that there were fewer rows than the limit.
        self._taken, self._has_ended = 0, False
        for num_taken, row in enumerate(self._rows(), 1):
            self._taken = num_taken
            yield row
            if num_taken == num_rows:
                return
        self._has_ended = True

    def select(self, columns: Iterable[str]) -> None:
        """Set which columns will be used, so that a columnar file reads no others.

        Args:
            columns: names out of ``columns``.
        """
        self._selected = self.roots_of(columns)

    def roots_of(self, columns: Iterable[str]) -> list[str]:
        """Return the columns of the file that some columns are taken from, those with exploded lists among them.

        Args:
            columns: names out of ``columns``, by path and others.
        """
        lists = self.exploding.roots if self.exploding else []
        roots = (str(self._paths[name][0]) if name in self._paths else name for name in columns)
        return list(dict.fromkeys([*lists, *roots]))

    def explode(self, names: Iterable[str]) -> None:
        """Make one row of every element of a list from now on.

        Args:
            names: paths of lists, the outermost first.

        Raises:
            UserError: one of them is no path.
        """
        self.exploding = Exploding(list(names), self.columns)

    def add_paths(self, names: Iterable[str]) -> None:
        """Add columns by path, such as ``translation.en``, where one of the first 1,000 rows has a value there.

        A column of the file that bears such a name itself is that column.

        Args:
            names: column names, paths among them.
        """
        paths = {name: parse_path(name) for name in names if name not in self.columns}
        # A column that bears such a name itself comes first; a path has to begin with a column.
        wanted = {name: steps for name, steps in paths.items() if steps and str(steps[0]) in self.columns}
        if not wanted:
            return
        # For this look alone, so that a columnar file reads nothing but the columns in question.
        self.select(str(steps[0]) for steps in wanted.values())
        reached: set[str] = set()
        for row in self._peeked():
            reached |= names_reached(row, wanted)
            # Mostly after the first row.
            if len(reached) == len(wanted):
                break
        for name, steps in wanted.items():
            if name in reached:
                self._paths[name] = steps
                self.columns = [*self.columns, name]
        self._selected = None
        # All that was read so far was a look, which progress does not count.
        self.raw.forget()

    @property
    def header(self) -> Header:
        """Return the columns, with what the file can say of others."""
        return Header(self.columns, self.path, self.explain_missing, self.describe_inside)

    def explain_missing(self, column: str) -> str:
        """Describe what the first row holds where a column was looked for, and what was probably meant.

        Args:
            column: a name that the file lacks.

        Returns:
            Sentences; empty where there is nothing to say.
        """
        row = next(self._peeked(), {})
        reason = explain_missing(row, column)
        near = suggest_path(column, nested_names(row))
        return (f" {reason}." if reason else "") + (f" Did you mean {near!r}?" if near else "")

    def describe_inside(self) -> str:
        """Describe how values inside the columns are named, where the first row has any; else nothing."""
        names = nested_names(next(self._peeked(), {}))
        return f" Values inside columns are named by path, such as {list_columns(names[:3])}." if names else ""

    def _peeked(self) -> Iterator[Row]:
        """Yield the good ones of the first 1,000 rows."""
        for index, (_, row) in enumerate(self):
            if isinstance(row, dict):
                yield row
            if index + 1 == _PEEKED_ROWS:
                return

    @property
    def selected(self) -> list[str]:
        """Columns of the file to read: those that were selected, else all."""
        return self.roots_of(self.columns) if self._selected is None else self._selected

    def progress(self) -> tuple[int, int, str]:
        """Return how much has been read, how much there is, and the unit of both: kB as they lie there, or rows.

        A file with fewer rows than ``max_rows`` is known to have them once it was read to its end.
        """
        if self.max_rows is not None:
            return self._taken, self._taken if self._has_ended else self.max_rows, "rows"
        return self._progress()

    def _progress(self) -> tuple[int, int, str]:
        return self.raw.progress()


def peek_columns(source: RowSource) -> list[str]:
    """Collect the keys of the first 1,000 rows, or of the first good row where none of these is one.

    Args:
        source: rows of a file without a header.

    Returns:
        The keys in the order in which they appear.

    Raises:
        UserError: there are no rows, none of them is an object, or one has too many keys.
    """
    problems: list[str] = []
    columns: dict[str, None] = {}
    num_rows = num_bad = 0
    for number, row in source:
        num_rows += 1
        if isinstance(row, RowProblem):
            num_bad += 1
            if num_bad <= _SHOWN_PROBLEMS:
                problems.append(f"{source.path}, row {number}: {row.reason}")
        else:
            if len(row) > MAX_COLUMNS:
                raise UserError(f"{source.path}, row {number}: {_too_many(len(row))}")
            columns.update(dict.fromkeys(row))
        # Of a file without a good row all bad ones are counted, so that the message tells the truth.
        if num_rows >= _PEEKED_ROWS and columns:
            break
    if not num_rows:
        raise UserError(f"{source.path} has no rows.")
    if num_bad == num_rows:
        rest = num_bad - len(problems)
        raise UserError([*problems, f"{source.path}: {count_of(rest, 'more bad row')}."] if rest else problems)
    return list(columns)


def beyond_row(path: str, number: int, error: Exception) -> UserError:
    """Report a file that cannot be read to its end.

    Args:
        path: the file.
        number: the last row that could be read; 0 for none.
        error: what the file system or the unpacker said.
    """
    position = f"after row {number}" if number else "before the first row"
    detail = str(error).strip().rstrip(".") or type(error).__name__
    return UserError(f"{path} cannot be read {position}: {detail}. Copy or download the file again.")


def check_columns(path: str, columns: list[str]) -> None:
    """Refuse column names that occur twice, and too many; names that are empty cannot be mapped and are let pass.

    Args:
        path: the file, for the message.
        columns: its column names.

    Raises:
        UserError: naming those that repeat, or how many there are.
    """
    if len(columns) > MAX_COLUMNS:
        raise UserError(f"{path}, header: {_too_many(len(columns))} It begins {list_columns(columns[:3])}.")
    repeated = sorted(column for column, count in Counter(columns).items() if column and count > 1)
    if repeated:
        raise UserError(f"{path} names these columns more than once: {list_columns(repeated)}. Rename them.")


def _too_many(num_columns: int) -> str:
    return (
        f"names {num_columns:,} columns, and at most {MAX_COLUMNS:,} are read. Values belong in rows, not in a header."
    )
