"""Long rows lose prompt before answer, and never half a character or the scaffolding around them."""

from __future__ import annotations

from typing import Any

import pytest

from lm_tuning.text.chat import ChatRenderer
from lm_tuning.text.masks import TokenizedRow, bare_backend, tokenize_row
from lm_tuning.text.rendering import RenderedRow, RowRefused, as_messages, render_plain, render_text
from lm_tuning.text.truncation import later_exchanges, shorten_row
from tests.support.tiny import ASSISTANT, END, SYSTEM, USER, ids, make_tokenizer


def shorten(rendered: RenderedRow, limit: int, truncation: str = "truncate_prompt") -> tuple[TokenizedRow, str]:
    with bare_backend(make_tokenizer()) as backend:
        encoding = backend.encode(rendered.text, add_special_tokens=False)
    row = tokenize_row(rendered, encoding, loss_on="assistant", prefix=[], end_id=END)
    assert len(row.ids) > limit
    return shorten_row(row, rendered, encoding, limit=limit, truncation=truncation)


def chat(prompt: str, response: str, system: str | None = None) -> RenderedRow:
    return ChatRenderer(make_tokenizer()).render(as_messages(prompt, response, system))


def test_the_prompt_loses_its_start_and_keeps_its_scaffolding():
    row, note = shorten(chat("0123456789", "yes"), 12)
    assert row.ids == [USER, *ids("56789"), END, ASSISTANT, *ids("yes"), END]
    assert len(row.ids) == 12
    assert row.spans == [(8, 12)]
    assert note == "prompt_shortened"


def test_the_longest_prompt_is_cut_first_and_then_the_next():
    row, _ = shorten(chat("12345", "y", system="abcdefgh"), 15)
    assert row.ids == [SYSTEM, *ids("fgh"), END, USER, *ids("12345"), END, ASSISTANT, *ids("y"), END]
    row, _ = shorten(chat("12345", "y", system="abcdefgh"), 9)
    assert row.ids == [SYSTEM, END, USER, *ids("45"), END, ASSISTANT, *ids("y"), END]


def test_a_prompt_may_vanish_for_the_answer():
    row, note = shorten(chat("0123456789", "yes"), 7)
    assert row.ids == [USER, END, ASSISTANT, *ids("yes"), END]
    assert note == "prompt_shortened"


def test_an_answer_that_does_not_fit_alone_loses_its_end_and_leaves_the_prompt_half_of_the_limit():
    row, note = shorten(chat("0123456789", "abcdefghij"), 8)
    assert row.ids == [USER, *ids("6789"), END, ASSISTANT, *ids("a")]
    assert row.spans == [(7, 8)]
    assert note == "answer_shortened"


def test_nothing_is_left_when_the_scaffolding_fills_the_limit():
    with pytest.raises(RowRefused) as refusal:
        shorten(chat("0123456789", "yes"), 3)
    assert refusal.value.reason == "no_answer_left"


def test_the_plain_prompt_is_cut_too():
    row, note = shorten(render_plain("0123456789", "yes"), 9)
    assert row.ids == [*ids("6789\n"), *ids("yes"), END]
    assert row.spans == [(5, 9)]
    assert note == "prompt_shortened"


def test_text_keeps_its_beginning():
    row, note = shorten(render_text("0123456789"), 4)
    assert row.ids == ids("0123")
    assert row.spans == [(0, 4)]
    assert note == "end_cut"


def test_cutting_the_end_can_leave_nothing_to_learn():
    row, note = shorten(chat("0123", "yes"), 8, "truncate_end")
    assert row.ids == [USER, *ids("0123"), END, ASSISTANT, *ids("y")]
    assert note == "end_cut"
    with pytest.raises(RowRefused) as refusal:
        shorten(chat("0123", "yes"), 7, "truncate_end")
    assert refusal.value.reason == "no_answer_left"


@pytest.mark.parametrize("truncation", ["drop", "error"])
def test_rows_are_refused_where_nothing_may_be_cut(truncation):
    with pytest.raises(RowRefused) as refusal:
        shorten(chat("0123", "yes"), 8, truncation)
    assert refusal.value.reason == "too_long"


def test_no_character_is_cut_in_half():
    from tests.text.test_masks import byte_level

    tokenizer = byte_level()
    rendered = render_plain("값값값값", "yes")
    with bare_backend(tokenizer) as backend:
        encoding = backend.encode(rendered.text, add_special_tokens=False)
        row = tokenize_row(rendered, encoding, loss_on="assistant", prefix=[], end_id=tokenizer.eos_token_id)
        for limit in range(len(row.ids) - 9, len(row.ids)):
            cut, _ = shorten_row(row, rendered, encoding, limit=limit, truncation="truncate_prompt")
            assert len(cut.ids) <= limit
            assert backend.decode(cut.ids).replace("값", "") == "\nyes"


def conversation(*turns: str) -> list[dict[str, Any]]:
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[turn[0]], "content": turn} for turn in turns]


def test_the_oldest_exchanges_go_first_and_the_system_message_stays():
    messages = conversation("s", "u1", "a1", "u2", "a2", "u3", "a3")
    assert later_exchanges(messages, 0.1) == conversation("s", "u2", "a2", "u3", "a3")
    assert later_exchanges(messages, 0.4) == conversation("s", "u3", "a3")
    assert later_exchanges(messages, 0.9) == conversation("s", "u3", "a3"), "the last exchange stays"


def test_a_tool_call_stays_with_the_question_that_led_to_it():
    messages = conversation("u1", "a1", "t1", "a1b", "u2", "a2")
    assert later_exchanges(messages, 0.1) == conversation("u2", "a2")


def test_a_single_exchange_has_nothing_older():
    assert later_exchanges(conversation("s", "u1", "a1"), 0.5) is None
    assert later_exchanges(conversation("u1", "a1", "u2"), 0.5) is None, "what follows the last answer is no exchange"
