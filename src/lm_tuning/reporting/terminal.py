"""Show a report on the terminal: the figures that matter, and the first example."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lm_tuning.reporting.document import Bars, Block, Example, Histogram, Issues, Paragraph, Report, Table
from lm_tuning.reporting.markdown import draw_bars, histogram_lines, marked_runs
from lm_tuning.reporting.text import shorten_middle, show_unseen
from lm_tuning.wording import on_one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_RUN_CHARACTERS = 400
MAX_CELL_CHARACTERS = 60
MAX_BARS = 12

_STYLES = {"stop": "bold red", "warning": "yellow", "note": ""}


def build_summary(report: Report) -> RenderableType:
    """Build what the terminal shows. Where nobody watches, it is the same without colours.

    Args:
        report: see ``compose_report``.
    """
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(_clean(report.subtitle)), Text("")]
    # Issues come last, where a reader's eye is when the run ends.
    sections = sorted(report.sections, key=lambda section: section.key == "concerns")
    for section in sections:
        parts.append(Text(_clean(section.title), style="bold"))
        first_example = True
        for block in section.blocks:
            if isinstance(block, Example):
                if not first_example:
                    continue
                first_example = False
            parts += _render(block)
        parts.append(Text(""))
    return Group(*parts)


def _render(block: Block) -> Iterator[RenderableType]:
    # Always Text, never a string, whose brackets Rich would read as markup.
    from rich.table import Table as RichTable
    from rich.text import Text

    match block:
        case Issues():
            for item in block.items:
                yield Text.assemble(
                    (f"{item['level'].capitalize()}: ", _STYLES[item["level"]]),
                    f"{_clean(item['text'])} {_clean(item['advice'])}",
                )
        case Table() if block.is_brief:
            # A title of the table's own would be broken to its width.
            yield Text(_clean(block.title), style="italic")
            table = RichTable()
            for index, name in enumerate(block.head):
                table.add_column(
                    Text(_clean(name)), justify="left" if index in block.text_columns else "right", overflow="fold"
                )
            for row in block.rows:
                table.add_row(*(Text(_clean(cell)) for cell in row))
            if block.total:
                table.add_section()
                table.add_row(*(Text(_clean(cell)) for cell in block.total))
            yield table
        case Bars() if block.is_brief:
            yield Text(_clean(block.title), style="italic")
            shown = list(zip(block.names, draw_bars(block.values), block.shown, strict=True))
            hidden = len(shown) - MAX_BARS
            if hidden > 0:
                shown = [*shown[: MAX_BARS // 2], ("…", "", f"{hidden:,} more"), *shown[-MAX_BARS // 2 :]]
            yield _grid([[name, bar, value] for name, bar, value in shown])
        case Histogram():
            yield Text(_clean(f"{block.title} ({block.unit}: {', '.join(block.counts)})"), style="italic")
            yield _grid([[span, bar, *counts] for span, bar, counts in histogram_lines(block)])
        case Example():
            yield Text(_clean(block.caption), style="italic")
            yield _mark(block)
        case Paragraph():
            yield Text(_clean(block.text))


def _grid(rows: list[list[str]]) -> RenderableType:
    from rich.table import Table as RichTable
    from rich.text import Text

    grid = RichTable.grid(padding=(0, 2))
    for index in range(len(rows[0]) if rows else 0):
        grid.add_column(justify="right" if index > 1 else "left", no_wrap=index == 1)
    for row in rows:
        grid.add_row(*(Text(shorten_middle(_clean(cell), MAX_CELL_CHARACTERS)) for cell in row))
    return grid


def _mark(example: Example) -> RenderableType:
    from rich.text import Text

    text = Text()
    for run, is_supervised in marked_runs(example, max_characters=MAX_RUN_CHARACTERS):
        text.append(run, style="green" if is_supervised else "")
    return text


def _clean(text: str) -> str:
    return on_one_line(show_unseen(text))
