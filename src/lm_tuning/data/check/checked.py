"""The folder of checked rows: every row that can be used in one Arrow file, and what is known of each beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lm_tuning.data.check.collect import OpenedFile, collect_rows
from lm_tuning.data.check.policy import find_refusals, log_skipped
from lm_tuning.data.check.unread import FINDINGS_NAME, PREVIEW_NAME, SUMMARY_NAME
from lm_tuning.data.format.columns import ColumnMapping, check_mapping, choose_mapping, describe_mapping, missing_column
from lm_tuning.data.format.labels import MAX_CLASSES, build_label_map, count_classes, trained_names
from lm_tuning.data.format.template import template_columns
from lm_tuning.data.mixing import describe_mixing
from lm_tuning.data.readers.base import MAX_ROW_BYTES, ReadSettings, RowSource
from lm_tuning.data.readers.open import open_rows
from lm_tuning.data.records import SPLITS
from lm_tuning.data.store import ExampleTable, preview_rows
from lm_tuning.errors import UserError
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.storage.atomic import write_json_atomic
from lm_tuning.wording import count_of

ROWS_VERSION = 4
"""Raise it when the same files and settings give other checked rows: stored ones are then rebuilt."""

ROWS_NAME = "rows.arrow"
FACTS_NAME = "facts.npz"
NAMES_NAME = "names_{}.arrow"

MAX_FILES = 32_767
"""Files that one run can read: the number that ``CheckedRows.files`` holds."""

# Beyond this many names of a column a list of them costs more memory than a look-up costs time.
_MAX_LISTED_NAMES = 100_000
_NUM_PREVIEW_ROWS = 10


@dataclass
class CheckedRows:
    """What is known of each checked row beside its text. All arrays are ``(rows,)`` in the order of ``rows.arrow``.

    Attributes:
        files: index of the row's file in ``sources``.
        contents: two 64-bit halves a row, ``(rows, 2)``: equal for equal content after trimming and NFC.
        wholes: the same with the label.
        values: number of the row's value by column, for group, stratum and label; -1 where the file has no such column.
        names: what the numbers of ``values`` stand for, in the order in which they first appear.
        sources: one dict a file in the order of reading: ``path``, ``split``, ``source``, ``first_row_id``,
            ``rows_read``, ``rows_kept`` and ``rows_skipped`` by kind.
        keys: ``(rows, 2)``: digest of the row's value of ``split.key``, zeros where a held-out file has no such column;
            None without one.
    """

    files: npt.NDArray[np.int16]
    contents: npt.NDArray[np.uint64]
    wholes: npt.NDArray[np.uint64]
    values: dict[str, npt.NDArray[np.int64]]
    names: dict[str, Sequence[str]]
    sources: list[dict[str, Any]] = field(default_factory=list)
    keys: npt.NDArray[np.uint64] | None = None


class StoredNames(Sequence[str]):
    """Names that stay on disk until they are asked for."""

    def __init__(self, column: pa.LargeStringArray) -> None:
        """Wrap a column of text.

        Args:
            column: memory-mapped.
        """
        self._column = column

    def __len__(self) -> int:
        """Count the names."""
        return len(self._column)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Return one name, or a list of some."""
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        name: str = self._column[index % len(self)].as_py()
        return name


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
            column: _read_names(folder / NAMES_NAME.format(index)) for index, column in enumerate(summary["numbered"])
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


def read_checked_summary(folder: Path) -> dict[str, Any]:
    """Return the summary of a stored folder.

    Args:
        folder: what ``write_checked_rows`` filled.
    """
    summary: dict[str, Any] = json.loads((folder / SUMMARY_NAME).read_text(encoding="utf-8"))
    return summary


def read_findings(folder: Path) -> dict[str, Any]:
    """Return the findings of a stored folder, see ``Findings.describe``.

    Args:
        folder: what ``write_checked_rows`` filled.
    """
    findings: dict[str, Any] = json.loads((folder / FINDINGS_NAME).read_text(encoding="utf-8"))
    return findings


def write_checked_rows(
    folder: Path,
    raw_examples: Mapping[str, Any],
    *,
    format: str = "auto",
    columns: Mapping[str, str | None] | None = None,
    template: str | None = None,
    on_bad_row: str = "error",
    max_bad_fraction: float = 0.05,
    normalize: str = "nfc",
    max_rows: int | None = None,
    max_row_bytes: int = MAX_ROW_BYTES,
    delimiter: str = "auto",
    field: str | None = None,
    explode: str | Sequence[str] | None = None,
    group: str | None = None,
    stratify: str | None = None,
    key: str | None = None,
    task: str = "causal_lm",
    on_progress: OnProgress = ignore_progress,
) -> dict[str, Any]:
    """Read all files, check every row, and write the good ones with an account of all of them.

    Bad rows raise nothing here: whether they forbid going on stands in the summary as ``refused``, so that a report on
    them can be stored first.

    Args:
        folder: an empty folder.
        raw_examples: the files, see ``describe_files``.
        format: see ``choose_mapping``.
        columns: column by part, see ``choose_mapping``.
        template: renders the prompt from columns.
        on_bad_row: ``error`` refuses the rows when one is bad, ``skip`` when more than a share of them is.
        max_bad_fraction: that share, of any file and of all files together.
        normalize: ``nfc`` or ``none``.
        max_rows: rows read of each file, before any are exploded; None for all.
        max_row_bytes: a row of more bytes, unpacked, is a bad row.
        delimiter: what separates the fields of CSV and TSV; ``auto`` finds it out.
        field: path of the list of rows in a ``.json`` file that holds an object, for files that name none themselves.
        explode: path of a list, or several from the outermost to the innermost; each element makes a row.
        group: column to number for grouped splits.
        stratify: column to number for stratified splits.
        key: column whose values name the training rows for good.
        task: see ``choose_mapping``.
        on_progress: told the progress of reading.

    Returns:
        The summary, as stored.

    Raises:
        UserError: everything that is wrong with files and columns.
        ReadingBrokeOff: a file cannot be read to its end.
    """
    lists = (explode,) if isinstance(explode, str) else tuple(explode or ())
    settings = ReadSettings(max_rows, max_row_bytes, delimiter, lists)
    keyed = [("split.group", group), ("split.stratify", stratify), ("split.key", key)]
    files = _open_files(raw_examples, settings=settings, field=field)
    _add_paths(files, [*(columns or {}).values(), *_columns_of(template), group, stratify, key])
    first = files[0].rows
    mapping = choose_mapping(
        first.columns,
        path=first.path,
        format=format,
        columns=columns,
        template=template,
        task=task,
        explain=first.explain_missing,
        inside=first.describe_inside,
    )
    label = mapping.columns.get("label")
    _check_columns(files, mapping, {column: parameter for parameter, column in keyed if column})
    rows = collect_rows(
        files,
        folder / ROWS_NAME,
        mapping=mapping,
        numbered=[column for column in dict.fromkeys([group, stratify, label]) if column],
        key=key,
        normalize=normalize == "nfc",
        on_progress=on_progress,
    )
    classes = label_map = None
    if label:
        is_train = np.array([file["split"] == "train" for file in rows.files])[rows.facts["files"]]
        labels = rows.names[label].to_pylist()
        classes = count_classes(rows.values[label], labels, is_train=is_train, column=label)
        classes |= rows.label_types.describe()
        trained = trained_names(rows.values[label], labels, is_train=is_train)
        label_map = build_label_map(trained) if len(trained) <= MAX_CLASSES else None
    refused = find_refusals(
        rows, on_bad_row=on_bad_row, max_bad_fraction=max_bad_fraction, classes=classes, max_rows=max_rows
    )
    num_read, num_kept = (sum(file[name] for file in rows.files) for name in ("rows_read", "rows_kept"))
    summary = {
        "format": mapping.format,
        "columns": mapping.columns,
        "appended": mapping.appended,
        "template": mapping.template,
        "reading": describe_mapping(mapping),
        "numbered": list(rows.values),
        "not_used": _not_used(first, {*mapping.used_columns, group, stratify, key}),
        "num_rows": {"read": num_read, "kept": num_kept, "skipped": num_read - num_kept},
        "files": rows.files,
        "sources": raw_examples["sources"],
        "mixing": describe_mixing(raw_examples["sources"], rows.files),
        "on_bad_row": on_bad_row,
        "max_bad_fraction": max_bad_fraction,
        "max_rows": max_rows,
        "text_lengths": rows.text_lengths,
        "findings": rows.findings.counts(),
        "refused": refused,
        "label_map": label_map,
        "classes": classes,
    }
    outcome = "refused" if refused or on_bad_row == "error" else "skipped"
    numbers = {f"values_{index}": values for index, values in enumerate(rows.values.values())}
    np.savez(folder / FACTS_NAME, **cast("dict[str, Any]", rows.facts | numbers))
    for index, names in enumerate(rows.names.values()):
        _write_names(folder / NAMES_NAME.format(index), names)
    write_json_atomic(folder / FINDINGS_NAME, rows.findings.describe(rows.files, bad_outcome=outcome), indent=None)
    write_json_atomic(folder / SUMMARY_NAME, summary, indent=None)
    names_shown, shown = preview_rows(ExampleTable(folder / ROWS_NAME), _NUM_PREVIEW_ROWS)
    write_json_atomic(folder / PREVIEW_NAME, {"columns": names_shown, "data": shown}, indent=None)
    if not refused:
        log_skipped(rows)
    return summary


def describe_checked(summary: Mapping[str, Any]) -> str:
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


def _open_files(raw_examples: Mapping[str, Any], *, settings: ReadSettings, field: str | None) -> list[OpenedFile]:
    files: list[OpenedFile] = []
    problems = _find_idle_settings(raw_examples, settings)
    for split in SPLITS:
        for file in raw_examples.get(split) or ():
            try:
                described = file if field is None or "field" in file else {**file, "field": field}
                rows = open_rows(described, settings=settings)
                problems += [
                    missing_column("data.explode", root, rows.columns, path=rows.path)
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


def _find_idle_settings(raw_examples: Mapping[str, Any], settings: ReadSettings) -> list[str]:
    """Refuse a separator where no file has one."""
    formats = {file["format"] for split in SPLITS for file in raw_examples.get(split) or ()}
    if settings.delimiter == "auto" or formats & {"csv", "tsv"}:
        return []
    return [f"data.delimiter = {settings.delimiter!r} has no use: none of the files is CSV or TSV. Leave it out."]


def _columns_of(template: str | None) -> list[str]:
    """Name the columns of a template; none where it does not parse, which is told elsewhere."""
    try:
        return template_columns(template) if template else []
    except ValueError:
        return []


def _add_paths(files: Sequence[OpenedFile], names: Sequence[str | None]) -> None:
    """Add the columns that are named by path to the files that have them."""
    wanted = list(dict.fromkeys(name for name in names if name))
    for file in files:
        file.rows.add_paths(wanted)


def _not_used(rows: RowSource, used: set[str | None]) -> list[str]:
    """Name the columns of a file that nothing is read of."""
    touched = {*used, *rows.roots_of(name for name in used if name)}
    return [column for column in rows.columns if column not in touched]


def _check_columns(files: Sequence[OpenedFile], mapping: ColumnMapping, keyed: Mapping[str, str]) -> None:
    """Refuse files without a column that is used; held-out files need none of those that training rows go by."""
    problems: list[str] = []
    for file in files:
        columns, path = file.rows.columns, file.rows.path
        try:
            check_mapping(mapping, columns, path=path, explain=file.rows.explain_missing)
        except UserError as error:
            problems += error.problems
        if file.split == "train":
            problems += [
                missing_column(parameter, column, columns, path=path, more=file.rows.explain_missing(column))
                for column, parameter in keyed.items()
                if column not in columns
            ]
    if problems:
        raise UserError(problems)


def _write_names(path: Path, names: pa.LargeStringArray) -> None:
    batch = pa.record_batch([names], names=["name"])
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def _read_names(path: Path) -> Sequence[str]:
    column = pa.ipc.open_file(pa.memory_map(str(path), "r")).get_batch(0).column(0)
    if len(column) > _MAX_LISTED_NAMES:
        return StoredNames(column)
    names: list[str] = column.to_pylist()
    return names
