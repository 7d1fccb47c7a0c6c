from __future__ import annotations

import pytest

from lm_tuning.reporting.text import PARAMETER, escape_markdown, shorten_middle, show_unseen


def test_what_has_no_shape_gets_one():
    assert show_unseen("a\x1b[31mb\x00\u202ec\u200b\ud800\td\ne") == "a\\u001b[31mb\\u0000\\u202ec\\u200b\\ud800\td\ne"
    assert show_unseen("a\r\nb\rc") == "a\\r\nb\\u000dc"


def test_the_middle_of_a_long_text_is_left_out_and_counted():
    assert shorten_middle("0123456789", 10) == "0123456789"
    assert shorten_middle("0123456789abc", 6) == "0123 … 7 characters … bc"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a | b `c` [d](e) <f> *g*", r"a \| b \`c\` \[d\](e) \<f\> \*g\*"),
        ("#h ~i~ &amp; j\\k $x$", r"\#h \~i\~ \&amp; j\\k \$x\$"),
        ("snake_case and _emphasis_", r"snake_case and \_emphasis\_"),
        ("two\n\nlines", "two ↵ lines"),
        ("set train.batching=packed.", "set `train.batching=packed`."),
        ("split.near_duplicates: ignore", "`split.near_duplicates: ignore`"),
        ("train.csv, data/train.jsonl and my-train.batching", "train.csv, data/train.jsonl and my-train.batching"),
    ],
)  # fmt: skip
def test_plain_text_stays_plain_in_markdown(text: str, shown: str):
    assert escape_markdown(text) == shown


def test_names_of_parameters_are_found():
    found = PARAMETER.findall("train.trainer.warmup_steps (below 1), tokenize.max_length_tokens: 512 allows.")
    assert found == ["train.trainer.warmup_steps", "tokenize.max_length_tokens: 512"]
