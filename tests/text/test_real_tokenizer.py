"""The default model's tokenizer and chat template, on real rows where they are at hand."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.parameters.data import TokenizeParameters
from lm_tuning.text.store.table import open_split
from lm_tuning.text.tokenize import write_tokens
from tests.support.real_tokenizer import real_tokenizer
from tests.text.conftest import store_examples, supervised

CODE = "    return x\n"
CONVERSATION = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello, 민수! 😀"},
    {"role": "user", "content": "Code?"},
    {"role": "assistant", "content": CODE},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return real_tokenizer()


def test_pad_and_eos_are_one_token_upstream_and_two_here(tokenizer):
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|endoftext|>", 0)


def test_both_answers_are_supervised_to_the_character_with_their_ends(tokenize, tokenizer):
    summary, [row] = tokenize(tokenizer, "messages", [CONVERSATION])
    assert [tokenizer.decode(row.input_ids[start:end]) for start, end in row.spans] == [
        "Hello, 민수! 😀<|im_end|>",
        CODE + "<|im_end|>",
    ]
    assert row.input_ids[-1] == 2
    assert summary["splits"]["train"]["changed"] == {}
    rendered = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert tokenizer.decode(row.input_ids) == rendered.rstrip("\n")
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant")


def test_ids_are_those_that_the_template_call_of_transformers_gives(tokenize, tokenizer):
    # An answer that begins with white space is cut apart from its prompt; theirs is not.
    conversation = [*CONVERSATION[:3], {"role": "assistant", "content": CODE.strip()}]
    _, [row] = tokenize(tokenizer, "messages", [conversation])
    expected = tokenizer.apply_chat_template(conversation, return_dict=True)["input_ids"]
    assert expected[: len(row.input_ids)] == row.input_ids.tolist()
    assert tokenizer.decode(expected[len(row.input_ids) :]) == "\n"


def test_the_prompt_of_a_row_is_what_generation_starts_from(tokenize, tokenizer):
    _, [row] = tokenize(tokenizer, "messages", [CONVERSATION])
    prompt = tokenizer.apply_chat_template(CONVERSATION[:3], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert row.input_ids[: row.spans[-1][0]].tolist() == prompt


def test_real_rows_come_through_whole(tmp_path: Path, tokenizer):
    data = Path(os.environ.get("LM_TUNING_TEST_DATA", "../shared/data")) / "gsm8k" / "test.jsonl"
    if not data.is_file():
        pytest.skip(f"no {data}; LM_TUNING_TEST_DATA names the folder")
    lines = data.read_text(encoding="utf-8").splitlines()[:300]
    rows = [(row["question"], row["answer"], None) for row in map(json.loads, lines)]
    examples = store_examples(tmp_path / "examples", "prompt_response", rows)
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    summary = write_tokens(tokens, examples, tokenizer, TokenizeParameters(max_length_tokens=512))
    train = summary["splits"]["train"]
    assert (train["num_rows"], train["changed"], train["dropped"]) == (300, {}, {})
    for row, (question, answer, _) in zip(open_split(tokens, "train"), rows, strict=True):
        assert tokenizer.decode(supervised(row)) == answer + "<|im_end|>"
        assert tokenizer.decode(row.input_ids[: row.spans[0][0]]).endswith(
            f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        )
