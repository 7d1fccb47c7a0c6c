"""What the limits take away is counted as by hand, and a limit that takes too much is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lm_tuning.errors import UserError
from lm_tuning.text.tokenizers.refusals import advise_limit, refuse_losses
from tests.support.tiny import make_tokenizer

words = st.text("ab ", min_size=1, max_size=30).map(lambda text: f"{text.strip()}.")
RANDOM = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def lost(summary: dict[str, Any], split: str = "train") -> int:
    return int(summary["splits"][split]["lost_to_limits"]["num_tokens_lost"])


@RANDOM
@given(
    rows=st.lists(st.tuples(words, words, st.none()), min_size=1, max_size=6),
    limit=st.integers(6, 40),
    truncation=st.sampled_from(["truncate_prompt", "truncate_end", "drop"]),
)
def test_tokens_of_answers_and_prompts(tokenize, rows, limit, truncation):
    whole, _ = tokenize(make_tokenizer(), "prompt_response", rows, max_length_tokens=1000)
    assert lost(whole) == 0
    try:
        cut, _ = tokenize(make_tokenizer(), "prompt_response", rows, max_length_tokens=limit, truncation=truncation)
    except UserError as error:
        assert "No training row is left" in str(error)
        return
    before, after = (summary["splits"]["train"]["num_tokens"] for summary in (whole, cut))
    assert lost(cut) == before - after
    assert cut["splits"]["train"]["lost_to_limits"]["fraction"] == pytest.approx((before - after) / before)


@RANDOM
@given(turns=st.lists(words, min_size=2, max_size=8), limit=st.integers(12, 60))
def test_tokens_of_old_exchanges(tokenize, turns, limit):
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns[: len(turns) // 2 * 2])]
    rows = [(messages,), (messages[:2],)]
    whole, _ = tokenize(make_tokenizer(), "messages", rows, max_length_tokens=1000)
    try:
        cut, _ = tokenize(make_tokenizer(), "messages", rows, max_length_tokens=limit)
    except UserError as error:
        assert "No training row is left" in str(error)
        return
    assert lost(cut) == whole["splits"]["train"]["num_tokens"] - cut["splits"]["train"]["num_tokens"]


@RANDOM
@given(rows=st.lists(st.tuples(words, st.sampled_from(["x", "y"])), min_size=1, max_size=6), limit=st.integers(3, 40))
def test_tokens_of_texts_with_a_class(tokenize, rows, limit):
    options: dict[str, Any] = {"task": "sequence_classification", "label_map": {"x": 0, "y": 1}}
    rows = [*rows, ("short", "x"), ("other", "y")]
    whole, _ = tokenize(make_tokenizer(), "text_label", rows, max_length_tokens=1000, **options)
    for truncation in ("truncate_end", "drop"):
        try:
            cut, _ = tokenize(
                make_tokenizer(), "text_label", rows, max_length_tokens=limit, truncation=truncation, **options
            )
        except UserError as error:
            assert "is left" in str(error)
            continue
        assert lost(cut) == whole["splits"]["train"]["num_tokens"] - cut["splits"]["train"]["num_tokens"]


def test_sources_and_targets_are_both_counted(tokenize):
    rows = [("0123456789", "abcdef", None), ("01", "ab", None)]
    cut, _ = tokenize(
        make_tokenizer(),
        "prompt_response",
        rows,
        task="seq2seq_lm",
        max_length_tokens=6,
        max_target_tokens=4,
        truncation="truncate_end",
    )
    whole, _ = tokenize(
        make_tokenizer(), "prompt_response", rows, task="seq2seq_lm", max_length_tokens=99, max_target_tokens=99
    )
    assert lost(cut) == whole["splits"]["train"]["num_tokens"] - cut["splits"]["train"]["num_tokens"] == 5 + 3


def refused(summary: dict[str, Any], share: float, *, positions: int | None = None) -> str:
    try:
        refuse_losses(summary, max_lost_fraction=share, max_positions=positions, model_name="tiny")
    except UserError as error:
        return str(error)
    return ""


def test_the_refusal_names_figure_key_value_and_both_fix(tokenize):
    rows = [("0" * 90, "b", None), ("1", "b", None)]
    summary, _ = tokenize(make_tokenizer(), "prompt_response", rows, max_length_tokens=15)
    # 95 tokens of the first row, of which 15 stay, and 6 of the second.
    assert lost(summary) == 80
    assert refused(summary, 80 / 101) == ""
    assert refused(summary, 1.0) == ""
    message = refused(summary, 0.5)
    assert message.startswith(
        "tokenize.max_length_tokens = 15 cuts 79.2% of the tokens of the training rows away (80 of 101), and "
        "tokenize.max_lost_fraction = 0.5 lets 50.0% pass: of 2 training rows 1 row beyond "
        "tokenize.max_length_tokens, the longest with 95 tokens. Fix: tokenize.max_length_tokens = 95 would hold"
    )
    assert message.endswith("or set tokenize.max_lost_fraction = 1 to train on what is left.")
    message = refused(summary, 0.5, positions=64)
    assert "tiny takes at most 64 tokens. Fix: raise tokenize.max_length_tokens to 64 at most" in message
    assert "95 would" not in message
    # Tokens that an earlier version stored do not say what was lost.
    del summary["splits"]["train"]["lost_to_limits"]
    assert refused(summary, 0.0) == ""


def test_advice_never_goes_beyond_the_model():
    advice = {"present": 512, "max_positions": 8192}
    assert advise_limit("max_length_tokens", 8192, **advice).startswith("tokenize.max_length_tokens = 8192 would hold")
    assert "22648" not in advise_limit("max_length_tokens", 22648, **advice)
    assert "to 8192 at most" in advise_limit("max_length_tokens", 22648, **advice)
    assert advise_limit("max_length_tokens", 22648, present=8192, max_positions=8192).startswith("shorten or split")
    assert "22648 would hold" in advise_limit("max_length_tokens", 22648, present=512, max_positions=None)
