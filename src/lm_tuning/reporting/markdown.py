"""Write a report as Markdown. Nobody else escapes a sign or draws a table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from lm_tuning.findings import SEVERITY_WORDS, Notice
from lm_tuning.reporting import document as doc
from lm_tuning.reporting.text import NO_ISSUES, reveal, shorten_middle, words_of, write_edge
from lm_tuning.wording import SUPERVISED_MARKS, visible

MAX_RUN_CHARACTERS = 1500
BAR_CHARACTERS = 30
HISTOGRAM_LINES = 15

_SIGNS = re.compile(r"([\\`*<>|\[\]#~&$])")
# Between letters an underscore is no emphasis, and names with a backslash in them are hard to read.
_OUTER_UNDERSCORE = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
# What begins a list, a heading underline or a numbered item when it stands first.
_FIRST = re.compile(r"^(\d{1,9})([.)](?:\s|$))|^([-+=])")


def write_markdown(report: doc.Report) -> str:
    """Write the whole report.

    Args:
        report: what a package composed.
    """
    # Blocks are parted by one empty line, and the file ends in a line break: what diffs and editors expect.
    parts = [f"# {write_inline(report.title)}"]
    if report.subtitle:
        parts.append(write_inline(report.subtitle))
    if report.tiles:
        parts.append(" · ".join(f"**{value}** {name}" for name, value in report.tiles))
    parts += map(_write_block, (*report.summary, *report.closing))
    parts += map(write_section, report.sections)
    return "\n\n".join(parts) + "\n"


def write_section(section: doc.Section) -> str:
    """Write a section of a report that other nodes go on with.

    Args:
        section: with its heading.
    """
    return "\n\n".join([f"## {write_inline(section.title)}", *map(_write_block, section.blocks)])


def join_sections(title: str, sections: Iterable[str]) -> str:
    """Join the sections of a report that several nodes wrote.

    Args:
        title: of the report.
        sections: see `write_section`.
    """
    return "\n\n".join([f"# {write_inline(title)}", *(section.strip() for section in sections)]) + "\n"


def write_blocks(blocks: Iterable[doc.Block]) -> str:
    """Write blocks without a heading of their own, for a notebook.

    Args:
        blocks: in order.
    """
    return "\n\n".join(map(_write_block, blocks)) + "\n"


def _write_block(block: doc.Block) -> str:
    return "\n".join(_lines_of(block))


def _lines_of(block: doc.Block) -> Iterator[str]:
    match block:
        case doc.Heading():
            yield f"{'#' * block.level} {write_inline(block.text)}"
        case doc.Paragraph():
            yield write_inline(block.text)
        case doc.Items():
            for item in block.items:
                yield f"- {write_inline(item.text)}"
                yield from (f"  - {write_inline(below)}" for below in item.below)
        case doc.Preformatted():
            yield from (write_inline(block.title), "") if block.title else ()
            # An empty block looks like a mistake of the report.
            yield fence(block.text) if block.text else "*(empty)*"
        case doc.Table():
            yield from _title(block.title)
            yield from _table(block.head, block.rows, block.text_columns, total=block.total or ())
        case doc.Bars() | doc.Intervals():
            yield from _title(block.title)
            yield from _table(["", "", ""], zip(block.names, draw(block), block.shown, strict=True), (0, 1))
        case doc.Histogram():
            yield from _title(block.title)
            rows = [[span, draw, *counts] for span, draw, counts in histogram_lines(block)]
            yield from _table([block.unit, "", *block.counts], rows, (0, 1))
        case doc.Issues():
            yield from map(_issue, block.items) if block.items else (NO_ISSUES,)
        case doc.Example():
            yield from (*_title(block.title), write_inline(block.caption), "")
            yield fence("".join(text for text, _ in marked_runs(block, max_characters=MAX_RUN_CHARACTERS)))
        case doc.Sample():
            yield from (*_title(block.title), *_lines_of(doc.Preformatted(block.text)))
            for name, text in block.answers.items():
                yield from ("", *_lines_of(doc.Paragraph(doc.Strong(name))), "", *_lines_of(doc.Preformatted(text)))


def _title(title: str) -> list[str]:
    return [f"### {write_inline(title)}", ""] if title else []


def _issue(issue: Notice) -> str:
    fix = f" *{write_inline(issue.fix)}*" if issue.fix else ""
    return f"- **{SEVERITY_WORDS[issue.severity].capitalize()}**: {write_inline(issue.message)}{fix}"


def _table(
    head: Sequence[str],
    rows: Iterable[Sequence[doc.Cell]],
    text_columns: Sequence[int],
    *,
    total: Sequence[doc.Cell] = (),
) -> Iterator[str]:
    yield _row(map(_write_cell, head))
    yield _row("---" if index in text_columns else "---:" for index in range(len(head)))
    yield from (_row(map(_write_cell, row)) for row in rows)
    if total:
        yield _row(cell and f"**{cell}**" for cell in map(_write_cell, total))


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _write_cell(cell: doc.Cell) -> str:
    return f"{cell:,}" if isinstance(cell, int | float) else write_inline(cell, in_cell=True)


def write_inline(text: doc.Inline, *, in_cell: bool = False) -> str:
    """Write running text on one line, so that Markdown shows what it holds; names of parameters become code.

    Args:
        text: plain text, perhaps with words out of rows in it.
        in_cell: whether it stands in a table, where a pipe ends a cell even inside code.
    """
    line = "".join(_write_words(words, in_cell=in_cell) for words in words_of(text))
    # Only what stands first in a line can begin a list; a cell never does.
    return line if in_cell else _FIRST.sub(_escape_first, line)


def _write_words(words: doc.Words, *, in_cell: bool) -> str:
    match words:
        case doc.Code():
            span = _span(words.text)
            # Inside code a backslash is a sign like any other, but for the one before a pipe in a table.
            return span.replace("|", "\\|") if in_cell else span
        case doc.Strong():
            return f"**{_escape(words.text)}**"
        case doc.Link():
            return f"[{_escape(words.text)}](#{words.key})"
    return _escape(words)


def _escape(line: str) -> str:
    """Escape the signs that Markdown reads anywhere in a line."""
    return _OUTER_UNDERSCORE.sub(r"\\_", _SIGNS.sub(r"\\\1", line))


def _escape_first(found: re.Match[str]) -> str:
    number, end, sign = found.groups()
    return f"{number}\\{end}" if number else f"\\{sign}"


def _span(line: str) -> str:
    """Write one line as code, whatever backticks are in it."""
    # A run of backticks of another length does not end the code, and no backslash escapes one inside.
    longest = max(map(len, re.findall("`+", line)), default=0)
    mark = "`" * (longest + 1)
    # A space at each end, which Markdown takes off again, keeps a backtick at the edge from joining the mark.
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{mark}{pad}{line}{pad}{mark}"


def fence(text: str) -> str:
    """Set a text in a Markdown block that no backticks inside it can end.

    Args:
        text: foreign text of any number of lines.
    """
    # A fence ends at one of the same length or longer, so any shorter run inside is text.
    longest = max(map(len, re.findall("`+", text)), default=0)
    mark = "`" * max(3, longest + 1)
    return f"{mark}text\n{visible(text)}\n{mark}"


def marked_runs(example: doc.Example, *, max_characters: int) -> list[tuple[str, bool]]:
    r"""Write a row as runs of text that is supervised, between ``⟦`` and ``⟧``, or only read.

    Args:
        example: the row. Brackets of this kind that stand in it become ``\u27e6`` and ``\u27e7``, and each line break
            gets a sign before it.
        max_characters: of a run that is longer, the middle is left out.

    Returns:
        Text and whether it is supervised, of each run.
    """
    opening, closing = SUPERVISED_MARKS
    # Parts are told apart by control tokens too, which Markdown does not show: they are joined into longer runs.
    runs = []
    for is_supervised, parts in groupby(example.parts, key=lambda part: bool(part["is_learned"])):
        text = shorten_middle("".join(part["text"] for part in parts), max_characters)
        # What stands in a row must not pass for the marks, or a reader would take it for supervised.
        text = reveal(text).replace(opening, "\\u27e6").replace(closing, "\\u27e7").replace("\n", "↵\n")
        runs.append((f"{opening}{text}{closing}" if is_supervised else text, is_supervised))
    return runs


def histogram_lines(histogram: doc.Histogram) -> list[tuple[str, str, list[str]]]:
    """Write a histogram as lines, joining bins so that there are few.

    Args:
        histogram: the counts.

    Returns:
        For each line its span in the unit, a bar of the first quantity, and the counts of all quantities.
    """
    num_bins = len(histogram.edges) - 1
    joined = -(-num_bins // HISTOGRAM_LINES)  # bins to a line, rounded up
    starts = range(0, num_bins, joined)
    counts = [[sum(values[start : start + joined]) for start in starts] for values in histogram.counts.values()]
    lines = []
    for index, (start, bar) in enumerate(zip(starts, draw_bars(counts[0]), strict=True)):
        first, last = histogram.edges[start], histogram.last_in_bin(min(start + joined, num_bins))
        span = write_edge(first) if first == last else f"{write_edge(first)} to {write_edge(last)}"
        lines.append((span, bar, [f"{of_quantity[index]:,}" for of_quantity in counts]))
    return lines


def draw(block: doc.Bars | doc.Intervals) -> list[str]:
    """Draw quantities of letters, one line each.

    Args:
        block: what is drawn.
    """
    return draw_bars(block.values) if isinstance(block, doc.Bars) else draw_intervals(block)


def draw_intervals(intervals: doc.Intervals) -> list[str]:
    """Draw intervals of letters on one scale, each with its value as a point.

    Args:
        intervals: what is drawn.
    """
    lines = []
    for ends in intervals.positions():
        low, value, high = (round(end * (BAR_CHARACTERS - 1)) for end in ends)
        line = [" "] * low + ["─"] * (high - low + 1)
        line[value] = "●"
        lines.append("".join(line).replace(" ", "·"))
    return lines


def draw_bars(values: Sequence[float]) -> list[str]:
    """Draw bars of letters, the longest one of full width; a value above 0 is never without a bar.

    Args:
        values: not negative.
    """
    longest = max(values, default=0) or 1
    # There are signs for an eighth of a column, from ▏ to █; one eighth is the least that anything gets.
    eighths = [max(round(value / longest * BAR_CHARACTERS * 8), value > 0) for value in values]
    return ["█" * (size // 8) + ["", *"▏▎▍▌▋▊▉"][size % 8] for size in eighths]
