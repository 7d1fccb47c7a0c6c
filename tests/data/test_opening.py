"""Packed files are unpacked on the way, whatever their name says, and damage is told by row."""

from __future__ import annotations

import bz2
import gzip
import logging
import lzma
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import zstandard

from lm_tuning.data.readers.open import open_rows
from lm_tuning.data.sources.describe import describe_file
from lm_tuning.data.sources.opening import RawFile, detect_compression
from lm_tuning.errors import UserError

PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
    "bz2": partial(bz2.compress, compresslevel=1),
    "xz": partial(lzma.compress, preset=0),
}
SUFFIX = {"gzip": ".gz", "zstd": ".zst", "bz2": ".bz2", "xz": ".xz"}
# Numbers that do not repeat, so that half of the packed bytes hold some of the rows.
LINES = [b'{"a": "%d", "b": "%s"}\n' % (number, (b"%x" % (number * 2654435761**3)) * 3) for number in range(6000)]
CONTENT = b"".join(LINES)


def unpacked(path: Path) -> bytes:
    with RawFile(describe_file(path, key="data.path")).open() as file:
        return file.read()


@pytest.mark.parametrize("compression", PACK)
def test_packing_is_seen_in_the_bytes(tmp_path, caplog, compression):
    caplog.set_level(logging.INFO)
    packed = PACK[compression](CONTENT)
    named, plain, wrong = tmp_path / f"a.jsonl{SUFFIX[compression]}", tmp_path / "b.jsonl", tmp_path / "c.jsonl.gz"
    named.write_bytes(packed)
    assert describe_file(named, key="data.path")["compression"] == compression
    assert caplog.text == ""
    plain.write_bytes(packed)
    assert describe_file(plain, key="data.path")["compression"] == compression
    assert f"b.jsonl is compressed ({compression}), whatever its name says" in caplog.text
    wrong.write_bytes(CONTENT)
    assert describe_file(wrong, key="data.path")["compression"] is None
    assert "c.jsonl.gz is not compressed, whatever its name says" in caplog.text
    assert unpacked(named) == unpacked(plain) == unpacked(wrong) == CONTENT


@pytest.mark.parametrize("compression", PACK)
def test_members_one_after_the_other_are_one_file(tmp_path, compression):
    path = tmp_path / f"a.jsonl{SUFFIX[compression]}"
    pack = PACK[compression]
    path.write_bytes(pack(CONTENT) + pack(b"") + b"\0" * 4 + pack(LINES[0]) + b"\0" * 40_000)
    assert unpacked(path) == CONTENT + LINES[0]


@pytest.mark.parametrize("compression", PACK)
def test_a_file_that_breaks_off_is_told_with_the_last_row(tmp_path, compression):
    path = tmp_path / f"a.jsonl{SUFFIX[compression]}"
    packed = PACK[compression](CONTENT)
    path.write_bytes(packed[: len(packed) * 9 // 10])
    source = open_rows(describe_file(path, key="data.path"))
    numbers = []
    with pytest.raises(UserError) as caught:
        numbers.extend(number for number, _ in source)
    assert 3000 < numbers[-1] < 6000
    assert str(caught.value) == (
        f"{path} cannot be read after row {numbers[-1]}: the {compression} data breaks off before its end. Copy or "
        "download the file again."
    )


@pytest.mark.parametrize(
    ("name", "content"), [("a.csv", b"a\n1\n2\n"), ("a.json", b'[{"a": 1}]'), ("a.jsonl", LINES[0])]
)
@pytest.mark.parametrize("compression", PACK)
def test_damaged_bytes_are_told(tmp_path, compression, name, content):
    path = tmp_path / f"{name}{SUFFIX[compression]}"
    packed = PACK[compression](content)
    middle = len(packed) // 2
    for damaged in (packed[:middle] + bytes(255 - byte for byte in packed[middle:]), packed[:12], packed + b"more"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"cannot be read .*the {compression} data (is damaged|breaks off)"):
            list(open_rows(describe_file(path, key="data.path")))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_packed_columnar_files_are_refused(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"anything"))
    with pytest.raises(UserError, match=r"file that is compressed \(gzip\). Unpack it first"):
        describe_file(path, key="data.path")


@pytest.mark.parametrize("start", [b"BZh,b\n1,2\n", b"\x1f,", b"(\xb5", b"", b"{", b"\xef\xbb\xbf{"])
def test_text_is_not_taken_for_packed(start):
    assert detect_compression(start) is None


def test_a_frame_to_be_skipped_comes_first_in_files_of_parallel_packers():
    packed = b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + zstandard.compress(b"text")
    assert detect_compression(packed) == "zstd"
