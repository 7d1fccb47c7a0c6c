"""Show a report on the terminal: the figures that matter, and the first example."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lm_tuning.findings import SEVERITY_WORDS, Severity
from lm_tuning.reporting import document as doc
from lm_tuning.reporting.markdown import draw, histogram_lines, marked_runs
from lm_tuning.reporting.text import NO_ISSUES, keep_ends, shorten_middle, words_of
from lm_tuning.runtime.log_records import protect
from lm_tuning.wording import on_one_line

# Less than Markdown has: what scrolls by is read once, and the file keeps the rest.
MAX_RUN_CHARACTERS = 400
MAX_CELL_CHARACTERS = 60
MAX_NAME_CHARACTERS = 24
MAX_SAMPLE_CHARACTERS = 200
MAX_BARS = 12
MAX_ROWS = 20
"""Rows of a table that the terminal shows; Markdown has all."""

_MAX_IN_SECTION: dict[type[doc.Block], int] = {doc.Example: 1, doc.Sample: 3}
_STYLES: dict[Severity, str] = {"stop": "bold red", "warn": "yellow", "note": ""}


def build_summary(report: doc.Report) -> RenderableType:
    """Build what the terminal shows. Where nobody watches, it is the same without colours.

    Args:
        report: what a package composed.
    """
    parts: list[RenderableType] = [_plain(report.subtitle), Text("")] if report.subtitle else []
    groups = [
        ("", report.summary),
        *((section.title, section.blocks) for section in report.sections if section.is_brief),
    ]
    # Issues come last, where a reader's eye is when the run ends.
    # Also where they stand in the middle of a section, such as the warnings of an evaluation.
    for wants_issues in (False, True):
        for title, blocks in groups:
            shown = [block for block in blocks if isinstance(block, doc.Issues) is wants_issues]
            if shown:
                parts += [_plain(title, style="bold")] if title else []
                parts += [*_render_all(shown), Text("")]
    return Group(*parts, *_render_all(report.closing))


def build_blocks(blocks: Iterable[doc.Block]) -> RenderableType:
    """Build what the terminal shows of a few blocks.

    Args:
        blocks: in order.
    """
    return Group(*_render_all(blocks))


def _render_all(blocks: Iterable[doc.Block]) -> Iterator[RenderableType]:
    num_shown: Counter[type[doc.Block]] = Counter()
    for block in blocks:
        num_shown[type(block)] += 1
        # Ten decoded rows would push everything else off the screen; the files have them all.
        if num_shown[type(block)] <= _MAX_IN_SECTION.get(type(block), num_shown[type(block)]):
            yield from _render(block)


def _render(block: doc.Block) -> Iterator[RenderableType]:
    match block:
        case doc.Heading() | doc.Paragraph():
            yield _inline(block.text)
        case doc.Items():
            for item in block.items:
                yield _inline(item.text)
                yield from (Text("  ") + _inline(below) for below in item.below)
        case doc.Preformatted() if block.is_brief:
            yield from [_plain(block.title)] if block.title else []
            yield Text(protect(shorten_middle(block.text, MAX_RUN_CHARACTERS)))
        case doc.Issues():
            for issue in block.items:
                word = f"{SEVERITY_WORDS[issue.severity].capitalize()}: "
                yield Text.assemble((word, _STYLES[issue.severity]), _clean(f"{issue.message} {issue.fix}"))
            yield from [] if block.items else [Text(NO_ISSUES)]
        case doc.Table() if block.is_brief:
            yield from _table(block)
        case doc.Bars() | doc.Intervals():
            yield _plain(block.title, style="italic")
            shown = list(zip(block.names, draw(block), block.shown, strict=True))
            hidden = len(shown) - MAX_BARS
            if hidden > 0:
                shown = [*shown[: MAX_BARS // 2], ("…", "", f"{hidden:,} more"), *shown[-MAX_BARS // 2 :]]
            yield _grid([[name, drawing, value] for name, drawing, value in shown])
        case doc.Histogram():
            yield _plain(f"{block.title} ({block.unit}: {', '.join(block.counts)})", style="italic")
            yield _grid([[span, bar, *counts] for span, bar, counts in histogram_lines(block)])
        case doc.Example():
            yield _plain(block.caption, style="italic")
            runs = marked_runs(block, max_characters=MAX_RUN_CHARACTERS)
            # A template of the user's own may hold a secret, which then stands in every row.
            yield Text.assemble(*((protect(run), "green" if is_supervised else "") for run, is_supervised in runs))
        case doc.Sample():
            yield Text("")
            yield _plain(block.title, style="italic")
            yield _sample(block)


def _table(block: doc.Table) -> Iterator[RenderableType]:
    if block.title:
        # A title of the table's own would be broken to its width.
        yield _plain(block.title, style="italic")
    table = Table()
    for index, name in enumerate(block.head):
        # Folded, not cut: a class name of which only the beginning is shown could be any of several.
        table.add_column(_plain(name), justify="left" if index in block.text_columns else "right", overflow="fold")
    for row in block.rows[:MAX_ROWS]:
        table.add_row(*map(_cell, row))
    if block.total:
        table.add_section()
        table.add_row(*map(_cell, block.total))
    yield table
    left_out = len(block.rows) - MAX_ROWS
    if left_out > 0:
        yield _plain(f"{left_out:,} more in the stored report", style="italic")


def _cell(cell: doc.Cell) -> Text:
    return _plain(f"{cell:,}") if isinstance(cell, int | float) else _inline(cell)


def _grid(rows: Sequence[Sequence[str]]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    # Name, bar, figures: a bar that wraps is no bar.
    for index in range(len(rows[0]) if rows else 0):
        grid.add_column(justify="right" if index > 1 else "left", no_wrap=index == 1)
    for row in rows:
        grid.add_row(*(Text(shorten_middle(_clean(cell), MAX_CELL_CHARACTERS)) for cell in row))
    return grid


def _sample(sample: doc.Sample) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    # A name may say much of its text, and must leave it room where the terminal is narrow.
    grid.add_column(style="bold", max_width=MAX_NAME_CHARACTERS)
    grid.add_column(overflow="fold")
    for name, text in ((sample.name, sample.text), *sample.answers.items()):
        grid.add_row(name, _plain(keep_ends(on_one_line(text), MAX_SAMPLE_CHARACTERS) or "(empty)"))
    return grid


def _inline(text: doc.Inline) -> Text:
    # Code has no style of its own here: backticks would be taken for a part of it, and colours are for severity.
    styled = [(words, "bold" if isinstance(words, doc.Strong) else "") for words in words_of(text)]
    return Text.assemble(
        *((protect(words if isinstance(words, str) else words.text), style) for words, style in styled)
    )


def _plain(text: str, style: str = "") -> Text:
    # Always Text, never a string, whose brackets Rich would read as markup.
    return Text(_clean(text), style=style)


def _clean(text: str) -> str:
    # Without secrets: what a terminal has shown lies in logs of CI and schedulers for good.
    return on_one_line(protect(text))
