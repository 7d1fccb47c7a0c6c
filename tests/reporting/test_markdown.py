"""What Markdown shows of foreign text is what it was, wherever it stands."""

from __future__ import annotations

import pytest
from markdown_it import MarkdownIt

from lm_tuning.reporting.document import (
    Cell,
    Code,
    Heading,
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
from lm_tuning.reporting.markdown import fence, join_sections, write_blocks, write_inline, write_markdown, write_section
from lm_tuning.wording import on_one_line, visible
from tests.support.hostile import HOSTILE


def rendered(markdown: str) -> str:
    """Return the text that a renderer of GitHub's Markdown shows."""
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(markdown)
    shown = []
    for token in tokens:
        for child in token.children or ():
            assert child.type in ("text", "text_special", "code_inline", "strong_open", "strong_close"), (
                markdown,
                child.type,
            )
            shown.append(child.content)
    return "".join(shown)


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_shows_foreign_text_as_it_is(text: str) -> None:
    expected = on_one_line(visible(text))
    assert rendered(write_inline(text)) == expected
    assert rendered(write_blocks([Items([Item(text)])])) == expected
    assert rendered(write_inline(("Token ", Code(text), "."))) == f"Token {expected}."
    cells: list[Cell] = [text, Code(text), ("a ", Code(text))]
    for cell, shown in zip(cells, [expected, expected, f"a {expected}"], strict=True):
        assert rendered(write_blocks([Table("", ("a", "b"), [(cell, "x")])])) == f"ab{shown}x", cell


def test_space_between_the_parts_of_running_text_stays() -> None:
    assert (
        write_inline(("Rows: ", Strong("4"), ", of ", Code("a\\b"), " \n ", Code(" "))) == "Rows: **4**, of `a\\b` ` `"
    )
    assert write_inline(("1. ", Code("x"))) == "1\\. `x`"


def test_a_fence_is_longer_than_what_it_holds() -> None:
    assert fence("a") == "```text\na\n```"
    assert fence("````") == "`````text\n````\n`````"
    assert fence("\x1b[2J") == "```text\n\\u001b[2J\n```"


def test_every_block_has_its_place() -> None:
    blocks = [
        Heading("Below", level=4),
        Paragraph("Words."),
        Items([Item("one", ["under it"]), Item("two")]),
        Preformatted("a\nb", "What stood there:"),
        Preformatted(""),
        Table("Sizes", ("what", "n", "share"), [("rows", 12345, 0.5)], total=("all", 12345, "")),
        Sample("Row 1", "Prompt", "question?", {"Base": "no", "Tuned": ""}),
    ]
    section = write_section(Section("all", "All of it", blocks))
    assert section == (
        "## All of it\n\n#### Below\n\nWords.\n\n- one\n  - under it\n- two\n\n"
        "What stood there:\n\n```text\na\nb\n```\n\n*(empty)*\n\n"
        "### Sizes\n\n| what | n | share |\n| --- | ---: | ---: |\n"
        "| rows | 12,345 | 0.5 |\n| **all** | **12,345** |  |\n\n"
        "### Row 1\n\n```text\nquestion?\n```\n\n**Base**\n\n```text\nno\n```\n\n**Tuned**\n\n*(empty)*"
    )
    report = Report("A report", "of rows", [("rows", "5")], [Paragraph("First.")], [], [Paragraph("Last.")])
    assert write_markdown(report) == "# A report\n\nof rows\n\n**5** rows\n\nFirst.\n\nLast.\n"
    assert join_sections("Title", [f"{section}\n", "## More"]) == f"# Title\n\n{section}\n\n## More\n"
