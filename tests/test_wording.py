"""Counts, and text that is not ours."""

from __future__ import annotations

import pytest

from lm_tuning.wording import count_of, noun_for, on_one_line, unit_for, visible


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
    assert visible("a\u200bb\u2063c") == "a\\u200bb\\u2063c"
    assert visible("a\r\nb\rc") == "a\\r\nb\\u000dc"
    kept = "한국어 👩\u200d👧 \u0645\u06cc\u200c\u062e [/INST] :smile: \\n"
    assert visible(kept) == kept


def test_a_line_break_can_be_seen_on_one_line() -> None:
    assert on_one_line(" a \n\n b\u2028c  d ") == "a ↵ b ↵ c d"
    assert on_one_line(" " * 10**6) == ""
