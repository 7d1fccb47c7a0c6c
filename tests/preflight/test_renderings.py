from __future__ import annotations

import io
from html.parser import HTMLParser
from typing import Any

import pytest

from lm_tuning.findings import Issue
from lm_tuning.preflight.report import compose_report
from lm_tuning.reporting.document import Bars, Example, Histogram, Issues, Paragraph, Part, Report, Section, Table
from lm_tuning.reporting.html import write_page
from lm_tuning.reporting.markdown import draw_bars, histogram_lines, write_markdown
from lm_tuning.reporting.terminal import build_summary
from tests.preflight.conftest import Look, questions

HOSTILE = '<script>alert(1)</script> | [red]x[/red] `tick` ``` ⟦fake⟧ **b** \x1b[31m "quoted" &lt; {{x}} </pre>'


def report_of(text: str) -> Report:
    parts: list[Part] = [
        {"text": "<|user|>", "is_learned": False, "is_control": True},
        {"text": f"{text}\n", "is_learned": False, "is_control": False},
        {"text": f" {text}", "is_learned": True, "is_control": False},
        {"text": "<|end|>", "is_learned": True, "is_control": True},
    ]
    blocks = [
        Paragraph(text),
        Table(text, [text, "n"], [[text, "1"]], total=["all", "1"]),
        Bars(text, [text, "other"], [2, 0], ["2", "0"]),
        Histogram(text, "tokens", [0, 2, 4], {"whole row": [1, 3], "supervised part": [4, 0]}, (3, "limit")),
        Issues([Issue("warn", "rows", text, text)]),
        Example(text, text, parts),
    ]
    return Report(title="Preflight", subtitle=text, tiles=[("rows", "1")], sections=[Section("all", text, blocks)])


def on_terminal(report: Report, *, width: int = 200) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width)
    console.print(build_summary(report))
    written: Any = console.file
    return str(written.getvalue())


class Page(HTMLParser):
    """Read a page as a browser would: its tags, its text, the text that is marked, and what is left open."""

    EMPTY = frozenset({"meta", "rect", "line"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = self.marked = self.style = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            self.style += data
        else:
            self.text += data
            self.marked += data if "mark" in self.open else ""

    def attributes(self, name: str) -> list[str | None]:
        return [attributes[name] for _, attributes in self.tags if name in attributes]


def test_hostile_text_is_only_text_on_the_page():
    page = Page(write_page(report_of(HOSTILE)))
    assert page.open == []
    assert not {"script", "img", "link", "iframe"} & {tag for tag, _ in page.tags}
    shown = HOSTILE.replace("\x1b", "\\u001b")
    assert page.text.count(shown) >= 10
    assert page.marked == f"·{shown}<|end|>"
    assert "\x1b" not in page.text


def test_hostile_text_is_only_text_in_markdown():
    text = write_markdown(report_of(HOSTILE))
    plain, _, rest = text.partition("````text\n")
    block, closed, after = rest.partition("\n````\n")
    assert closed
    assert after.strip() == ""
    for fragment in ("<script>", "| [red]", " `tick`", "**b**", "\x1b"):
        assert fragment not in plain, fragment
    # Brackets out of the row can not be taken for the marks of what is supervised.
    shown = HOSTILE.replace("\x1b", "\\u001b").replace("⟦", "\\u27e6").replace("⟧", "\\u27e7")
    assert block == f"<|user|>{shown}↵\n⟦ {shown}<|end|>⟧"
    cells = [line for line in plain.splitlines() if line.startswith("|") and "script" in line]
    assert len(cells) == 3
    assert {line.replace("\\|", "").count("|") for line in cells} == {3, 4}


def test_hostile_text_is_only_text_on_the_terminal():
    text = on_terminal(report_of(HOSTILE), width=400)
    assert "[red]x[/red]" in text
    assert "\x1b" not in text
    assert "⟦ <script>" in text
    assert "\\u27e6fake\\u27e7" in text


@pytest.fixture
def whole(look: Look) -> dict[str, Any]:
    rows = [{**row, "kind": "|" if index % 4 == 1 else "<b>"} for index, row in enumerate(questions(40))]
    return look(rows, checking={"stratify": "kind"}, splitting={"test": 4, "stratify": "kind"})


def test_the_page_needs_nothing_and_can_be_read_by_all(whole: dict[str, Any]):
    text = write_page(compose_report(whole))
    page = Page(text)
    assert page.open == []
    assert not page.attributes("src")
    assert "url(" not in page.style
    assert "@import" not in page.style
    links, ids = page.attributes("href"), page.attributes("id")
    assert [f"#{name}" for name in ids if name and not name.endswith("-title")] == links
    assert len(ids) == len(set(ids))
    tags = [tag for tag, _ in page.tags]
    assert tags.count("table") == tags.count("caption") > 8
    assert all(attributes["scope"] for tag, attributes in page.tags if tag == "th")
    assert all(
        attributes["role"] == "img" and "Histogram of" in str(attributes["aria-label"])
        for tag, attributes in page.tags
        if tag == "svg"
    )
    assert {"lang", "charset"} <= {name for _, attributes in page.tags for name in attributes}
    assert "prefers-color-scheme: dark" in page.style
    assert text.count("<h1>") == 1


def test_all_three_say_the_same(whole: dict[str, Any]):
    report = compose_report(whole)
    page, markdown, terminal = Page(write_page(report)).text, write_markdown(report), on_terminal(report)
    for words in ("trained on", "What another", "Does the model learn to stop?", "2 classes in column 'kind'"):
        assert words in page
        assert words in markdown
        assert words in terminal
    assert [section.key for section in report.sections] == [
        "concerns", "examples", "rows", "splits", "labels", "lengths", "padding", "schedule", "special_tokens"
    ]  # fmt: skip
    assert "| **read** |  | **40** | **100.0%** |" in markdown
    assert r"| \<b\> | 27 (75.0%) | 0 (0.0%) | 3 (75.0%) |" in markdown


def test_the_terminal_shows_no_colour_codes_and_stays_within_its_width(whole: dict[str, Any]):
    text = on_terminal(compose_report(whole), width=80)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert text.rstrip().splitlines()[-1] != ""


def test_only_the_first_example_is_on_the_terminal(whole: dict[str, Any]):
    report = compose_report(whole)
    assert on_terminal(report).count("⟦4<|end|>⟧") == 1
    assert write_markdown(report).count("⟦4<|end|>⟧") == 3


def test_bars_are_in_proportion_and_never_vanish():
    assert draw_bars([30, 15, 0.001, 0]) == ["█" * 30, "█" * 15, "▏", ""]
    assert draw_bars([]) == []


def test_a_histogram_of_many_bins_is_joined_into_few_lines():
    counts = list(range(40))
    lines = histogram_lines(Histogram("", "tokens", list(range(0, 82, 2)), {"row": counts, "answer": counts}))
    assert [line[0] for line in lines][:2] == ["0 to 5", "6 to 11"]
    assert lines[-1][0] == "78 to 79"
    assert len(lines) == 14
    assert sum(int(line[2][0]) for line in lines) == sum(counts)


def test_little_is_not_taken_for_nothing(whole: dict[str, Any]):
    whole["lengths"]["supervised_fraction"] = 0.0001
    whole["padding"]["choices"][-1]["padding_fraction"] = 0.9999
    tiles = dict(compose_report(whole).tiles)
    assert (tiles["supervised tokens"], tiles["padding"]) == ("< 0.1%", "> 99.9%")
