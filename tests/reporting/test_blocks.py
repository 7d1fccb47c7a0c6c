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
    Issues,
    Item,
    Items,
    Paragraph,
    Preformatted,
    Report,
    Sample,
    Section,
    Strong,
    Table,
)
from lm_tuning.reporting.html import write_page
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
