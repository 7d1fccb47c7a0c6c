"""Arrow, Feather and Parquet files give plain values of the types that they declare."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from lm_tuning.data.check.findings import RowProblem
from lm_tuning.data.readers.base import RowSource
from lm_tuning.data.readers.open import open_rows
from lm_tuning.data.sources.describe import describe_file
from lm_tuning.errors import UserError

NAMES = ("a.arrow", "a.feather", "a.parquet")


def written(table: pa.Table, path: Path, *, as_stream: bool = False) -> RowSource:
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
    elif path.suffix == ".feather":
        pyarrow.feather.write_feather(table, path, compression="zstd")
    else:
        new_writer = pa.ipc.new_stream if as_stream else pa.ipc.new_file
        with new_writer(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return open_rows(describe_file(path, key="data.path"))


def values_of(source: RowSource) -> list[Any]:
    rows = list(source)
    assert [number for number, _ in rows] == list(range(1, len(rows) + 1))
    return [f"{row.kind}: {row.reason}" if isinstance(row, RowProblem) else row for _, row in rows]


@pytest.mark.parametrize("name", NAMES)
def test_values_keep_their_types_and_structs_lose_the_nulls_that_arrow_added(tmp_path, name):
    rows = [
        {"text": "null", "n": 1, "turns": [{"role": "user", "args": {"city": "Busan", "n": None}}]},
        {"text": None, "n": 2, "turns": [{"role": "tool", "args": {"city": None, "n": 3}}]},
        {"text": "007", "n": 3, "turns": []},
    ]
    source = written(pa.Table.from_pylist(rows), tmp_path / name)
    assert source.columns == ["text", "n", "turns"]
    assert values_of(source) == [
        {"text": "null", "n": 1, "turns": [{"role": "user", "args": {"city": "Busan"}}]},
        {"text": None, "n": 2, "turns": [{"role": "tool", "args": {"n": 3}}]},
        {"text": "007", "n": 3, "turns": []},
    ]
    source.select(["n"])
    assert values_of(source) == [{"n": 1}, {"n": 2}, {"n": 3}]
    done, total, _ = source.progress()
    assert done >= total - 1


@pytest.mark.parametrize("name", NAMES)
def test_text_of_every_arrow_type_is_text(tmp_path, name):
    words = ["one", None, "두 번째"]
    kinds = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
    table = pa.table({str(index): pa.array(words, kind) for index, kind in enumerate(kinds)})
    assert values_of(written(table, tmp_path / name)) == [{str(index): word for index in range(3)} for word in words]


def test_dates_stay_dates_and_what_python_cannot_hold_is_a_problem_of_its_row(tmp_path):
    days = pa.array([0, 2_932_896, 9_999_999], pa.int32()).cast(pa.date32())
    assert values_of(written(pa.table({"day": days}), tmp_path / "a.arrow")) == [
        {"day": datetime.date(1970, 1, 1)},
        {"day": datetime.date(9999, 12, 31)},
        "wrong_type: column 'day' holds a value that Python cannot hold (date value out of range).",
    ]


@pytest.mark.parametrize("name", ["a.arrow", "a.parquet"])
def test_text_that_is_no_utf8_is_a_problem_of_its_row(tmp_path, name):
    cells = pa.array([b"good", b"b\xffd", b"fine"]).view(pa.string())
    assert values_of(written(pa.table({"text": cells, "n": [1, 2, 3]}), tmp_path / name)) == [
        {"text": "good", "n": 1},
        "not_utf8: column 'text' holds text whose byte 1 is not UTF-8.",
        {"text": "fine", "n": 3},
    ]


def test_the_stream_form_of_arrow_is_read(tmp_path):
    source = written(pa.table({"a": ["1", "2", "3"]}), tmp_path / "a.arrow", as_stream=True)
    assert values_of(source) == values_of(source) == [{"a": "1"}, {"a": "2"}, {"a": "3"}]


@pytest.mark.parametrize("name", NAMES)
def test_classes_and_nested_json_that_a_file_declares_are_given_as_such(tmp_path, name):
    import datasets

    calls = [{"name": "weather", "arguments": {"city": "Busan", "when": None}}, {"name": "add", "arguments": {"n": 3}}]
    rows = [
        {"label": 1, "calls": [calls[0]], "turn": {"kind": 0, "text": None}},
        {"label": -1, "calls": [calls[1]], "turn": {"kind": 1, "text": "b"}},
    ]
    features = datasets.Features(
        {
            "label": datasets.ClassLabel(names=["neg", "pos"]),
            "calls": datasets.List(datasets.Json()),
            "turn": {"kind": datasets.ClassLabel(names=["ask", "say"]), "text": datasets.Value("string")},
        }
    )
    saved = datasets.Dataset.from_list(rows, features=features)
    table = saved.with_format("arrow")[:].replace_schema_metadata(features.arrow_schema.metadata)
    assert values_of(written(table, tmp_path / name)) == [
        {"label": "pos", "calls": [calls[0]], "turn": {"kind": "ask"}},
        {"label": None, "calls": [calls[1]], "turn": {"kind": "say", "text": "b"}},
    ]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.parquet", b"text\none\n", "no readable Parquet file"),
        ("a.arrow", b"text\none\n", "no readable Arrow file"),
        ("a.feather", b"FEA1 and more", "no readable Arrow file"),
    ],
)
def test_a_file_of_another_kind_says_so(tmp_path, name, content, expected):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=expected):
        open_rows(describe_file(path, key="data.path"))


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_and_repeated_columns_are_refused(tmp_path, name):
    with pytest.raises(UserError, match="has no rows"):
        written(pa.table({"a": pa.array([], pa.string())}), tmp_path / name)
    if name != "a.feather":  # its writer refuses them by itself
        with pytest.raises(UserError, match="more than once: 'a'"):
            written(pa.table([["1"], ["2"]], names=["a", "a"]), tmp_path / name)


def test_a_stream_that_breaks_off_is_told_with_the_last_row(tmp_path):
    path = tmp_path / "a.arrow"
    written(pa.table({"a": [str(number) for number in range(9)]}), path, as_stream=True)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 3 // 4])
    with pytest.raises(UserError, match=r"a\.arrow cannot be read after row [246]:"):
        list(open_rows(describe_file(path, key="data.path")))


def test_a_damaged_page_of_parquet_is_told_with_the_last_row(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"a": [f"{number:040}" for number in range(6000)]})
    pq.write_table(table, path, row_group_size=3000, compression="zstd", use_dictionary=False)
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[start + 40 : start + 400] = b"\0" * 360
    path.write_bytes(content)
    rows = []
    with pytest.raises(UserError, match=r"a\.parquet cannot be read after row (2048|3000): .*\. Copy or download"):
        rows.extend(open_rows(describe_file(path, key="data.path")))
    assert len(rows) in (2048, 3000)  # a batch may end with the row group before
