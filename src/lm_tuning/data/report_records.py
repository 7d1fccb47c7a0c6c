"""What the data report stores of rows and of splits beside its text."""

from __future__ import annotations

from typing import TypedDict

from lm_tuning.data.records import (
    CheckedClasses,
    FileRows,
    FindingsByKind,
    LabelMap,
    MixedSource,
    RowCounts,
    RowsBySplit,
    TextLength,
    UnbegunFile,
)
from lm_tuning.data.split.records import DividedSource, DivisionFacts


class RowsFacts(TypedDict):
    """The facts of the section ``rows``, see ``build_rows_section``; those of unread rows are None where unknown."""

    num_rows: RowCounts
    bad_fraction: float
    format: str | None
    reading: str
    columns: dict[str, str] | None
    appended: str | None
    template: str | None
    not_used: list[str]
    on_bad_row: str
    max_bad_fraction: float
    max_rows: int | None
    files: list[FileRows] | list[FileRows | UnbegunFile]
    mixing: list[MixedSource]
    refused: list[str]
    label_map: LabelMap | None
    classes: CheckedClasses | None
    text_lengths: dict[str, TextLength] | None
    is_unread: bool
    findings: FindingsByKind


class SplitsFacts(DivisionFacts):
    """The facts of the section ``splits``, see ``build_splits_section``: ``copies``: row numbers by kind and file."""

    rows: RowsBySplit
    seed: int
    key: str | None
    sources: list[DividedSource]
    label_map: LabelMap | None
    warnings: list[str]
    copies: dict[str, dict[str, list[int]]]
