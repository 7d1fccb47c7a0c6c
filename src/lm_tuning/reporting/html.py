"""Write a report as one HTML file that needs nothing else: no script, no network.

It is legible on a phone, in light and in dark, and on paper.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence

from lm_tuning.findings import SEVERITY_WORDS, Notice
from lm_tuning.reporting import document as doc
from lm_tuning.reporting.text import NO_ISSUES, reveal, shorten_middle, words_of
from lm_tuning.wording import visible

STYLE = """
:root {
  --back: #ffffff; --raised: #f4f6f8; --text: #1c2024; --quiet: #565e66; --line: #d4d9de; --link: #0b57b0;
  --bar: #3572b0; --supervised: #cdeccf; --supervised-text: #0c3614; --supervised-line: #2e7d3b; --control: #5b3ea6;
  --stop: #a3161c; --warning: #8a4b00; --note: #2f5f8f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #14171a; --raised: #1e2327; --text: #e4e7ea; --quiet: #a4adb5; --line: #39414a; --link: #8ab8f0;
    --bar: #6fa8e0; --supervised: #1d4a28; --supervised-text: #dcf5e0; --supervised-line: #6cc47e; --control: #c6b4ff;
    --stop: #ff9b96; --warning: #f0b866; --note: #9cc3ea;
  }
}
* { box-sizing: border-box; }
html { scroll-padding-top: 1rem; }
body {
  margin: 0 auto; max-width: 64rem; padding: 1rem clamp(0.75rem, 3vw, 2rem) 4rem; background: var(--back);
  color: var(--text); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere;
}
h1 { margin: 0; font-size: 1.7rem; }
h2 { margin: 2.5rem 0 0.75rem; padding-top: 0.5rem; border-top: 1px solid var(--line); font-size: 1.3rem; }
h3 { margin: 1.5rem 0 0.25rem; font-size: 1.05rem; }
p { margin: 0.5rem 0; max-width: 46rem; }
a { color: var(--link); }
code { font: 0.92em ui-monospace, monospace; background: var(--raised); padding: 0.05em 0.25em; border-radius: 3px; }
.subtitle, .axis, .legend, .panel-name span { color: var(--quiet); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: 0.5rem; margin: 1rem 0; }
.tiles div { display: flex; flex-direction: column-reverse; padding: 0.5rem 0.75rem; background: var(--raised);
  border-radius: 6px; }
.tiles dt { color: var(--quiet); font-size: 0.85rem; }
.tiles dd { margin: 0; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; }
nav ul { display: flex; flex-wrap: wrap; gap: 0.25rem 1.1rem; margin: 0; padding: 0; list-style: none; }
nav a { display: inline-block; padding: 0.3rem 0; }
.issues { margin: 0; padding: 0; list-style: none; }
.issues li { display: flex; gap: 0.75rem; padding: 0.6rem 0.75rem; margin-bottom: 0.5rem; background: var(--raised);
  border-left: 4px solid; border-radius: 0 6px 6px 0; }
.issues strong { flex: 0 0 5rem; overflow-wrap: normal; }
.issues li > span { color: var(--text); min-width: 0; }
.issues .stop { color: var(--stop); }
.issues .warning { color: var(--warning); }
.issues .note { color: var(--note); }
.advice { color: var(--quiet); }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; min-width: min(100%, 28rem); font-size: 0.95rem; }
caption, figcaption { padding-bottom: 0.35rem; text-align: left; font-weight: 600; }
th, td { padding: 0.3rem 0.9rem 0.3rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top;
  overflow-wrap: normal; }
thead th { color: var(--quiet); font-weight: 500; }
tbody th { font-weight: 400; }
tbody th:not(.number) { min-width: 8rem; }
tfoot th, tfoot td { border-bottom: 0; font-weight: 600; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.bars { width: 100%; }
.bars tbody th { width: 1%; min-width: min(14rem, 36vw); overflow-wrap: anywhere; }
.bars td.number { width: 1%; padding-right: 0; }
.bar { min-width: 6rem; vertical-align: middle; }
.bar div { height: 0.9rem; min-width: 1px; background: var(--bar); border-radius: 0 2px 2px 0; }
figure { margin: 1rem 0; max-width: 46rem; }
svg { display: block; width: 100%; height: 6.5rem; border-bottom: 1px solid var(--quiet); }
svg rect { fill: var(--bar); }
svg line { stroke: var(--text); stroke-width: 1.5; stroke-dasharray: 5 4; vector-effect: non-scaling-stroke; }
.panel-name { margin-top: 0.6rem; font-size: 0.9rem; }
.axis { display: flex; justify-content: space-between; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
.legend { margin: 0.25rem 0; font-size: 0.85rem; }
pre { margin: 0.5rem 0; padding: 0.75rem 1rem; max-height: 32rem; overflow: auto; background: var(--raised);
  border-radius: 6px; font: 0.9rem/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
mark { background: var(--supervised); color: var(--supervised-text); border-bottom: 2px solid var(--supervised-line); }
.control { color: var(--control); font-weight: 600; }
mark .control { color: inherit; outline: 1px solid var(--supervised-line); }
.space { color: var(--quiet); }
mark .space { color: inherit; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
@media (max-width: 34rem) {
  .issues li { flex-direction: column; gap: 0.1rem; }
  .issues strong { flex-basis: auto; }
}
@media print { nav { display: none; } pre { max-height: none; } }
"""


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
    # The policy is a second lock behind the escaping: nothing in a row could load or run anything.
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{_attribute(f"{report.title}: {report.subtitle}")}</title>
<style>{STYLE}</style>
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
            yield f"<h3>{_text(block.title)}</h3>"
            for name, text in ((block.name, block.text), *block.answers.items()):
                yield f"<p><strong>{_text(name)}</strong></p>"
                yield from _write_block(doc.Preformatted(text))
        case doc.Table():
            yield _write_table(block)
        case doc.Bars():
            yield _write_bars(block)
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


def _write_histogram(histogram: doc.Histogram) -> str:
    """Draw one panel a quantity, each with its own scale, above one axis; words stay text, so they do not shrink."""
    first, last = histogram.edges[0], histogram.edges[-1]
    panels = []
    for name, counts in histogram.counts.items():
        most = max(counts, default=0)
        alt = (
            f"Histogram of {name} in {histogram.unit}: {_describe_peak(histogram.edges, counts)}, from {first:,} to "
            f"{last:,}"
        )
        # Stretched to the width of the page, which text inside the drawing would be as well; so names stand outside.
        panels.append(
            f'<div class="panel-name">{_text(name)} <span>highest bar {most:,}</span></div>'
            f'<svg viewBox="0 0 {_HISTOGRAM_WIDTH} {_HISTOGRAM_HEIGHT}" preserveAspectRatio="none" role="img" '
            f'aria-label="{_attribute(alt)}">{"".join(_draw(histogram, counts))}</svg>'
        )
    middle = (first + last) // 2
    axis = (
        f'<div class="axis"><span>{first:,}</span><span>{middle:,}</span><span>{last:,} {histogram.unit}</span></div>'
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


def _describe_peak(edges: Sequence[int], counts: Sequence[int]) -> str:
    if not any(counts):
        return "no rows"
    index = max(range(len(counts)), key=counts.__getitem__)
    return f"most rows ({counts[index]:,}) at {edges[index]:,} to {edges[index + 1] - 1:,}"


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
    return html.escape(words)
