"""Whatever text a row holds, it comes back exactly, from every format and packed in every way."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_tuning.data.readers.open import open_rows
from lm_tuning.data.sources.describe import describe_files

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
TRICKY = st.sampled_from(
    ['": {', " : ", '\\"', '"a":', "\t:", "\r\n", "\r", "\n\n", "\u2028", "\x85", "\ufeff", "\x00", '""', "null", "NaN"]
)
CELL = st.lists(st.one_of(TEXT, TRICKY), max_size=4).map("".join)
TABLE = st.lists(st.tuples(CELL, CELL), min_size=1, max_size=5)
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def read_back(name: str, content: bytes) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        (file,) = describe_files(train=str(path))["train"]
        rows = list(open_rows(file))
    assert [number for number, _ in rows] == list(range(1, len(rows) + 1))
    return [row for _, row in rows]


def as_rows(table: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"first": first, "second": second} for first, second in table]


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("escaped", [True, False])
@settings(max_examples=15, deadline=None)
@given(table=TABLE)
def test_json_lines_come_back(suffix, escaped, table):
    rows = as_rows(table)
    text = "".join(json.dumps(row, ensure_ascii=escaped) + "\n" for row in rows)
    assert read_back(f"rows.jsonl{suffix}", PACKED[suffix](text.encode())) == rows


@pytest.mark.parametrize("indent", [None, 2])
@settings(max_examples=25, deadline=None)
@given(table=TABLE)
def test_json_arrays_come_back(indent, table):
    rows = as_rows(table)
    assert read_back("rows.json", json.dumps(rows, indent=indent, ensure_ascii=False).encode()) == rows


@pytest.mark.parametrize(("name", "separator"), [("rows.csv", ","), ("rows.tsv.zst", "\t"), ("rows.csv.gz", ",")])
@settings(max_examples=25, deadline=None)
@given(table=TABLE)
def test_tables_come_back(name, separator, table):
    packed = PACKED[Path(name).suffix] if name.count(".") == 2 else bytes
    plain, windows = io.StringIO(newline=""), io.StringIO(newline="")
    for file, line_end, quoting in ((plain, "\n", csv.QUOTE_ALL), (windows, "\r\n", csv.QUOTE_MINIMAL)):
        writer = csv.writer(file, delimiter=separator, lineterminator=line_end, quoting=quoting)
        writer.writerows([("first", "second"), *table])
    assert read_back(name, packed(plain.getvalue().encode())) == as_rows(table)
    # Where lines end in two characters, line breaks in fields are that same convention.
    unified = [(first.replace("\r\n", "\n"), second.replace("\r\n", "\n")) for first, second in table]
    assert read_back(name, packed(windows.getvalue().encode())) == as_rows(unified)


@settings(max_examples=25, deadline=None)
@given(table=TABLE)
def test_columnar_files_come_back(table):
    rows = as_rows(table)
    columns = pa.Table.from_pylist(rows)
    for name, new_writer in (("rows.arrow", pa.ipc.new_file), ("rows.feather", pa.ipc.new_stream)):
        sink = io.BytesIO()
        with new_writer(sink, columns.schema) as writer:
            writer.write_table(columns, max_chunksize=2)
        assert read_back(name, sink.getvalue()) == rows
    sink = io.BytesIO()
    pq.write_table(columns, sink)
    assert read_back("rows.parquet", sink.getvalue()) == rows
