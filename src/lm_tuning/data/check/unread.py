"""Account for rows that could not be read to the end, so that a report on them can be written all the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_tuning.data.check.findings import Findings
from lm_tuning.data.mixing import describe_mixing
from lm_tuning.data.records import SPLITS
from lm_tuning.errors import UserError
from lm_tuning.storage.atomic import write_json_atomic

SUMMARY_NAME = "summary.json"
PREVIEW_NAME = "preview.json"
FINDINGS_NAME = "findings.json"


class ReadingBrokeOff(UserError):
    """Report that files could not be read to their end, with an account of the rows before.

    Attributes:
        files: one dict a file that was begun, see ``CheckedRows.sources``; ``broke_off`` is true for those that ended
            early.
        findings: what was found in the rows that were read.
    """

    def __init__(
        self,
        problems: str | Iterable[str],
        *,
        files: Sequence[Mapping[str, Any]] = (),
        findings: Findings | None = None,
    ) -> None:
        """Keep the problems and the account.

        Args:
            problems: one sentence, or several.
            files: see the class.
            findings: see the class.
        """
        self.files = [dict(file) for file in files]
        self.findings = findings or Findings()
        super().__init__(problems)


def write_unread(
    folder: Path,
    raw_examples: Mapping[str, Any],
    error: UserError,
    *,
    on_bad_row: str,
    max_bad_fraction: float,
    max_rows: int | None,
) -> dict[str, Any]:
    """Fill a folder like one of checked rows, but without rows: its summary is refused and tells what is known.

    Args:
        folder: an empty folder.
        raw_examples: the files, see ``describe_files``.
        error: why they could not be read.
        on_bad_row: ``data.on_bad_row``.
        max_bad_fraction: ``data.max_bad_fraction``.
        max_rows: ``data.max_rows``.

    Returns:
        The summary, as stored. Of a file that was not begun, the counts are null.
    """
    begun: list[dict[str, Any]] = error.files if isinstance(error, ReadingBrokeOff) else []
    findings = error.findings if isinstance(error, ReadingBrokeOff) else Findings()
    files = [
        {"path": file["path"], "split": split, "source": file.get("source", -1)}
        for split in SPLITS
        for file in raw_examples.get(split) or ()
    ]
    not_begun: dict[str, Any] = {"first_row_id": None, "rows_read": None, "rows_kept": None, "rows_skipped": {}}
    files = [begun[position] if position < len(begun) else file | not_begun for position, file in enumerate(files)]
    num_read, num_kept = (sum(file[name] for file in begun) for name in ("rows_read", "rows_kept"))
    summary = {
        "is_unread": True,
        "format": None,
        "columns": None,
        "appended": None,
        "template": None,
        "reading": "",
        "numbered": [],
        "not_used": [],
        "num_rows": {"read": num_read, "kept": num_kept, "skipped": num_read - num_kept},
        "files": files,
        "sources": raw_examples["sources"],
        "mixing": describe_mixing(raw_examples["sources"], begun),
        "on_bad_row": on_bad_row,
        "max_bad_fraction": max_bad_fraction,
        "max_rows": max_rows,
        "findings": findings.counts(),
        "refused": error.problems,
        "label_map": None,
        "classes": None,
    }
    write_json_atomic(folder / FINDINGS_NAME, findings.describe(begun, bad_outcome="refused"), indent=None)
    write_json_atomic(folder / SUMMARY_NAME, summary, indent=None)
    write_json_atomic(folder / PREVIEW_NAME, {"columns": [], "data": []}, indent=None)
    return summary
