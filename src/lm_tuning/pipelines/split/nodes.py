"""Nodes of the split pipeline."""

from __future__ import annotations

import logging
from pathlib import Path

from lm_tuning.data.records import RawExamples, RowsFacts, RowSources
from lm_tuning.data.split.records import SplitsFacts, SplitsSummary
from lm_tuning.errors import MachineFault, UserError
from lm_tuning.parameters.data import DataParameters, SplitParameters
from lm_tuning.parameters.train import TrainParameters
from lm_tuning.progress import show_progress
from lm_tuning.reporting.document import ReportSection
from lm_tuning.secrets import remember_settings
from lm_tuning.storage.digests import digest_values
from lm_tuning.storage.folders import SCHEMA_VERSION, FolderStore, StagedFolder, read_manifest

logger = logging.getLogger(__name__)


def check_examples(
    raw_examples: RawExamples, *, check_cache: FolderStore, data: DataParameters, split: SplitParameters, task: str
) -> tuple[StagedFolder | Path, ReportSection[RowsFacts]]:
    """Read all files and check every row, or find that the same was done before.

    Bad rows and files that cannot be read are no error here, so that the report on them is stored before
    ``split_examples`` refuses them.

    Args:
        raw_examples: the files, see ``prepare_raw_examples``.
        check_cache: the store of checked rows.
        data: the ``data`` parameters.
        split: the ``split`` parameters: the columns that rows are divided by are read here.
        task: the ``task`` parameter.

    Returns:
        The folder of checked rows to publish, and the section ``rows`` of the data report.
    """
    from lm_tuning.data.check.checked import read_checked_summary, read_findings
    from lm_tuning.data.rows_report import build_rows_section

    # Stored addresses have no passwords; the parameters do, and a node may be run in a process of its own.
    remember_settings(data.model_dump())
    rows, folder = _find_or_check(check_cache, raw_examples, data, split, task=task)
    return rows, build_rows_section(read_checked_summary(folder), read_findings(folder))


def split_examples(
    checked_examples: Path,
    *,
    split_cache: FolderStore,
    data: DataParameters,
    split: SplitParameters,
    train: TrainParameters,
    seed: int,
    task: str,
    output: str,
) -> tuple[StagedFolder | Path, SplitsSummary, ReportSection[SplitsFacts]]:
    """Divide the checked rows, or find that the same was done before.

    Args:
        checked_examples: the folder of checked rows.
        split_cache: the store of splits.
        data: the ``data`` parameters, which the rows must have been checked with.
        split: the ``split`` parameters.
        train: the ``train`` parameters, whose class weights must name classes that there are.
        seed: fixes the division.
        task: the ``task`` parameter.
        output: the ``output`` parameter: where the data report lies, for messages.

    Returns:
        The folder of splits to publish, its summary, and the section ``splits`` of the data report.

    Raises:
        UserError: the rows cannot be used further, see ``find_refusals``; they were checked with other parameters; or a
            class weight is that of no class.
    """
    from lm_tuning.data.settings import refuse_other_rows
    from lm_tuning.data.split.folder import read_copies, read_summary
    from lm_tuning.data.splits_report import build_splits_section

    # In this order: rows of other parameters have findings that say nothing of the present ones.
    refuse_other_rows(checked_examples, data, split, task=task)
    _refuse_bad_rows(checked_examples, train, output=output)
    splits, folder = _find_or_divide(split_cache, checked_examples, data, split, seed=seed, task=task)
    summary = read_summary(folder)
    return splits, summary, build_splits_section(summary, read_copies(folder))


def _find_or_check(
    store: FolderStore, raw_examples: RawExamples, data: DataParameters, split: SplitParameters, *, task: str
) -> tuple[StagedFolder | Path, Path]:
    """Return the checked rows to publish, and where they lie now."""
    from lm_tuning.data.check.checked import describe_checked, read_checked_summary, write_checked_rows
    from lm_tuning.data.settings import as_read, check_settings, rows_key

    sources: RowSources = {"settings": check_settings(data, split, task=task), "files": raw_examples}

    def check(staged: StagedFolder) -> None:
        with show_progress() as on_progress:
            write_checked_rows(staged.path, raw_examples, *as_read(data, split), task=task, on_progress=on_progress)
        staged.facts = sources

    # The settings are a part of the facts too, since a key tells that something differs, and not what.
    key = rows_key(sources)
    try:
        rows, folder = store.find_or_make(key, check)
    except MachineFault:  # a full disk says nothing about the rows
        raise
    except UserError as error:
        return _account_for_unread(error, sources, data, store=store, key=key)
    outcome = "reused" if isinstance(rows, Path) else "checked"  # a path is what was stored before
    logger.info("Rows %s: %s, in %s", outcome, describe_checked(read_checked_summary(folder)), store.root / key)
    return rows, folder


def _account_for_unread(
    error: UserError, sources: RowSources, data: DataParameters, *, store: FolderStore, key: str
) -> tuple[StagedFolder, Path]:
    """Stage what is known of files that could not be read, under a key of its own: the next run reads them again."""
    from lm_tuning.data.check.account import write_unread

    with store.stage(f"{key}.unread") as staged:
        write_unread(staged.path, sources["files"], error, data=data)
        staged.facts = sources
    # An error in the log and none raised: Kedro would not store the report, and split_examples refuses the rows.
    logger.error("The rows could not be read. What is known of them is in the data report.")
    return staged, staged.path


def _refuse_bad_rows(folder: Path, train: TrainParameters, *, output: str) -> None:
    """Refuse rows that cannot be used further, and weights of classes that they do not have."""
    from lm_tuning.data.check.checked import read_checked_summary
    from lm_tuning.data.format.labels import refuse_unknown_weights

    # The check itself has decided, by on_bad_row and max_bad_fraction; both are in the key of the rows.
    checked = read_checked_summary(folder)
    if checked["refused"]:
        hint = f"All of them, by file and row number: data/08_reporting/{output}/data_report.md"
        raise UserError([*checked["refused"], *([hint] if checked["findings"] else [])])
    refuse_unknown_weights(train.class_weights, checked.get("label_map"))


def _find_or_divide(
    store: FolderStore, rows: Path, data: DataParameters, split: SplitParameters, *, seed: int, task: str
) -> tuple[StagedFolder | Path, Path]:
    """Return the splits to publish, and where they lie now."""
    from lm_tuning.data.settings import as_read, division_settings, split_settings
    from lm_tuning.data.split.folder import has_present_facts, write_splits

    # More than the key needs: what the rows were read with is compared when the splits are used.
    settings, manifest = split_settings(data, split, seed=seed, task=task), read_manifest(rows)
    _, split = as_read(data, split)

    def divide(staged: StagedFolder) -> None:
        with show_progress() as on_progress:
            write_splits(staged.path, rows, split, seed=seed, task=task, on_progress=on_progress)
        staged.facts = {"settings": settings, "files": manifest["facts"]["files"]}

    division = division_settings(split, seed=seed)
    key = digest_values({"schema_version": SCHEMA_VERSION, "rows": manifest["key"], "settings": division})
    # An earlier version may have divided the same way and said less of it: its splits are divided again.
    splits, folder = store.find_or_make(key, divide, is_usable=has_present_facts)
    _log_splits(folder, store.root / key, is_reused=isinstance(splits, Path))
    return splits, folder


def _log_splits(folder: Path, stored_at: Path, *, is_reused: bool) -> None:
    """Log what the splits are, and again what was warned of when they were made."""
    from lm_tuning.data.split.folder import describe_splits, read_summary

    summary = read_summary(folder)
    logger.info("Splits %s: %s, in %s", "reused" if is_reused else "made", describe_splits(summary), stored_at)
    # Those that were just made have said it while they were made.
    for warning in summary["warnings"] if is_reused else ():
        logger.warning(warning)
