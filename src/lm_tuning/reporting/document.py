"""The parts of a report, before it becomes Markdown, a page, or lines on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypedDict, TypeVar

from lm_tuning.findings import Notice


@dataclass(frozen=True)
class Code:
    """Something to read letter by letter, such as a token or a command.

    Attributes:
        text: what stands there, as it is.
    """

    text: str


@dataclass(frozen=True)
class Strong:
    """Words or a figure that catch the eye.

    Attributes:
        text: plain text.
    """

    text: str


@dataclass(frozen=True)
class Link:
    """Words that lead to a sample of the same report.

    Attributes:
        text: plain text.
        key: of the sample, see :class:`Sample`.
    """

    text: str
    key: str


# Plain strings, not markup of our own: whatever stands in a row can be put into a block without escaping it first.
Words = str | Code | Strong | Link
Inline = Words | tuple[Words, ...]
"""Running text. A string is plain text, foreign or not; names of parameters are set apart where the output can."""

Cell = Inline | int | float
"""What stands in a cell. A number gets thousands separators and all its decimals; format one that wants fewer."""


@dataclass(frozen=True)
class Heading:
    """A heading below that of a section.

    Attributes:
        text: what the text below it is about.
        level: 3, or 4 below a level-3 heading.
    """

    text: Inline
    level: int = 3


@dataclass(frozen=True)
class Paragraph:
    """Running text.

    Attributes:
        text: what it says.
    """

    text: Inline


@dataclass(frozen=True)
class Item:
    """An item of a list.

    Attributes:
        text: what it says.
        below: the items under it.
    """

    text: Inline
    below: Sequence[Inline] = ()


@dataclass(frozen=True)
class Items:
    """A list.

    Attributes:
        items: in order.
    """

    items: Sequence[Item]


@dataclass(frozen=True)
class Preformatted:
    """Foreign text with its line breaks.

    Attributes:
        text: of any length; a report that wants less shortens it before.
        title: a sentence before it; empty for none.
        is_brief: whether the terminal shows it too.
    """

    text: str
    title: str = ""
    is_brief: bool = True


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        title: what it shows; empty where a heading or the text before says it.
        head: names of the columns.
        rows: one cell per column.
        text_columns: columns that hold words; the others hold numbers and stand on the right.
        total: a last row that sums up; None for none.
        is_brief: whether the terminal shows it too.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    text_columns: Sequence[int] = (0,)
    total: Sequence[Cell] | None = None
    is_brief: bool = True


@dataclass(frozen=True)
class Bars:
    """Named quantities as bars.

    Attributes:
        title: what it shows.
        names: one per bar.
        values: their lengths, not negative.
        shown: the values as text.
    """

    title: str
    names: Sequence[str]
    values: Sequence[float]
    shown: Sequence[str]


@dataclass(frozen=True)
class Intervals:
    """Named values with an interval each, on one scale.

    Attributes:
        title: what it shows.
        names: one per value.
        values: lower end, value and upper end of each; the three are equal where there is no interval.
        shown: the values as text.
    """

    title: str
    names: Sequence[str]
    values: Sequence[tuple[float, float, float]]
    shown: Sequence[str]

    def positions(self) -> list[tuple[float, float, float]]:
        """Return the values as shares of the scale, 0 to 1, which goes from the lowest end to the highest."""
        ends = [end for value in self.values for end in value]
        lowest, width = min(ends, default=0.0), max(ends, default=0.0) - min(ends, default=0.0)

        def share(end: float) -> float:
            return (end - lowest) / width if width else 0.5  # all in one point stand in the middle

        return [(share(low), share(value), share(high)) for low, value, high in self.values]


@dataclass(frozen=True)
class Histogram:
    """Counts in bins of equal width, of one or two quantities.

    Attributes:
        title: what it shows.
        unit: of the bins' edges.
        edges: ``(bins + 1,)``, ascending; integers, or fractions of what is measured.
        counts: by name of the quantity, ``(bins,)``.
        mark: a limit within the edges to draw as a line, with its name; None for none.
    """

    title: str
    unit: str
    edges: Sequence[float]
    counts: Mapping[str, Sequence[int]]
    mark: tuple[int, str] | None = None

    def last_in_bin(self, end: int) -> float:
        """Return the largest value before an edge: integers stop one short of it.

        Args:
            end: index of the edge.
        """
        edge = self.edges[end]
        return edge - 1 if isinstance(edge, int) else edge


@dataclass(frozen=True)
class Issues:
    """What a user should know of. The terminal shows it last, where a reader's eye is when the run ends.

    Attributes:
        items: the gravest first, see ``gravest_first``; without any the report says so.
    """

    items: Sequence[Notice]


class Part(TypedDict):
    """A segment of a decoded row, as reports store it.

    Attributes:
        text: the tokens of the segment.
        is_learned: whether they are supervised.
        is_control: whether they are one control token.
    """

    text: str
    is_learned: bool
    is_control: bool


@dataclass(frozen=True)
class Example:
    """One row as the model sees it.

    Attributes:
        title: which row.
        caption: its size.
        parts: its segments, in order.
    """

    title: str
    caption: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Sample:
    """A text and what was said to it.

    Attributes:
        title: which row.
        name: what the text is.
        text: foreign text.
        answers: by who or what they are from; foreign text too.
        key: what links lead to it by; it has to be its title in lower case with hyphens, as Markdown makes anchors of
            headings. Empty for none.
    """

    title: str
    name: str
    text: str
    answers: Mapping[str, str] = field(default_factory=dict)
    key: str = ""


Block = Heading | Paragraph | Items | Preformatted | Table | Bars | Intervals | Histogram | Issues | Example | Sample


@dataclass(frozen=True)
class Section:
    """A part of the report with a heading.

    Attributes:
        key: short name, for links.
        title: the heading.
        blocks: what it holds, in order.
        is_brief: whether the terminal shows it too.
    """

    key: str
    title: str
    blocks: Sequence[Block]
    is_brief: bool = True


@dataclass(frozen=True)
class Report:
    """The whole report.

    Attributes:
        title: the heading.
        subtitle: what it is about.
        tiles: the few figures to begin with: name and value.
        summary: what stands before the first section.
        sections: its parts.
        closing: where to go on; it follows the summary, and comes last on the terminal.
    """

    title: str
    subtitle: str = ""
    tiles: Sequence[tuple[str, str]] = ()
    summary: Sequence[Block] = ()
    sections: Sequence[Section] = ()
    closing: Sequence[Block] = ()


Facts = TypeVar("Facts")


class ReportSection(TypedDict, Generic[Facts]):
    """A section of a report that several nodes write, as the JSON file beside the Markdown holds it.

    Attributes:
        facts: everything that is known, whatever JSON can hold.
        metrics: numbers for tracking, by name.
        markdown: the text, see :func:`lm_tuning.reporting.markdown.write_section`.
    """

    facts: Facts
    metrics: dict[str, float]
    markdown: str
