"""The parts of a report, before it becomes Markdown, a page, or lines on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Paragraph:
    """Running text.

    Attributes:
        text: plain text; names of parameters are set apart where the output can.
    """

    text: str


@dataclass(frozen=True)
class Table:
    """A table; cells are plain text.

    Attributes:
        title: what it shows.
        head: names of the columns.
        rows: one cell a column.
        text_columns: columns that hold words; the others hold numbers and stand on the right.
        total: a last row that sums up; None for none.
        is_brief: whether the terminal shows it too.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: Sequence[int] = (0,)
    total: Sequence[str] | None = None
    is_brief: bool = True


@dataclass(frozen=True)
class Bars:
    """Named quantities as bars.

    Attributes:
        title: what it shows.
        names: one a bar.
        values: their lengths, not negative.
        shown: the values as text.
        is_brief: whether the terminal shows it too.
    """

    title: str
    names: Sequence[str]
    values: Sequence[float]
    shown: Sequence[str]
    is_brief: bool = True


@dataclass(frozen=True)
class Histogram:
    """Counts in bins of equal width, of one or two quantities.

    Attributes:
        title: what it shows.
        unit: of the bins' edges.
        edges: ``(bins + 1,)``, ascending.
        counts: by name of the quantity, ``(bins,)``.
        mark: a limit within the edges to draw as a line, with its name; None for none.
    """

    title: str
    unit: str
    edges: Sequence[int]
    counts: dict[str, Sequence[int]]
    mark: tuple[int, str] | None = None


@dataclass(frozen=True)
class Issues:
    """What a user should know of, the gravest first.

    Attributes:
        items: see ``find_issues``.
    """

    items: Sequence[dict[str, str]]


@dataclass(frozen=True)
class Example:
    """One row as the model sees it.

    Attributes:
        title: which row.
        caption: its size.
        parts: see ``decode_parts``.
    """

    title: str
    caption: str
    parts: Sequence[dict[str, Any]]


Block = Paragraph | Table | Bars | Histogram | Issues | Example


@dataclass(frozen=True)
class Section:
    """A part of the report with a heading.

    Attributes:
        key: short name, for links.
        title: the heading.
        blocks: what it holds, in order.
    """

    key: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Report:
    """The whole report.

    Attributes:
        title: the heading.
        subtitle: what it is about.
        tiles: the few figures to begin with: name and value.
        sections: its parts.
    """

    title: str
    subtitle: str
    tiles: Sequence[tuple[str, str]]
    sections: Sequence[Section] = field(default_factory=tuple)
