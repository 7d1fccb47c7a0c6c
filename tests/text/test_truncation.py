"""Long rows lose prompt before answer, and never half a character or the scaffolding around them."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_tuning.text.align.masks import TokenizedRow, bare_backend, tokenize_row
from lm_tuning.text.render.chat import ChatRenderer
from lm_tuning.text.render.plain import RenderedRow, RowRefused, as_messages, render_plain, render_text
from lm_tuning.text.tokenizers.truncation import (
    align_columns,
    choose_cuts,
    later_exchanges,
    shorten_prompt,
    shorten_row,
)
from tests.support.tiny import ASSISTANT, END, SYSTEM, USER, ids, make_tokenizer


def shorten(
    rendered: RenderedRow, limit: int, truncation: str = "truncate_prompt", **options: Any
) -> tuple[TokenizedRow, list[str]]:
    with bare_backend(make_tokenizer()) as backend:
        encoding = backend.encode(rendered.text, add_special_tokens=False)
    row = tokenize_row(rendered, encoding, loss_on="assistant", prefix=[], end_id=END)
    assert len(row.ids) > limit
    return shorten_row(row, rendered, encoding, limit=limit, truncation=truncation, **options)


def chat(prompt: str, response: str, system: str | None = None) -> RenderedRow:
    return ChatRenderer(make_tokenizer()).render(as_messages(prompt, response, system))


@pytest.mark.parametrize(("cut_at", "kept"), [("middle", "01289"), ("end", "01234"), ("start", "56789")])
def test_the_prompt_loses_what_the_parameter_says_and_keeps_its_scaffolding(cut_at, kept):
    row, notes = shorten(chat("0123456789", "yes"), 12, cut_prompt_at=cut_at)
    assert row.ids == [USER, *ids(kept), END, ASSISTANT, *ids("yes"), END]
    assert row.spans == [(8, 12)]
    assert notes == ["prompt_shortened"]


def test_the_longest_prompt_gives_way_down_to_the_length_of_the_next():
    row, _ = shorten(chat("12345", "y", system="abcdefgh"), 18)
    assert row.ids == [SYSTEM, *ids("abcfgh"), END, USER, *ids("12345"), END, ASSISTANT, *ids("y"), END]
    row, notes = shorten(chat("12345", "y", system="abcdefgh"), 11)
    assert row.ids == [SYSTEM, *ids("ah"), END, USER, *ids("15"), END, ASSISTANT, *ids("y"), END]
    assert notes == ["prompt_shortened"]


def test_a_prompt_may_vanish_for_the_answer_and_that_is_told():
    row, notes = shorten(chat("0123456789", "yes"), 7)
    assert row.ids == [USER, END, ASSISTANT, *ids("yes"), END]
    assert notes == ["prompt_shortened", "prompt_emptied"]


def test_an_answer_that_does_not_fit_alone_leaves_the_prompt_half_of_the_limit():
    row, notes = shorten(chat("0123456789", "abcdefghij"), 8)
    assert row.ids == [USER, *ids("0189"), END, ASSISTANT, *ids("a")]
    assert row.spans == [(7, 8)]
    assert notes == ["answer_shortened"]


def test_nothing_is_left_when_the_scaffolding_fills_the_limit():
    with pytest.raises(RowRefused) as refusal:
        shorten(chat("0123456789", "yes"), 3)
    assert refusal.value.reason == "no_answer_left"


def test_the_plain_prompt_is_cut_too_and_keeps_the_line_break_before_the_answer():
    row, notes = shorten(render_plain("0123456789", "yes"), 9, cut_prompt_at="end")
    assert row.ids == [*ids("0123\n"), *ids("yes"), END]
    assert row.spans == [(5, 9)]
    assert notes == ["prompt_shortened"]


def test_a_plain_system_message_is_a_prompt_of_its_own():
    row, _ = shorten(render_plain("0123456789", "yes", "ab"), 13)
    assert row.ids == [*ids("ab\n\n0189\n"), *ids("yes"), END]


def test_text_keeps_its_beginning():
    row, notes = shorten(render_text("0123456789"), 4)
    assert row.ids == ids("0123")
    assert row.spans == [(0, 4)]
    assert notes == ["end_cut"]


def test_cutting_the_end_can_leave_nothing_to_learn():
    row, notes = shorten(chat("0123", "yes"), 8, "truncate_end")
    assert row.ids == [USER, *ids("0123"), END, ASSISTANT, *ids("y")]
    assert notes == ["end_cut"]
    with pytest.raises(RowRefused) as refusal:
        shorten(chat("0123", "yes"), 7, "truncate_end")
    assert refusal.value.reason == "no_answer_left"


def test_columns_give_way_and_the_text_between_them_stays():
    rendered = chat("Sum up: 0123456789 in a word", "yes", system="s")
    yielding = align_columns(rendered, "Sum up: 0123456789 in a word", [(8, 18)])
    assert [rendered.text[low:high] for low, high in yielding] == ["s", "0123456789"]
    row, notes = shorten(rendered, 32, yielding=yielding)
    assert row.ids == [SYSTEM, *ids("s"), END, USER, *ids("Sum up: 0189 in a word"), END, ASSISTANT, *ids("yes"), END]
    assert notes == ["prompt_shortened"]


def test_columns_are_found_where_the_template_trims_the_prompt():
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}"
    rendered = ChatRenderer(make_tokenizer(chat_template=template)).render(as_messages("\n[ab]cd ", "y"))
    yielding = align_columns(rendered, "\n[ab]cd ", [(2, 4), (5, 8)])
    assert [rendered.text[low:high] for low, high in yielding] == ["ab", "cd"]


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
            for cut_at in ("middle", "end", "start"):
                cut, _ = shorten_row(
                    row, rendered, encoding, limit=limit, truncation="truncate_prompt", cut_prompt_at=cut_at
                )
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


@given(
    lengths=st.lists(st.integers(min_value=0, max_value=30), min_size=1, max_size=5),
    share=st.floats(min_value=0, max_value=1),
    cut_at=st.sampled_from(["middle", "end", "start"]),
)
def test_exactly_so_much_goes_and_nothing_short_before_something_long(lengths, share, cut_at):
    edges = [0, *accumulate(lengths)]
    spans = list(pairwise(edges))
    num_cut = round(share * edges[-1])
    offsets = [(position, position + 1) for position in range(edges[-1])]
    cuts = choose_cuts(spans, offsets, num_cut=num_cut, cut_at=cut_at)
    assert sum(end - start for start, end in cuts) == num_cut
    kept = [length - (end - start) for length, (start, end) in zip(lengths, cuts, strict=True)]
    longest = max(kept)
    assert all(left == length or left >= longest - 1 for left, length in zip(kept, lengths, strict=True))


def test_a_prompt_for_an_answer_keeps_its_special_tokens():
    prompt = [USER, *ids("0123456789"), END, ASSISTANT]
    assert shorten_prompt(prompt, 7, {USER, END, ASSISTANT}) == [USER, *ids("0189"), END, ASSISTANT]
    assert shorten_prompt(prompt, 2, {USER, END, ASSISTANT}) == [END, ASSISTANT]
    assert shorten_prompt(prompt, 99, {USER}) == prompt
