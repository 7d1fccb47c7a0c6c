"""What a run is remembered with."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from lm_tuning.runtime.facts import environment_facts, read_git, remember_decisions, run_facts
from lm_tuning.runtime.threads import Decision

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@needs_git
def test_commit_and_dirty_flag_of_the_project_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    project = tmp_path / "repository" / "project"
    project.mkdir(parents=True)
    assert read_git(project) == {"git.commit": "unknown", "git.dirty": "unknown"}
    git(project.parent, "init", "--quiet")
    (project / "parameters.yml").write_text("seed: 1\n")
    git(project.parent, "add", "-A")
    git(project.parent, "commit", "--quiet", "--no-verify", "-m", "first")
    commit = git(project.parent, "rev-parse", "HEAD")
    assert read_git(project) == {"git.commit": commit, "git.dirty": "false"}
    (project.parent / "elsewhere").write_text("beside the project\n")
    assert read_git(project)["git.dirty"] == "false"
    (project / "parameters.yml").write_text("seed: 2\n")
    assert read_git(project) == {"git.commit": commit, "git.dirty": "true"}


def test_versions_and_machine(tmp_path: Path) -> None:
    facts = run_facts(tmp_path)
    assert facts["version.torch"] == version("torch")
    assert facts["version.transformers"] == version("transformers")
    assert facts["python"] == platform.python_version()
    assert int(facts["cpu.cores"]) >= 1
    assert facts["device.kind"] in ("cpu", "cuda", "mps")
    assert facts["device.name"]
    assert all(isinstance(value, str) for value in facts.values())


def test_threads_are_read_from_a_torch_that_is_loaded(tmp_path: Path) -> None:
    import torch

    assert run_facts(tmp_path)["torch.num_threads"] == str(torch.get_num_threads())
    assert environment_facts()["torch.num_threads"] == str(torch.get_num_threads())


def test_decisions_are_remembered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    decisions = [
        Decision("OMP_NUM_THREADS", "2", "set by you", "user"),
        Decision("NOT_THERE", "1", "because", "lm_tuning"),
    ]
    try:
        assert remember_decisions(decisions)
        assert not remember_decisions(decisions)
        facts = environment_facts()
        assert (facts["env.OMP_NUM_THREADS"], facts["env.NOT_THERE"]) == ("2", "1")
        assert facts["env.set_by_user"] == "OMP_NUM_THREADS"
        assert remember_decisions(decisions[:1])
    finally:
        remember_decisions([])
