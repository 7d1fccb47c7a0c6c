"""What separates the fields of a CSV file is found where nothing else is possible, and asked for elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lm_tuning.data.readers.base import ReadSettings, RowSource
from lm_tuning.data.readers.open import open_rows
from lm_tuning.data.sources.describe import describe_file
from lm_tuning.errors import UserError


def open_table(folder: Path, content: str, name: str = "a.csv", delimiter: str = "auto") -> RowSource:
    path = folder / name
    path.write_bytes(content.encode())
    return open_rows(describe_file(path, key="data.path"), settings=ReadSettings(delimiter=delimiter))


def rows_of(*arguments: Any, **options: Any) -> list[Any]:
    return [tuple(row.values()) if isinstance(row, dict) else row.kind for _, row in open_table(*arguments, **options)]


@pytest.mark.parametrize("mark", [";", "|", "\t"])
def test_another_separator_is_found_where_header_and_rows_agree_on_it(tmp_path, mark):
    plain = f"prompt{mark}response\nhi, you{mark}yes, me\na{mark}b\n"
    assert rows_of(tmp_path, plain) == [("hi, you", "yes, me"), ("a", "b")]
    quoted = f'"prompt"{mark}"response"\n"one{mark} ""two"""{mark}"line\nbreak"\n'
    assert rows_of(tmp_path, quoted) == [(f'one{mark} "two"', "line\nbreak")]


def test_commas_in_a_file_of_tabs(tmp_path):
    assert rows_of(tmp_path, "prompt,response\na,b\n", name="a.tsv") == [("a", "b")]


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        ("prompt,response\na; b,c;d\n", [("a; b", "c;d")]),
        ("text\na; b\nc; d\n", [("a; b",), ("c; d",)]),
        ("text\na;b;c\nd|e\n", [("a;b;c",), ("d|e",)]),
        ('text\n"one; ""two"", three"\n', [('one; "two", three',)]),
        ("prompt,response\na;b\n", ["wrong_field_count"]),
        ("a;b,c\n1,2\n3;4,5\n", [("1", "2"), ("3;4", "5")]),
        ("a;b\nno mark\nx;y\n", [("no mark",), ("x;y",)]),
    ],
)
def test_marks_in_the_texts_are_never_taken_for_separators(tmp_path, content, rows):
    assert rows_of(tmp_path, content) == rows


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a;b|c\nx;y|z\n", ["can be cut at a semicolon (';') or a vertical bar ('|')", 'data.delimiter: ";"']),
        ("a;b, c\nx;y\nz;w\n", ["2 of its first 2 rows have another number of fields", "a semicolon (';')"]),
        ('"a";"b"\n"c";"d";"e"\n', ["the fields look separated by a semicolon (';')", 'set data.delimiter: ";"']),
        ('"a"\t"b"\n"c"\n', ["the fields look separated by a tab", "set data.delimiter: tab"]),
    ],
)
def test_where_more_than_one_is_possible_the_key_is_named(tmp_path, content, expected):
    with pytest.raises(UserError) as caught:
        open_table(tmp_path, content)
    for text in ("a.csv", *expected):
        assert text in str(caught.value)


def test_a_separator_that_is_set_is_taken(tmp_path):
    assert rows_of(tmp_path, "a;b\n1;2;3\n4;5\n", delimiter=";") == ["wrong_field_count", ("4", "5")]
    assert rows_of(tmp_path, "a\tb\n1\t2\n", delimiter="tab") == [("1", "2")]
    assert rows_of(tmp_path, "a;b\n1;2\n", delimiter=",") == [("1;2",)]


def test_the_line_that_excel_writes_first_is_no_header(tmp_path):
    assert rows_of(tmp_path, "sep=;\r\na;b\r\n1,5;2\r\n") == [("1,5", "2")]
    assert rows_of(tmp_path, "\ufeffSEP=|\na|b\n1|2\n") == [("1", "2")]


def test_a_column_that_is_missing_since_the_header_was_not_cut_says_so(tmp_path):
    source = open_table(tmp_path, "prompt;response\na;b;c\nd;e\n")
    assert source.columns == ["prompt;response"]
    for told in (source.explain_missing("prompt"), source.describe_inside()):
        assert "The fields seem to be separated by a semicolon (';'): set data.delimiter to it." in told
    assert "lacks a header line" in open_table(tmp_path, "hello there,pos\nbye,neg\n").explain_missing("text")


def test_lines_of_old_macs_are_still_read(tmp_path):
    assert rows_of(tmp_path, 'a,b\r1,2\r"x\ry",3\r') == [("1", "2"), ("x\ry", "3")]
