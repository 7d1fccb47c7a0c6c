"""Whole ``kedro run``s with ``train.fp8``: refused where no card can do it, and told in files and MLflow elsewhere."""

from __future__ import annotations

from pathlib import Path

from tests.pipelines.test_health_of_runs import Project

EMULATION = """

def why_no_device(device: str) -> str | None:
    return None
"""
BFLOAT16 = {"train__precision": "bfloat16", "train__fp8": "true", "train__compile": "false"}


def test_a_run_with_products_in_8_bits(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    refused = project.run(exit_code=2, **BFLOAT16)
    assert "train.fp8 = true cannot be had: training runs on the CPU" in refused
    assert "Traceback" not in refused
    assert project.health()["run"]["state"] == "refused"
    together = project.run(exit_code=2, train__fp8="true", train__method="full", train__precision="float32")
    assert "train.method = full trains all weights" in together
    assert "but train.precision = float32" in together

    kernels = project.folder / "src/lm_tuning/training/kernels/fp8.py"
    kernels.write_text(kernels.read_text() + EMULATION)
    printed = project.run(exit_code=0, **BFLOAT16)
    assert "Products in 8 bits: yes: 14 frozen layers" in printed
    health = project.health()
    assert health["run"]["state"] == "finished"
    assert "fp8-not-used" not in [finding["code"] for finding in health["findings"]]
    assert health["facts"]["fast_path"]["fp8"].startswith("yes: 14 frozen layers")
    assert 0 < health["facts"]["fp8_first_step"]["relative_difference"] < 0.01
    assert project.logged(health["run"]["mlflow_run_id"]) == health
    assert (project.folder / "data/06_models/smoke/tuned_model/adapter_model.safetensors").is_file()
