"""Characters become exactly the tokens that hold them, whatever the tokenizer does at the edges."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from lm_tuning.text.align.masks import RowEncoder, added_around, bare_backend, inner_span, token_span, tokenize_row
from lm_tuning.text.render.plain import RenderedRow, render_plain, render_text
from tests.support.tiny import ASSISTANT, BOS, END, USER, ids, make_tokenizer


def byte_level(**options: Any) -> Any:
    """Build a byte-level tokenizer as GPT-2, Llama 3 and SmolLM2 have, trained on a few words."""
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=True)
    for name, value in options.items():
        setattr(core, name, value)
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken("<|end|>", special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["answer: yes no yes  answer", "answer:\n\n\nyes"] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")


def chunks(tokenizer: Any, text: str, part: str) -> list[str]:
    """Return the tokens of the part of a text, as text."""
    start = text.index(part)
    with bare_backend(tokenizer) as backend:
        encoding = backend.encode(text, add_special_tokens=False)
        first, after = token_span(encoding, (start, start + len(part)), len(text))
        return [backend.decode([token], skip_special_tokens=False) for token in encoding.ids[first:after]]


def test_an_answer_keeps_its_leading_white_space_although_positions_are_trimmed():
    tokenizer = byte_level()
    assert chunks(tokenizer, "answer:\n  yes<|end|>", "\n  yes<|end|>")[0].startswith("\n")
    assert "".join(chunks(tokenizer, "answer:\n  yes<|end|>", "\n  yes<|end|>")) == "\n  yes<|end|>"
    assert "".join(chunks(tokenizer, "answer: yes \n<|end|>no", "yes \n")) == " yes \n"


def test_a_token_across_the_edge_belongs_to_the_answer():
    assert chunks(byte_level(), "answer: yes<|end|>", "yes<|end|>") == [" yes", "<|end|>"]


def test_every_byte_of_a_last_character_is_inside():
    tokenizer = byte_level()
    with bare_backend(tokenizer) as backend:
        encoding = backend.encode("a 값 b", add_special_tokens=False)
        first, after = token_span(encoding, (2, 3), len("a 값 b"))
        assert backend.decode(encoding.ids[first:after]).strip() == "값"
        assert after - first >= 3


def test_an_empty_range_is_an_empty_span_at_its_position():
    tokenizer = make_tokenizer()
    with bare_backend(tokenizer) as backend:
        encoding = backend.encode("abc", add_special_tokens=False)
    assert token_span(encoding, (1, 1), 3) == (1, 1)
    assert token_span(encoding, (3, 3), 3) == (3, 3)


def test_characters_that_the_normalizer_drops_are_passed_over():
    tokenizer = byte_level(normalizer=normalizers.Replace("~", ""))
    assert "".join(chunks(tokenizer, "answer:~yes~<|end|>", "~yes~")) == "yes"


def test_inner_tokens_leave_out_what_lies_across_the_edges():
    tokenizer = byte_level()
    text = "answer: yes no"
    with bare_backend(tokenizer) as backend:
        encoding = backend.encode(text, add_special_tokens=False)
        first, after = inner_span(encoding, (8, 11), len(text))
        assert backend.decode(encoding.ids[first:after]) == ""
        first, after = inner_span(encoding, (0, 11), len(text))
        assert backend.decode(encoding.ids[first:after]) == "answer: yes"


def test_the_backend_is_given_back_as_it_was():
    tokenizer = byte_level()
    backend = tokenizer.backend_tokenizer
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    with pytest.raises(RuntimeError), bare_backend(tokenizer) as bare:
        assert bare.post_processor is None
        assert len(bare.encode("yes no yes no")) not in (2, 9)
        raise RuntimeError
    assert isinstance(backend.post_processor, processors.ByteLevel)
    assert backend.truncation["max_length"] == 2
    assert backend.padding["length"] == 9


def test_the_prefix_is_what_the_tokenizer_adds_in_front():
    assert added_around(make_tokenizer(adds_bos=True)) == ([BOS], [])
    assert added_around(make_tokenizer()) == ([], [])


def tokens(row: RenderedRow, *, loss_on: str = "assistant", prefix: list[int] | None = None) -> Any:
    with bare_backend(make_tokenizer()) as backend:
        encoding = backend.encode(row.text, add_special_tokens=False)
        return tokenize_row(row, encoding, loss_on=loss_on, prefix=prefix or [], end_id=END)


def chunks_of(tokenizer: Any, row: RenderedRow) -> tuple[list[str], list[str]]:
    """Return the tokens before the answer and those of the answer, as text."""
    with bare_backend(tokenizer) as backend:
        [encoding] = RowEncoder(backend).encode([row])
        first, after = token_span(encoding, row.answers[0], len(row.text))
        tokens = [backend.decode([token], skip_special_tokens=False) for token in encoding.ids]
    return tokens[:first], tokens[first:after]


def test_no_token_lies_across_the_position_where_generation_begins():
    tokenizer = byte_level()
    row = RenderedRow("answer:\n\n\nyes<|end|>", [], [(8, 18)], is_closed=True, openings=[8])
    before, answer = chunks_of(tokenizer, row)
    assert before[-1] == "\n"
    assert "".join(answer) == "\n\nyes<|end|>"
    row.openings = []
    assert chunks_of(tokenizer, row)[1][0] == "\n\n", "else the tokenizer joins both sides"


def test_a_space_before_the_answer_may_join_its_first_word():
    before, answer = chunks_of(byte_level(), render_plain("answer: ", "yes"))
    assert "".join(before) == "answer:"
    assert answer == [" yes"]
    before, answer = chunks_of(byte_level(), render_plain("answer:\n", "\nyes"))
    assert "".join(before) == "answer:\n"
    assert "".join(answer) == "\nyes"


def test_rows_stay_joined_where_chunks_would_change_the_text():
    tokenizer = byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True))
    row = RenderedRow("answeryes", [], [(3, 9)], is_closed=True, openings=[3])
    with bare_backend(tokenizer) as backend:
        [encoding] = RowEncoder(backend).encode([row])
        assert backend.decode(encoding.ids) == " answeryes"


TEXT = "<|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>d<|end|>"
ROW = RenderedRow(TEXT, prompts=[(8, 9), (45, 46)], answers=[(29, 37), (66, 74)], is_closed=True)
IDS = [USER, *ids("a"), END, ASSISTANT, *ids("b"), END, USER, *ids("c"), END, ASSISTANT, *ids("d"), END]


@pytest.mark.parametrize(
    ("loss_on", "spans"), [("assistant", [(4, 6), (10, 12)]), ("completion", [(10, 12)]), ("all", [(0, 12)])]
)
def test_the_loss_is_on_what_was_asked_for(loss_on, spans):
    row = tokens(ROW, loss_on=loss_on)
    assert row.ids == IDS
    assert row.spans == spans


def test_a_prefix_moves_the_spans_and_is_not_doubled():
    row = tokens(ROW, prefix=[BOS])
    assert row.ids == [BOS, *IDS]
    assert row.spans == [(5, 7), (11, 13)]
    begun = RenderedRow("<bos>" + TEXT, [], [(34, 42), (71, 79)], is_closed=True)
    assert tokens(begun, prefix=[BOS]).ids == [BOS, *IDS]
    assert tokens(begun, prefix=[BOS]).spans == [(5, 7), (11, 13)]


def test_an_open_row_gets_its_end_once_and_learns_it():
    row = tokens(render_text("ab"))
    assert row.ids == [*ids("ab"), END]
    assert row.spans == [(0, 3)]
    assert tokens(render_text("ab<|end|>")).ids == [*ids("ab"), END]
