"""What of a run reaches MLflow: weights by choice, every setting under a name of its own, reports of a failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hooks.test_tracking import all_runs, artifacts, read_artifact
from tests.support.tiny_project import run_session


@pytest.mark.parametrize(
    ("choice", "method", "is_kept"),
    [
        ("adapter", "lora", True),
        ("adapter", "qlora", True),
        ("adapter", "full", False),
        ("always", "full", True),
        ("never", "lora", False),
    ],
)
def test_log_model_decides_whether_weights_are_copied(project: Path, choice: str, method: str, is_kept: bool) -> None:
    run_session(project, params={"tracking": {"log_model": choice}, "train": {"method": method}})
    (run,) = all_runs()
    assert ("model" in artifacts(run)) == is_kept
    assert "reports" in artifacts(run)


@pytest.mark.parametrize("one_of", [("환불(카드)", "환불[카드]"), ("c++", "c##")])
def test_settings_whose_names_mlflow_does_not_take_are_kept_apart(project: Path, one_of: tuple[str, str]) -> None:
    first, second = one_of
    weights = {"plain": 3.0, first: 1.0, second: 2.0}
    run_session(project, params={"task": "sequence_classification", "train": {"class_weights": weights}})
    (run,) = all_runs()
    found = {name: value for name, value in run.data.params.items() if name.startswith("train.class_weights.")}
    assert found["train.class_weights.plain"] == "3.0"
    assert sorted(found.values()) == ["1.0", "2.0", "3.0"], found


def test_a_report_that_is_written_before_a_failure_is_logged_with_it(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is not saved through the catalog then; what lies there from an earlier run is not logged."""
    monkeypatch.setenv("TINY_NODE", "raise")
    with pytest.raises(RuntimeError):
        run_session(project)
    (first,) = all_runs()
    assert "reports/health.json" not in artifacts(first, "reports")
    monkeypatch.setenv("TINY_NODE", "report and raise")
    with pytest.raises(RuntimeError):
        run_session(project)
    second = all_runs()[-1]
    assert json.loads(read_artifact(second, "reports/health.json", tmp_path)) == {"findings": 1}
    monkeypatch.setenv("TINY_NODE", "raise")
    with pytest.raises(RuntimeError):
        run_session(project)
    assert "reports/health.json" not in artifacts(all_runs()[-1], "reports")
