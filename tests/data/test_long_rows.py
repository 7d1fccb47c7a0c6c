"""A row beyond the limit is named with its size, passed by in bounded memory, and the rows behind it are read."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from lm_tuning.data.check.findings import RowProblem
from lm_tuning.data.readers.base import ReadSettings
from lm_tuning.data.readers.csv import RecordLines
from lm_tuning.data.readers.open import open_rows
from lm_tuning.data.sources.describe import describe_file
from lm_tuning.data.sources.opening import Unpacked
from lm_tuning.errors import UserError

LIMIT = 1000
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def rows_of(path: Path, max_row_bytes: int = LIMIT) -> list[tuple[int, Any]]:
    source = open_rows(describe_file(path, key="data.path"), settings=ReadSettings(max_row_bytes=max_row_bytes))
    return [(number, row.reason if isinstance(row, RowProblem) else row["a"]) for number, row in source]


def told(num_bytes: int, limit: int = LIMIT) -> str:
    return (
        f"is {num_bytes:,} bytes long, and data.max_row_bytes lets {limit:,} pass. Cut its text into several rows, or "
        "raise the limit."
    )


def content_of(kind: str, texts: list[str]) -> bytes:
    if kind == "csv":
        return ("a\n" + "".join(f"{text}\n" for text in texts)).encode()
    rows = [json.dumps({"a": text}, ensure_ascii=False) for text in texts]
    return (f"[{', '.join(rows)}]" if kind == "json" else "\n".join(rows) + "\n").encode()


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize(("kind", "around"), [("jsonl", 9), ("json", 9), ("csv", 0)])
def test_a_long_row_is_named_with_its_size_and_reading_goes_on(tmp_path, kind, around, suffix):
    path = tmp_path / f"a.{kind}{suffix}"
    fits = "f" * (LIMIT - around)
    path.write_bytes(PACK[suffix](content_of(kind, ["one", fits, "x" * 5_000_000, "값" * 400, f"{fits}g", "last"])))
    assert rows_of(path) == [
        (1, "one"),
        (2, fits),
        (3, told(5_000_000 + around)),
        (4, told(1200 + around)),
        (5, told(LIMIT + 1)),
        (6, "last"),
    ]


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_the_end_of_a_long_json_row_is_found_wherever_chunks_begin(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr("lm_tuning.data.readers.json_values._CHUNK_CHARACTERS", chunk)
    path = tmp_path / "a.json"
    long = json.dumps({"a": '"}]\\' * 60, "b": [{"c": "\\"}] * 40})
    path.write_text(f'[{{"a": "one"}}, {long}, {{"a": "two"}}]')
    assert rows_of(path, 200) == [(1, "one"), (2, told(len(long), 200)), (3, "two")]


def test_a_damaged_json_row_is_no_long_row(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"a": "one"}, {"a": }' + ', {"a": "x"}' * 1000 + "]")
    with pytest.raises(UserError, match="row 2: is not JSON"):
        rows_of(path)


def test_a_long_first_line_of_a_json_file_is_a_row_where_others_follow(tmp_path):
    path = tmp_path / "a.json"
    long = json.dumps({"a": "x" * 5000})
    path.write_text(f'{long}\n\n{{"a": "two"}}\n')
    assert rows_of(path) == [(1, told(len(long))), (3, "two")]
    path.write_text(json.dumps({"train": [{"a": "x" * 500}] * 5, "version": 1}) + "\n")
    with pytest.raises(UserError, match=r"It has the list 'train'.*data\.field: train"):
        rows_of(path)


def test_a_long_record_of_several_lines_ends_with_its_quotes(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('a\n"' + 'line, ""x""\n' * 500 + '"\nnext\n"two\nlines"\n')
    assert rows_of(path) == [(1, told(500 * 12 + 2)), (2, "next"), (3, "two\nlines")]


def test_a_quote_that_is_never_closed_is_no_long_row_that_hides_all_others(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('a\nfine\n"' + "x\n" * 5000)
    with pytest.raises(UserError, match=r"row 2 \(line 3\): a quoted field begins here and never ends"):
        rows_of(path)


def test_a_header_beyond_the_limit_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a" * 2000 + "\n1\n")
    with pytest.raises(UserError, match=r"a.csv, header: is 2,000 bytes long, and data.max_row_bytes lets 1,000 pass"):
        rows_of(path)


def test_a_very_long_header_is_read_to_its_end_once(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_text("a;b|c\t" * 1000 + "\n1\n")
    skips: list[int] = []
    skip = RecordLines.skip_record
    monkeypatch.setattr(RecordLines, "skip_record", lambda self: skips.append(1) or skip(self))
    with pytest.raises(UserError, match=r"a.csv, header: is 6,000 bytes long"):
        rows_of(path)
    assert len(skips) == 1


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_very_many_columns_are_refused(tmp_path, name):
    names = [f"c{number}" for number in range(10_001)]
    path = tmp_path / name
    if name == "a.csv":
        path.write_text(",".join(names) + "\n" + ",".join("1" * len(names)) + "\n")
    elif name == "a.jsonl":
        path.write_text(json.dumps(dict.fromkeys(names, "1")) + "\n")
    else:
        pq.write_table(pa.table({name: ["1"] for name in names}), path)
    with pytest.raises(UserError, match=r"names 10,001 columns, and at most 10,000 are read"):
        rows_of(path, 10**6)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize("is_dictionary", [False, True])
def test_long_cells_of_columnar_files_are_named(tmp_path, name, is_dictionary):
    column: Any = pa.array(["one", "x" * 5000, "two"])
    table = pa.table({"a": column.dictionary_encode() if is_dictionary else column})
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    rows = rows_of(path)
    assert [row for row in rows if row[0] != 2] == [(1, "one"), (3, "two")]
    number, reason = rows[1]
    assert number == 2
    assert 5000 <= int(reason.split()[1].replace(",", "")) < 5100  # Arrow's own bytes: offsets as well
    assert "data.max_row_bytes lets 1,000 pass" in reason


def test_a_row_group_that_is_one_long_row_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"a": ["one", "x" * 5000]}), path, row_group_size=1, compression="none", use_dictionary=False
    )
    read: list[Any] = []
    whole = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile,
        "iter_batches",
        lambda self, *args, **options: read.append(options["row_groups"]) or whole(self, *args, **options),
    )
    rows = rows_of(path)
    assert rows[0] == (1, "one")
    assert "data.max_row_bytes lets 1,000 pass" in rows[1][1]
    assert read == [[0]]


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2", ".xz"])
def test_a_few_packed_bytes_never_unpack_to_gigabytes_at_a_time(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACK[suffix](b"x" * 60_000_000))
    compression = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}[suffix]
    num_bytes = largest = 0
    with path.open("rb") as stored, Unpacked(stored, compression) as unpacked:
        while unpacked._unpack_more():
            largest = max(largest, len(unpacked._ready))
            num_bytes += len(unpacked._ready)
    assert num_bytes == 60_000_000
    assert largest <= 33_000_000


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.csv.gz"])
def test_memory_stays_near_the_limit(tmp_path, name):
    limit = 1 << 20
    path = tmp_path / name
    path.write_bytes(gzip.compress(content_of(name.split(".")[1], ["one", "x" * (40 << 20), "two"])))
    tracemalloc.start()
    rows = rows_of(path, limit)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [number for number, _ in rows] == [1, 2, 3]
    assert peak < 24 * limit
