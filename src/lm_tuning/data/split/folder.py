"""Make the folder of splits from checked rows: find what is alike, divide, write, and sum up."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lm_tuning.data.arrays import Ints, number_equal
from lm_tuning.data.check.account import PREVIEW_NAME, SUMMARY_NAME, count_skipped
from lm_tuning.data.format.columns import CAUSAL_LM
from lm_tuning.data.records import HELD_OUT, SPLITS, FileRows, Preview, TrainingSource
from lm_tuning.data.split.assign import TRAIN
from lm_tuning.data.split.copies import describe_copies
from lm_tuning.data.split.groups import write_groups
from lm_tuning.data.split.records import DividedSource, Leakage, NearFacts, SplitsSummary
from lm_tuning.data.store import ExampleTable, open_examples, preview_rows, write_selected
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import SplitParameters
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.storage.atomic import write_json_atomic
from lm_tuning.wording import count_of

logger = logging.getLogger(__name__)

COPIES_NAME = "copies.npz"
FACTS_VERSION = 3
"""Raise it when the summary says more of the same division: stored splits with an earlier one are written again."""

_FACTS_BEFORE_LEFT_OUT = 2


def write_splits(
    folder: Path,
    checked: Path,
    split: SplitParameters,
    *,
    seed: int = 42,
    task: str = CAUSAL_LM,
    on_progress: OnProgress = ignore_progress,
) -> SplitsSummary:
    """Write ``train.arrow``, ``validation.arrow``, ``test.arrow``, ``summary.json``, ``preview.json``, ``copies.npz``.

    Rows keep the order of their files within a split, and rows of a file that is a split by itself never move. Memory
    grows by about 200 bytes per row; texts stay on disk.

    Args:
        folder: an empty folder.
        checked: the folder of checked rows, with the columns of ``group``, ``stratify`` and ``key`` noted.
        split: how they are divided, see ``divide_rows``.
        seed: fixes the division.
        task: the ``task`` parameter: a classifier refuses held-out classes that no training row has.
        on_progress: told the progress of comparing and writing.

    Returns:
        The summary, as stored.

    Raises:
        UserError: sizes, groups, classes or folds that the rows do not allow.
    """
    from lm_tuning.data.check.checked import ROWS_NAME, open_checked, read_checked_summary
    from lm_tuning.data.split.classes import refuse_classes
    from lm_tuning.data.split.divide import divide_rows, key_order, take_rows
    from lm_tuning.data.split.near_duplicates import find_near_duplicates

    rows = open_checked(checked)
    checked_summary = read_checked_summary(checked)
    _check_folds(split, has_validation=any(file["split"] == "validation" for file in rows.sources))
    table = ExampleTable(checked / ROWS_NAME)
    row_ids = table.row_ids()  # (rows,)
    order = None
    if split.key:
        order = key_order(rows)  # (rows,): from here on rows follow their keys; the table keeps the order of the files
        rows, row_ids = take_rows(rows, order), row_ids[order]
    contents = number_equal(rows.contents)
    label = checked_summary["columns"].get("label")
    near = None
    if split.near_duplicates != "ignore":
        # (contents,): the first row of each text; copies of it need no signature of their own.
        firsts = np.unique(contents, return_index=True)[1]
        near = find_near_duplicates(
            table,
            firsts if order is None else order[firsts],
            folder / "signatures.tmp",
            similarity=split.near_duplicate_similarity,
            on_progress=on_progress,
        )
    division = divide_rows(
        rows,
        row_ids,
        contents=contents,
        wholes=number_equal(rows.wholes),
        near=near,
        label=label,
        split=split,
        seed=seed,
    )
    if split.group:
        is_held_out = division.splits > TRAIN  # (rows,); -1 is a row that is left out
        write_groups(
            folder, split.group, row_ids[is_held_out], rows.values[split.group][is_held_out], rows.names[split.group]
        )
    max_rows = checked_summary["max_rows"]
    warnings = division.warnings + refuse_classes(
        rows, division.splits, row_ids, label=label, task=task, settings=split, max_rows=max_rows
    )
    for warning in warnings:
        logger.warning(warning)
    sources = _count_sources(checked_summary["sources"], rows.files[division.splits == TRAIN], rows.sources)
    splits = division.splits
    if order is not None:
        splits = np.empty_like(division.splits)
        # From the order of the keys back to that of the file, in which rows are written.
        splits[order] = division.splits
    # Writing needs none of them, and together they are some hundred bytes per row.
    del rows, row_ids, contents, near, order
    num_rows = len(splits)
    on_progress("Writing splits", 0, num_rows, "rows")
    num_written = write_selected(
        table, folder, splits, on_rows=lambda done: on_progress("Writing splits", done, num_rows, "rows")
    )
    summary: SplitsSummary = {
        "facts_version": FACTS_VERSION,
        "rows": num_written,
        "format": checked_summary["format"],
        "columns": checked_summary["columns"],
        "template": checked_summary["template"],
        "seed": seed,
        "key": split.key,
        "max_rows": max_rows,
        "text_lengths": checked_summary.get("text_lengths"),
        "files": checked_summary["files"],
        "sources": sources,
        "label_map": checked_summary.get("label_map"),
        **division.facts,
        "warnings": warnings,
    }
    np.savez(folder / COPIES_NAME, **cast("dict[str, Any]", division.copies))
    write_json_atomic(folder / SUMMARY_NAME, summary)
    write_json_atomic(folder / PREVIEW_NAME, _preview(folder))
    return summary


def read_summary(folder: Path) -> SplitsSummary:
    """Return the summary of a stored folder.

    Args:
        folder: what the split pipeline stored.
    """
    summary: SplitsSummary = json.loads((folder / SUMMARY_NAME).read_text(encoding="utf-8"))
    # Version 2 knew of no labels of rows that were left out. Where it left none out, there was nothing to know.
    if summary.get("facts_version") == _FACTS_BEFORE_LEFT_OUT:
        summary.setdefault("lost_classes", None)
        conflicts = summary["duplicates"]["conflicts"]
        if conflicts is not None:
            conflicts.setdefault("num_texts_in_splits", conflicts["num_texts"])
            conflicts.setdefault("num_rows_left_out", 0)
    return summary


def has_present_facts(folder: Path) -> bool:
    """Return whether stored splits come with all facts that they would come with today.

    Args:
        folder: what the split pipeline stored.
    """
    summary = read_summary(folder)
    if summary.get("facts_version") != _FACTS_BEFORE_LEFT_OUT:
        return summary.get("facts_version") == FACTS_VERSION
    # The present version adds what was left out as a copy; where nothing was, the one before says all there is.
    near = summary["near_duplicates"]
    return not summary["duplicates"]["num_dropped"] and not (near and near["num_dropped"])


def read_copies(folder: Path) -> dict[str, Ints]:
    """Return the ids of copies: ``exact`` and perhaps ``near`` ones in the splits, and those that were ``left_out``.

    Args:
        folder: what the split pipeline stored.
    """
    with np.load(folder / COPIES_NAME) as stored:
        return {name: stored[name] for name in stored.files}


def describe_splits(summary: SplitsSummary) -> str:
    """Describe in a line what a summary holds, for the log.

    Args:
        summary: see ``write_splits``.
    """
    counts = ", ".join(f"{count:,} {split}" for split, count in summary["rows"].items())
    parts = [counts, describe_copies(summary["duplicates"])]
    near = summary["near_duplicates"]
    if near:
        parts.append(f"{_describe_near(near, summary['leakage'])} (at {near['rows_per_second'] or 0:,} rows/s)")
    if summary["leakage"]["num_rows"]:
        num_rows = summary["leakage"]["num_rows"]
        parts.append(f"{count_of(num_rows, 'held-out row')} {'stands' if num_rows == 1 else 'stand'} in train too")
    skipped = count_skipped(summary["files"])
    if skipped:
        parts.append(f"{count_of(skipped, 'bad row')} skipped")
    if summary["groups"]:
        groups = summary["groups"]
        parts.append(f"{count_of(groups['num_groups'], 'group')} of {groups['column']!r} kept whole")
    if summary["folds"]:
        parts.append(f"validation is fold {summary['folds']['fold']} of 0 to {summary['folds']['num_folds'] - 1}")
    return "; ".join(parts)


def _describe_near(near: NearFacts, leakage: Leakage) -> str:
    """Return how many texts are almost like an earlier one, and what became of their rows."""
    if not near["num_near_copies"]:
        return "no near duplicates"
    found = count_of(near["num_near_copies"], "near duplicate")
    if near["handling"] == "drop":
        return f"{found}, {count_of(near['num_dropped'], 'row')} dropped"
    if near["handling"] == "report":
        return f"{found} reported"
    leaks = [leakage[name]["near"] for name in HELD_OUT]
    if any(side and side["num_rows"] for side in leaks):
        return f"{found}, not all in one split"
    return f"{found} kept together"


def _check_folds(split: SplitParameters, *, has_validation: bool) -> None:
    num_folds, fold = split.num_folds, split.fold
    problems = []
    if num_folds and not 0 <= fold < num_folds:
        problems.append(
            f"split.fold: {fold} is no fold of split.num_folds: {num_folds}; folds are counted from 0 to "
            f"{num_folds - 1}."
        )
    if num_folds and has_validation:
        problems.append(
            f"split.num_folds: {num_folds} makes validation one of the folds, and data.validation_path names rows for "
            "it. Leave one of the two out."
        )
    if problems:
        raise UserError(problems)


def _count_sources(
    sources: list[TrainingSource], train_files: npt.NDArray[np.int16], files: list[FileRows]
) -> list[DividedSource]:
    """Return how many rows of train each source gave."""
    source_of_file = np.array([file["source"] for file in files], dtype=np.int64)
    counts = np.bincount(source_of_file[train_files], minlength=len(sources))
    return [
        {"path": source["path"], "weight": source["weight"], "num_rows": int(count)}
        for source, count in zip(sources, counts, strict=True)
    ]


def _preview(folder: Path) -> Preview:
    """Return the first rows of each split as a table."""
    preview: Preview = {"columns": [], "data": []}
    for split in SPLITS:
        of_split = preview_rows(open_examples(folder, split), 5)
        if of_split["data"]:
            preview["columns"] = ["split", *of_split["columns"]]
            preview["data"] += [[split, *row] for row in of_split["data"]]
    return preview
