from __future__ import annotations

import pytest

from lm_tuning import secrets
from lm_tuning.reporting.document import Code
from lm_tuning.reporting.markdown import write_inline
from lm_tuning.reporting.text import keep_ends, reveal, shorten_middle, words_of


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


@pytest.mark.parametrize("num_before", range(0, 60, 3))
def test_what_is_left_of_a_long_text_has_no_part_of_a_secret(num_before: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(secrets, "_known", set())
    monkeypatch.setattr(secrets, "_known_pattern", None)
    secrets.remember(["Pw-planted-1"])
    text = f"{'. ' * num_before} Pw-planted-1 {'. ' * (60 - num_before)}"
    for shown in (keep_ends(text, 60), shorten_middle(text, 60)):
        assert "Pw" not in shown and "ted-1" not in shown, shown


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        (
            "train.trainer.warmup_steps (below 1), tokenize.max_length_tokens: 512 allows.",
            ["train.trainer.warmup_steps", "tokenize.max_length_tokens: 512"],
        ),
        ("train.learning_rate=1e-5, train.resume: false, data.max_rows: null or split.validation: 0.1",
         ["train.learning_rate=1e-5", "train.resume: false", "data.max_rows: null", "split.validation: 0.1"]),
        ("split.duplicates: drop with split.duplicates_by: text whatever the label",
         ["split.duplicates: drop", "split.duplicates_by: text"]),
        ("train.batching=packed, train.lora.target_modules: all-linear.",
         ["train.batching=packed", "train.lora.target_modules: all-linear"]),
        # A sentence follows, no value.
        ("data.columns.label: column 'label' holds one class only", ["data.columns.label"]),
        ("data.columns.label: text that is no class", ["data.columns.label"]),
        ("split.duplicates: dropping copies takes a class away", ["split.duplicates"]),
        ("train.load_best: that folder holds no model", ["train.load_best"]),
        ("train.max_steps: 3rd try", ["train.max_steps"]),
    ],
)  # fmt: skip
def test_names_of_parameters_are_set_apart_with_values_written_after_them(text: str, codes: list[str]):
    assert [words.text for words in words_of(text) if isinstance(words, Code)] == codes
