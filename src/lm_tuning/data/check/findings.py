"""Collect what is wrong with rows, how often and where, and report it together by row number."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from lm_tuning.data.records import Cell, FileRows, FindingsByKind, Row
from lm_tuning.wording import name_first, shorten

MAX_REASONS = 1000
"""Findings of a kind that are kept with their reason; of the others the row number is."""

# What the kinds of findings mean, for reports.
_MEANINGS: Mapping[str, str] = {
    "empty": "nothing but space where text is wanted",
    "wrong_type": "a value of another type than the column should hold",
    "wrong_role": "a turn by somebody who is neither system, user, assistant nor tool",
    "no_assistant_turn": "a conversation without an answer to learn from",
    "unlabelled": "a text without its class",
    "missing_value": "no value in a column that rows are divided by",
    "missing_column": "a row without a column that the others have",
    "repeated_key": "a value of split.key that an earlier row has as well",
    "lone_surrogate": "half of a surrogate pair, which is no character",
    "repeated_name": "an object that names a key twice, so that one value would hide the other",
    "not_json": "a line that is not JSON",
    "not_an_object": "a JSON value without columns",
    "not_utf8": "bytes that are not UTF-8",
    "wrong_field_count": "more or fewer fields than the header names",
    "too_long": "more bytes than data.max_row_bytes",
    "two_systems": "a system column and another system turn in the same row",
    "control_character": "control characters that no text needs, such as NUL",
    "replacement_character": "U+FFFD, which stands where text was decoded wrongly",
    "system_not_first": "a system turn behind other turns, which some chat templates refuse",
    "empty_turn": "a turn without text",
}


class Findings:
    """Row ids by kind, with the reason of the first thousand of a kind: eight bytes per finding beyond those."""

    def __init__(self) -> None:
        """Start without findings."""
        # An array of eight bytes a number: a file whose every row is bad has millions of findings.
        self._ids: defaultdict[str, array[int]] = defaultdict(lambda: array("q"))
        self._reasons: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        self._bad_kinds: set[str] = set()

    def add(self, row_id: int, kind: str, reason: str, *, is_bad: bool) -> None:
        """Note one finding; a row has at most one of a kind.

        Args:
            row_id: the row.
            kind: short name that counts go by, see ``_MEANINGS``.
            reason: the rest of the sentence that begins with file and row number.
            is_bad: whether the row cannot be used; all findings of a kind are alike in this.
        """
        if is_bad:
            self._bad_kinds.add(kind)
        self._ids[kind].append(row_id)
        if len(self._reasons[kind]) < MAX_REASONS:
            self._reasons[kind].append((row_id, reason))

    def counts(self) -> dict[str, int]:
        """Count the rows by kind."""
        return {kind: len(ids) for kind, ids in self._ids.items()}

    def describe(self, sources: Sequence[FileRows], *, bad_outcome: str) -> FindingsByKind:
        """Return everything as JSON holds it, bad rows first.

        Args:
            sources: the files, see ``CheckedRows``.
            bad_outcome: what becomes of rows that cannot be used: ``skipped`` or ``refused``; the others are ``kept``.

        Returns:
            By kind: ``num_rows``, ``meaning``, ``fate``, ``rows`` (the first with ``file``, ``row`` and ``reason``) and
            ``row_numbers`` by file, all of them.
        """
        # Row numbers are worked out only here, since the report needs them by file and everything else by id.
        positions = RowPositions(sources)
        # Bad rows first, then by number; the name settles a draw, so that reports do not differ without a reason.
        order = sorted(self._ids, key=lambda kind: (kind not in self._bad_kinds, -len(self._ids[kind]), kind))
        return {
            kind: {
                "num_rows": len(self._ids[kind]),
                "meaning": _MEANINGS.get(kind, kind.replace("_", " ")),
                "fate": bad_outcome if kind in self._bad_kinds else "kept",
                "rows": [
                    {"file": file, "row": row, "reason": reason}
                    for row_id, reason in self._reasons[kind]
                    for file, row in [positions.find(row_id)]
                ],
                "row_numbers": dict(positions.by_file(self._ids[kind])),
            }
            for kind in order
        }


class RowPositions:
    """Turn row ids into file and row number.

    Attributes:
        names: how each file is called, in the order of reading.
    """

    def __init__(self, sources: Sequence[FileRows]) -> None:
        """Look at where the ids of each file begin.

        Args:
            sources: the files in the order of reading, with ``path``, ``split`` and ``first_row_id``.
        """
        # (files,): ascending, since files are numbered one after the other as they are read
        self._first_ids = np.array([source["first_row_id"] for source in sources], dtype=np.int64)
        paths = [source["path"] for source in sources]
        times = Counter(paths)
        seen: Counter[str] = Counter()
        self.names: list[str] = []
        for path, source in zip(paths, sources, strict=True):
            # One file may be read twice, as training rows and as held-out ones.
            name = f"{path} ({source['split']})" if times[path] > 1 else path
            seen[name] += 1
            # Two configurations of a hub data set, for example, bear one name; each keeps rows of its own.
            self.names.append(f"{name} #{seen[name]}" if seen[name] > 1 else name)

    def find(self, row_id: int) -> tuple[str, int]:
        """Return the file and the 1-based row number in it.

        Args:
            row_id: id of a row.
        """
        # The last file that begins at the id or before it; a file without rows has the same first id as the next one.
        index = int(np.searchsorted(self._first_ids, row_id, side="right")) - 1
        return self.names[index], int(row_id - self._first_ids[index]) + 1

    def by_file(self, row_ids: Iterable[int]) -> Iterator[tuple[str, list[int]]]:
        """Yield each file that has some of the rows, with their numbers in it, ascending.

        Args:
            row_ids: ids in any order.
        """
        ids = np.sort(np.asarray(row_ids, dtype=np.int64))
        # (files + 1,): where the ids of each file begin among the sorted ones
        edges = [*np.searchsorted(ids, self._first_ids).tolist(), len(ids)]
        for index, name in enumerate(self.names):
            part = ids[edges[index] : edges[index + 1]]
            if len(part):
                yield name, (part - self._first_ids[index] + 1).tolist()


MAX_REPORTED = 20


class RowProblem(ValueError):
    """Describe why one row cannot be used.

    Attributes:
        kind: short name that counts go by, such as ``wrong_type``.
        reason: the rest of the sentence that begins with file and row number.
    """

    def __init__(self, kind: str, reason: str) -> None:
        """Keep kind and reason.

        Args:
            kind: short name that counts go by.
            reason: the rest of the sentence that begins with file and row number.
        """
        self.kind = kind
        self.reason = reason
        super().__init__(reason)


NumberedRow: TypeAlias = tuple[int, Row | RowProblem]
"""A row with its 1-based number, or else what is wrong with it."""


def describe_value(value: Cell) -> str:
    """Name the type of a value as JSON calls it, with the value if it is short.

    Args:
        value: what a reader gave.

    Returns:
        For example ``a number (42)``, ``null``, ``a list``.
    """
    if value is None:
        return "null"
    # Before numbers, among which Python counts booleans.
    if isinstance(value, bool):
        return f"a boolean ({'true' if value else 'false'})"
    if isinstance(value, int | float):
        return f"a number ({shorten(repr(value))})"
    for kind, name in ((str, "text"), (list, "a list"), (dict, "an object"), (bytes, "binary data")):
        if isinstance(value, kind):
            return name
    return f"a value of type {type(value).__name__}"


def wrong_type(subject: str, value: Cell, wanted: str, *, kind: str = "wrong_type") -> RowProblem:
    """Report a value of another type than is wanted.

    Args:
        subject: the beginning of the reason, up to the verb.
        value: what is there.
        wanted: what should be, with its article.
        kind: short name that counts go by.
    """
    return RowProblem(kind, f"{subject} {describe_value(value)}, where {wanted} is wanted.")


def list_columns(columns: Sequence[str]) -> str:
    """Write column names for a message: at most 30 of them, each shortened."""
    # A file of one line without a separator has its whole text for a column name.
    return name_first([repr(shorten(column)) for column in columns], 30)


def too_long(num_bytes: int, max_row_bytes: int) -> RowProblem:
    """Report a row of too many bytes.

    Args:
        num_bytes: its size.
        max_row_bytes: the limit.
    """
    return RowProblem(
        "too_long",
        f"is {num_bytes:,} bytes long, and data.max_row_bytes lets {max_row_bytes:,} pass. Cut its text into several "
        "rows, or raise the limit.",
    )
