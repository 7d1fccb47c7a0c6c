"""Faults of the machine in a whole ``kedro run``: exit code 2, one message, nothing half written, and a way on."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.pipelines.test_health_of_runs import Project
from tests.support.small_disk import mounted


def loader_workers(pid: int) -> list[int]:
    """Return the children of a process that PyTorch has named as loader workers."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in children if Path(f"/proc/{child}/comm").read_text().startswith("pt_data")]


def test_a_disk_that_is_full_at_the_second_checkpoint(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    params = {"train__method": "full", "train__max_steps": 4, "train__save_every_steps": 2}
    with mounted(project.folder / "data/06_models/smoke/checkpoints", "440k") as disk:
        printed = project.run(exit_code=2, **params)
        assert printed.count("the disk is full") == 1
        assert "Could not write the checkpoint of step 4 to " in printed
        assert "train.resume=true" in printed
        assert "Traceback" not in printed
        assert "unexpected pos" not in printed
        assert [path.name for path in disk.glob("run-*/*")] == ["checkpoint-2"]
        assert (project.health()["run"]["state"], project.health()["run"]["ended_by"]) == ("failed", "RuntimeError")
        subprocess.run(["mount", "-o", "remount,size=2m", str(disk)], check=True)
        project.run(exit_code=0, train__resume="true", **params)
    assert (project.folder / "data/06_models/smoke/tuned_model/model.safetensors").is_file()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="this system has no /proc to find the workers in")
def test_a_loader_worker_that_is_killed(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    params = {"train__max_steps": 6, "train__save_every_steps": 1, "train__num_loader_workers": 2}
    process = project.start("slow", **params)
    printed, workers = "", list[int]()
    assert process.stdout is not None
    for line in process.stdout:
        printed += line
        if "a step begins" in line and not workers:
            workers = loader_workers(process.pid)
            assert len(workers) == 2
            os.kill(workers[0], signal.SIGKILL)
    assert process.wait() == 2, printed[-6000:]
    assert printed.count(f"The loader worker {workers[0]} was killed from outside.") == 1
    assert "The checkpoint of step 1 is kept in " in printed
    assert "Traceback" not in printed
    assert [pid for pid in workers if Path(f"/proc/{pid}").exists()] == []
    assert project.health()["run"]["state"] == "failed"
    project.run(exit_code=0, train__resume="true", **params)


def test_a_chat_template_without_an_end_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    template = project.folder / "models/tiny/chat_template.jinja"
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    template.write_text(template.read_text() + loop + "{% endfor %}" * 3)
    printed = project.run(exit_code=2)
    assert printed.count("The chat template in ") == 1
    assert "chat_template.jinja cannot be used: a short conversation takes more than 100,000 steps" in printed
    assert "Traceback" not in printed
    template.write_text("{% for message in messages %}{{ message.content }}")
    printed = project.run(exit_code=2)
    assert "chat_template.jinja, line 1, cannot be compiled" in printed
    assert "Traceback" not in printed
