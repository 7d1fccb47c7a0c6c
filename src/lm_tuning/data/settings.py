"""What checked rows and splits depend on: parameters as plain values, the keys they are stored by, and what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from lm_tuning.data.check.checked import ROWS_VERSION
from lm_tuning.data.example import example_settings, is_example
from lm_tuning.data.split.folder import find_staleness
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import DataParameters, SplitParameters
from lm_tuning.storage.digests import digest_values
from lm_tuning.storage.folders import SCHEMA_VERSION, read_manifest


class RowSources(TypedDict):
    """What checked rows are made from: keywords of ``write_checked_rows``, and the files, see ``describe_files``."""

    settings: dict[str, Any]
    files: dict[str, Any]


def check_settings(data: DataParameters, split: SplitParameters, *, task: str) -> dict[str, Any]:
    """Unpack the parameters into the keywords of ``write_checked_rows``.

    Args:
        data: the ``data`` parameters.
        split: the ``split`` parameters: the columns that rows are divided by are read as well.
        task: the ``task`` parameter.
    """
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


def division_settings(split: SplitParameters, *, group: str | None, seed: int) -> dict[str, Any]:
    """Unpack the parameters into the keywords of ``write_splits``.

    Args:
        split: the ``split`` parameters.
        group: the column whose equal values stay in one split, which the example has without being asked.
        seed: fixes the division.
    """
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


def split_settings(data: DataParameters, split: SplitParameters, *, seed: int, task: str) -> dict[str, Any]:
    """Unpack the parameters into everything that stored splits depend on beside the files.

    Args:
        data: the ``data`` parameters.
        split: the ``split`` parameters.
        seed: fixes the division.
        task: the ``task`` parameter.
    """
    settings = check_settings(data, split, task=task)
    return {**settings, **division_settings(split, group=settings["group"], seed=seed)}


def rows_key(sources: RowSources) -> str:
    """Return the key of checked rows.

    Args:
        sources: what they are made from.
    """
    return digest_values(
        {
            "schema_version": SCHEMA_VERSION,
            "rows_version": ROWS_VERSION,
            "raw_examples": sources["files"],
            "settings": sources["settings"],
        }
    )


def refuse_other_rows(checked_rows: Path, data: DataParameters, split: SplitParameters, *, task: str) -> None:
    """Refuse rows that an earlier run checked with other parameters, when only the later node is run.

    Args:
        checked_rows: the stored folder of checked rows.
        data: the ``data`` parameters.
        split: the ``split`` parameters.
        task: the ``task`` parameter.

    Raises:
        UserError: what differs, and how to check the rows again.
    """
    stored, settings = read_manifest(checked_rows)["facts"]["settings"], check_settings(data, split, task=task)
    changed = [
        f"  - {name}: the stored rows were checked with {stored.get(name)!r}, the parameters say {settings.get(name)!r}"
        for name in dict.fromkeys([*stored, *settings])
        if stored.get(name) != settings.get(name)
    ]
    if changed:
        raise UserError(
            [
                f"The checked rows in {checked_rows} do not belong to the present parameters:",
                *changed,
                "Run the whole split pipeline: kedro run --pipelines=split (the same --env and --params).",
            ]
        )


def refuse_other_splits(
    splits: Path, data: DataParameters, split: SplitParameters, *, seed: int, task: str, digest_cache: Path | None
) -> None:
    """Refuse splits that were made from other rows or with other parameters.

    Args:
        splits: the stored folder of splits.
        data: the ``data`` parameters.
        split: the ``split`` parameters.
        seed: fixes the division.
        task: the ``task`` parameter.
        digest_cache: see ``digest_file``.

    Raises:
        UserError: what differs, and how to make the splits again.
    """
    rows = data.model_dump()
    stale = find_staleness(
        read_manifest(splits)["facts"],
        sources={"train": rows["path"], "validation": rows["validation_path"], "test": rows["test_path"]},
        settings=split_settings(data, split, seed=seed, task=task),
        digest_cache=digest_cache,
    )
    if stale:
        raise UserError(
            [
                f"The stored splits in {splits} do not belong to the present rows and parameters, so nothing "
                "is trained on them:",
                *(f"  - {difference}" for difference in stale),
                "Set these back, or make the splits again with kedro run --pipelines=split (the same --env and "
                "--params). A training goes on from its checkpoint (train.resume=true) with its own rows only: for "
                "that, set them back.",
            ]
        )
