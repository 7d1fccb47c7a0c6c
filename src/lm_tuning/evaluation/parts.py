"""Tell figures by group, source and file of the rows: the same sums, over a part of the rows each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from lm_tuning.evaluation.base import finite
from lm_tuning.evaluation.records import PartFigures
from lm_tuning.evaluation.statistics.scored_rows import ScoredRows
from lm_tuning.reporting.document import Section, Table
from lm_tuning.reporting.text import keep_ends, write_number
from lm_tuning.text.store.origins import ORIGIN_KINDS, OriginKind, Origins, RowParts
from lm_tuning.text.store.table import Int64Array
from lm_tuning.wording import on_one_line

MAX_PARTS = 50
"""Groups, sources or files that are told, those with the most rows; there may be one for each row."""

_NAME_CHARACTERS = 60

_Parted = Mapping[str, RowParts]
"""The part of each row, by name of the score."""


def figures_by_part(scored: Mapping[str, tuple[ScoredRows, ScoredRows]], origins: Origins | None) -> list[PartFigures]:
    """Return every score by group, source and file, where rows of several are there.

    Args:
        scored: by name, base and tuned.
        origins: where the rows came from; ``None`` where nobody knows.
    """
    if origins is None:
        return []
    parts: list[PartFigures] = []
    seen: list[_Parted] = []
    for kind in ORIGIN_KINDS:
        parted = _part_rows(scored, origins, kind)
        # One source that is one file would be told twice, and a single one is the whole.
        if len({name for each in parted.values() for name in each.names}) > 1 and not any(
            _are_equal(parted, other) for other in seen
        ):
            parts += _parts_of(kind, scored, parted)
        seen.append(parted)
    return parts


def _part_rows(
    scored: Mapping[str, tuple[ScoredRows, ScoredRows]], origins: Origins, kind: OriginKind
) -> dict[str, RowParts]:
    """Return the part of each row of each score; scores of the same rows share one."""
    parted: dict[str, RowParts] = {}
    known: list[tuple[Int64Array, RowParts]] = []
    for name, (_, tuned) in scored.items():
        same = next((parts for row_ids, parts in known if np.array_equal(row_ids, tuned.row_ids)), None)
        parted[name] = origins.parts_of(tuned.row_ids, kind) if same is None else same
        known += [(tuned.row_ids, parted[name])] if same is None else []
    return parted


def _are_equal(first: _Parted, second: _Parted) -> bool:
    return all(
        one.names == other.names and np.array_equal(one.indices, other.indices)
        for one, other in zip(first.values(), second.values(), strict=True)
    )


def _parts_of(
    kind: OriginKind, scored: Mapping[str, tuple[ScoredRows, ScoredRows]], parted: _Parted
) -> Iterator[PartFigures]:
    """Yield the parts with the most rows."""
    # By the score with the most rows: fewer rows are answered than measured, or none.
    largest = max(parted.values(), key=lambda parts: int((parts.indices >= 0).sum()))
    counts = np.bincount(largest.indices[largest.indices >= 0], minlength=len(largest.names))
    for index in np.argsort(-counts, kind="stable")[:MAX_PARTS].tolist():
        part = largest.names[index]
        base, tuned = {}, {}
        for name, (of_base, of_tuned) in scored.items():
            rows = parted[name].rows_of(part)
            base[name], tuned[name] = (finite(each.take(rows).value) for each in (of_base, of_tuned))
        yield PartFigures(by=kind, name=part, num_rows=int(counts[index]), base=base, tuned=tuned)


def part_sections(parts: list[PartFigures], titles: Mapping[str, str], group_column: str | None) -> Iterator[Section]:
    """Yield a table for groups, for sources, and for files.

    Args:
        parts: see :func:`figures_by_part`.
        titles: names of the scores in reports, by their keys.
        group_column: the column of ``split.group``.
    """
    for kind in ORIGIN_KINDS:
        of_kind = [part for part in parts if part["by"] == kind]
        if not of_kind:
            continue
        called = f"{kind} {group_column!r}" if kind == "group" and group_column else kind
        names = list(of_kind[0]["tuned"])
        head = (kind.capitalize(), "Rows", *(f"{titles.get(name, name)}, base and tuned" for name in names))
        rows: list[list[str | int]] = [
            [
                keep_ends(on_one_line(part["name"]), _NAME_CHARACTERS),
                part["num_rows"],
                *(f"{write_number(part['base'][name], 4)} → {write_number(part['tuned'][name], 4)}" for name in names),
            ]
            for part in of_kind
        ]
        yield Section(f"by_{kind}", f"By {called}", [Table("", head, rows, text_columns=range(1))])
