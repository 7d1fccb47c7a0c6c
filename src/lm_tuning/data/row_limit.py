"""Describe in a report which files ``data.max_rows`` has cut short."""

from __future__ import annotations

from collections.abc import Iterable

from lm_tuning.wording import count_of


def describe_row_limit(max_rows: int | None, rows_read: Iterable[int | None]) -> str | None:
    """Describe how many files were read no further than ``data.max_rows``.

    Args:
        max_rows: the limit in rows of a file; ``None`` for none.
        rows_read: of each file; ``None`` for one that was not begun.

    Returns:
        A sentence or two; ``None`` where no file reached the limit, so that everything was read.
    """
    counts = list(rows_read)
    num_reached = 0 if max_rows is None else sum(rows is not None and rows >= max_rows for rows in counts)
    if max_rows is None or not num_reached:
        return None
    # A file of exactly as many rows reaches the limit too: nobody has looked behind it.
    files = "The file" if len(counts) == 1 else f"{num_reached:,} of {len(counts):,} files"
    return (
        f"data.max_rows: {max_rows} ends the reading of a file after {count_of(max_rows, 'row')}. {files} reached it; "
        "rows after that are in no count."
    )
