"""The files that parameters name are checked before anything is read."""

from __future__ import annotations

import hashlib

import pytest

from lm_tuning.data.raw_files import describe_file, describe_files, resolve_path
from lm_tuning.errors import UserError


def test_a_file_is_described_by_format_size_and_digest(tmp_path):
    path = tmp_path / "Rows.CSV"
    path.write_bytes(b"text\none\n")
    assert describe_file(str(path), key="data.path") == {
        "path": path.as_posix(),
        "format": "csv",
        "num_bytes": 9,
        "digest": hashlib.sha256(b"text\none\n").hexdigest(),
    }


def test_backslashes_are_slashes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "01_raw").mkdir(parents=True)
    (tmp_path / "data" / "01_raw" / "train.jsonl").write_text('{"text": "a"}\n')
    assert describe_file(r"data\01_raw\train.jsonl", key="data.path")["path"] == "data/01_raw/train.jsonl"


def test_a_file_whose_name_has_a_backslash_is_found(tmp_path):
    path = tmp_path / "odd\\name.jsonl"
    path.write_text("{}\n")
    assert resolve_path(str(path)) == path


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("absent.jsonl", None, "does not exist"),
        ("empty.jsonl", "", "is empty"),
        ("rows.txt", "text", "end in .jsonl, .json, .csv, .parquet"),
        ("rows.jsonl.gz", "text", "end in .jsonl, .json, .csv, .parquet"),
    ],
)
def test_a_file_that_cannot_be_read_names_parameter_and_path(tmp_path, name, content, expected):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=expected) as caught:
        describe_file(str(path), key="data.path")
    assert "data.path" in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="names the folder"):
        describe_file(str(tmp_path), key="data.path")


def test_all_files_are_checked_together(tmp_path):
    with pytest.raises(UserError) as caught:
        describe_files(train=str(tmp_path / "a.jsonl"), validation=str(tmp_path / "b.jsonl"), test=None)
    assert [problem.split()[0] for problem in caught.value.problems] == ["data.path", "data.validation_path"]
