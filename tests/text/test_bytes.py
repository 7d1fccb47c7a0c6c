"""Bytes of tokens are those that the tokenizer's decoder gives, and put every token in its place."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import decoders, normalizers

from lm_tuning.text.align.bytes import AlignedRows, build_byte_table
from lm_tuning.text.align.masks import AlignedTokens, bare_backend
from lm_tuning.text.store.table import flatten_ids
from tests.support import templates
from tests.support.real_tokenizer import real_tokenizer
from tests.support.tiny import make_tokenizer
from tests.text.conftest import make_byte_tokenizer, tokenize_rows

TEXTS = ["answer: yes<|end|>", "", "값 é😀 no\n\n", "yes"]


def align(texts: list[str]) -> tuple[AlignedRows, list[list[int]]]:
    tokenizer = make_byte_tokenizer()
    with bare_backend(tokenizer) as backend:
        table = build_byte_table(backend)
        ids = [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
    assert table is not None
    return AlignedRows(table, texts, *flatten_ids(ids)), ids


def test_the_default_models_tokens_are_bytes():
    tokenizer = real_tokenizer()
    table = build_byte_table(tokenizer.backend_tokenizer)
    assert table is not None
    text = "Hello, 민수! 😀 <|im_end|>"
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    assert table.spell(ids).to_pybytes() == text.encode()
    assert table.lengths[ids].sum() == len(text.encode())


def test_tokens_that_are_not_bytes_have_no_table():
    assert build_byte_table(make_tokenizer().backend_tokenizer) is None


def test_a_decoder_that_says_something_else_has_no_table(monkeypatch):
    backend = make_byte_tokenizer().backend_tokenizer
    monkeypatch.setattr("lm_tuning.text.align.bytes.is_byte_level", lambda backend: True)
    assert build_byte_table(backend) is not None
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("swer", "x")])
    assert build_byte_table(backend) is None


def test_tokens_lie_where_the_library_says_so():
    aligned, _ = align(TEXTS)
    assert aligned.proven.tolist() == [True] * 4
    with bare_backend(make_byte_tokenizer()) as backend:
        for index, text in enumerate(TEXTS):
            encoding = backend.encode(text, add_special_tokens=False)
            row = aligned.row(index)
            assert (row.ids, row.offsets) == (encoding.ids, encoding.offsets)
            assert [row.char_to_token(i) for i in range(len(text) + 1)] == [
                encoding.char_to_token(i) for i in range(len(text) + 1)
            ]
            assert [row.token_to_chars(i) for i in range(len(row))] == encoding.offsets


def test_spans_of_many_rows_are_found_at_once():
    aligned, ids = align(TEXTS)
    rows = np.array([0, 0, 2, 2, 3])
    first, after = aligned.spans(rows, np.array([8, 8, 0, 1, 0]), np.array([11, 8, 1, 3, 3]))
    decode = make_byte_tokenizer().backend_tokenizer.decode
    found = [decode(ids[row][a:b], skip_special_tokens=False) for row, a, b in zip(rows, first, after, strict=True)]
    assert found == [" yes", "", "값", " é", "yes"], "a token across the edge is inside, an empty range holds none"


def test_crossed_positions_are_those_inside_a_token():
    aligned, _ = align(TEXTS)
    crossed = aligned.are_crossed(np.array([0, 0, 0, 0, 3]), np.array([0, 7, 8, 11, 3]))
    assert crossed.tolist() == [False, False, True, False, False]
    assert aligned.are_crossed(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)).tolist() == []


def test_rows_whose_tokens_spell_something_else_are_not_proven():
    _, ids = align(["yes", "no", "값"])
    tokenizer = make_byte_tokenizer()
    table = build_byte_table(tokenizer.backend_tokenizer)
    assert table is not None
    assert AlignedRows(table, ["yes", "on", "값"], *flatten_ids(ids)).proven.tolist() == [True, False, True]
    assert AlignedRows(table, ["yes!", "no", "값"], *flatten_ids(ids)).proven.tolist() == [False, True, True]


def test_a_row_that_the_tokenizer_normalizes_leaves_its_neighbours_alone():
    tokenizer = make_byte_tokenizer(parts={"normalizer": normalizers.NFC()}, chat_template=None)
    rows = [("a", "yes", None), ("a", "e\u0301!", None), ("a", "no", None)]
    made, counts = tokenize_rows(tokenizer, "prompt_response", rows)
    answers = [tokenizer.decode(row.input_ids[row.spans[0][0] : row.spans[0][1]]) for row in made]
    assert answers == ["yes<|end|>", "é!<|end|>", "no<|end|>"]
    assert counts.counts["not_round_trip"] == 1
    assert [row.row_id for row in made] == [1, 2, 3]


def test_a_position_that_no_token_holds_has_none():
    tokens = AlignedTokens([7, 8], [0, 3], [1, 4])
    assert [tokens.char_to_token(position) for position in range(5)] == [0, None, None, 1, None]


@pytest.mark.parametrize("text", ["", "a"])
def test_an_empty_chunk_is_no_problem(text):
    tokenizer = make_byte_tokenizer()
    made, counts = tokenize_rows(tokenizer, "text", [(text,)])
    assert [row.input_ids.tolist()[1:] for row in made] == ([[tokenizer.eos_token_id]] if text else [])
    assert counts.counts["no_answer_left"] == (not text)
    assert tokenize_rows(tokenizer, "text", [])[0] == []


def test_rows_are_cut_where_generation_begins_and_their_neighbours_are_not():
    tokenizer = make_byte_tokenizer(chat_template=templates.PHI)
    rows = [("a", "yes", None), ("a", "\n\nyes", None), ("a", "\n\n<bos>", None)]
    made, _ = tokenize_rows(tokenizer, "prompt_response", rows)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
    )
    expected = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert [row.input_ids[: row.spans[0][0]].tolist() for row in made] == [expected] * 3
    assert [tokenizer.decode(row.input_ids[slice(*row.spans[0])]) for row in made] == [
        "yes<|end|>",
        "\n\nyes<|end|>",
        "\n\n<bos><|end|>",
    ]
    joined = tokenizer(prompt + "\n\nyes<|end|>", add_special_tokens=False)["input_ids"]
    assert joined[: len(expected)] != expected, "else there would be nothing to cut"
