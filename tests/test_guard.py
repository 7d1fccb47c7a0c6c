"""What no test may write is not written and fails the test, and the code can be told another processor."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import guard
from tests.support.guard import REPOSITORY, find_owner, take_notes
from tests.support.machine import BFLOAT16, CORES

NAME = "written-by-a-test"
IN_CHECKOUT, IN_HOME = REPOSITORY / "data" / NAME, Path.home() / NAME


@pytest.fixture(autouse=True)
def left() -> Iterator[None]:
    """Nothing is there afterwards, and the notes of these tests are read here."""
    yield
    take_notes()
    assert not IN_CHECKOUT.exists() and not IN_HOME.exists()


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_text("x"),
        lambda path: path.open("ab").close(),
        lambda path: os.open(path, os.O_CREAT | os.O_WRONLY),
        Path.mkdir,
        Path.unlink,
        Path.rmdir,
        shutil.rmtree,
        lambda path: path.symlink_to("/nowhere"),
        lambda path: path.with_name("other").rename(path),
        lambda path: path.rename("/tmp/elsewhere"),
        sqlite3.connect,
    ],
)
@pytest.mark.parametrize("path", [IN_CHECKOUT, IN_HOME], ids=["checkout", "home"])
def test_a_write_into_the_users_folders_is_stopped_and_noted(write: Callable[[Path], object], path: Path) -> None:
    if find_owner(path) is None:
        pytest.skip("the home folder is a temporary one")
    with pytest.raises(PermissionError, match="Tests do not write"):
        write(path)
    (note,) = take_notes()
    assert str(path.parent) in note
    assert "test_a_write_into_the_users_folders" in note


def test_an_error_that_the_code_swallows_is_noted_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    with contextlib.suppress(OSError):
        Path("data", NAME).mkdir()
    assert len(take_notes()) == 1, "relative paths are the working folder's"


def test_a_process_of_a_test_is_watched_too() -> None:
    code = f"import os; os.makedirs({str(IN_CHECKOUT / 'below')!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ForbiddenWrite" in done.stderr
    assert NAME in "".join(take_notes())


def test_what_belongs_to_the_tools_may_be_written(tmp_path: Path) -> None:
    for allowed in (
        tmp_path / "x",
        REPOSITORY / ".pytest_cache" / "x",
        REPOSITORY / ".coverage.1",
        REPOSITORY / "src" / "lm_tuning" / "__pycache__" / "x.pyc",
        Path.home() / ".cache" / "x",
        "/dev/null",
    ):
        assert find_owner(allowed) is None, allowed
    for forbidden in (REPOSITORY / "mlflow.db", REPOSITORY / "src" / "x.py", REPOSITORY / ".env"):
        assert find_owner(forbidden) == "the checkout"
    if find_owner(IN_HOME) is not None:
        assert find_owner(Path.home() / ".ipython") == "the home folder"
    assert find_owner(REPOSITORY.with_name(REPOSITORY.name + "-other")) != "the checkout"


def test_reading_is_nobodys_business() -> None:
    assert (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    (REPOSITORY / "src").mkdir(exist_ok=True)
    assert take_notes() == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({BFLOAT16: "fast", CORES: "7"}, [True, 7, 7]),
        ({BFLOAT16: "slow", CORES: "1"}, [False, 1, 1]),
    ],
)
def test_the_code_takes_the_processor_for_another(given: dict[str, str], expected: list[object]) -> None:
    code = (
        "import json; from lm_tuning.runtime.device import describe_device, probe_device, read_processor; "
        "found = probe_device({}); "
        "print(json.dumps([found.supports_bf16, found.cores, read_processor().num_logical]))"
    )
    environment = os.environ | given | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == expected


def test_children_and_this_process_have_the_same_guard() -> None:
    assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == str(Path(guard.__file__).parent / "child")
