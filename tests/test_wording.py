"""Counts, and text that is not ours: what Markdown shows of it is what it was."""

from __future__ import annotations

import pytest
from markdown_it import MarkdownIt

from lm_tuning.wording import code_span, count_of, escape_markdown, fence, noun_for, on_one_line, unit_for, visible
from tests.support.hostile import HOSTILE


@pytest.mark.parametrize(
    ("number", "noun", "written"),
    [
        (1, "row", "1 row"),
        (0, "row", "0 rows"),
        (1, "class", "1 class"),
        (2, "class", "2 classes"),
        (1, "micro-batch", "1 micro-batch"),
        (2, "micro-batch", "2 micro-batches"),
        (1, "copy", "1 copy"),
        (2, "copy", "2 copies"),
        (2, "key", "2 keys"),
        (1500, "training row", "1,500 training rows"),
    ],
)  # fmt: skip
def test_a_count_goes_with_its_noun(number: int, noun: str, written: str) -> None:
    assert count_of(number, noun) == written


@pytest.mark.parametrize("noun", ["row", "batch", "class", "size", "copy", "key", "kB"])
def test_the_singular_comes_back(noun: str) -> None:
    assert unit_for(1, noun if noun == "kB" else noun_for(2, noun)) == noun


def test_a_plural_can_be_given() -> None:
    assert count_of(2, "row of train", "rows of train") == "2 rows of train"
    assert noun_for(1, "row of train", "rows of train") == "row of train"


def test_control_characters_become_escapes_and_nothing_else_changes() -> None:
    assert visible("a\x1b[31mb\x00\x9b\u202ec\ud800\td\ne") == "a\\u001b[31mb\\u0000\\u009b\\u202ec\\ud800\td\ne"
    assert visible("a\r\nb\rc") == "a\\r\nb\\u000dc"
    kept = "한국어 👩\u200d👧 \u0645\u06cc\u200c\u062e [/INST] :smile: \\n"
    assert visible(kept) == kept


def test_a_line_break_can_be_seen_on_one_line() -> None:
    assert on_one_line(" a \n\n b\u2028c  d ") == "a ↵ b ↵ c d"
    assert on_one_line(" " * 10**6) == ""


def rendered(markdown: str) -> str:
    """Return the text that a renderer of GitHub's Markdown shows."""
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(markdown)
    shown = []
    for token in tokens:
        for child in token.children or ():
            assert child.type in ("text", "text_special", "code_inline"), (markdown, child.type)
            shown.append(child.content)
    return "".join(shown)


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_shows_foreign_text_as_it_is(text: str) -> None:
    expected = on_one_line(visible(text))
    assert rendered(escape_markdown(text)) == expected
    table = f"| a | b |\n|---|---|\n| {escape_markdown(text)} | x |\n"
    assert rendered(table) == f"ab{expected}x"
    assert rendered(f"- {escape_markdown(text)}") == expected
    assert rendered(f"Token {code_span(text)}.") == f"Token {expected}."


def test_a_fence_is_longer_than_what_it_holds() -> None:
    assert fence("a") == "```text\na\n```"
    assert fence("````") == "`````text\n````\n`````"
    assert fence("\x1b[2J") == "```text\n\\u001b[2J\n```"
