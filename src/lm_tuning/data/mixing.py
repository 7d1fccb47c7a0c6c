"""How many rows of each source an epoch holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from lm_tuning.data.records import FileRows, MixedSource, TrainingSource


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
