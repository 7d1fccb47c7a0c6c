"""Files and folders are replaced whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.errors import UserError
from lm_tuning.storage import atomic
from lm_tuning.storage.atomic import (
    replace_folder,
    replacing_file,
    restore_folder,
    write_bytes_atomic,
    write_json_atomic,
    write_text_atomic,
)
from tests.support.small_disk import mounted


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def make_folder(path: Path, content: str) -> Path:
    path.mkdir(parents=True)
    (path / "weights.bin").write_text(content)
    return path


def test_text_keeps_its_line_ends_and_letters(tmp_path: Path) -> None:
    target = tmp_path / "new" / "notes.md"
    write_text_atomic(target, "값\r\nx\n")
    assert target.read_bytes() == "값\r\nx\n".encode()
    assert names(target.parent) == ["notes.md"]


def test_value_that_is_no_json_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    write_json_atomic(target, {"a": 1})
    with pytest.raises(TypeError):
        write_json_atomic(target, {"a": object()})
    assert json.loads(target.read_text()) == {"a": 1}
    assert names(tmp_path) == ["a.json"]


def test_failing_block_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    with pytest.raises(RuntimeError), replacing_file(target) as aside:
        aside.write_text("half")
        raise RuntimeError
    assert target.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_full_disk_is_explained_and_the_old_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")

    def fail(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(UserError, match=r"a\.txt.*disk is full.*previous output is kept"):
        write_bytes_atomic(target, b"new")
    assert target.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EDQUOT, "the disk quota is used up"),
        (errno.EROFS, "the file system is read-only"),
        (errno.EACCES, "permission is denied"),
    ],
)
def test_other_reasons_not_to_write_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / ".a.aside.txt"))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UserError, match=rf"a\.txt': {said}\. The previous output is kept"):
        write_text_atomic(tmp_path / "a.txt", "new")


def test_a_file_elsewhere_that_may_not_be_read_is_not_called_a_failed_write(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), replacing_file(tmp_path / "a.txt"):
        raise PermissionError(errno.EACCES, "Permission denied", "/elsewhere/rows.jsonl")


def test_other_errors_are_not_called_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="Input/output error"):
        write_text_atomic(tmp_path / "a.txt", "new")


SIZE_LIMITED = """
import resource, sys
from pathlib import Path
from lm_tuning.errors import UserError
from lm_tuning.storage.atomic import write_bytes_atomic
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_bytes_atomic(Path(sys.argv[1]), b"x" * 5000)
except UserError as error:
    sys.exit(str(error))
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="this system has no file size limit")
def test_write_that_the_system_cuts_short_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "a.bin"
    target.write_bytes(b"old")
    done = subprocess.run(
        [sys.executable, "-c", SIZE_LIMITED, str(target)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "previous output is kept" in done.stderr
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", "256k") as folder:
        yield folder


def test_really_full_disk_leaves_file_and_folder(small_disk: Path, tmp_path: Path) -> None:
    write_text_atomic(small_disk / "a.txt", "old")
    make_folder(small_disk / "model", "old")
    with pytest.raises(UserError, match="disk is full"):
        write_bytes_atomic(small_disk / "a.txt", b"x" * 1_000_000)
    big = make_folder(tmp_path / "elsewhere", "x" * 1_000_000)
    with pytest.raises(UserError, match="disk is full"):
        replace_folder(big, small_disk / "model")
    assert (small_disk / "a.txt").read_text() == "old"
    assert (small_disk / "model" / "weights.bin").read_text() == "old"
    assert names(small_disk) == ["a.txt", "model"]
    assert (big / "weights.bin").exists()


def test_folder_is_replaced(tmp_path: Path) -> None:
    target = make_folder(tmp_path / "model", "old")
    (target / "only_in_old.txt").touch()
    replace_folder(make_folder(tmp_path / "work" / "done", "new"), target)
    assert names(target) == ["weights.bin"]
    assert (target / "weights.bin").read_text() == "new"
    assert names(tmp_path) == ["model", "work"]


def test_failing_rename_leaves_both_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, source = make_folder(tmp_path / "model", "old"), make_folder(tmp_path / "done", "new")
    rename = os.rename

    def fail(origin: Path, to: Path) -> None:
        if Path(origin) == source:
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(origin, to)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(UserError, match="disk is full"):
        replace_folder(source, target)
    assert (target / "weights.bin").read_text() == "old"
    assert (source / "weights.bin").read_text() == "new"
    assert names(tmp_path) == ["done", "model"]


def test_missing_source_leaves_the_target(tmp_path: Path) -> None:
    target = make_folder(tmp_path / "model", "old")
    with pytest.raises(FileNotFoundError, match="done"):
        replace_folder(tmp_path / "done", target)
    assert (target / "weights.bin").read_text() == "old"


def test_folder_from_another_file_system_is_copied_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system at hand")
    source = make_folder(shared / f"lm-tuning-{os.getpid()}", "new")
    replace_folder(source, tmp_path / "model")
    assert (tmp_path / "model" / "weights.bin").read_text() == "new"
    assert not source.exists()


def test_folder_left_aside_by_a_killed_process_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, source = make_folder(tmp_path / "model", "old"), make_folder(tmp_path / "done", "new")
    rename = os.rename

    class Killed(BaseException):
        pass

    def die(origin: Path, to: Path) -> None:
        if Path(origin) != target:
            raise Killed
        rename(origin, to)

    monkeypatch.setattr(atomic.os, "rename", die)
    with pytest.raises(Killed):
        replace_folder(source, target)
    monkeypatch.undo()
    assert not target.exists()
    assert restore_folder(target)
    assert (target / "weights.bin").read_text() == "old"
    assert not restore_folder(target)
