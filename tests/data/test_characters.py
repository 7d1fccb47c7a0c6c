"""Characters that hint at damaged text are found among any others."""

from __future__ import annotations

import json
import re

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_tuning.data.check.values import find_odd_characters


def found(*texts: str | None, is_json: bool = False) -> list[tuple[int, str, str]]:
    return list(find_odd_characters(pa.array(texts, pa.string()), is_json=is_json))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a\x00b", "U+0000 (NUL)"),
        ("\x0c", "U+000C (FF)"),
        ("a\x7f", "U+007F (DEL)"),
        ("\x01é", "U+0001"),
        ("é\x85", "U+0085 (NEL)"),
        ("\x9f", "U+009F"),
    ],
)
def test_control_characters_are_named(text, name):
    expected = (1, "control_character", f"holds the control character {name}.")
    assert found("fine", text, None, "\t\r\n") == [expected]
    written = [json.dumps([one], ensure_ascii=False) for one in ("fine", text)]
    assert found(*written, is_json=True) == [expected]


def test_several_are_counted():
    assert found("\x00\x00\x01\ufffd\ufffd") == [
        (0, "control_character", "holds the control character U+0000 (NUL), and 2 more."),
        (0, "replacement_character", "holds U+FFFD 2 times: some of it was decoded wrongly once."),
    ]


def test_backslashes_in_json_are_no_control_characters():
    assert not found(json.dumps([r"\begin{x} \frac \u0000", "a\n\t"]), is_json=True)


def test_nothing_is_found_in_no_text_and_a_slice_is_read_from_its_beginning():
    assert found() == found(None) == found("") == []
    column = pa.array(["\x00", "fine", "\x01"], pa.string()).slice(1)
    assert [index for index, *_ in find_odd_characters(column, is_json=False)] == [1]


@given(st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=6))
def test_every_row_with_one_is_found_and_no_other(texts):
    pattern = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
    expected = [index for index, text in enumerate(texts) if text and pattern.search(text)]
    replaced = [index for index, text in enumerate(texts) if text and "\ufffd" in text]
    got = found(*texts)
    assert [index for index, kind, _ in got if kind == "control_character"] == expected
    assert [index for index, kind, _ in got if kind == "replacement_character"] == replaced
    encoded = [None if text is None else json.dumps({"a": [text]}, ensure_ascii=False) for text in texts]
    assert found(*encoded, is_json=True) == got
