"""Write a report as one HTML file that needs nothing else: no script, no network.

It is legible on a phone, in light and in dark, and on paper.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lm_tuning.findings import SEVERITY_WORDS, Notice
from lm_tuning.reporting import document as doc
from lm_tuning.reporting.text import NO_ISSUES, reveal, shorten_middle, words_of, write_edge
from lm_tuning.wording import visible

MAX_PART_CHARACTERS = 4000
_HISTOGRAM_WIDTH, _HISTOGRAM_HEIGHT = 600, 110
# Space that would not be seen: at either end of a part, or before a line break.
_SPACE = re.compile(r"\n|\t|^ +| +(?=\n)| +$")


def write_page(report: doc.Report) -> str:
    """Write the whole page.

    Args:
        report: what a package composed.
    """
    links = "".join(f'<li><a href="#{section.key}">{_text(section.title)}</a></li>' for section in report.sections)
    tiles = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in report.tiles)
    opening = [part for block in (*report.summary, *report.closing) for part in _write_block(block)]
    body = "\n".join([*opening, *map(_write_section, report.sections)])
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    # The policy is a second lock behind the escaping: nothing in a row could load or run anything.
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{_attribute(f"{report.title}: {report.subtitle}")}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{_text(report.title)}</h1>
<p class="subtitle">{_text(report.subtitle)}</p>
<dl class="tiles">{tiles}</dl>
</header>
<nav aria-label="Contents"><ul>{links}</ul></nav>
<main>
{body}
</main>
</body>
</html>
"""


def _write_section(section: doc.Section) -> str:
    blocks = "\n".join(part for block in section.blocks for part in _write_block(block))
    heading = f'<h2 id="{section.key}-title">{_text(section.title)}</h2>'
    return f'<section id="{section.key}" aria-labelledby="{section.key}-title">\n{heading}\n{blocks}\n</section>'


def _write_block(block: doc.Block) -> Iterator[str]:
    match block:
        case doc.Heading():
            yield f"<h{block.level}>{_text(block.text)}</h{block.level}>"
        case doc.Paragraph():
            yield f"<p>{_text(block.text)}</p>"
        case doc.Items():
            yield f"<ul>{''.join(map(_write_item, block.items))}</ul>"
        case doc.Preformatted():
            yield f"<p>{_text(block.title)}</p>" if block.title else ""
            yield f"<pre>{_show_space(visible(block.text))}</pre>" if block.text else "<p>(empty)</p>"
        case doc.Sample():
            anchor = f' id="{_attribute(block.key)}"' if block.key else ""
            yield f"<h3{anchor}>{_text(block.title)}</h3>"
            for name, text in ((block.name, block.text), *block.answers.items()):
                yield f"<p><strong>{_text(name)}</strong></p>"
                yield from _write_block(doc.Preformatted(text))
        case doc.Table():
            yield _write_table(block)
        case doc.Bars():
            yield _write_bars(block)
        case doc.Intervals():
            yield _write_intervals(block)
        case doc.Histogram():
            yield _write_histogram(block)
        case doc.Issues():
            items = "\n".join(map(_write_issue, block.items))
            yield f'<ul class="issues">\n{items}\n</ul>' if items else f"<p>{NO_ISSUES}</p>"
        case doc.Example():
            yield f"<h3>{_text(block.title)}</h3>"
            yield f"<p>{_text(block.caption)}</p>"
            label = f"{_attribute(block.title)}, decoded"
            yield f'<pre tabindex="0" role="region" aria-label="{label}">{"".join(_write_parts(block))}</pre>'


def _write_issue(issue: Notice) -> str:
    word = SEVERITY_WORDS[issue.severity]
    return (
        f'<li class="{word}"><strong>{word.capitalize()}</strong> '
        f'<span>{_text(issue.message)} <span class="advice">{_text(issue.fix)}</span></span></li>'
    )


def _write_item(item: doc.Item) -> str:
    below = "".join(f"<li>{_text(text)}</li>" for text in item.below)
    return f"<li>{_text(item.text)}{below and f'<ul>{below}</ul>'}</li>"


def _write_parts(example: doc.Example) -> Iterator[str]:
    for part in example.parts:
        # Shortened first: an escape such as \u200b that is cut in two would be read as other text.
        text = _show_space(reveal(shorten_middle(part["text"], MAX_PART_CHARACTERS)))
        if part["is_control"]:
            text = f'<span class="control">{text}</span>'
        yield f"<mark>{text}</mark>" if part["is_learned"] else text


def _show_space(text: str) -> str:
    """Escape a text and put signs where space would be overlooked; a screen reader does not read them."""
    signs = {"\n": '<span class="space" aria-hidden="true">↵</span>\n', "\t": _sign("→")}
    # What lies between the signs is escaped segment by segment, so that no entity is mistaken for text of a row.
    chunks, at = [], 0
    for found in _SPACE.finditer(text):
        chunks.append(html.escape(text[at : found.start()]))
        chunks.append(signs.get(found.group()) or _sign("·" * len(found.group())))
        at = found.end()
    return "".join([*chunks, html.escape(text[at:])])


def _sign(sign: str) -> str:
    return f'<span class="space" aria-hidden="true">{sign}</span>'


def _write_table(table: doc.Table) -> str:
    def cell(index: int, content: doc.Cell) -> str:
        kind = ' class="number"' if index not in table.text_columns else ""
        text = f"{content:,}" if isinstance(content, int | float) else _text(content)
        return f'<th scope="row"{kind}>{text}</th>' if index == 0 else f"<td{kind}>{text}</td>"

    head = "".join(_head_cell(name, is_number=index not in table.text_columns) for index, name in enumerate(table.head))
    rows = "".join(f"<tr>{''.join(cell(*item) for item in enumerate(row))}</tr>" for row in table.rows)
    total = ""
    if table.total:
        total = f"<tfoot><tr>{''.join(cell(*item) for item in enumerate(table.total))}</tr></tfoot>"
    return _scrolling(
        f"<table><caption>{_text(table.title)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody>{total}</table>",
        table.title,
    )


def _head_cell(name: str, *, is_number: bool) -> str:
    kind = ' class="number"' if is_number else ""
    # An empty heading is none: screen readers would announce it before every cell of the column.
    return f'<th scope="col"{kind}>{_text(name)}</th>' if name else f"<td{kind}></td>"


def _write_bars(bars: doc.Bars) -> str:
    longest = max(bars.values, default=0) or 1  # all 0 makes bars of no width, not a division by 0
    rows = "".join(
        f'<tr><th scope="row">{_text(shorten_middle(name, 80))}</th>'
        f'<td class="bar" aria-hidden="true"><div style="width:{100 * value / longest:.2f}%"></div></td>'
        f'<td class="number">{_text(shown)}</td></tr>'
        for name, value, shown in zip(bars.names, bars.values, bars.shown, strict=True)
    )
    return _scrolling(
        f'<table class="bars"><caption>{_text(bars.title)}</caption><tbody>{rows}</tbody></table>', bars.title
    )


def _write_intervals(intervals: doc.Intervals) -> str:
    rows = "".join(
        f'<tr><th scope="row">{_text(shorten_middle(name, 80))}</th>'
        f'<td class="range" aria-hidden="true"><div><i style="left:{100 * low:.2f}%;width:{100 * (high - low):.2f}%">'
        f'</i><b style="left:{100 * value:.2f}%"></b></div></td>'
        f'<td class="number">{_text(shown)}</td></tr>'
        for name, shown, (low, value, high) in zip(intervals.names, intervals.shown, intervals.positions(), strict=True)
    )
    return _scrolling(
        f'<table class="bars"><caption>{_text(intervals.title)}</caption><tbody>{rows}</tbody></table>',
        intervals.title,
    )


def _write_histogram(histogram: doc.Histogram) -> str:
    """Draw one panel a quantity, each with its own scale, above one axis; words stay text, so they do not shrink."""
    first, last = histogram.edges[0], histogram.edges[-1]
    panels = []
    for name, counts in histogram.counts.items():
        most = max(counts, default=0)
        alt = (
            f"Histogram of {name} in {histogram.unit}: {_describe_peak(histogram, counts)}, from {write_edge(first)} "
            f"to {write_edge(last)}"
        )
        # Stretched to the width of the page, which text inside the drawing would be as well; so names stand outside.
        panels.append(
            f'<div class="panel-name">{_text(name)} <span>highest bar {most:,}</span></div>'
            f'<svg viewBox="0 0 {_HISTOGRAM_WIDTH} {_HISTOGRAM_HEIGHT}" preserveAspectRatio="none" role="img" '
            f'aria-label="{_attribute(alt)}">{"".join(_draw(histogram, counts))}</svg>'
        )
    middle = (first + last) // 2 if isinstance(first, int) and isinstance(last, int) else (first + last) / 2
    axis = (
        f'<div class="axis"><span>{write_edge(first)}</span><span>{write_edge(middle)}</span>'
        f"<span>{write_edge(last)} {_text(histogram.unit)}</span></div>"
    )
    mark = ""
    if histogram.mark:
        mark = f'<p class="legend">Dashed: {_text(histogram.mark[1])} ({histogram.mark[0]:,})</p>'
    return f"<figure><figcaption>{_text(histogram.title)}</figcaption>{''.join(panels)}{axis}{mark}</figure>"


def _draw(histogram: doc.Histogram, counts: Sequence[int]) -> Iterator[str]:
    most = max(counts, default=0) or 1
    width = _HISTOGRAM_WIDTH / max(len(counts), 1)
    for index, count in enumerate(counts):
        if count:
            # A bin with one row among thousands would be lower than a pixel, and look empty.
            height = max(count / most * (_HISTOGRAM_HEIGHT - 2), 1.5)
            yield (
                f'<rect x="{index * width:.2f}" y="{_HISTOGRAM_HEIGHT - height:.2f}" width="{width * 0.92:.2f}" '
                f'height="{height:.2f}"/>'
            )
    if histogram.mark:
        first, last = histogram.edges[0], histogram.edges[-1]
        x = (histogram.mark[0] - first) / max(last - first, 1) * _HISTOGRAM_WIDTH
        yield f'<line x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{_HISTOGRAM_HEIGHT}"/>'


def _describe_peak(histogram: doc.Histogram, counts: Sequence[int]) -> str:
    if not any(counts):
        return "no rows"
    index = max(range(len(counts)), key=counts.__getitem__)
    first, last = write_edge(histogram.edges[index]), write_edge(histogram.last_in_bin(index + 1))
    return f"most rows ({counts[index]:,}) at {first} to {last}"


def _scrolling(table: str, title: str) -> str:
    """Let a wide table scroll by itself, by keyboard too."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{_attribute(title)}">{table}</div>'


def _text(text: doc.Inline) -> str:
    """Escape running text; names of parameters become code."""
    return "".join(map(_write_words, words_of(text)))


def _attribute(text: doc.Inline) -> str:
    """Escape running text for an attribute or the title, in which no markup may stand."""
    return html.escape("".join(words if isinstance(words, str) else words.text for words in words_of(text)))


def _write_words(words: doc.Words) -> str:
    match words:
        case doc.Code():
            return f"<code>{html.escape(words.text)}</code>"
        case doc.Strong():
            return f"<strong>{html.escape(words.text)}</strong>"
        case doc.Link():
            return f'<a href="#{html.escape(words.key)}">{html.escape(words.text)}</a>'
    return html.escape(words)
