"""A whole ``kedro run`` that trains all weights says whether products read copies of them, and trains the same."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from tests.pipelines.test_health_of_runs import Project

# Copies are for GPUs; this lets a CPU have them, where the same functions run.
ON_CPU = """
import os


def plant():
    from lm_tuning.training.kernels import weight_copies

    if os.environ.get("TINY_FAULT"):
        weight_copies._DEVICES = ("cpu",)
"""


def losses_of(project: Project) -> list[str]:
    [file] = (project.folder / "data/08_reporting/smoke").glob("*step*.csv")
    with file.open() as lines:
        return [row["loss_nats_per_token"] for row in csv.DictReader(lines)]


def test_a_full_training_says_whether_there_are_copies_and_is_the_same(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    (project.folder / "src/lm_tuning/planted.py").write_text(ON_CPU)
    options: dict[str, Any] = {"train__method": "full", "train__precision": "bfloat16", "train__max_steps": 4}
    printed = project.run(exit_code=0, **options)
    assert "no 16-bit copies, since training runs on the CPU" in printed
    plain = project.health()
    assert plain["facts"]["fast_path"]["weights"] == "no 16-bit copies, since training runs on the CPU"
    wanted = losses_of(project)
    assert len(wanted) == 4
    printed = project.run("copies", exit_code=0, **options)
    health = project.health()
    assert health["facts"]["fast_path"]["weights"].startswith("bfloat16 copies for 14 products")
    assert health["facts"]["fast_path"]["weights"] in printed
    assert losses_of(project) == wanted
    assert project.logged(health["run"]["mlflow_run_id"]) == health
