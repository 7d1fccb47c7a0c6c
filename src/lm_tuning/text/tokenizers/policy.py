"""Apply ``data.on_bad_row`` to rows that turn out to be unusable only when they are rendered or tokenized."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from lm_tuning.data.check.account import HOW_TO_FIX, find_excesses
from lm_tuning.data.check.findings import RowPositions
from lm_tuning.data.records import FileRows, ReadRows
from lm_tuning.text.render.template_call import REFUSED
from lm_tuning.text.tokenizers.counts import DROPPED, UNUSABLE, SplitCounts, name_rows
from lm_tuning.wording import count_of

_NUM_ROWS_NAMED = 20
# Different reasons that are spelled out for a split; a template may name the row in each of its messages.
_NUM_GROUPS = 10
# Why a row is refused before the template is given it.
_BEFORE_TEMPLATE = ("no_assistant_turn", "control_token", "tool_arguments_not_json")


def find_unusable(
    counts: Mapping[str, SplitCounts],
    files: Sequence[FileRows],
    *,
    on_bad_row: str,
    max_bad_fraction: float,
) -> list[str]:
    """Describe why rows that cannot be rendered or tokenized forbid going on with the others.

    Args:
        counts: what happened to the rows, by split.
        files: where the rows come from, see ``CheckedRows.sources``: rows that were skipped in reading count as well.
        on_bad_row: ``error`` lets no such row pass, ``skip`` a share of them.
        max_bad_fraction: that share, of any file and of all files together. Up to 3 bad rows always pass, unless it is
            0.

    Returns:
        One sentence per problem, with the rows and how to fix them; none when all is well.
    """
    if not any(of_split.counts[reason] for of_split in counts.values() for reason in UNUSABLE):
        return []
    positions = RowPositions(files)
    excesses = find_excesses(_all_skipped(counts, files, positions), max_bad_fraction)
    how_to_fix = HOW_TO_FIX
    if excesses:
        how_to_fix = (
            "Fix these rows, or leave so many out and have them counted with data.on_bad_row: skip and a "
            "data.max_bad_fraction above their share."
        )
    elif on_bad_row == "skip":
        return []
    groups = [line for split, of_split in counts.items() for line in _describe_groups(split, of_split, positions)]
    return [*groups, *excesses, how_to_fix]


def find_template_fault(counts: Mapping[str, SplitCounts], positions: RowPositions, *, template: str) -> list[str]:
    """Report once a chat template that refuses every row that it is given; then no row is to be fixed.

    Args:
        counts: what happened to the rows, by split.
        positions: where rows stand in their files.
        template: names the template, to begin a sentence with.

    Returns:
        One sentence with the template's own words for the first row; none where it takes a row.
    """
    num_given = sum(
        of_split.num_read - sum(of_split.counts[reason] for reason in _BEFORE_TEMPLATE) for of_split in counts.values()
    )
    num_refused = sum(of_split.counts[REFUSED] for of_split in counts.values())
    if not num_refused or num_refused < num_given:
        return []
    first = next(of_split for of_split in counts.values() if of_split.counts[REFUSED])
    row_id = first.rows(REFUSED)[0]
    file, number = positions.find(row_id)
    return [
        f"{template} (see model.name_or_path) refuses every row that it is given ({count_of(num_refused, 'row')}). Of "
        f"{file}, row {number}, it says: {first.detail(REFUSED, row_id).rstrip('. ')}. Fix: repair the template "
        "(chat_template.jinja in the model's folder), take another model, or change the rows to what it takes."
    ]


def _all_skipped(
    counts: Mapping[str, SplitCounts], files: Sequence[FileRows], positions: RowPositions
) -> list[ReadRows]:
    """Return the files with the rows that reading skipped and those that turned out to be unusable since."""
    found = [Counter(file["rows_skipped"]) for file in files]
    names = positions.names
    for of_split in counts.values():
        for reason in UNUSABLE:
            for name, numbers in positions.by_file(of_split.rows(reason)):
                found[names.index(name)][reason] += len(numbers)
    return [
        {"path": name, "rows_read": file["rows_read"], "rows_skipped": dict(kinds)}
        for name, file, kinds in zip(names, files, found, strict=True)
    ]


def _describe_groups(split: str, counts: SplitCounts, positions: RowPositions) -> list[str]:
    """Write one line for all rows of a split that have the same reason."""
    lines = []
    for reason in UNUSABLE:
        groups = counts.by_detail(reason)
        for detail, rows in list(groups.items())[:_NUM_GROUPS]:
            where = name_rows(rows, positions, num_named=_NUM_ROWS_NAMED)
            number = f"{len(rows):,} {split} {'row' if len(rows) == 1 else 'rows'}"
            lines.append(f"{where}: {number} cannot be used ({DROPPED[reason]}){f': {detail}' if detail else '.'}")
        rest = sum(map(len, list(groups.values())[_NUM_GROUPS:]))
        if rest:
            number = f"{rest:,} more {split} {'row' if rest == 1 else 'rows'}"
            lines.append(f"{number} cannot be used ({DROPPED[reason]}), each for another reason.")
    return lines
