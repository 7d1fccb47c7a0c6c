"""``kedro chat`` from the command line: lines in, answers out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_SECONDS
from tests.support.project_copy import copy_project
from tests.support.stored import save_tuned
from tests.support.tiny import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "project"
    copy_project(folder)
    base = save_tiny_model(folder / "models/tiny")
    tuned = folder / "data/06_models/smoke/tuned_model"
    tuned.parent.mkdir(parents=True)
    save_tuned(tuned, base, "lora", tokens_key="k", compute_dtype="float32", rendering={"format": "messages"})
    return folder


def chat(folder: Path, text: str, *options: str, env: str = "smoke") -> subprocess.CompletedProcess[str]:
    """Run the command with some lines of input."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    return subprocess.run(
        [sys.executable, "-m", "kedro", "chat", "--env", env, *options],
        cwd=folder,
        env={**kept, "COLUMNS": "200"},
        input=text,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def test_each_line_is_answered_by_both_models_and_nothing_else_is_printed(folder: Path) -> None:
    done = chat(folder, "hello\nand now?\n/reset\nagain\n", "--model", "both", "--max-new-tokens", "4")
    assert done.returncode == 0, done.stderr[-3000:]
    names = [line.partition("> ")[0] for line in done.stdout.splitlines() if "> " in line]
    assert names == ["base", "tuned"] * 3
    assert "Forgotten." in done.stdout
    assert "INFO" not in done.stdout + done.stderr
    assert not (folder / "data/08_reporting").exists()
    assert "Traceback" not in done.stderr


def test_without_a_tuned_model_the_command_that_makes_one_is_named(folder: Path) -> None:
    done = chat(folder, "hello\n", env="gsm8k")
    assert done.returncode == 2
    assert "'tuned_model' is not stored yet" in done.stderr
    assert "kedro run --pipelines=" in done.stderr


def test_a_wrong_parameter_is_told_as_in_a_run(folder: Path) -> None:
    done = chat(folder, "hello\n", "--params", "generate.generation.max_tokens=3")
    assert done.returncode == 2
    assert "generate.generation.max_new_tokens" in done.stderr
