"""What a whole ``kedro run`` leaves of its health, whatever ends it: exit code, ``health.json`` and MLflow's copy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.project_copy import copy_project
from tests.support.tiny import save_tiny_model

ANIMALS = ["cat", "dog", "bird", "fish", "horse", "sheep", "goat", "duck"]

# A user's own code, which Kedro imports with the project: it plants what TINY_FAULT says.
FAULTS = """
import os

FAULT = os.environ.get("TINY_FAULT", "")


def plant():
    from lm_tuning.training.trainer import StepPlanTrainer

    sound = StepPlanTrainer.micro_batch_loss

    def loss(self, model, micro_batch, total):
        value = sound(self, model, micro_batch, total)
        if FAULT == "first loss":
            return 3 * value
        if FAULT == "crash" and self.state.global_step == 1:
            raise RuntimeError("something broke")
        if FAULT == "memory" and self.state.global_step == 1:
            raise MemoryError
        if FAULT == "slow" and self.state.global_step >= 1:
            import time

            print("a step begins", flush=True)
            time.sleep(2)
        return value

    StepPlanTrainer.micro_batch_loss = loss
"""


class Project:
    """A copy of this project with a tiny model, rows and faults that can be planted in its runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        copy_project(folder)
        (folder / "src/lm_tuning/planted.py").write_text(FAULTS)
        nodes = folder / "src/lm_tuning/pipelines/train/nodes.py"
        called = "    from lm_tuning.planted import plant\n\n    plant()\n    try:\n        with show_progress()"
        text = nodes.read_text()
        assert text.count("    try:\n        with show_progress()") == 1
        nodes.write_text(text.replace("    try:\n        with show_progress()", called))
        save_tiny_model(folder / "models/tiny")
        rows = [
            {"question": f"{ANIMALS[n % 8]} number {n}?", "answer": f"{n} {ANIMALS[n % 8][::-1]}"} for n in range(60)
        ]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def start(self, fault: str = "", **params: object) -> subprocess.Popen[str]:
        """Start a training of the stored tokens, or of all before it, with a fault."""
        given: dict[str, object] = {"model.name_or_path": "models/tiny", "data.path": "rows.jsonl"}
        given |= {key.replace("__", "."): value for key, value in params.items()}
        text = ",".join(f"{key}={value}" for key, value in given.items())
        environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
        environment |= {"COLUMNS": "400", "TINY_FAULT": fault, "PYTHONPATH": str(self.folder / "src")}
        pipelines = "split,train"
        return subprocess.Popen(
            [sys.executable, "-m", "kedro", "run", "--env", "smoke", f"--pipelines={pipelines}", "--params", text],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, fault: str = "", *, exit_code: int, **params: object) -> str:
        """Run to the end; return what was printed."""
        process = self.start(fault, **params)
        printed, _ = process.communicate()
        assert process.returncode == exit_code, printed[-6000:]
        return printed

    def health(self) -> dict[str, Any]:
        """Read ``health.json``."""
        path = self.folder / "data/08_reporting/smoke/health.json"
        return dict(json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON")))

    def logged(self, run_id: str) -> dict[str, Any]:
        """Read the copy that MLflow has of a run."""
        from mlflow import MlflowClient

        run = MlflowClient(f"sqlite:///{self.folder}/mlflow.db").get_run(run_id)
        uri = run.info.artifact_uri.removeprefix("file://")
        [path] = (self.folder / uri).rglob("health.json")
        return dict(json.loads(path.read_text()))


def test_a_run_without_memory_or_gradients_leaves_its_report_too(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    project.run("memory", exit_code=2, train__max_steps=3, train__micro_batch_tokens=512)
    assert project.health()["run"]["state"] == "out of memory"

    printed = project.run(exit_code=2, train__method="full", train__freeze="model")
    assert "[nothing-has-gradient]" in printed
    assert "freezes the whole model" in printed
    assert "Traceback" not in printed
    frozen = project.health()
    assert (frozen["run"]["state"], frozen["run"]["ended_by"]) == ("stopped", "nothing-has-gradient")
    assert project.logged(frozen["run"]["mlflow_run_id"]) == frozen


def test_this_run_s_report_is_left_whatever_ends_the_run(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    project.run(exit_code=0, train__max_steps=3)
    first = project.health()
    assert (first["run"]["state"], first["run"]["ended_by"]) == ("finished", None)
    assert project.logged(first["run"]["mlflow_run_id"]) == first

    printed = project.run("first loss", exit_code=2, train__max_steps=3)
    assert "[first-loss-off]" in printed
    assert "Traceback" not in printed
    stopped = project.health()
    assert [finding["code"] for finding in stopped["findings"] if finding["severity"] == "stop"] == ["first-loss-off"]
    assert (stopped["run"]["state"], stopped["run"]["ended_by"]) == ("stopped", "first-loss-off")
    assert stopped["facts"]["first_step_rows"] > 0
    assert stopped["run"]["mlflow_run_id"] != first["run"]["mlflow_run_id"]
    assert project.logged(stopped["run"]["mlflow_run_id"]) == stopped
    assert project.logged(first["run"]["mlflow_run_id"]) == first

    project.run("crash", exit_code=1, train__max_steps=3)
    crashed = project.health()
    assert (crashed["run"]["state"], crashed["run"]["ended_by"]) == ("failed", "RuntimeError")
    assert project.logged(crashed["run"]["mlflow_run_id"]) == crashed

    process = project.start("slow", train__max_steps=30)
    assert process.stdout is not None
    while "a step begins" not in (line := process.stdout.readline()):
        assert line, "the run ended"
    running = project.health()
    assert (running["run"]["state"], running["run"]["ended"]) == ("running", None)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    interrupted = project.health()
    assert (interrupted["run"]["state"], interrupted["run"]["ended_by"]) == ("interrupted", "SIGTERM")
    assert project.logged(interrupted["run"]["mlflow_run_id"]) == interrupted

    # A resume that is refused leaves the report of the run that it would have continued.
    project.run(exit_code=2, train__max_steps=30, train__resume="true", train__learning_rate=0.5, seed=99)
    assert project.health() == interrupted
