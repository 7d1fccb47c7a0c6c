"""Node of the split pipeline."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lm_tuning.parameters.data import DataParameters, SplitParameters
from lm_tuning.storage.digests import digest_values
from lm_tuning.storage.folders import SCHEMA_VERSION, FolderStore, StagedFolder

logger = logging.getLogger(__name__)


def split_examples(
    raw_examples: dict[str, Any],
    *,
    split_cache: FolderStore,
    data: DataParameters,
    split: SplitParameters,
    seed: int,
    task: str,
) -> tuple[StagedFolder | Path, dict[str, Any]]:
    """Read, check and divide the rows, or find that the same was done before.

    Args:
        raw_examples: the files, see ``prepare_raw_examples``.
        split_cache: the store of splits.
        data: the ``data`` parameters.
        split: the ``split`` parameters.
        seed: fixes the division.
        task: the ``task`` parameter.

    Returns:
        The folder of splits to publish, and its summary.
    """
    from lm_tuning.data.split_folder import describe_splits, read_summary, write_splits
    from lm_tuning.progress import show_progress

    files = {name: raw_examples[name] for name in ("train", "validation", "test")}
    settings = split_settings(data, split, seed=seed, task=task)
    contents = {name: file and [file["digest"], file["format"]] for name, file in files.items()}
    key = digest_values({"schema_version": SCHEMA_VERSION, "files": contents, "settings": settings})
    found = split_cache.find(key)
    if found:
        summary = read_summary(found)
        logger.info("Splits reused: %s, in %s", describe_splits(summary), found)
        return found, summary
    with split_cache.stage(key) as staged, show_progress() as on_progress:
        summary = write_splits(staged.path, files, **settings, on_progress=on_progress)
        staged.facts = {"settings": settings, "files": files}
    logger.info("Splits made: %s, in %s", describe_splits(summary), split_cache.root / key)
    return staged, summary


def split_settings(data: DataParameters, split: SplitParameters, *, seed: int, task: str) -> dict[str, Any]:
    """Unpack the parameters into the keywords of ``write_splits``."""
    from lm_tuning.data.example import EXAMPLE_PATH, example_settings
    from lm_tuning.data.raw_files import resolve_path

    columns, template, group = data.columns.model_dump(), data.template, split.group
    if resolve_path(data.path) == Path(EXAMPLE_PATH):
        columns, template, group = example_settings(columns, template, group)
    return {
        "format": data.format,
        "columns": columns,
        "template": template,
        "on_bad_row": data.on_bad_row,
        "normalize": data.normalize,
        "validation": split.validation,
        "test": split.test,
        "group": group,
        "stratify": split.stratify,
        "duplicates": split.duplicates,
        "seed": seed,
        "task": task,
    }
