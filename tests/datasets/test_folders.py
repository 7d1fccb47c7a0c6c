"""Folder datasets hand out paths and stores, and publish by renaming."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from kedro.framework import project
from kedro.io import DatasetError
from kedro.pipeline import Pipeline, node

from lm_tuning.datasets import FolderDataset, FolderStoreDataset, ModelFolderDataset, StoredFolderDataset
from lm_tuning.datasets.entry import find_maker
from lm_tuning.errors import UserError


def publish(root: Path, key: str, preview: Any = None) -> Path:
    store = FolderStoreDataset(filepath=str(root)).load()
    staged = store.stage(key)
    (staged.path / "train.arrow").write_text(key)
    if preview is not None:
        (staged.path / "preview.json").write_text(json.dumps(preview))
    dataset = StoredFolderDataset(filepath=str(root), keep=2)
    dataset.save(staged)
    return dataset.load()


def test_store_and_published_folder_agree(tmp_path: Path) -> None:
    dataset = StoredFolderDataset(filepath=str(tmp_path))
    assert not dataset.exists()
    first = publish(tmp_path, "k1")
    assert dataset.exists()
    publish(tmp_path, "k2")
    store = FolderStoreDataset(filepath=str(tmp_path)).load()
    assert store.find("k1") == first
    dataset.save(first)
    assert dataset.load() == first
    publish(tmp_path, "k3")
    assert store.find("k2") is None


def test_folder_preview_shows_its_first_rows(tmp_path: Path) -> None:
    dataset = StoredFolderDataset(filepath=str(tmp_path))
    assert dataset.preview() is None
    publish(tmp_path, "k0")
    assert dataset.preview() is None
    publish(tmp_path, "k1", {"columns": ["prompt"], "data": [["a"], ["b"], ["c"]]})
    assert dataset.preview(nrows=2) == {"index": [0, 1], "columns": ["prompt"], "data": [["a"], ["b"]]}


def make_model(path: Path, content: str) -> Path:
    path.mkdir(parents=True)
    (path / "weights").write_text(content)
    return path


def test_model_folder_is_replaced_whole(tmp_path: Path) -> None:
    dataset = ModelFolderDataset(filepath=str(tmp_path / "tuned_model"))
    assert not dataset.exists()
    dataset.save(make_model(tmp_path / "work" / "one", "old"))
    dataset.save(make_model(tmp_path / "work" / "two", "new"))
    assert (dataset.load() / "weights").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tuned_model", "work"]


def test_full_disk_keeps_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = ModelFolderDataset(filepath=str(tmp_path / "tuned_model"))
    dataset.save(make_model(tmp_path / "one", "old"))
    source = make_model(tmp_path / "two", "new")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DatasetError) as caught:
        dataset.save(source)
    assert isinstance(caught.value.__cause__, UserError)
    assert (dataset.load() / "weights").read_text() == "old"


@pytest.mark.parametrize("kind", [FolderStoreDataset, FolderDataset])
def test_saving_to_a_working_folder_is_refused(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(DatasetError):
        kind(filepath=str(tmp_path)).save(tmp_path)


def test_working_folder_is_made_on_load(tmp_path: Path) -> None:
    dataset = FolderDataset(filepath=str(tmp_path / "a" / "checkpoints"))
    assert dataset.exists()
    assert dataset.load().is_dir()


def identity(value: Any) -> Any:
    return value


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    train = Pipeline(
        [node(identity, "tokens", "tuned_model", name="train_model")],
        namespace="train",
        prefix_datasets_with_namespace=False,
        inputs={"tokens"},
    )
    tokenize = Pipeline([node(identity, "rows", "tokens", name="tokenize_examples")])
    monkeypatch.setattr(
        project, "pipelines", {"__default__": tokenize + train, "tokenize": tokenize, "train": tokenize + train}
    )


@pytest.mark.usefixtures("registry")
def test_missing_entry_names_the_node_and_the_smallest_pipeline(tmp_path: Path) -> None:
    assert find_maker("unknown") is None
    dataset = StoredFolderDataset(filepath=str(tmp_path / "tokens"))
    dataset.entry_name = "tokens"
    with pytest.raises(DatasetError) as caught:
        dataset.load()
    message = str(caught.value.__cause__)
    assert "'tokens' is not stored yet" in message
    assert str(tmp_path / "tokens") in message
    assert "Node tokenize_examples makes it: kedro run --pipelines=tokenize" in message


@pytest.mark.usefixtures("registry")
def test_missing_model_names_the_train_pipeline_rather_than_the_default(tmp_path: Path) -> None:
    dataset = ModelFolderDataset(filepath=str(tmp_path / "tuned_model"))
    dataset.entry_name = "tuned_model"
    with pytest.raises(DatasetError, match=r"train_model makes it: kedro run --pipelines=train"):
        dataset.load()
