"""The folder of checked rows: every row that can be used in one Arrow file, and what is known of each beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lm_tuning.data.arrays import Digests, Ints, Splits
from lm_tuning.data.check.account import (
    FINDINGS_NAME,
    SUMMARY_NAME,
    count_rows,
    describe_mixing,
    find_refusals,
    log_skipped,
    write_account,
)
from lm_tuning.data.check.collect import CollectedRows, OpenedFile, collect_rows
from lm_tuning.data.check.values import read_names, write_names
from lm_tuning.data.format.columns import (
    CAUSAL_LM,
    ColumnMapping,
    check_mapping,
    choose_mapping,
    describe_mapping,
    template_columns,
)
from lm_tuning.data.format.labels import MAX_CLASSES, build_label_map, count_classes
from lm_tuning.data.readers.base import ReadSettings, RowSource
from lm_tuning.data.readers.open import open_rows
from lm_tuning.data.records import SPLITS, CheckedClasses, FileRows, FindingsByKind, LabelMap, RawExamples, RowsSummary
from lm_tuning.data.store import ExampleTable, preview_rows
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import DataParameters, SplitParameters
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.wording import count_of

ROWS_VERSION = 4
"""Raise it when the same files and settings give other checked rows: stored ones are then rebuilt."""

ROWS_NAME = "rows.arrow"
FACTS_NAME = "facts.npz"
NAMES_NAME = "names_{}.arrow"

MAX_FILES = 32_767
"""Files that one run can read: the number that ``CheckedRows.files`` holds."""


@dataclass
class CheckedRows:
    """What is known of each checked row beside its text. All arrays are ``(rows,)`` in the order of ``rows.arrow``.

    Attributes:
        files: index of the row's file in ``sources``.
        contents: two 64-bit halves a row, ``(rows, 2)``: equal for equal content after trimming and NFC.
        wholes: the same with the label.
        values: number of the row's value by column, for group, stratum and label; -1 where the file has no such column.
        names: what the numbers of ``values`` stand for, in the order in which they first appear.
        sources: what became of the rows of each file, in the order of reading.
        keys: ``(rows, 2)``: digest of the row's value of ``split.key``, zeros where a held-out file has no such column;
            None without one.
    """

    files: npt.NDArray[np.int16]
    contents: Digests
    wholes: Digests
    values: dict[str, Ints]
    names: dict[str, Sequence[str]]
    sources: list[FileRows] = field(default_factory=list)
    keys: Digests | None = None

    @property
    def file_splits(self) -> Splits:
        """Return the split of the file that each row stands in, ``(rows,)``."""
        return np.array([SPLITS.index(file["split"]) for file in self.sources], dtype=np.int8)[self.files]


def open_checked(folder: Path) -> CheckedRows:
    """Read what is known of each row of a stored folder.

    Args:
        folder: what ``write_checked_rows`` filled.

    Raises:
        UserError: the folder is missing or damaged.
    """
    try:
        summary = read_checked_summary(folder)
        with np.load(folder / FACTS_NAME) as stored:
            facts = {name: stored[name] for name in stored.files}
        names = {
            column: read_names(folder / NAMES_NAME.format(index)) for index, column in enumerate(summary["numbered"])
        }
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"The checked rows in {folder} are missing or damaged ({error}). Make them with: "
            "kedro run --pipelines=split"
        ) from error
    return CheckedRows(
        files=facts["files"],
        contents=facts["contents"],
        wholes=facts["wholes"],
        values={column: facts[f"values_{index}"] for index, column in enumerate(names)},
        names=names,
        sources=summary["files"],
        keys=facts.get("keys"),
    )


def read_checked_summary(folder: Path) -> RowsSummary:
    """Return the summary of a stored folder.

    Args:
        folder: what ``write_checked_rows`` filled.
    """
    summary: RowsSummary = json.loads((folder / SUMMARY_NAME).read_text(encoding="utf-8"))
    return summary


def read_findings(folder: Path) -> FindingsByKind:
    """Return the findings of a stored folder, see ``Findings.describe``.

    Args:
        folder: what ``write_checked_rows`` filled.
    """
    findings: FindingsByKind = json.loads((folder / FINDINGS_NAME).read_text(encoding="utf-8"))
    return findings


def write_checked_rows(
    folder: Path,
    raw_examples: RawExamples,
    data: DataParameters,
    split: SplitParameters,
    *,
    task: str = CAUSAL_LM,
    on_progress: OnProgress = ignore_progress,
) -> RowsSummary:
    """Read all files, check every row, and write the good ones with an account of all of them.

    Bad rows raise nothing here: whether they forbid going on stands in the summary as ``refused``, so that a report on
    them can be stored first.

    Args:
        folder: an empty folder.
        raw_examples: the files, see ``describe_files``.
        data: how rows are read and checked; the files that it names do not count.
        split: the columns of ``group``, ``stratify`` and ``key`` are read as well.
        task: see ``choose_mapping``.
        on_progress: told the progress of reading.

    Returns:
        The summary, as stored.

    Raises:
        UserError: everything that is wrong with files and columns.
        ReadingBrokeOff: a file cannot be read to its end.
    """
    # By parameter, as messages name them. Two of them may name one column.
    keyed = {"split.group": split.group, "split.stratify": split.stratify, "split.key": split.key}
    files = _open_files(raw_examples, data)
    named = [*data.columns.model_dump().values(), *_columns_of(data.template), *keyed.values()]
    for file in files:
        file.rows.add_paths(dict.fromkeys(name for name in named if name))
    # All files are read as the first one is; one that lacks a column is refused, not read in another way.
    first = files[0].rows
    mapping = choose_mapping(first.header, data, task=task)
    label = mapping.columns.get("label")
    _check_columns(files, mapping, {column: parameter for parameter, column in keyed.items() if column})
    rows = collect_rows(
        files,
        folder / ROWS_NAME,
        mapping=mapping,
        numbered=[column for column in dict.fromkeys([split.group, split.stratify, label]) if column],
        key=split.key,
        normalize=data.normalize == "nfc",
        on_progress=on_progress,
    )
    classes, label_map = _find_classes(rows, label) if label else (None, None)
    refused = find_refusals(rows.files, rows.bad_lines, data, classes=classes)
    summary: RowsSummary = {
        "format": mapping.format,
        "columns": mapping.columns,
        "appended": mapping.appended,
        "template": mapping.template,
        "reading": describe_mapping(mapping),
        "numbered": list(rows.values),
        "not_used": _not_used(first, {*mapping.used_columns, *keyed.values()}),
        "num_rows": count_rows(rows.files),
        "files": rows.files,
        "sources": raw_examples["sources"],
        "mixing": describe_mixing(raw_examples["sources"], rows.files),
        "on_bad_row": data.on_bad_row,
        "max_bad_fraction": data.max_bad_fraction,
        "max_rows": data.max_rows,
        "text_lengths": rows.text_lengths,
        "findings": rows.findings.counts(),
        "refused": refused,
        "label_map": label_map,
        "classes": classes,
    }
    # Columns are stored by number, since a name may hold what no file name in an archive can.
    numbers = {f"values_{index}": values for index, values in enumerate(rows.values.values())}
    np.savez(folder / FACTS_NAME, **cast("dict[str, Any]", rows.facts | numbers))
    for index, names in enumerate(rows.names.values()):
        write_names(folder / NAMES_NAME.format(index), names)
    outcome = "refused" if refused or data.on_bad_row == "error" else "skipped"
    findings = rows.findings.describe(rows.files, bad_outcome=outcome)
    write_account(folder, summary, findings, preview_rows(ExampleTable(folder / ROWS_NAME), 10))
    if not refused:
        log_skipped(rows.files, rows.bad_lines)
    return summary


def _find_classes(rows: CollectedRows, label: str) -> tuple[CheckedClasses, LabelMap | None]:
    """Count the classes, and number those of the training files unless they are too many to be classes."""
    is_train = np.array([file["split"] == "train" for file in rows.files])[rows.facts["files"]]  # (rows,)
    labels = rows.names[label].to_pylist()
    counts = count_classes(rows.values[label], labels, is_train=is_train, column=label)
    # A model knows no other classes than those of training files.
    trained = [labels[number] for number in np.unique(rows.values[label][is_train]).tolist()]
    label_map = build_label_map(trained) if len(trained) <= MAX_CLASSES else None
    return {**counts, **rows.label_types.describe()}, label_map


def describe_checked(summary: RowsSummary) -> str:
    """Describe in a line what a summary holds, for the log.

    Args:
        summary: see ``write_checked_rows``.
    """
    counts = summary["num_rows"]
    parts = [f"{counts['read']:,} read, {counts['kept']:,} kept, {counts['skipped']:,} skipped", summary["format"]]
    if len(summary["files"]) > 1:
        parts.append(count_of(len(summary["files"]), "file"))
    if summary["label_map"]:
        parts.append(count_of(len(summary["label_map"]), "class"))
    return "; ".join(parts)


def _open_files(raw_examples: RawExamples, data: DataParameters) -> list[OpenedFile]:
    lists = (data.explode,) if isinstance(data.explode, str) else tuple(data.explode or ())
    settings = ReadSettings(data.max_rows, data.max_row_bytes, data.delimiter, lists)
    named = [(split, file) for split in SPLITS for file in raw_examples[split] or ()]
    files: list[OpenedFile] = []
    problems: list[str] = []
    if data.delimiter != "auto" and not any(file["format"] in ("csv", "tsv") for _, file in named):
        problems.append(
            f"data.delimiter = {data.delimiter!r} has no use: none of the files is CSV or TSV. Leave it out."
        )
    for split, file in named:
        try:
            # A field that stands beside its file means that file alone, and so comes first.
            rows = open_rows(file if data.field is None else {"field": data.field, **file}, settings=settings)
            problems += [
                rows.header.missing("data.explode", root, is_explained=False)
                for root in (rows.exploding.roots if rows.exploding else [])
                if root not in rows.columns
            ]
            files.append(OpenedFile(rows, split, file["source"]))
        except UserError as error:
            problems += error.problems
    if len(files) > MAX_FILES:
        problems.append(f"{len(files):,} files are more than the {MAX_FILES:,} that are read. Join them to fewer.")
    if problems:
        raise UserError(problems)
    return files


def _columns_of(template: str | None) -> list[str]:
    """Name the columns of a template; none where it does not parse, which is told elsewhere."""
    try:
        return template_columns(template) if template else []
    except ValueError:
        return []


def _not_used(rows: RowSource, used: set[str | None]) -> list[str]:
    """Name the columns of a file that nothing is read of."""
    # A column is used as well if a path leads into it.
    touched = {*used, *rows.roots_of(name for name in used if name)}
    return [column for column in rows.columns if column not in touched]


def _check_columns(files: Sequence[OpenedFile], mapping: ColumnMapping, keyed: Mapping[str, str]) -> None:
    """Refuse files without a column that is used; held-out files need none of those that training rows go by."""
    problems: list[str] = []
    for file in files:
        header = file.rows.header
        try:
            check_mapping(mapping, header)
        except UserError as error:
            problems += error.problems
        if file.split == "train":
            problems += [
                header.missing(parameter, column) for column, parameter in keyed.items() if column not in header.columns
            ]
    if problems:
        raise UserError(problems)
