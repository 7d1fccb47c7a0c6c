"""Stop strings are found in the text, wherever their ends lie in the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lm_tuning.generation.answers import Answer, answer_text, finish_answer
from lm_tuning.generation.stop_strings import StopStrings, StringEnd
from tests.support.tiny import BOS, END, ids, make_tokenizer


def make_words() -> Any:
    """Build a tokenizer with a few tokens of several bytes, and all single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    letters = sorted(ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*letters, "ab", "cd", "abcd", "<end>"])}
    core = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("c", "d"), ("ab", "cd")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")


@pytest.mark.parametrize(
    ("text", "strings", "kept", "num_tokens"),
    [
        ("xabcdy", ["cd"], "xab", 1),  # in the middle of a token: "abcd" is one
        ("xabcdy", ["dy"], "xabc", 1),
        ("xyabcd", ["abcd"], "xy", 2),
        ("xyabcd", ["x"], "", 0),
        ("가나다 xab", ["다"], "가나", 6),  # three bytes each
        ("가나다 xab", ["나", "가나다"], "가", 3),  # the one that is complete first
        ("aabb", ["b", "ab"], "a", 1),  # at one end the longer one
    ],
)
def test_the_text_before_the_string_is_kept(text: str, strings: list[str], kept: str, num_tokens: int) -> None:
    tokenizer = make_words()
    tokens = tokenizer.encode(text)
    assert StopStrings(tokenizer, strings).find(tokens) == StringEnd(num_tokens, kept)


def test_nothing_is_found_where_nothing_came() -> None:
    tokenizer = make_words()
    stops = StopStrings(tokenizer, ["zz", "다"])
    # Two of three bytes of the character.
    tokens = tokenizer.encode("z가z나") + tokenizer.encode("다")[:2]
    assert stops.find(tokens) is None
    assert not stops.may_have_come(tokens, 1)
    assert stops.find([]) is None


def test_the_end_of_a_long_answer_is_enough_to_see_a_string() -> None:
    tokenizer = make_tokenizer()
    stops = StopStrings(tokenizer, ["STOP"])
    tokens = ids("x" * 500 + "STOP" + "y" * 3)
    assert stops.may_have_come(tokens, 4)
    assert not stops.may_have_come(tokens + ids("y" * 200), 1)
    assert stops.find(tokens) == StringEnd(500, "x" * 500)


def test_a_special_token_may_be_named_and_its_name_is_no_text() -> None:
    tokenizer = make_tokenizer()
    tokens = [*ids("ab"), BOS, *ids("c"), END]
    assert StopStrings(tokenizer, ["<|end|>"]).find(tokens) == StringEnd(4, "abc")
    assert StopStrings(tokenizer, ["os>"]).find(tokens) == StringEnd(2, "ab")


def test_a_string_before_the_eos_token_ends_the_answer() -> None:
    tokenizer = make_tokenizer()
    stops = StopStrings(tokenizer, ["c"])
    log_probs = [-1.0, -2.0, -4.0, -8.0]
    found = finish_answer([*ids("abc"), END], log_probs, stop_ids=[END], stop_strings=stops)
    assert found == Answer(ids("ab"), "stop_string", -3.0, "ab")
    found = finish_answer([*ids("abx"), END], log_probs, stop_ids=[END], stop_strings=stops)
    assert found == Answer(ids("abx"), "stop", -15.0)
    assert answer_text(tokenizer, found) == "abx"
    # What follows the end is none of the answer's, the string in it neither.
    found = finish_answer([*ids("ab"), END, *ids("c")], log_probs, stop_ids=[END], stop_strings=stops)
    assert found == Answer(ids("ab"), "stop", -7.0)
    assert finish_answer(ids("abx"), None, stop_ids=[END], stop_strings=None) == Answer(ids("abx"), "length", None)


def test_settings_of_a_tuned_model_say_how_it_was_evaluated_but_for_lengths_and_strings(tmp_path: Path) -> None:
    from transformers import GenerationConfig

    from lm_tuning.models.generation_settings import settings_of_answers
    from lm_tuning.parameters.generation import GenerationParameters
    from tests.support.tiny import PAD, make_model

    generation = GenerationParameters(
        do_sample=True, temperature=0.7, top_p=0.9, repetition_penalty=1.2, no_repeat_ngram_size=3, stop_strings=["x"]
    )
    stored = settings_of_answers(
        make_model(), make_tokenizer(), supervised_stop_ids=[END], first_id=None, pad_id=PAD, generation=generation
    )
    stored.save_pretrained(tmp_path)
    read = GenerationConfig.from_pretrained(tmp_path)
    assert (read.do_sample, read.temperature, read.top_p, read.top_k) == (True, 0.7, 0.9, 0)
    assert (read.repetition_penalty, read.no_repeat_ngram_size, read.num_beams) == (1.2, 3, 1)
    assert read.stop_strings is None
    assert read.max_new_tokens is None
