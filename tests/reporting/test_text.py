from __future__ import annotations

import pytest

from lm_tuning.reporting.markdown import write_inline
from lm_tuning.reporting.text import PARAMETER, reveal, shorten_middle


def test_a_decoded_row_hides_nothing():
    assert reveal("\u0645\u200c\u062e 👩\u200d👧\x1b\n") == "\u0645\\u200c\u062e 👩\\u200d👧\\u001b\n"


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
    assert write_inline(text) == shown


def test_names_of_parameters_are_found():
    found = PARAMETER.findall("train.trainer.warmup_steps (below 1), tokenize.max_length_tokens: 512 allows.")
    assert found == ["train.trainer.warmup_steps", "tokenize.max_length_tokens: 512"]
