"""Rows are read at addresses, through the drivers of fsspec."""

from __future__ import annotations

import gzip
import json
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lm_tuning.data.readers.open import open_rows
from lm_tuning.data.settings import find_changed_sources
from lm_tuning.data.sources.describe import describe_files
from lm_tuning.errors import UserError

ROWS = [{"text": f"row {number}"} for number in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def read_all(described: dict[str, Any]) -> list[list[Any]]:
    return [[row for _, row in open_rows(file)] for file in described["train"]]


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    system.pipe({"/rows/b.jsonl": LINES, "/rows/a.jsonl.gz": gzip.compress(LINES), "/rows/sub/notes.md": b"text"})
    yield system
    system.rm("/rows", recursive=True)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """Serve a folder."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    (tmp_path / "rows.jsonl").write_bytes(LINES)
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(b"text\nrow 0\nrow 1\nrow 2\n"))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=partial(server.serve_forever, poll_interval=0.01), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("address", ["memory://rows", "memory://rows/*", "memory://rows/**/*"])
def test_folders_and_patterns_at_an_address_stand_for_their_files_of_rows(memory, address):
    described = describe_files(train=address)
    assert [file["path"] for file in described["train"]] == ["memory:///rows/a.jsonl.gz", "memory:///rows/b.jsonl"]
    assert [file["compression"] for file in described["train"]] == ["gzip", None]
    assert described["train"][1]["num_bytes"] == len(LINES)
    assert read_all(described) == [ROWS, ROWS]


def test_the_digest_of_a_remote_file_follows_its_marks_of_change(memory):
    first, same = (describe_files(train="memory://rows/b.jsonl")["train"][0]["digest"] for _ in range(2))
    memory.pipe("/rows/b.jsonl", LINES * 2)
    assert first == same
    assert describe_files(train="memory://rows/b.jsonl")["train"][0]["digest"] != first


def test_changes_at_an_address_are_looked_for_without_going_there(memory):
    stored = describe_files(train="memory://rows/b.jsonl")
    memory.rm("/rows/b.jsonl")
    assert find_changed_sources(stored, train="memory://rows/b.jsonl") == []
    (change,) = find_changed_sources(stored, train="memory://rows/c.jsonl")
    assert change.endswith("were made from memory://rows/b.jsonl, the parameters say memory://rows/c.jsonl")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("memory://rows/gone.jsonl", "data.path names 'memory://rows/gone.jsonl', which does not exist."),
        ("memory://rows/*.csv", "where no file of rows is"),
        ("memory://rows/sub/notes.md", "whose suffix tells no format"),
        ("sftp://host/rows.jsonl", "reading sftp:// needs another package: pip install paramiko"),
        ("s4://bucket/rows.jsonl", "which cannot be read: Protocol not known: s4"),
    ],
)
def test_addresses_that_lead_nowhere_say_so(memory, address, expected):
    with pytest.raises(UserError) as caught:
        describe_files(train=address)
    assert expected in str(caught.value)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("protocol", "package"), [("s3", "s3fs"), ("gs", "gcsfs"), ("az", "adlfs"), ("oss", "ossfs"), ("webdav", "webdav4")]
)
def test_a_driver_that_is_not_installed_is_named_by_its_package(monkeypatch, protocol, package):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not there, also where it is
    with pytest.raises(UserError, match=rf"; reading {protocol}:// needs another package: pip install {package}$"):
        describe_files(train=f"{protocol}://bucket/rows.jsonl")


def test_settings_of_the_hub_have_no_use_at_an_address(memory):
    with pytest.raises(UserError, match=r"data\.path\.split = 'train': 'memory://rows' is no data set on the hub"):
        describe_files(train={"path": "memory://rows", "split": "train"})


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl?download=1", "rows.csv.gz", "rows.parquet"])
def test_files_are_read_from_the_web(web, name):
    assert read_all(describe_files(train=f"{web}/{name}")) == [ROWS]


def test_a_page_that_is_not_there_says_so(web):
    with pytest.raises(UserError, match=r"names 'http://127.0.0.1:\d+/gone.jsonl', which does not exist"):
        describe_files(train=f"{web}/gone.jsonl")


def test_a_server_that_is_not_there_says_so():
    with pytest.raises(UserError, match=r"names 'http://127.0.0.1:9/rows.jsonl', which"):
        describe_files(train="http://127.0.0.1:9/rows.jsonl")


def test_files_inside_an_archive_are_read(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "rows.zip", "w") as archive:
        archive.writestr("b.jsonl", LINES)
        archive.writestr("sub/a.jsonl", LINES)
    described = describe_files(train=f"zip://**/*.jsonl::{tmp_path / 'rows.zip'}")
    assert [file["path"].partition("::")[0] for file in described["train"]] == ["zip://b.jsonl", "zip://sub/a.jsonl"]
    assert read_all(described) == [ROWS, ROWS]


class Broken:
    """A driver's file whose connection ends after some bytes."""

    def __init__(self) -> None:
        self.chunks = [LINES[:20], LINES[20:40]]

    def read(self, num_bytes: int) -> bytes:
        if not self.chunks:
            raise RuntimeError("connection reset\nby somebody")
        return self.chunks.pop(0)

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        pass


def test_a_connection_that_breaks_is_told_with_the_last_row(memory, monkeypatch):
    (file,) = describe_files(train="memory://rows/b.jsonl")["train"]
    source = open_rows(file)
    monkeypatch.setattr(type(memory), "open", lambda self, path, mode: Broken())
    rows = []
    with pytest.raises(UserError, match=r"b\.jsonl cannot be read after row 2: connection reset\. Copy or download"):
        rows.extend(row for _, row in source)
    assert rows == ROWS[:2]
