"""Faults of the machine in a whole ``kedro run``: exit code 2, one message, nothing half written, and a way on."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.pipelines.test_health_of_runs import Project
from tests.support.small_disk import mounted


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
        assert project.health()["run"]["state"] == "failed"
        subprocess.run(["mount", "-o", "remount,size=2m", str(disk)], check=True)
        project.run(exit_code=0, train__resume="true", **params)
    assert (project.folder / "data/06_models/smoke/tuned_model/model.safetensors").is_file()
