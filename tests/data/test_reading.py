"""Rows come out of a file as they stand in it: nothing guessed, nothing lost, every problem with its row."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.data.check.findings import RowProblem
from lm_tuning.data.readers.base import ReadSettings, RowSource
from lm_tuning.data.readers.open import open_rows
from lm_tuning.data.sources.describe import describe_file
from lm_tuning.errors import UserError


def source_of(path: Path, *, max_rows: int | None = None) -> RowSource:
    return open_rows(describe_file(path, key="data.path"), settings=ReadSettings(max_rows=max_rows))


def rows_of(path: Path, *, max_rows: int | None = None) -> list[tuple[int, Any]]:
    return [
        (number, f"{row.kind}: {row.reason}" if isinstance(row, RowProblem) else row)
        for number, row in source_of(path, max_rows=max_rows)
    ]


def file_of(folder: Path, name: str, content: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def message_of(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        rows_of(path)
    return str(caught.value)


def test_json_lines_with_mark_and_crlf_read_like_plain_ones(tmp_path):
    windows = file_of(tmp_path, "windows.jsonl", b'\xef\xbb\xbf{"text":"one"}\r\n{"text":"two"}\r\n\r\n')
    plain = file_of(tmp_path, "plain.jsonl", b'{"text":"one"}\n{"text":"two"}\n')
    assert rows_of(windows) == rows_of(plain) == [(1, {"text": "one"}), (2, {"text": "two"})]
    assert source_of(windows).columns == ["text"]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_unicode_line_separators_stay_inside_strings(tmp_path, separator):
    row = {"text": f"one{separator}two"}
    lines = file_of(tmp_path, "a.jsonl", json.dumps(row, ensure_ascii=False) + "\n")
    array = file_of(tmp_path, "a.json", json.dumps([row], ensure_ascii=False))
    table = file_of(tmp_path, "a.csv", f"text\n{row['text']}\n")
    assert rows_of(lines) == rows_of(array) == rows_of(table) == [(1, row)]


def test_blank_lines_of_json_lines_are_counted_so_that_row_numbers_are_line_numbers(tmp_path):
    path = file_of(tmp_path, "a.jsonl", '{"a": 1}\n\n  \n{"a": 2}')
    assert rows_of(path) == [(1, {"a": 1}), (4, {"a": 2})]


def test_lines_that_are_no_rows_are_reported_by_number_and_the_rest_is_read(tmp_path):
    path = file_of(tmp_path, "a.jsonl", b'{"a": 1}\n{"a": \n[1, 2]\n{"a": "\xff"}\n{"a": 5}\n' + b"[" * 100_000 + b"\n")
    rows = dict(rows_of(path))
    assert rows[1] == {"a": 1}
    assert rows[2].startswith("not_json: is not JSON (Expecting value at character")
    assert rows[3] == "not_an_object: holds a list, where an object with columns is wanted."
    assert rows[4] == "not_utf8: byte 30 of the file is not UTF-8. Save the file as UTF-8."
    assert rows[5] == {"a": 5}
    assert rows[6].startswith("not_json")


def test_a_bare_tab_inside_a_text_is_named_with_its_character(tmp_path):
    rows = dict(rows_of(file_of(tmp_path, "a.jsonl", b'{"a": "x\ty"}\n{"a": 1}\n')))
    assert rows[1].startswith("not_json: is not JSON (Invalid control character at character 9)")
    message = message_of(file_of(tmp_path, "a.json", b'[{"a": "x\ty"}]'))
    assert "a.json, row 1: is not JSON (Invalid control character); the row begins" in message


def test_a_file_without_a_single_object_fails_with_its_first_lines(tmp_path):
    message = message_of(file_of(tmp_path, "a.jsonl", "one\ntwo\n"))
    assert "a.jsonl, row 1: is not JSON" in message
    assert "a.jsonl, row 2: is not JSON" in message


def test_an_array_under_the_name_of_json_lines_says_where_it_belongs(tmp_path):
    rows = dict(rows_of(file_of(tmp_path, "a.jsonl", '[\n{"a": 1}\n]\n')))
    assert rows[1].endswith("An array of rows belongs in a .json file.")
    assert rows[2] == {"a": 1}


def test_columns_are_those_of_all_first_rows(tmp_path):
    path = file_of(tmp_path, "a.jsonl", '{"a": 1}\n{"b": 1, "a": 2}\n')
    assert source_of(path).columns == ["a", "b"]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64, 1 << 20])
def test_json_arrays_are_streamed_in_chunks_of_any_size(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr("lm_tuning.data.readers.json_values._CHUNK_CHARACTERS", chunk)
    rows: list[Any] = [{"text": 'a "quoted" }, ]\n값', "n": [1, {"b": None}]}, {"text": "x" * 100}, {"text": ""}]
    for text in (json.dumps(rows), json.dumps(rows, indent=2, ensure_ascii=False), f" {json.dumps(rows)} \n\n"):
        assert rows_of(file_of(tmp_path, "a.json", b"\xef\xbb\xbf" + text.encode())) == list(enumerate(rows, 1))


@pytest.mark.parametrize("chunk", [1, 1 << 20])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[{"a": 1}, {"a": }]', "row 2: is not JSON"),
        ('[{"a": 1} {"a": 2}]', "'{' stands after row 1"),
        ('[{"a": 1}', "the file ends after row 1"),
        ('[{"a": 1}, ', "row 2: is not JSON"),
        ('[{"a": 1}][{"a": 2}]', "'[' stands behind the array"),
        ('{"rows":\n[{"a": 1}]}', "holds no array"),
        ("[]", "has no rows"),
        ("[1, 22]", "row 2: holds a number (22)"),
    ],
)
def test_damaged_json_arrays_name_the_row(tmp_path, monkeypatch, text, expected, chunk):
    monkeypatch.setattr("lm_tuning.data.readers.json_values._CHUNK_CHARACTERS", chunk)
    assert expected in message_of(file_of(tmp_path, "a.json", text))


def test_a_json_file_with_one_object_a_line_is_read_as_such(tmp_path):
    assert rows_of(file_of(tmp_path, "a.json", '{"a": 1}\n{"a": 2}\n')) == [(1, {"a": 1}), (2, {"a": 2})]


def test_csv_values_are_the_text_between_the_commas(tmp_path):
    content = "text,label\nnull,neg\nN/A,pos\nfine,None\n007,1e5\n2024-01-01,\n NaN ,true\n"
    rows = [tuple(row.values()) for _, row in rows_of(file_of(tmp_path, "a.csv", content))]
    assert rows == [
        ("null", "neg"),
        ("N/A", "pos"),
        ("fine", "None"),
        ("007", "1e5"),
        ("2024-01-01", ""),
        (" NaN ", "true"),
    ]


def test_csv_fields_hold_commas_quotes_and_line_breaks(tmp_path):
    path = file_of(tmp_path, "a.csv", 'a,b\n"one, ""two""\nthree",x\n\nlast,y\n\n')
    assert rows_of(path) == [(1, {"a": 'one, "two"\nthree', "b": "x"}), (2, {"a": "last", "b": "y"})]


def test_csv_from_windows_reads_like_a_plain_one_inside_fields_as_well(tmp_path):
    plain = 'a,b\n"one\ntwo",x\nthree,y\n'
    windows = file_of(tmp_path, "w.csv", b"\xef\xbb\xbf" + plain.replace("\n", "\r\n").encode())
    assert rows_of(windows) == rows_of(file_of(tmp_path, "p.csv", plain))


def test_a_carriage_return_in_a_field_of_a_plain_csv_is_content(tmp_path):
    assert rows_of(file_of(tmp_path, "a.csv", 'a\n"one\r\ntwo"\n')) == [(1, {"a": "one\r\ntwo"})]


def test_long_csv_fields_are_read(tmp_path):
    assert len(rows_of(file_of(tmp_path, "a.csv", f"a,b\n{'x' * 500_000},1\n"))[0][1]["a"]) == 500_000


def test_csv_rows_of_another_width_are_reported(tmp_path):
    rows = dict(rows_of(file_of(tmp_path, "a.csv", "a,b\n1,2\n1,2,3\n1\n")))
    assert rows[2] == "wrong_field_count: has 3 fields, where the header names 2; it begins '1'."
    assert rows[3].startswith("wrong_field_count: has 1 field, ")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'a,b\n1,2\n3,"4\n5,6\n', "row 2 (line 3): a quoted field begins here and never ends"),
        (b'a,b\n1,"2"3\n', "row 1 (line 2): ',' expected after '\"' in line 2"),
        (b"a,b,a\n1,2,3\n", "names these columns more than once: 'a'"),
        (b"a,b\n", "has a header and no rows"),
        (b"\n\n", "has no header"),
        (b",\n", "has no header"),
        ("a\n이름\n".encode("cp949"), "line 2: byte 2 of the file (0xc0) is not UTF-8"),
        ("a\nb\n".encode("utf-16"), "is UTF-16 (byte 0"),
    ],
)
def test_damaged_csv_names_the_position(tmp_path, content, expected):
    assert expected in message_of(file_of(tmp_path, "a.csv", content))


def test_words_that_look_missing_stay_text(tmp_path):
    path = file_of(tmp_path, "a.csv", "text,label\nnull,neg\nN/A,pos\nfine,None\n")
    assert rows_of(path) == [
        (1, {"text": "null", "label": "neg"}),
        (2, {"text": "N/A", "label": "pos"}),
        (3, {"text": "fine", "label": "None"}),
    ]


def test_tables_with_tabs_follow_the_rules_of_csv(tmp_path):
    path = file_of(tmp_path, "a.tsv", b'\xef\xbb\xbfa\tb\r\n"one, ""two""\r\nthree"\tN/A\r\n007\t\r\n')
    assert rows_of(path) == [(1, {"a": 'one, "two"\nthree', "b": "N/A"}), (2, {"a": "007", "b": ""})]
    assert source_of(path).format == "tsv"


def test_values_of_different_types_come_as_they_stand(tmp_path):
    path = file_of(tmp_path, "a.jsonl", '{"text":"hello"}\n{"text":42}\n{"text":null}\n{"text":["a","b"]}\n')
    assert [row["text"] for _, row in rows_of(path)] == ["hello", 42, None, ["a", "b"]]


def test_json_objects_have_only_the_keys_that_their_row_has(tmp_path):
    rows = [
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "weather", "arguments": {"city": "Busan"}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"n": 3}}]}]},
    ]
    for name, text in (("a.jsonl", "\n".join(map(json.dumps, rows))), ("a.json", json.dumps(rows))):
        assert [row for _, row in rows_of(file_of(tmp_path, name, text))] == rows


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_what_json_cannot_say_is_a_problem_of_its_row_alone(tmp_path, name):
    rows = ['{"a": 1}', '{"a": NaN}', '{"a": 1, "a": 2}', '{"a": "x: y", "b": [-Infinity]}', f'{{"a": {10**40}}}']
    text = f"[{', '.join(rows)}]" if name == "a.json" else "\n".join(rows)
    assert rows_of(file_of(tmp_path, name, text)) == [
        (1, {"a": 1}),
        (2, "not_json: holds NaN, which is no number of JSON; write null or a text."),
        (3, "repeated_name: names 'a' twice in one object; only one value can count."),
        (4, "not_json: holds -Infinity, which is no number of JSON; write null or a text."),
        (5, {"a": 10**40}),
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"a": "1"}\n{"a": \n{"a": "3"}\n{"a": "4"}\n'),
        ("a.json", '[{"a": "1"}, 2, {"a": "3"}, {"a": "4"}]'),
        ("a.csv", "a\n1\n2,2\n3\n4\n"),
    ],
)
def test_reading_stops_after_so_many_rows_good_or_bad(tmp_path, name, content):
    path = file_of(tmp_path, name, content)
    rows = rows_of(path, max_rows=3)
    assert [number for number, _ in rows] == [1, 2, 3]
    assert (rows[0], rows[2]) == ((1, {"a": "1"}), (3, {"a": "3"}))
    source = source_of(path, max_rows=3)
    assert source.progress() == (0, 3, "rows")
    assert len(list(source)) == len(list(source)) == 3
    assert source.progress() == (3, 3, "rows")
    assert len(rows_of(path, max_rows=9)) == 4


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.jsonl.gz"])
def test_progress_reaches_the_end_of_the_file_in_bytes_as_they_lie_there(tmp_path, name):
    content: bytes = {
        "a.jsonl": b"".join(b'{"a": "%d"}\n' % number for number in range(50_000)),
        "a.json": b"[" + b", ".join([b'{"a": "1"}'] * 50_000) + b"]",
        "a.csv": b"a\n" + b"1\n" * 50_000,
    }[name.removesuffix(".gz")]
    content = gzip.compress(content) if name.endswith(".gz") else content
    source = source_of(file_of(tmp_path, name, content))
    total = len(content) // 1000 + 1
    assert (source.name, source.progress()) == (name, (0, total, "kB"))
    halfway = 0
    for number, _ in source:
        if number == 25_000:
            halfway = source.progress()[0]
    assert number == 50_000
    # A megabyte at most is read ahead.
    assert halfway <= total - 2 or name in ("a.json", "a.csv")
    assert source.progress() == (len(content) // 1000, total, "kB")


def test_a_file_that_is_gone_says_so(tmp_path):
    path = file_of(tmp_path, "a.jsonl", '{"a": 1}\n')
    file = describe_file(path, key="data.path")
    path.unlink()
    with pytest.raises(UserError, match=r"a\.jsonl is gone since it was looked at"):
        open_rows(file)


def test_real_files_are_read_to_the_last_row(real_data):
    for name, num_rows, columns in [
        ("gsm8k/train.jsonl", 7473, ["question", "answer"]),
        ("banking77/train.csv", 10003, ["text", "category"]),
        ("mts_dialog/train.csv", 1201, ["ID", "section_header", "section_text", "dialogue"]),
        ("chatbot_ko/ChatbotData.csv", 11823, ["Q", "A", "label"]),
    ]:
        path = real_data(name)
        rows = rows_of(path)
        assert [number for number, _ in rows] == list(range(1, num_rows + 1))
        assert all(list(row) == columns for _, row in rows)
        assert not any("\r" in value for _, row in rows for value in row.values())


@pytest.mark.parametrize(("max_rows", "expected"), [(3, 3), (4, 4), (9, 4)])
def test_progress_with_a_limit_ends_at_the_rows_really_read(tmp_path, max_rows, expected):
    source = source_of(file_of(tmp_path, "a.csv", "a\n1\n2\n3\n4\n"), max_rows=max_rows)
    for _ in range(2):
        assert len(list(source)) == expected
        assert source.progress() == (expected, expected, "rows")
