"""JSON is parsed fast where that is safe and exactly everywhere, so nothing is lost in silence."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_tuning.data.check.findings import RowProblem
from lm_tuning.data.readers.json_values import parse_line

VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=100, deadline=None)
@given(
    row=st.dictionaries(st.text(max_size=4), VALUE, max_size=4),
    separators=st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : "), (",\t", "\t:\t"), (",\r", "\r:")]),
    escaped=st.booleans(),
)
def test_every_row_is_parsed_as_the_standard_library_does(row, separators, escaped):
    text = json.dumps(row, separators=separators, ensure_ascii=escaped)
    parsed = parse_line(text.encode())
    assert parsed == row
    assert json.dumps(parsed) == json.dumps(row)  # also types and the order of keys


@pytest.mark.parametrize(
    "number", [2**63, 2**64, -(2**63) - 1, 10**30, 0.1, 1e400, -0.0], ids=lambda number: f"{number:.3g}"
)
def test_numbers_of_any_size_are_exact(number):
    text = f'{{"a": [{number!r}], "b": {number!r}}}'.replace("inf", "1e400")
    parsed = parse_line(text.encode())
    assert parsed == {"a": [number], "b": number}
    assert type(parsed["b"]) is type(number)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        '{"a": 1, "a" : 2}',
        '{"a":1,"a"\t:2}',
        '{"a":1,"a"\r:2}',
        '{"a": "x:y", "a": 2}',
        '{"a": "\\":", "b" : 1, "b": 2}',
        '{"b": {"a": 1, "a": 2}}',
        '{"b": [[{"c": 1}, {"a": 1, "a": 1}]]}',
        '{"a": 1, "\\u0061": 2}',
    ],
)
def test_a_key_that_stands_twice_is_a_problem_of_the_row(text):
    with pytest.raises(RowProblem, match="twice in one object") as caught:
        parse_line(text.encode())
    assert caught.value.kind == "repeated_name"


@settings(max_examples=100, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(['":', " :", "x", ":"])), min_size=1, max_size=4),
    gaps=st.lists(st.sampled_from(["", " ", "\t", "\r", "  "]), min_size=4, max_size=4),
)
def test_no_way_of_spacing_hides_a_repeated_key(pairs, gaps):
    members = ", ".join(f'"{key}"{gap}: {json.dumps(text)}' for (key, text), gap in zip(pairs, gaps, strict=False))
    keys = [key for key, _ in pairs]
    line = f"{{{members}}}".encode()
    if len(set(keys)) == len(keys):
        assert parse_line(line) == dict(pairs)
    else:
        with pytest.raises(RowProblem):
            parse_line(line)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_lacks_are_a_problem_of_the_row(literal):
    with pytest.raises(RowProblem, match=f"holds {literal}, which is no number of JSON") as caught:
        parse_line(f'{{"a": {literal}}}'.encode())
    assert caught.value.kind == "not_json"


def test_half_a_surrogate_pair_is_kept_for_the_check_of_the_row():
    assert parse_line(b'{"a": "\\ud800"}') == {"a": "\ud800"}


def test_bytes_that_are_no_utf8_are_told_by_position():
    with pytest.raises(UnicodeDecodeError) as caught:
        parse_line(b'{"a": "\xff"}')
    assert caught.value.start == 7
