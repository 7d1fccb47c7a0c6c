"""Account for rows that could not be read to the end, so that a report on them can be written all the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from lm_tuning.data.check.findings import Findings
from lm_tuning.data.mixing import describe_mixing
from lm_tuning.data.records import (
    SPLITS,
    FileRows,
    FindingsByKind,
    Preview,
    RawExamples,
    RowCounts,
    RowsSummary,
    UnbegunFile,
    UnreadSummary,
)
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import DataParameters
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
        files: Sequence[FileRows] = (),
        findings: Findings | None = None,
    ) -> None:
        """Keep the problems and the account.

        Args:
            problems: one sentence, or several.
            files: see the class.
            findings: see the class.
        """
        self.files = list(files)
        self.findings = findings or Findings()
        super().__init__(problems)


def write_unread(folder: Path, raw_examples: RawExamples, error: UserError, *, data: DataParameters) -> UnreadSummary:
    """Fill a folder like one of checked rows, but without rows: its summary is refused and tells what is known.

    Args:
        folder: an empty folder.
        raw_examples: the files, see ``describe_files``.
        error: why they could not be read.
        data: the ``data`` parameters that they were read with.

    Returns:
        The summary, as stored. Of a file that was not begun, the counts are null.
    """
    begun, findings = (error.files, error.findings) if isinstance(error, ReadingBrokeOff) else ([], Findings())
    # Files are read in this order, so those that were begun come first.
    named = [(split, file) for split in SPLITS for file in raw_examples[split] or ()]
    # Null and not 0: nobody knows how many rows these files have.
    not_begun: list[UnbegunFile] = [
        {
            "path": file["path"],
            "split": split,
            "source": file["source"],
            "first_row_id": None,
            "rows_read": None,
            "rows_kept": None,
            "rows_skipped": {},
        }
        for split, file in named[len(begun) :]
    ]
    summary: UnreadSummary = {
        "is_unread": True,
        "format": None,
        "columns": None,
        "appended": None,
        "template": None,
        "reading": "",
        "numbered": [],
        "not_used": [],
        "num_rows": count_rows(begun),
        "files": [*begun, *not_begun],
        "sources": raw_examples["sources"],
        "mixing": describe_mixing(raw_examples["sources"], begun),
        "on_bad_row": data.on_bad_row,
        "max_bad_fraction": data.max_bad_fraction,
        "max_rows": data.max_rows,
        "findings": findings.counts(),
        "refused": error.problems,
        "label_map": None,
        "classes": None,
    }
    write_account(folder, summary, findings.describe(begun, bad_outcome="refused"), {"columns": [], "data": []})
    return summary


def count_rows(files: Sequence[FileRows]) -> RowCounts:
    """Add up the rows of some files.

    Args:
        files: what became of the rows of each.
    """
    num_read, num_kept = sum(file["rows_read"] for file in files), sum(file["rows_kept"] for file in files)
    return {"read": num_read, "kept": num_kept, "skipped": num_read - num_kept}


def write_account(
    folder: Path, summary: RowsSummary | UnreadSummary, findings: FindingsByKind, preview: Preview
) -> None:
    """Write what stands beside the rows, whether they could be read to the end or not.

    Args:
        folder: where ``findings.json``, ``summary.json`` and ``preview.json`` go.
        summary: of the rows.
        findings: see ``Findings.describe``.
        preview: the first rows.
    """
    for name, value in ((FINDINGS_NAME, findings), (SUMMARY_NAME, summary), (PREVIEW_NAME, preview)):
        # Without line breaks: findings list the numbers of all bad rows, of which there may be millions.
        write_json_atomic(folder / name, value, indent=None)
