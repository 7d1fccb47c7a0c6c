"""What of a run reaches MLflow and by which names: weights by choice, settings, figures, reports of a failure."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from lm_tuning.tracking.journal import MAX_COPIED_BYTES, Journal
from lm_tuning.tracking.run_description import find_link
from tests.hooks.test_tracking import all_runs, artifacts, client, losses, read_artifact, resume_params
from tests.support.tiny_project import run_session
from tests.support.tracking_store import history


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


def test_a_journal_copies_small_files_and_links_large_ones(tmp_path: Path) -> None:
    """A report may be written again before it is sent; a copy of a model would cost time and space."""
    journal = Journal.create(tmp_path / "journals", {})
    for name, size in (("report.json", MAX_COPIED_BYTES), ("model.bin", MAX_COPIED_BYTES + 1)):
        path = tmp_path / name
        with path.open("wb") as file:
            file.truncate(size)
        journal.add_file(path, "reports", name)
        (kept,) = journal.folder.glob(f"files/*/{name}")
        assert kept.stat().st_size == size
        assert kept.samefile(path) == (size > MAX_COPIED_BYTES)


def test_the_list_of_runs_has_a_view_of_loss_score_and_speed_that_users_may_change(project: Path) -> None:
    import mlflow

    tag = "mlflow.sharedViewState.lm-tuning"
    run_session(project)
    (run,) = all_runs()
    view = json.loads(client().get_experiment(run.info.experiment_id).tags[tag])
    assert view["name"] == "Loss, score, speed"
    columns = json.loads(view["state"])["selectedColumns"]
    assert columns[0] == "metrics.`Loss/train_nats_per_token`"
    assert "metrics.`test/tuned_nats_per_token`" in columns
    mlflow.set_tracking_uri(os.environ["MLFLOW_TRACKING_URI"])
    link = find_link("http://127.0.0.1:5000")
    assert link is not None
    assert link.startswith(f"http://127.0.0.1:5000/#/experiments/{run.info.experiment_id}/runs?viewStateShareKey=lm-")

    client().set_experiment_tag(run.info.experiment_id, tag, "of a user")
    run_session(project)
    assert client().get_experiment(run.info.experiment_id).tags[tag] == "of a user"


@pytest.mark.parametrize("split", ["validation", ""])
def test_the_group_of_an_evaluation_is_the_split_that_it_was_made_on(
    project: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    monkeypatch.setenv("TINY_SPLIT", split)
    run_session(project)
    (run,) = all_runs()
    groups = {name.rpartition("/")[0] for name in run.data.metrics}
    assert groups == {"train", "data", *(["validation", "base"] if split else [])}


def test_a_resumed_run_of_an_earlier_version_keeps_its_names(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_NODE", "raise")
    with pytest.raises(RuntimeError):
        run_session(project)
    monkeypatch.delenv("TINY_NODE")
    (run,) = all_runs()
    # What a version without groups has logged until then.
    for name in ("loss", "gradient_norm"):
        client().log_metric(run.info.run_id, name, 3.0, step=1)
    run_session(project, params=resume_params())
    (run,) = all_runs()
    uri = os.environ["MLFLOW_TRACKING_URI"]
    assert set(history(uri, run.info.run_id, "loss")) == {(1, 3.0), (2, 2.0)}
    assert losses(run) == [(1, 3.0)]  # of the first session
    assert run.data.metrics["tuned.nats_per_token"] == 2.5
    assert run.data.metrics["data_rows_read"] == 7.0


def test_a_value_too_long_for_a_parameter_is_kept_whole_as_a_file(project: Path, tmp_path: Path) -> None:
    labels = {f"LABEL_{number}": "x" * 20 for number in range(400)}
    run_session(project, params={"environment": {"variables": labels}, "data": {"template": "값{text}" * 2000}})
    (run,) = all_runs()
    assert run.info.status == "FINISHED"
    shortened = run.data.params["environment.variables"]
    assert shortened.startswith('{"LABEL_0": "xxxx')
    assert len(shortened) == 500
    assert shortened.endswith("[shortened: 14690 characters, all in parameters.yml]")
    assert "shortened: 14000 characters" in run.data.params["data.template"]
    resolved = yaml.safe_load(read_artifact(run, "parameters.yml", tmp_path))
    assert resolved["environment"]["variables"] == labels
    assert resolved["data"]["template"] == "값{text}" * 2000
