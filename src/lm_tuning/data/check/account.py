"""Account for rows beside the rows: how many of each source there are, and why they cannot be used further."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from lm_tuning.data.check.findings import Findings
from lm_tuning.data.format.labels import find_class_problem
from lm_tuning.data.records import (
    SPLITS,
    ClassCounts,
    FileRows,
    FindingsByKind,
    MixedSource,
    Preview,
    RawExamples,
    ReadRows,
    RowCounts,
    RowsSummary,
    TrainingSource,
    UnbegunFile,
    UnreadSummary,
)
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import DataParameters
from lm_tuning.storage.atomic import write_json_atomic
from lm_tuning.wording import count_of

logger = logging.getLogger(__name__)

SUMMARY_NAME = "summary.json"
PREVIEW_NAME = "preview.json"
FINDINGS_NAME = "findings.json"

MAX_LINES = 100
"""Bad rows of all files that are spelled out in one message."""

ALWAYS_SKIPPED = 3
"""Bad rows that on_bad_row: skip lets pass whatever their share: of four rows, one is a quarter."""

HOW_TO_FIX = "Fix these rows, or leave them out and have them counted with data.on_bad_row: skip."


def rows_per_epoch(weight: float | Fraction, num_rows: int) -> int:
    """Count the rows of a source in an epoch: weight times rows, halves rounded up.

    Args:
        weight: of the source, taken as typed: 2.3 means 23/10, not the nearest binary fraction.
        num_rows: of the source.
    """
    # round() would take halves to the even neighbour, and 0.5 of 5 rows would be 2 while 0.5 of 7 is 4.
    return math.floor(Fraction(str(weight)) * num_rows + Fraction(1, 2))


def describe_mixing(sources: Sequence[TrainingSource], files: Sequence[FileRows]) -> list[MixedSource]:
    """Count the rows of each training source, and how many of them an epoch holds.

    Args:
        sources: ``path`` and ``weight`` of each.
        files: what was read, see ``CheckedRows.sources``.

    Returns:
        By source: ``path``, ``weight``, ``num_rows`` and ``rows_per_epoch``, before any of them are held out.
    """
    counts = [sum(file["rows_kept"] for file in files if file["source"] == index) for index in range(len(sources))]
    return [
        {
            "path": source["path"],
            "weight": source["weight"],
            "num_rows": num_rows,
            "rows_per_epoch": rows_per_epoch(source["weight"], num_rows),
        }
        for source, num_rows in zip(sources, counts, strict=True)
    ]


class ReadingBrokeOff(UserError):
    """Report that files could not be read to their end, with an account of the rows before.

    Attributes:
        files: one dict a file that was begun, see ``CheckedRows.sources``; ``broke_off`` is true for those that ended
            early.
        findings: what was found in the rows that were read.
    """

    def __init__(
        self, problems: str | Iterable[str], *, files: Sequence[FileRows] = (), findings: Findings | None = None
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


def count_skipped(files: Iterable[ReadRows]) -> int:
    """Count the bad rows of some files.

    Args:
        files: what became of the rows of each.
    """
    return sum(sum(file["rows_skipped"].values()) for file in files)


def spell_out(file: ReadRows, lines: Sequence[str]) -> list[str]:
    """Return the first bad rows of a file in full, and how many more there are.

    Args:
        file: what became of its rows.
        lines: the first bad rows in full.
    """
    rest = count_skipped([file]) - len(lines)
    return [*lines, *([f"{file['path']}: {count_of(rest, 'more bad row')}."] if rest else [])]


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


def find_refusals(
    files: Sequence[FileRows], bad_lines: Sequence[Sequence[str]], data: DataParameters, *, classes: ClassCounts | None
) -> list[str]:
    """Describe why the rows cannot be used further.

    Args:
        files: what became of the rows of each file.
        bad_lines: by file, the first bad rows in full.
        data: the ``data`` parameters. ``on_bad_row``: ``error`` lets no bad row pass, ``skip`` a share of them;
            ``max_bad_fraction``: that share, of any file and of all files together. Up to 3 bad rows always pass,
            unless it is 0.
        classes: see ``count_classes``; None where there are none.

    Returns:
        One sentence per problem; none when all is well.
    """
    problems: list[str] = []
    has_bad_rows = any(file["rows_skipped"] for file in files)
    if data.on_bad_row == "error" and has_bad_rows:
        problems += [*_bad_lines(files, bad_lines), HOW_TO_FIX]
    if data.on_bad_row == "skip":
        problems += find_excesses(files, data.max_bad_fraction)
    for file in files:
        # With ``error``, the bad rows of a file without a good one are named already.
        if not file["rows_kept"] and (data.on_bad_row == "skip" or not file["rows_skipped"]):
            problems.append(f"{file['path']} has no rows that can be used.")
    num_skipped = count_skipped(file for file in files if file["split"] == "train")
    class_problem = find_class_problem(classes, num_skipped=num_skipped, max_rows=data.max_rows) if classes else None
    return [*problems, class_problem] if class_problem else problems


def log_skipped(files: Sequence[FileRows], bad_lines: Sequence[Sequence[str]]) -> None:
    """Warn of the rows that were left out, with the first of each file in full.

    Args:
        files: what became of the rows of each file.
        bad_lines: by file, the first bad rows in full.
    """
    for file, lines in zip(files, bad_lines, strict=True):
        if lines:
            skipped = count_of(count_skipped([file]), "row")
            listed = "\n".join(spell_out(file, lines))
            logger.warning("%s: %s skipped (%s).\n%s", file["path"], skipped, _kinds(file["rows_skipped"]), listed)


def _bad_lines(files: Sequence[FileRows], bad_lines: Sequence[Sequence[str]]) -> list[str]:
    """Spell out the first bad rows of each file and count the others."""
    lines: list[str] = []
    for file, first in zip(files, bad_lines, strict=True):
        spelled = spell_out(file, first)
        # The rest is in the report; a terminal full of rows hides what to do about them.
        if len(lines) + len(spelled) > MAX_LINES:
            lines += spelled[: MAX_LINES - len(lines)]
            return [*lines, f"{count_of(count_skipped(files), 'bad row')} in all files."]
        lines += spelled
    return lines


def find_excesses(files: Sequence[ReadRows], max_bad_fraction: float) -> list[str]:
    """Name the files that hold too many bad rows, and all of them together where no single one does.

    Args:
        files: ``path``, ``rows_read`` and ``rows_skipped`` by kind of each.
        max_bad_fraction: share of the rows of a file, and of all files, that may be bad; see ``ALWAYS_SKIPPED``.
    """
    of_files = (_excess(file["path"], file["rows_read"], file["rows_skipped"], max_bad_fraction) for file in files)
    problems = [problem for problem in of_files if problem]
    # A file that is named is to be looked at; the sum would only say the same again.
    if problems or len(files) == 1:
        return problems
    kinds: Counter[str] = Counter()
    for file in files:
        kinds.update(file["rows_skipped"])
    problem = _excess("All files together", sum(file["rows_read"] for file in files), kinds, max_bad_fraction)
    return [problem] if problem else []


def _excess(name: str, num_read: int, kinds: Mapping[str, int], max_bad_fraction: float) -> str | None:
    num_bad = sum(kinds.values())
    # Compared as products, since a file may have no rows. A limit of 0 means none, so the few that always pass do not.
    if num_bad <= max_bad_fraction * num_read or (num_bad <= ALWAYS_SKIPPED and max_bad_fraction > 0):
        return None
    return (
        f"{name}: {num_bad:,} of {count_of(num_read, 'row')} ({num_bad / num_read:.1%}) cannot be used, and "
        f"data.max_bad_fraction lets {max_bad_fraction:.1%} pass. Most of them: {_kinds(kinds)}."
    )


def _kinds(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {kind}" for kind, count in ordered)
