"""Make the folder of splits: read, check, divide, write, and sum up."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_tuning.data.collecting import collect_rows
from lm_tuning.data.columns import choose_mapping
from lm_tuning.data.dividing import divide_rows
from lm_tuning.data.problems import shorten
from lm_tuning.data.raw_files import resolve_path
from lm_tuning.data.reading import RowSource, open_rows
from lm_tuning.data.rows import SPLITS, ExampleTable, open_examples, write_selected
from lm_tuning.errors import UserError
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.storage.digests import digest_file

logger = logging.getLogger(__name__)

SUMMARY_NAME = "summary.json"
PREVIEW_NAME = "preview.json"
_NUM_PREVIEW_ROWS = 5
_MAX_PREVIEW_CHARACTERS = 300


def write_splits(
    folder: Path,
    files: Mapping[str, Mapping[str, Any] | None],
    *,
    format: str = "auto",
    columns: Mapping[str, str | None] | None = None,
    template: str | None = None,
    on_bad_row: str = "error",
    normalize: str = "nfc",
    validation: float | int = 0.05,
    test: float | int = 0.05,
    group: str | None = None,
    stratify: str | None = None,
    duplicates: str = "keep_together",
    seed: int = 42,
    task: str = "causal_lm",
    on_progress: OnProgress = ignore_progress,
) -> dict[str, Any]:
    """Write ``train.arrow``, ``validation.arrow``, ``test.arrow``, ``summary.json`` and ``preview.json``.

    Rows keep the order of their files within a split. Memory grows by about 60 bytes a row; texts stay on disk.

    Args:
        folder: an empty folder.
        files: by split, ``path`` and ``format`` of its file; None for a split that is cut from the training file.
        format: see ``choose_mapping``.
        columns: column by part, see ``choose_mapping``.
        template: renders the prompt from columns.
        on_bad_row: ``error`` or ``skip``.
        normalize: ``nfc`` or ``none``.
        validation: a float is a fraction, an int a number of rows; without effect when ``files`` has one for it.
        test: the same.
        group: column whose equal values stay in one split.
        stratify: column whose classes are divided alike.
        duplicates: ``keep_together``, ``drop`` or ``ignore``.
        seed: fixes the division.
        task: see ``choose_mapping``.
        on_progress: told the progress of reading and writing.

    Returns:
        The summary, as stored.

    Raises:
        UserError: everything that is wrong with files, columns, rows or sizes, as far as it can be known together.
    """
    sources = _open_sources(files)
    mapping = choose_mapping(
        sources["train"].columns,
        path=sources["train"].path,
        format=format,
        columns=columns,
        template=template,
        task=task,
    )
    keys = {column: key for column, key in ((group, "split.group"), (stratify, "split.stratify")) if column}
    everything = folder / "rows.arrow"
    rows = collect_rows(
        sources,
        everything,
        mapping=mapping,
        keys=keys,
        skip_bad_rows=on_bad_row == "skip",
        normalize=normalize == "nfc",
        on_progress=on_progress,
    )
    division = divide_rows(
        rows,
        validation=validation,
        test=test,
        group=group,
        stratify=stratify,
        duplicates=duplicates,
        seed=seed,
    )
    for warning in division.warnings:
        logger.warning(warning)
    num_rows = len(division.splits)
    num_written = write_selected(
        ExampleTable(everything),
        folder,
        division.splits,
        on_rows=lambda done: on_progress("Writing splits", done, num_rows, "rows"),
    )
    everything.unlink()
    summary = {
        "rows": num_written,
        "format": mapping.format,
        "columns": mapping.columns,
        "template": mapping.template,
        "seed": seed,
        "files": rows.sources,
        **division.facts,
        "warnings": division.warnings,
    }
    _write_json(folder / SUMMARY_NAME, summary)
    _write_json(folder / PREVIEW_NAME, _preview(folder))
    return summary


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the summary of a stored folder.

    Args:
        folder: what the split pipeline stored.
    """
    summary: dict[str, Any] = json.loads((folder / SUMMARY_NAME).read_text(encoding="utf-8"))
    return summary


def describe_splits(summary: Mapping[str, Any]) -> str:
    """Say in a line what a summary holds, for the log.

    Args:
        summary: see ``write_splits``.
    """
    counts = ", ".join(f"{count:,} {split}" for split, count in summary["rows"].items())
    copies = summary["duplicates"]["num_copies"]
    handling = {"keep_together": "kept together", "drop": "dropped", "ignore": "ignored"}
    handled = handling[summary["duplicates"]["handling"]]
    parts = [counts, f"{copies:,} duplicate{'s' * (copies > 1)} {handled}" if copies else "no duplicates"]
    skipped = sum(sum(file["rows_skipped"].values()) for file in summary["files"].values())
    if skipped:
        parts.append(f"{skipped:,} bad rows skipped")
    if summary["groups"]:
        parts.append(f"{summary['groups']['num_groups']:,} groups of {summary['groups']['column']!r} kept whole")
    return "; ".join(parts)


def _open_sources(files: Mapping[str, Mapping[str, Any] | None]) -> dict[str, RowSource]:
    sources: dict[str, RowSource] = {}
    problems: list[str] = []
    for split in SPLITS:
        file = files.get(split)
        if file is None:
            continue
        try:
            sources[split] = open_rows(Path(file["path"]), file["format"])
        except FileNotFoundError:
            problems.append(f"{file['path']} is gone. Run the split pipeline again once it is back.")
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)
    return sources


def _preview(folder: Path) -> dict[str, Any]:
    """Return the first rows of each split as a table."""
    data: list[list[Any]] = []
    columns: list[str] = []
    for split in SPLITS:
        for row in open_examples(folder, split).head(_NUM_PREVIEW_ROWS):
            columns = ["split", *row]
            data.append([split, *(_shown(value) for value in row.values())])
    return {"columns": columns, "data": data}


def _shown(value: Any) -> Any:
    return shorten(value, _MAX_PREVIEW_CHARACTERS) if isinstance(value, str) else value


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def find_staleness(
    facts: Mapping[str, Any], *, paths: Mapping[str, str | None], settings: Mapping[str, Any], digest_cache: Path | None
) -> list[str]:
    """Name what stored splits were made from and the present parameters or files do not say.

    Args:
        facts: of the splits' manifest: ``settings`` and ``files``.
        paths: ``train``, ``validation`` and ``test`` as the parameters name them.
        settings: what ``write_splits`` would be given now.
        digest_cache: see ``digest_file``.

    Returns:
        One sentence a difference. A raw file that is gone since cannot have changed, so it is none.
    """
    found = [
        f"{name}: the stored splits were made with {old!r}, the parameters say {settings[name]!r}"
        for name, old in facts["settings"].items()
        if old != settings.get(name)
    ]
    for split, text in paths.items():
        stored, present = facts["files"].get(split), resolve_path(text) if text else None
        if (stored and stored["path"]) != (present and str(present)):
            found.append(
                f"rows of {split}: the stored splits were made from {stored and stored['path']}, "
                f"the parameters say {present and str(present)}"
            )
        elif stored and present and present.is_file() and digest_file(present, digest_cache) != stored["digest"]:
            found.append(f"rows of {split}: {present} has changed since the stored splits were made from it")
    return found
