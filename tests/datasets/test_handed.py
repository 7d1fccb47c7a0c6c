from __future__ import annotations

from pathlib import Path

import pytest
from kedro.io import DatasetError

from lm_tuning.datasets import FinishedFileDataset


def test_a_file_is_moved_to_its_path_and_replaces_the_one_before(tmp_path: Path) -> None:
    dataset = FinishedFileDataset(str(tmp_path / "kept" / "trace.json.gz"))
    for content in (b"first", b"second"):
        made = tmp_path / "work" / "made.gz"
        made.parent.mkdir(exist_ok=True)
        made.write_bytes(content)
        dataset.save(made)
        assert dataset.load().read_bytes() == content
        assert not made.exists()
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["trace.json.gz"]


def test_a_save_that_fails_keeps_the_file_from_before(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(b"kept")
    dataset = FinishedFileDataset(str(path))
    with pytest.raises(FileNotFoundError):
        dataset.save(tmp_path / "absent")
    assert dataset.load().read_bytes() == b"kept"
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json.gz"]


def test_a_missing_file_is_told_apart(tmp_path: Path) -> None:
    dataset = FinishedFileDataset(str(tmp_path / "absent"))
    assert not dataset.exists()
    with pytest.raises(DatasetError, match="absent"):
        dataset.load()
