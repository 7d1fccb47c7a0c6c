"""The folder store finds whole folders, publishes in one rename and prunes by age."""

from __future__ import annotations

import errno
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lm_tuning.errors import UserError
from lm_tuning.storage import folders
from lm_tuning.storage.folders import FolderStore, StagedFolder, read_manifest


def publish(store: FolderStore, key: str, content: str = "rows") -> Path:
    with store.stage(key) as staged:
        (staged.path / "sub").mkdir()
        (staged.path / "sub" / "train.arrow").write_text(content)
        staged.facts["num_rows"] = len(content)
        return store.publish(staged)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_published_folder_is_found_and_current(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "tokens")
    assert store.find("k1") is None
    folder = publish(store, "k1")
    assert folder == tmp_path / "tokens" / "k1" == store.find("k1") == store.current()
    assert names(store.root) == ["current.json", "k1"]
    manifest = read_manifest(folder)
    assert manifest["key"] == "k1"
    assert manifest["facts"] == {"num_rows": 4}
    assert manifest["files"] == {"sub/train.arrow": 4}
    assert manifest["schema_version"] == folders.SCHEMA_VERSION


def test_found_folder_becomes_current_without_being_written(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    first = publish(store, "k1")
    publish(store, "k2")
    inode = first.stat().st_ino
    assert store.publish(first) == first
    assert store.current() == first
    assert first.stat().st_ino == inode


def test_the_same_work_is_done_once(tmp_path: Path) -> None:
    store, filled = FolderStore(tmp_path), []

    def fill(staged: StagedFolder) -> None:
        filled.append(staged.key)
        (staged.path / "rows.arrow").write_text("rows")
        staged.facts = {"num_rows": 4}

    made, folder = store.find_or_make("k1", fill)
    assert isinstance(made, StagedFolder)
    assert (folder / "rows.arrow").read_text() == "rows"
    assert store.find("k1") is None  # until it is published
    published = store.publish(made)
    assert read_manifest(published)["facts"] == {"num_rows": 4}
    assert store.find_or_make("k1", fill) == (published, published)
    assert filled == ["k1"]


def test_what_is_stored_and_no_longer_usable_is_made_again(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    publish(store, "k1", "old")

    def fill(staged: StagedFolder) -> None:
        (staged.path / "rows.arrow").write_text("new")

    made, _ = store.find_or_make("k1", fill, is_usable=lambda folder: (folder / "rows.arrow").is_file())
    assert names(store.publish(made)) == ["manifest.json", "rows.arrow"]


def test_a_folder_that_could_not_be_filled_leaves_nothing(tmp_path: Path) -> None:
    def fill(staged: StagedFolder) -> None:
        (staged.path / "rows.arrow").write_text("half")
        raise UserError("bad rows")

    with pytest.raises(UserError, match="bad rows"):
        FolderStore(tmp_path).find_or_make("k1", fill)
    assert names(tmp_path) == []


def test_staged_folder_is_invisible_until_published(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    staged = store.stage("k1")
    (staged.path / "train.arrow").write_text("half")
    assert store.find("k1") is None
    with pytest.raises(UserError):
        store.current()
    staged.discard()
    assert names(tmp_path) == []


def test_failing_work_leaves_nothing(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    with pytest.raises(RuntimeError), store.stage("k1") as staged:
        (staged.path / "train.arrow").write_text("half")
        raise RuntimeError
    assert names(tmp_path) == []


def test_full_disk_during_the_work_is_explained(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    with pytest.raises(UserError, match=r"k1': the disk is full"), store.stage("k1"):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert names(tmp_path) == []


def test_forgotten_staged_folder_goes_with_its_object(tmp_path: Path) -> None:
    staged = FolderStore(tmp_path).stage("k1")
    assert names(tmp_path) != []
    del staged
    gc.collect()
    assert names(tmp_path) == []


def test_forked_copy_does_not_remove_the_folder(tmp_path: Path) -> None:
    staged = FolderStore(tmp_path).stage("k1")
    child = os.fork()
    if child == 0:
        staged.discard()
        os._exit(0)
    os.waitpid(child, 0)
    assert staged.path.is_dir()


def test_folder_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from lm_tuning.storage.folders import FolderStore;"
        "FolderStore(Path(sys.argv[1])).stage('k-1'); os._exit(1)"
    )
    # os._exit skips the clean-up, as a kill does; the object has to live until then.
    code = code.replace("FolderStore(Path(sys.argv[1])).stage", "staged = FolderStore(Path(sys.argv[1])).stage")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert [name.startswith(".staging-k-1-") for name in names(tmp_path)] == [True]
    mine = FolderStore(tmp_path).stage("k2")
    assert names(tmp_path) == [mine.path.name]


@pytest.mark.parametrize("damage", ["truncate", "remove", "other_key", "other_schema", "no_manifest", "bad_manifest"])
def test_damaged_folder_is_not_found(tmp_path: Path, damage: str) -> None:
    store = FolderStore(tmp_path, made_by="kedro run --pipelines=split")
    folder = publish(store, "k1")
    manifest_path, data = folder / "manifest.json", folder / "sub" / "train.arrow"
    manifest = json.loads(manifest_path.read_text())
    if damage == "truncate":
        data.write_text("r")
    elif damage == "remove":
        data.unlink()
    elif damage == "no_manifest":
        manifest_path.unlink()
    elif damage == "bad_manifest":
        manifest_path.write_text("{")
    else:
        manifest["key" if damage == "other_key" else "schema_version"] = "other"
        manifest_path.write_text(json.dumps(manifest))
    assert store.find("k1") is None
    with pytest.raises(UserError, match=r"k1.*damaged.*kedro run --pipelines=split"):
        store.current()
    publish(store, "k1", "again")
    assert (store.current() / "sub" / "train.arrow").read_text() == "again"


def test_empty_store_says_what_makes_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokens.*kedro run --pipelines=tokenize"):
        FolderStore(tmp_path / "tokens", made_by="kedro run --pipelines=tokenize").current()
    assert not (tmp_path / "tokens").exists()


def test_least_recently_used_keys_are_pruned_but_never_the_current(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, keep=2)
    first = publish(store, "k1")
    publish(store, "k2")
    store.publish(first)
    publish(store, "k3")
    assert names(tmp_path) == ["current.json", "k1", "k3"]
    lean = FolderStore(tmp_path, keep=1)
    assert lean.publish(first) == lean.current() == first
    assert names(tmp_path) == ["current.json", "k1"]


def test_full_disk_keeps_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path)
    first = publish(store, "k1")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folders, "sync_folder", fail)
    with pytest.raises(UserError, match=r"k2.*disk is full"):
        publish(store, "k2")
    assert store.current() == first
    assert names(tmp_path) == ["current.json", "k1"]


def test_manifest_of_another_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a stored result"):
        read_manifest(tmp_path)
