"""Nodes of the split pipeline."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lm_tuning.errors import MachineFault, UserError
from lm_tuning.parameters.data import DataParameters, SplitParameters
from lm_tuning.parameters.train import TrainParameters
from lm_tuning.secrets import remember_settings
from lm_tuning.storage.digests import digest_values
from lm_tuning.storage.folders import SCHEMA_VERSION, FolderStore, StagedFolder, read_manifest

logger = logging.getLogger(__name__)

_REPORT_HINT = "All of them, by file and row number: data/08_reporting/{output}/data_report.md"


def check_examples(
    raw_examples: dict[str, Any],
    *,
    check_cache: FolderStore,
    data: DataParameters,
    split: SplitParameters,
    task: str,
) -> tuple[StagedFolder | Path, dict[str, Any]]:
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
    from lm_tuning.data.check.checked import (
        ROWS_VERSION,
        describe_checked,
        read_checked_summary,
        read_findings,
        write_checked_rows,
    )
    from lm_tuning.data.rows_report import build_rows_section
    from lm_tuning.progress import show_progress

    remember_settings(data.model_dump())  # stored addresses have no passwords; the parameters do
    settings = check_settings(data, split, task=task)
    key = digest_values(
        {
            "schema_version": SCHEMA_VERSION,
            "rows_version": ROWS_VERSION,
            "raw_examples": raw_examples,
            "settings": settings,
        }
    )
    found = check_cache.find(key)
    if found:
        summary = read_checked_summary(found)
        logger.info("Rows reused: %s, in %s", describe_checked(summary), found)
        return found, build_rows_section(summary, read_findings(found))
    try:
        with check_cache.stage(key) as staged, show_progress() as on_progress:
            summary = write_checked_rows(staged.path, raw_examples, **settings, on_progress=on_progress)
            staged.facts = {"settings": settings, "files": raw_examples}
    except MachineFault:  # a full disk says nothing about the rows
        raise
    except UserError as error:
        return _account_for_unread(error, raw_examples, settings, check_cache=check_cache, key=key)
    logger.info("Rows checked: %s, in %s", describe_checked(summary), check_cache.root / key)
    return staged, build_rows_section(summary, read_findings(staged.path))


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
) -> tuple[StagedFolder | Path, dict[str, Any], dict[str, Any]]:
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
        UserError: the rows cannot be gone on with, see ``find_refusals``; they were checked with other parameters; or a
            class weight is that of no class.
    """
    from lm_tuning.data.check.checked import read_checked_summary
    from lm_tuning.data.format.labels import refuse_unknown_weights
    from lm_tuning.data.split.folder import FACTS_VERSION, describe_splits, read_copies, read_summary, write_splits
    from lm_tuning.data.splits_report import build_splits_section
    from lm_tuning.progress import show_progress

    manifest = read_manifest(checked_examples)
    _refuse_other_settings(checked_examples, manifest["facts"]["settings"], check_settings(data, split, task=task))
    checked = read_checked_summary(checked_examples)
    if checked["refused"]:
        hint = [_REPORT_HINT.format(output=output)] if checked["findings"] else []
        raise UserError([*checked["refused"], *hint])
    refuse_unknown_weights(train.class_weights, checked.get("label_map"))
    settings = _division_settings(split, group=manifest["facts"]["settings"]["group"], seed=seed)
    key = digest_values({"schema_version": SCHEMA_VERSION, "rows": manifest["key"], "settings": settings})
    found = split_cache.find(key)
    summary = read_summary(found) if found else {}
    if found and summary.get("facts_version") == FACTS_VERSION:
        logger.info("Splits reused: %s, in %s", describe_splits(summary), found)
        for warning in summary["warnings"]:
            logger.warning(warning)
        return found, summary, build_splits_section(summary, read_copies(found))
    with split_cache.stage(key) as staged, show_progress() as on_progress:
        summary = write_splits(staged.path, checked_examples, **settings, task=task, on_progress=on_progress)
        staged.facts = {
            "settings": split_settings(data, split, seed=seed, task=task),
            "files": manifest["facts"]["files"],
        }
    logger.info("Splits made: %s, in %s", describe_splits(summary), split_cache.root / key)
    return staged, summary, build_splits_section(summary, read_copies(staged.path))


def _account_for_unread(
    error: UserError, raw_examples: dict[str, Any], settings: dict[str, Any], *, check_cache: FolderStore, key: str
) -> tuple[StagedFolder, dict[str, Any]]:
    """Stage what is known of files that could not be read, under a key of its own: the next run reads them again."""
    from lm_tuning.data.check.checked import read_findings
    from lm_tuning.data.check.unread import write_unread
    from lm_tuning.data.rows_report import build_rows_section

    names = ("on_bad_row", "max_bad_fraction", "max_rows")
    with check_cache.stage(f"{key}.unread") as staged:
        summary = write_unread(staged.path, raw_examples, error, **{name: settings[name] for name in names})
        staged.facts = {"settings": settings, "files": raw_examples}
    logger.error("The rows could not be read. What is known of them is in the data report.")
    return staged, build_rows_section(summary, read_findings(staged.path))


def check_settings(data: DataParameters, split: SplitParameters, *, task: str) -> dict[str, Any]:
    """Unpack the parameters into the keywords of ``write_checked_rows``."""
    from lm_tuning.data.example import example_settings, is_example

    columns, template, group = data.columns.model_dump(), data.template, split.group
    if is_example(data.model_dump()["path"]):
        columns, template, group = example_settings(columns, template, group)
    # Settings that came later count only where they are set, so that rows which were read before them are found again.
    shape = {
        name: value
        for name in ("field", "explode", "delimiter", "max_row_bytes")
        if (value := getattr(data, name)) != DataParameters.model_fields[name].default
    }
    return {
        "format": data.format,
        "columns": columns,
        "template": template,
        "on_bad_row": data.on_bad_row,
        "max_bad_fraction": data.max_bad_fraction,
        "normalize": data.normalize,
        "max_rows": data.max_rows,
        "group": group,
        "stratify": split.stratify,
        "key": split.key,
        "task": task,
        **shape,
    }


def split_settings(data: DataParameters, split: SplitParameters, *, seed: int, task: str) -> dict[str, Any]:
    """Unpack the parameters into everything that stored splits depend on beside the files."""
    settings = check_settings(data, split, task=task)
    return {**settings, **_division_settings(split, group=settings["group"], seed=seed)}


def _division_settings(split: SplitParameters, *, group: str | None, seed: int) -> dict[str, Any]:
    """Unpack the parameters into the keywords of ``write_splits``."""
    # Left out where it changes nothing: splits of earlier versions keep their key, and checkpoints their token set.
    by = {} if split.duplicates_by == "row" else {"duplicates_by": split.duplicates_by}
    return {
        **by,
        "validation": split.validation,
        "test": split.test,
        "group": group,
        "stratify": split.stratify,
        "key": split.key,
        "num_folds": split.num_folds,
        "fold": split.fold,
        "duplicates": split.duplicates,
        "near_duplicates": split.near_duplicates,
        "near_duplicate_similarity": split.near_duplicate_similarity,
        "seed": seed,
    }


def _refuse_other_settings(folder: Path, stored: dict[str, Any], present: dict[str, Any]) -> None:
    """Refuse rows that an earlier run checked with other parameters, when only the later node is run."""
    changed = [
        f"  - {name}: the stored rows were checked with {stored.get(name)!r}, the parameters say {present.get(name)!r}"
        for name in dict.fromkeys([*stored, *present])
        if stored.get(name) != present.get(name)
    ]
    if changed:
        raise UserError(
            [
                f"The checked rows in {folder} do not belong to the present parameters:",
                *changed,
                "Run the whole split pipeline: kedro run --pipelines=split (the same --env and --params).",
            ]
        )
