"""What the package hands on: raw rows, descriptions of files, and the summaries of checked rows and of splits.

Every ``TypedDict`` here is stored as JSON under these very keys, by the function that its docstring names; older stored
folders lack the keys that are not required. What stays in memory is a dataclass beside the code that makes it.
"""

from __future__ import annotations

from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Literal, NotRequired, TypeAlias, TypedDict, Union, final
from uuid import UUID

from lm_tuning.json_types import JsonObject

SplitName = Literal["train", "validation", "test"]

SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")
HELD_OUT: tuple[Literal["validation", "test"], ...] = ("validation", "test")
"""The splits that nothing is trained on, in the order of ``SPLITS``."""

Scalar: TypeAlias = bool | int | float | str | bytes | datetime | date | time | timedelta | Decimal | UUID | None
Cell: TypeAlias = Union[Scalar, "list[Cell]", "tuple[Cell, ...]", "dict[str, Cell]"]
"""A value as a reader gives it. Text formats have the types of JSON; the others are those of Arrow, whose maps come as
lists of pairs."""

Row: TypeAlias = dict[str, Cell]
"""A raw row: its values by column."""

RowsBySplit: TypeAlias = dict[str, int]
"""Numbers of rows by the name of the split, or of the pair of splits, such as ``train_test``."""

LabelMap: TypeAlias = dict[str, int]
"""Id by name of the classes that training rows have."""


class SourceFile(TypedDict):
    """One file of raw rows, see ``describe_files``.

    ``num_bytes`` counts the file as it lies there, packed; None where nobody knows. ``digest`` names its content: of a
    hub data set the commit. ``source`` is the index of the training source, -1 for held-out rows, and ``field`` the
    path of the list of rows in an object. The last three are those of hub data sets.
    """

    path: str
    format: str
    compression: str | None
    num_bytes: int | None
    digest: str
    source: NotRequired[int]
    field: NotRequired[str]
    config: NotRequired[str | None]
    split: NotRequired[str | None]
    revision: NotRequired[str | None]


class NamedSource(TypedDict):
    """A source of rows as the parameters name it, see ``describe_files``; ``num_files`` is known once it was found."""

    path: str
    weight: float
    config: str | None
    split: str | None
    revision: str | None
    field: NotRequired[str]
    num_files: NotRequired[int]


class TrainingSource(TypedDict):
    """A training source: ``path`` as typed, and how often its rows come up in an epoch."""

    path: str
    weight: float
    num_files: int


class RawExamples(TypedDict):
    """All files of a run, see ``describe_files``; None for a split that names none of its own."""

    train: list[SourceFile] | None
    validation: list[SourceFile] | None
    test: list[SourceFile] | None
    sources: list[TrainingSource]
    named: NotRequired[dict[str, list[NamedSource] | None]]
    is_example: NotRequired[bool]


class RowSources(TypedDict):
    """What checked rows, or splits, are made from: settings by the name of their parameter, and the files."""

    settings: JsonObject
    files: RawExamples


class Preview(TypedDict):
    """The first rows as a table, see ``preview_rows``."""

    columns: list[str]
    data: list[list[str | int | None]]


class ExplodedRows(TypedDict):
    """What became of the lists of a file, see ``Exploding.describe``; numbers are those of the rows before."""

    lists: list[str]
    rows_in_file: int
    rows_with_empty_lists: int
    first_rows_with_empty_lists: list[int]


class ReadRows(TypedDict):
    """How many rows of a file were read, and how many of them are bad, by kind."""

    path: str
    rows_read: int
    rows_skipped: dict[str, int]


class FileRows(ReadRows):
    """What became of the rows of one file, see ``collect_rows``.

    The row ids of a file begin at ``first_row_id`` and follow its row numbers, so a skipped row renumbers nothing.
    """

    split: SplitName
    source: int
    first_row_id: int
    rows_kept: int
    broke_off: NotRequired[bool]
    exploded: NotRequired[ExplodedRows]


@final
class UnbegunFile(TypedDict):
    """A file that nothing was read of, since reading broke off before, see ``write_unread``."""

    path: str
    split: SplitName
    source: int
    first_row_id: None
    rows_read: None
    rows_kept: None
    rows_skipped: dict[str, int]


class RowCounts(TypedDict):
    """Rows of all files together."""

    read: int
    kept: int
    skipped: int


class MixedSource(TypedDict):
    """How many rows of a training source an epoch holds, see ``describe_mixing``."""

    path: str
    weight: float
    num_rows: int
    rows_per_epoch: int


class TextLength(TypedDict):
    """How long the texts of a field are, in characters, see ``TextLengths``."""

    num_rows: int
    mean: float
    p50: int
    p90: int
    p99: int
    longest: int


class LabelTypeCounts(TypedDict):
    """Rows by the type of their label, and the names that labels of several types share, see ``LabelTypes``."""

    types: dict[str, int]
    joined: list[str]


class ClassCounts(TypedDict):
    """The classes of the training files, see ``count_classes``."""

    column: str
    num_classes: int
    num_rows: dict[str, int]
    largest: str | None
    smallest: str | None
    only_held_out: list[str]
    similar: list[list[str]]


class CheckedClasses(ClassCounts, LabelTypeCounts):
    """The same with the types of the labels; rows of earlier versions lack these."""


class FoundRow(TypedDict):
    """A row that something is to be said about: ``row`` is its 1-based number in the file."""

    file: str
    row: int
    reason: str


class FindingFacts(TypedDict):
    """What was found in rows, of one kind, see ``Findings.describe``: ``row_numbers`` are all of them, by file."""

    num_rows: int
    meaning: str
    fate: str
    rows: list[FoundRow]
    row_numbers: dict[str, list[int]]


FindingsByKind: TypeAlias = dict[str, FindingFacts]


class ReadingFacts(TypedDict):
    """What was read, and what became of it: what summaries and the data report have in common."""

    reading: str
    not_used: list[str]
    num_rows: RowCounts
    mixing: list[MixedSource]
    on_bad_row: str
    max_bad_fraction: float
    max_rows: int | None
    refused: list[str]


class RowsAccount(ReadingFacts):
    """What the summaries of checked rows and of unread ones have in common."""

    numbered: list[str]
    sources: list[TrainingSource]
    findings: dict[str, int]


# Final, so that ``"is_unread" in summary`` tells the type checker which of the two it is.
@final
class RowsSummary(RowsAccount):
    """The summary of a folder of checked rows, see ``write_checked_rows``."""

    format: str
    columns: dict[str, str]
    appended: str | None
    template: str | None
    files: list[FileRows]
    text_lengths: NotRequired[dict[str, TextLength]]
    label_map: LabelMap | None
    classes: CheckedClasses | None


@final
class UnreadSummary(RowsAccount):
    """The same of rows that could not be read to the end, see ``write_unread``: only the data report reads it."""

    is_unread: bool
    format: None
    columns: None
    appended: None
    template: None
    files: list[FileRows | UnbegunFile]
    label_map: None
    classes: None


class RowsFacts(ReadingFacts):
    """The facts of the section ``rows``, see ``build_rows_section``; those of unread rows are None where unknown."""

    bad_fraction: float
    format: str | None
    columns: dict[str, str] | None
    appended: str | None
    template: str | None
    files: list[FileRows] | list[FileRows | UnbegunFile]
    label_map: LabelMap | None
    classes: CheckedClasses | None
    text_lengths: dict[str, TextLength] | None
    is_unread: bool
    findings: FindingsByKind
