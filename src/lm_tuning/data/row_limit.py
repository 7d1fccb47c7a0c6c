"""Describe in a report how many files ``data.max_rows`` has cut short."""

from __future__ import annotations

from collections.abc import Iterable

from lm_tuning.data.records import FileRows, UnbegunFile
from lm_tuning.wording import count_of


def count_rows_in_file(file: FileRows | UnbegunFile) -> int | None:
    """Count the rows that were read of a file as they stand there, before any were exploded.

    Args:
        file: what became of its rows.

    Returns:
        Their number; ``None`` where reading was not begun.
    """
    return file["exploded"]["rows_in_file"] if "exploded" in file else file["rows_read"]


def describe_row_limit(max_rows: int | None, rows_in_files: Iterable[int | None]) -> str | None:
    """Describe how many files were read no further than ``data.max_rows``.

    Args:
        max_rows: the limit in rows of a file; ``None`` for none.
        rows_in_files: of each file, see ``count_rows_in_file``.

    Returns:
        A sentence or two; ``None`` where no file reached the limit, so that everything was read.
    """
    counts = list(rows_in_files)
    num_reached = 0 if max_rows is None else sum(rows is not None and rows >= max_rows for rows in counts)
    if max_rows is None or not num_reached:
        return None
    # A file of exactly as many rows reaches the limit too: nobody has looked behind it.
    files = "The file" if len(counts) == 1 else f"{num_reached:,} of {len(counts):,} files"
    return (
        f"data.max_rows: {max_rows} ends the reading of a file after {count_of(max_rows, 'row')}. {files} reached it; "
        "rows after that are in no count."
    )
