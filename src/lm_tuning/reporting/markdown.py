"""Write a report as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from lm_tuning.reporting.document import Bars, Block, Example, Histogram, Issues, Paragraph, Report, Table
from lm_tuning.reporting.text import escape_markdown, shorten_middle, show_unseen
from lm_tuning.wording import SUPERVISED_MARKS, fence

MAX_RUN_CHARACTERS = 1500
BAR_CHARACTERS = 30
HISTOGRAM_LINES = 15

_LEVELS = {"stop": "Stop", "warning": "Warning", "note": "Note"}


def write_markdown(report: Report) -> str:
    """Write the whole report.

    Args:
        report: see ``compose_report``.
    """
    tiles = " · ".join(f"**{value}** {name}" for name, value in report.tiles)
    lines = [f"# {escape_markdown(report.title)}", "", escape_markdown(report.subtitle), "", tiles, ""]
    for section in report.sections:
        lines += [f"## {escape_markdown(section.title)}", ""]
        for block in section.blocks:
            lines += [*_write_block(block), ""]
    return "\n".join(lines)


def _write_block(block: Block) -> Iterator[str]:
    match block:
        case Paragraph():
            yield escape_markdown(block.text)
        case Table():
            yield f"### {escape_markdown(block.title)}"
            yield ""
            body = [*block.rows, *([block.total] if block.total else [])]
            yield from _table(block.head, body, block.text_columns, is_total=block.total is not None)
        case Bars():
            yield f"### {escape_markdown(block.title)}"
            yield ""
            bars = [list(row) for row in zip(block.names, draw_bars(block.values), block.shown, strict=True)]
            yield from _table(["", "", ""], bars, (0, 1))
        case Histogram():
            yield f"### {escape_markdown(block.title)}"
            yield ""
            names = list(block.counts)
            rows = [[span, draw, *counts] for span, draw, counts in histogram_lines(block)]
            yield from _table([block.unit, "", *names], rows, (0, 1))
        case Issues():
            for item in block.items:
                text, advice = escape_markdown(item["text"]), escape_markdown(item["advice"])
                yield f"- **{_LEVELS[item['level']]}**: {text} *{advice}*"
        case Example():
            yield f"### {escape_markdown(block.title)}"
            yield ""
            yield escape_markdown(block.caption)
            yield ""
            yield fence("".join(text for text, _ in marked_runs(block, max_characters=MAX_RUN_CHARACTERS)))


def marked_runs(example: Example, *, max_characters: int) -> list[tuple[str, bool]]:
    r"""Write a row as runs of text that is supervised, between ``⟦`` and ``⟧``, or only read.

    Args:
        example: the row. Brackets of this kind that stand in it become ``\u27e6`` and ``\u27e7``, and each line break
            gets a sign before it.
        max_characters: of a run that is longer, the middle is left out.

    Returns:
        Text and whether it is supervised, of each run.
    """
    opening, closing = SUPERVISED_MARKS
    runs = []
    for is_supervised, parts in groupby(example.parts, key=lambda part: bool(part["is_learned"])):
        text = shorten_middle("".join(part["text"] for part in parts), max_characters)
        text = show_unseen(text).replace(opening, "\\u27e6").replace(closing, "\\u27e7").replace("\n", "↵\n")
        runs.append((f"{opening}{text}{closing}" if is_supervised else text, is_supervised))
    return runs


def histogram_lines(histogram: Histogram) -> list[tuple[str, str, list[str]]]:
    """Write a histogram as lines, joining bins so that there are few.

    Args:
        histogram: the counts.

    Returns:
        For each line its span in the unit, a bar of the first quantity, and the counts of all quantities.
    """
    num_bins = len(histogram.edges) - 1
    joined = -(-num_bins // HISTOGRAM_LINES)
    starts = range(0, num_bins, joined)
    counts = [[sum(values[start : start + joined]) for start in starts] for values in histogram.counts.values()]
    lines = []
    for index, (start, bar) in enumerate(zip(starts, draw_bars(counts[0]), strict=True)):
        first, last = histogram.edges[start], histogram.edges[min(start + joined, num_bins)] - 1
        span = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        lines.append((span, bar, [f"{of_quantity[index]:,}" for of_quantity in counts]))
    return lines


def draw_bars(values: Sequence[float]) -> list[str]:
    """Draw bars of letters, the longest one of full width; a value above 0 is never without a bar.

    Args:
        values: not negative.
    """
    longest = max(values, default=0) or 1
    eighths = [max(round(value / longest * BAR_CHARACTERS * 8), value > 0) for value in values]
    return ["█" * (size // 8) + ["", *"▏▎▍▌▋▊▉"][size % 8] for size in eighths]


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], text_columns: Sequence[int], *, is_total: bool = False
) -> Iterator[str]:
    yield f"| {' | '.join(escape_markdown(cell) for cell in head)} |"
    yield f"| {' | '.join('---' if index in text_columns else '---:' for index in range(len(head)))} |"
    for number, row in enumerate(rows, start=1):
        cells = [escape_markdown(cell) for cell in row]
        if is_total and number == len(rows):
            cells = [f"**{cell}**" if cell else "" for cell in cells]
        yield f"| {' | '.join(cells)} |"
