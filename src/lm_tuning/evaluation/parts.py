"""Tell figures by group, source and file of the rows: the same sums, over a part of the rows each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from lm_tuning.evaluation.base import finite
from lm_tuning.evaluation.records import PartFigures
from lm_tuning.evaluation.statistics.scored_rows import ScoredRows
from lm_tuning.reporting.document import Section, Table
from lm_tuning.reporting.text import keep_ends, write_number
from lm_tuning.text.store.origins import ORIGIN_KINDS, OriginKind, Origins
from lm_tuning.wording import on_one_line

MAX_PARTS = 50
"""Groups, sources or files that are told, those with the most rows; there may be one for each row."""

_NAME_CHARACTERS = 60


def figures_by_part(scored: Mapping[str, tuple[ScoredRows, ScoredRows]], origins: Origins | None) -> list[PartFigures]:
    """Return every score by group, source and file, where rows of several are there.

    Args:
        scored: by name, base and tuned.
        origins: where the rows came from; ``None`` where nobody knows.
    """
    if origins is None:
        return []
    parts: list[PartFigures] = []
    seen: set[tuple[str | None, ...]] = set()
    for kind in ORIGIN_KINDS:
        named = {
            name: np.array(origins.names_of(tuned.row_ids, kind), dtype=object) for name, (_, tuned) in scored.items()
        }
        names = tuple(part for each in named.values() for part in each)
        # One source that is one file would be told twice, and a single one is the whole.
        if len(set(names) - {None}) > 1 and names not in seen:
            parts += _parts_of(kind, scored, named)
        seen.add(names)
    return parts


def _parts_of(
    kind: OriginKind,
    scored: Mapping[str, tuple[ScoredRows, ScoredRows]],
    named: Mapping[str, npt.NDArray[np.object_]],
) -> Iterator[PartFigures]:
    """Yield the parts with the most rows."""
    # By the score with the most rows: fewer rows are answered than measured, or none.
    counts = max((Counter(part for part in each if part is not None) for each in named.values()), key=Counter.total)
    for part, num_rows in counts.most_common(MAX_PARTS):
        rows = {name: np.flatnonzero(each == part) for name, each in named.items()}
        taken = {name: (pair[0].take(rows[name]), pair[1].take(rows[name])) for name, pair in scored.items()}
        yield PartFigures(
            by=kind,
            name=part,
            num_rows=num_rows,
            base={name: finite(base.value) for name, (base, _) in taken.items()},
            tuned={name: finite(tuned.value) for name, (_, tuned) in taken.items()},
        )


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
