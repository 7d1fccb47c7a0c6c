"""Decide whether rows that cannot be used forbid going on with the others."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from lm_tuning.data.check.collect import CollectedRows, count_skipped, spell_out
from lm_tuning.data.format.labels import find_class_problem
from lm_tuning.data.records import ClassCounts, ReadRows
from lm_tuning.parameters.data import DataParameters
from lm_tuning.wording import count_of

logger = logging.getLogger(__name__)

MAX_LINES = 100
"""Bad rows of all files that are spelled out in one message."""

ALWAYS_SKIPPED = 3
"""Bad rows that on_bad_row: skip lets pass whatever their share: of four rows, one is a quarter."""

HOW_TO_FIX = "Fix these rows, or leave them out and have them counted with data.on_bad_row: skip."


def find_refusals(rows: CollectedRows, data: DataParameters, *, classes: ClassCounts | None) -> list[str]:
    """Describe why the rows cannot be used further.

    Args:
        rows: what was read.
        data: the ``data`` parameters. ``on_bad_row``: ``error`` lets no bad row pass, ``skip`` a share of them;
            ``max_bad_fraction``: that share, of any file and of all files together. Up to 3 bad rows always pass,
            unless it is 0.
        classes: see ``count_classes``; None where there are none.

    Returns:
        One sentence per problem; none when all is well.
    """
    problems: list[str] = []
    has_bad_rows = any(file["rows_skipped"] for file in rows.files)
    if data.on_bad_row == "error" and has_bad_rows:
        problems += [*_bad_lines(rows), HOW_TO_FIX]
    if data.on_bad_row == "skip":
        problems += find_excesses(rows.files, data.max_bad_fraction)
    for file in rows.files:
        # With ``error``, the bad rows of a file without a good one are named already.
        if not file["rows_kept"] and (data.on_bad_row == "skip" or not file["rows_skipped"]):
            problems.append(f"{file['path']} has no rows that can be used.")
    num_skipped = count_skipped(file for file in rows.files if file["split"] == "train")
    class_problem = find_class_problem(classes, num_skipped=num_skipped, max_rows=data.max_rows) if classes else None
    return [*problems, class_problem] if class_problem else problems


def log_skipped(rows: CollectedRows) -> None:
    """Warn of the rows that were left out, with the first of each file in full.

    Args:
        rows: what was read.
    """
    for file, lines in zip(rows.files, rows.bad_lines, strict=True):
        if lines:
            skipped = count_of(count_skipped([file]), "row")
            listed = "\n".join(spell_out(file, lines))
            logger.warning("%s: %s skipped (%s).\n%s", file["path"], skipped, _kinds(file["rows_skipped"]), listed)


def _bad_lines(rows: CollectedRows) -> list[str]:
    """Spell out the first bad rows of each file and count the others."""
    lines: list[str] = []
    for file, first in zip(rows.files, rows.bad_lines, strict=True):
        spelled = spell_out(file, first)
        # The rest is in the report; a terminal full of rows hides what to do about them.
        if len(lines) + len(spelled) > MAX_LINES:
            lines += spelled[: MAX_LINES - len(lines)]
            return [*lines, f"{count_of(count_skipped(rows.files), 'bad row')} in all files."]
        lines += spelled
    return lines


def find_excesses(files: Sequence[ReadRows], max_bad_fraction: float) -> list[str]:
    """Name the files that hold too many bad rows, and all of them together where no single one does.

    Args:
        files: ``path``, ``rows_read`` and ``rows_skipped`` by kind of each.
        max_bad_fraction: share of the rows of a file, and of all files, that may be bad; see ``ALWAYS_SKIPPED``.
    """
    problems = [
        problem
        for file in files
        if (problem := _excess(file["path"], file["rows_read"], file["rows_skipped"], max_bad_fraction))
    ]
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
