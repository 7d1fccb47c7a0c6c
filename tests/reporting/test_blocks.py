"""Every block is written as a page and for the terminal, and foreign text in it is only text."""

from __future__ import annotations

import html
import io
import re

import pytest
from rich.console import Console

from lm_tuning import secrets
from lm_tuning.findings import Issue
from lm_tuning.reporting.document import (
    Bars,
    Block,
    Code,
    Example,
    Heading,
    Histogram,
    Intervals,
    Issues,
    Item,
    Items,
    Link,
    Paragraph,
    Preformatted,
    Report,
    Sample,
    Section,
    Strong,
    Table,
)
from lm_tuning.reporting.html import write_page
from lm_tuning.reporting.markdown import draw, histogram_lines, write_markdown
from lm_tuning.reporting.terminal import MAX_ROWS, build_blocks, build_summary

HOSTILE = '<b>x</b> [red]y[/red] `z` | & "q" \x1b[31m'
SHOWN = HOSTILE.replace("\x1b", "\\u001b")
SECRET = "Pw-planted-1"


def printed(report: Report) -> str:
    console = Console(file=io.StringIO(), width=400)
    console.print(build_summary(report))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize(
    ("block", "times"),
    [
        (Heading((HOSTILE, " ", Code(HOSTILE))), 2),
        (Paragraph((Strong(HOSTILE), " and ", HOSTILE)), 2),
        (Items([Item(HOSTILE, [HOSTILE]), Item(Code(HOSTILE))]), 3),
        (Preformatted(HOSTILE, HOSTILE), 2),
        (Table("", ("a", "b"), [(Code(HOSTILE), HOSTILE)], text_columns=(0, 1)), 2),
        (Issues([Issue("warn", "rows", HOSTILE, HOSTILE)]), 2),
        (Sample(HOSTILE, "Text", HOSTILE, {"Answer": HOSTILE}), 3),
        (Intervals("", (HOSTILE,), [(0.0, 0.5, 1.0)], (HOSTILE,)), 2),
        (Paragraph((Link(HOSTILE, "row-1"), " and ", HOSTILE)), 2),
    ],
)
def test_foreign_text_is_only_text(block: Block, times: int) -> None:
    report = Report("A report", sections=[Section("all", "All", [block])])
    body = write_page(report).partition("</head>")[2]
    assert html.unescape(re.sub(r"<[^>]*>", "", body)).count(SHOWN) == times
    assert "<b>" not in body
    assert printed(report).count(SHOWN) == times
    assert "\x1b" not in body + printed(report)


@pytest.mark.parametrize(
    "block",
    [
        Heading(f"read {SECRET} here"),
        Paragraph(("read ", Code(SECRET), Strong(SECRET))),
        Items([Item(SECRET, [SECRET])]),
        Preformatted(f"read {SECRET} here", SECRET),
        Table(SECRET, (SECRET, "n"), [(SECRET, 1)], total=(SECRET, 1)),
        Bars(SECRET, [SECRET], [1], [SECRET]),
        Histogram(SECRET, SECRET, [0, 1], {SECRET: [1]}),
        Issues([Issue("warn", "rows", SECRET, SECRET)]),
        Example("Example 1", SECRET, [{"text": f"read {SECRET} here", "is_learned": True, "is_control": False}]),
        Sample(SECRET, "Text", SECRET, {"Answer": SECRET}),
    ],
    ids=lambda block: type(block).__name__,
)
def test_the_terminal_shows_no_secret_of_this_run(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_known", set())
    monkeypatch.setattr(secrets, "_known_pattern", None)
    secrets.remember([SECRET])
    shown = printed(Report("A report", SECRET, sections=[Section("all", SECRET, [block])]))
    assert SECRET not in shown
    assert "***" in shown


def test_issues_and_the_closing_come_last_on_the_terminal() -> None:
    issues = Issues([Issue("stop", "rows", "No rows.", "Add some.")])
    sections = [Section("issues", "Issues", [issues]), Section("rows", "Rows", [Paragraph("None.")])]
    shown = printed(Report("A report", "of rows", sections=sections, closing=[Paragraph("Go on.")]))
    assert re.findall(r"of rows|Rows|None\.|Issues|Stop: No rows\. Add some\.|Go on\.", shown) == [
        "of rows", "Rows", "None.", "Issues", "Stop: No rows. Add some.", "Go on."
    ]  # fmt: skip
    assert "Nothing stands out." in printed(Report("A report", sections=[Section("issues", "Issues", [Issues([])])]))


def test_of_a_long_table_the_terminal_says_how_much_is_missing() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(
        build_blocks([Table("Rows", ("row", "n"), [(f"r{number}", number) for number in range(MAX_ROWS + 5)])])
    )
    shown: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert "5 more in the stored report" in shown
    assert f"r{MAX_ROWS - 1}" in shown and f"r{MAX_ROWS} " not in shown


def test_intervals_share_one_scale() -> None:
    block = Intervals("Score", ("Base", "Tuned"), [(0.0, 0.25, 0.5), (0.5, 0.75, 1.0)], ("0.25", "0.75"))
    page = write_page(Report("A report", sections=[Section("all", "All", [block])]))
    assert re.findall(r'left:([\d.]+)%;width:([\d.]+)%"></i><b style="left:([\d.]+)%', page) == [
        ("0.00", "50.00", "25.00"),
        ("50.00", "50.00", "75.00"),
    ]
    base, tuned = draw(block)
    assert base.index("●") < tuned.index("●")
    assert (base[0], tuned[-1]) == ("─", "─")
    assert base.rstrip("─●").strip("·") == "" and tuned.lstrip("·")[0] == "─"
    one = Intervals("Score", ("Base",), [(2.0, 2.0, 2.0)], ("2",))
    assert one.positions() == [(0.5, 0.5, 0.5)], "a point without a scale stands in the middle"
    assert draw(one)[0].count("●") == 1


def test_a_link_leads_to_its_sample() -> None:
    link, sample = Paragraph((Link("7", "row-7"),)), Sample("Row 7", "Text", "words", key="row-7")
    report = Report("A report", sections=[Section("all", "All", [link, sample])])
    page, text = write_page(report), write_markdown(report)
    assert '<a href="#row-7">7</a>' in page and '<h3 id="row-7">Row 7</h3>' in page
    assert "[7](#row-7)" in text and "### Row 7" in text, "a git host makes the anchor row-7 of that heading"


def test_the_terminal_leaves_out_what_is_for_the_files() -> None:
    sections = [Section("a", "Shown", [Paragraph("one")]), Section("b", "Stored", [Paragraph("two")], is_brief=False)]
    shown = printed(Report("A report", sections=sections))
    assert "one" in shown and "two" not in shown and "Stored" not in shown


def test_bins_of_fractions_are_written_as_such() -> None:
    block = Histogram("Losses", "nats", [0.0, 0.25, 0.5], {"tuned": [3, 1]})
    page = write_page(Report("A report", sections=[Section("all", "All", [block])]))
    assert "most rows (3) at 0 to 0.25, from 0 to 0.5" in page
    assert [line[0] for line in histogram_lines(block)] == ["0 to 0.25", "0.25 to 0.5"]


def test_a_long_name_leaves_its_text_room_in_a_narrow_terminal() -> None:
    name = "Base (ROUGE-L 0.148; cut off at the longest answer; copied from the prompt)"
    sample = Sample("Row 8", "Question", "why so " * 8, {name: "because of this and that " * 4})
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(build_summary(Report("Title", sections=[Section("samples", "Samples", [sample])])))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("because of this and that" in line for line in lines)
    assert len(lines) < 16
