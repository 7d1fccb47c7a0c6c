"""Each run is one MLflow run that tells how it was started, what it made and how it ended."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kedro.runner import ThreadRunner

from lm_tuning.errors import Interrupted, UserError
from lm_tuning.hooks import tracking
from lm_tuning.hooks.mlflow_config import complete_mlflow_config
from lm_tuning.parameters import Parameters
from lm_tuning.parameters.loading import read_settled
from lm_tuning.runtime.facts import run_facts
from lm_tuning.tracking import sender
from lm_tuning.tracking.journal import JOURNAL_FOLDER, list_journals
from tests.support.patience import PATIENCE_SECONDS
from tests.support.tiny_project import PARAMETERS, run_session, send_what_is_kept_by, write_project
from tests.support.tracking_store import history


def client() -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=os.environ["MLFLOW_TRACKING_URI"])


def all_runs() -> list[Any]:
    """Every run of every experiment, oldest first."""
    experiments = [experiment.experiment_id for experiment in client().search_experiments()]
    return list(client().search_runs(experiments, order_by=["attributes.start_time ASC"]))


def losses(run: Any) -> list[tuple[int, float]]:
    return history(os.environ["MLFLOW_TRACKING_URI"], run.info.run_id, "train/loss")


def artifacts(run: Any, folder: str | None = None) -> set[str]:
    return {entry.path for entry in client().list_artifacts(run.info.run_id, folder)}


def read_artifact(run: Any, name: str, folder: Path) -> str:
    return Path(client().download_artifacts(run.info.run_id, name, str(folder))).read_text(encoding="utf-8")


def no_run_is_active() -> bool:
    import mlflow

    return mlflow.active_run() is None


def test_the_parameters_of_a_session_are_read_and_checked_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_tuning.hooks import parameters as session_parameters

    read = []

    def count(loader: Any, root: Path) -> Any:
        read.append(root)
        return read_settled(loader, root)

    monkeypatch.setattr(session_parameters, "read_settled", count)
    run_session(project)
    assert read == [project], "several hooks need them"
    run_session(project)
    assert read == [project] * 2, "a second session in the same process reads its files anew"


def test_a_run_tells_settings_facts_data_results_and_figures(project: Path, tmp_path: Path) -> None:
    run_session(project, params={"train": {"lora": {"target_modules": ["q_proj", "v_proj"]}}})
    (run,) = all_runs()
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "all default"
    assert client().get_experiment(run.info.experiment_id).name == "lm-tuning"
    assert no_run_is_active()

    assert run.data.params["train.lora.target_modules"] == '["q_proj", "v_proj"]'
    assert run.data.params["train.max_steps"] == "2"
    assert run.data.params["train.lora.r"] == "16"  # a default that no file names
    assert run.data.params["data.path"] == "rows.jsonl"
    resolved = yaml.safe_load(read_artifact(run, "parameters.yml", tmp_path))
    assert resolved["train"]["lora"]["target_modules"] == ["q_proj", "v_proj"]
    assert Parameters.model_validate(resolved).train.max_steps == 2

    tags = run.data.tags
    assert tags["command"] == """kedro run '--params=train.lora.target_modules=["q_proj", "v_proj"]'"""
    assert tags["pipelines"] == "all"
    assert tags["version.mlflow"]
    assert tags["device.kind"]
    assert "git.dirty" in tags
    assert tags["mlflow.source.git.commit"] == tags["git.commit"]
    assert (tags["data.raw_examples.train"], tags["data.raw_examples.test"]) == ("d1", "d2")
    assert tags["data.example_splits"] == "k1"
    assert "data.checkpoints" not in tags

    assert losses(run) == [(1, 3.0), (2, 2.0)]
    figures = {name: value for name, value in run.data.metrics.items() if name != "train/loss"}
    evaluated = {"base/nats_per_token": 3.5, "base/num_tokens": 10.0, "test/tuned_nats_per_token": 2.5}
    assert figures == {**evaluated, "test/num_rows": 3.0, "data/rows_read": 7.0}
    assert artifacts(run) == {"model", "parameters.yml", "reports"}
    reports = {"data_report.json", "data_report.md", "evaluation.json", "health.json", "training_summary.csv"}
    assert artifacts(run, "reports") == {f"reports/{name}" for name in reports}
    assert artifacts(run, "model") == {"model/adapter.bin", "model/tuning.json"}


def test_two_sessions_of_one_process_are_two_clean_runs(project: Path) -> None:
    run_session(project)
    run_session(project, pipelines=["evaluate"], params={"tracking": {"run_name": "again", "experiment": "other"}})
    first, second = all_runs()
    assert [first.info.status, second.info.status] == ["FINISHED", "FINISHED"]
    assert second.info.run_name == "again"
    assert client().get_experiment(second.info.experiment_id).name == "other"
    assert "train/loss" not in second.data.metrics
    assert second.data.metrics["test/tuned_nats_per_token"] == 2.5
    assert artifacts(second) == {"parameters.yml", "reports"}


def test_threads_of_the_runner_log_into_the_one_run(project: Path) -> None:
    run_session(project, runner=ThreadRunner())
    (run,) = all_runs()
    assert run.info.status == "FINISHED"
    assert losses(run) == [(1, 3.0), (2, 2.0)]
    assert run.data.tags["data.example_splits"] == "k1"


def test_failed_run_keeps_its_error_and_the_metrics_so_far(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_NODE", "raise")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(RuntimeError, match=r"^step 2 failed$"):
        run_session(project)
    (run,) = all_runs()
    assert run.info.status == "FAILED"
    assert run.info.end_time is not None
    assert run.data.tags["error"] == "RuntimeError: step 2 failed"
    assert losses(run) == [(1, 3.0)]
    assert no_run_is_active()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    monkeypatch.delenv("TINY_NODE")
    run_session(project)
    assert [run.info.status for run in all_runs()] == ["FAILED", "FINISHED"]


def test_broken_store_hides_neither_the_error_nor_the_results(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    log_artifact = MlflowClient.log_artifact
    # The first session of a process sets logging up anew, which takes pytest's listeners away.
    warnings: list[str] = []
    monkeypatch.setattr(sender.logger, "warning", lambda text, *values: warnings.append(text % values))
    monkeypatch.setattr(sender, "RETRY_SECONDS", 0.01)

    def refuse(*_: object, **__: object) -> None:
        raise OSError("the store is gone")

    def refuse_figures(self: Any, run_id: str, path: str, folder: str | None = None) -> None:
        if path.endswith("evaluation.json"):
            refuse()
        log_artifact(self, run_id, path, folder)

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_artifact", refuse_figures)
        run_session(project)
    (run,) = all_runs()
    assert run.info.status == "FINISHED"
    assert (project / "data/default/evaluation.json").is_file()
    assert warnings == ["The MLflow run lacks a copy of 'evaluation' for now: the store is gone"]
    assert "reports/training_summary.csv" in artifacts(run, "reports")
    assert "reports/evaluation.json" not in artifacts(run, "reports")
    (kept,) = list_journals(project / JOURNAL_FOLDER)
    assert (kept / "files").is_dir()

    monkeypatch.setenv("TINY_NODE", "raise")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=r"^step 2 failed$"):
        patch.setattr(MlflowClient, "set_terminated", refuse)
        run_session(project)
    assert no_run_is_active()


def test_ctrl_c_that_no_hook_sees_is_closed_by_the_next_session(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kedro.framework.session import KedroSession

    monkeypatch.setenv("TINY_NODE", "interrupt")
    with pytest.raises(KeyboardInterrupt):
        run_session(project)
    monkeypatch.delenv("TINY_NODE")
    with KedroSession.create(project_path=project) as session:  # the same hooks, as in a notebook
        session.run()
    first, second = all_runs()
    assert (first.info.status, second.info.status) == ("KILLED", "FINISHED")
    assert losses(first) == [(1, 3.0)]


@pytest.mark.parametrize(
    ("behaviour", "number"),
    [
        ("wait", signal.SIGINT),
        ("wait", signal.SIGTERM),
        # The test above has the same in this process, and the first case the same from outside.
        pytest.param("interrupt", None, marks=pytest.mark.slow),
    ],
)
def test_interrupted_process_leaves_a_killed_run(project: Path, behaviour: str, number: signal.Signals | None) -> None:
    environment = {**os.environ, "TINY_NODE": behaviour, "DO_NOT_TRACK": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "kedro", "run"]
    with subprocess.Popen(
        command, cwd=project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        output = ""
        if number is not None:
            for line in process.stdout:
                output += line
                if "waiting" in line:
                    process.send_signal(number)
                    break
        output += process.communicate(timeout=PATIENCE_SECONDS)[0]
    assert process.returncode == 128 + (number or signal.SIGINT), output
    assert "Stopped by" in output, output
    send_what_is_kept_by(project)  # where a busy machine had no time for it in the end
    (run,) = all_runs()
    assert run.info.status == "KILLED", output
    assert losses(run) == [(1, 3.0)]


def test_a_request_to_stop_that_a_library_swallowed_stops_before_the_next_node(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import that is tried takes the error of a signal for a missing package."""
    monkeypatch.setenv("TINY_NODE", "swallow")
    with pytest.raises(Interrupted, match="SIGTERM"):
        run_session(project)
    (run,) = all_runs()
    assert run.info.status == "KILLED"
    assert losses(run) == [(1, 3.0), (2, 2.0)], "the node that swallowed it went on"
    assert "test/tuned_nats_per_token" not in run.data.metrics
    monkeypatch.delenv("TINY_NODE")
    run_session(project)  # the request is forgotten with its run
    assert all_runs()[-1].info.status == "FINISHED"


def resume_params(**train: Any) -> dict[str, Any]:
    return {"train": {"resume": True, **train}}


def test_resumed_training_goes_on_in_its_run_and_tells_what_changed(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("TINY_NODE", "raise")
    with pytest.raises(RuntimeError):
        run_session(project)
    monkeypatch.delenv("TINY_NODE")
    with caplog.at_level(logging.WARNING, logger="lm_tuning"):
        run_session(project, pipelines=["train"], params=resume_params(learning_rate=5e-5))
    (run,) = all_runs()
    assert run.info.status == "FINISHED"
    assert run.data.params["train.learning_rate"] == "0.0002"
    assert run.data.params["train.resume"] == "false"
    assert run.data.tags["resume.1.train.learning_rate"] == "5e-05"
    assert run.data.tags["pipelines"] == "all"
    assert run.data.tags["resume.1.pipelines"] == "train"
    assert "resume.1.train.resume" not in run.data.tags
    assert "resume.1.version.mlflow" not in run.data.tags
    (warning,) = [message for message in caplog.messages if "Resumed with other settings" in message]
    assert "train.learning_rate (0.0002 -> 5e-05)" in warning
    assert set(losses(run)) == {(1, 3.0), (2, 2.0)}
    again = yaml.safe_load(read_artifact(run, "resume/1/parameters.yml", tmp_path))
    assert again["train"]["learning_rate"] == 5e-5
    assert no_run_is_active()

    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="lm_tuning"):
        run_session(project, pipelines=["train"], params=resume_params())
    (run,) = all_runs()
    assert run.data.tags["resume.count"] == "2"
    assert not any("Resumed with other settings" in message for message in caplog.messages)


def test_a_refused_resume_leaves_its_run_as_it_was_but_for_the_reason(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TINY_NODE", "raise")
    with pytest.raises(RuntimeError):
        run_session(project)
    (before,) = all_runs()
    monkeypatch.setenv("TINY_NODE", "refuse")
    monkeypatch.setattr(tracking, "run_facts", lambda root: {**run_facts(root), "version.new": "1"})
    for _ in range(2):
        with pytest.raises(UserError):
            run_session(project, pipelines=["train"], params=resume_params(learning_rate=5e-5))
    (run,) = all_runs()
    assert run.info.status == before.info.status == "FAILED"
    assert run.data.params == before.data.params
    added = {"refused": "UserError: train.resume: not this one", "resume.count": "0"}
    assert run.data.tags == before.data.tags | added
    assert "Resumed with other settings" not in caplog.text
    monkeypatch.delenv("TINY_NODE")
    run_session(project, pipelines=["train"], params=resume_params())
    (run,) = all_runs()
    assert (run.info.status, run.data.tags["resume.count"], run.data.tags["version.new"]) == ("FINISHED", "1", "1")


def test_a_resume_that_a_health_check_stops_after_a_step_was_not_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_session(project)
    monkeypatch.setenv("TINY_NODE", "report and stop")
    with pytest.raises(UserError, match="health check"):
        run_session(project, pipelines=["train"], params=resume_params(learning_rate=5e-5))
    (run,) = all_runs()
    assert run.info.status == "FAILED"
    assert run.data.tags["error"] == "UserError: Training was stopped by its health check"
    assert (run.data.tags["resume.count"], run.data.tags["resume.1.train.learning_rate"]) == ("1", "5e-05")
    assert "refused" not in run.data.tags
    assert json.loads(read_artifact(run, "reports/health.json", project)) == {"findings": 1}
    assert "Resumed with other settings: train.learning_rate (0.0002 -> 5e-05)." in caplog.text
    assert no_run_is_active()


def test_a_run_that_the_user_ends_tells_what_changed_in_it(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    import mlflow

    run_session(project)
    (run,) = all_runs()
    with mlflow.start_run(run_id=run.info.run_id):
        run_session(project, pipelines=["evaluate"], params={"seed": 43})
    assert "Resumed with other settings: seed (42 -> 43)." in caplog.text


def test_only_training_reopens_a_run(project: Path) -> None:
    run_session(project)
    run_session(project, pipelines=["evaluate"], params=resume_params())
    assert len(all_runs()) == 2


def test_the_newest_complete_checkpoint_decides(project: Path) -> None:
    run_session(project)
    (first,) = all_runs()
    folder = project / "data/default/checkpoints"
    for name, facts in {
        "run-1/checkpoint-9": {"mlflow_run_id": "older run", "complete": True, "step": 9},
        "run-2/checkpoint-2": {"mlflow_run_id": "earlier step", "complete": True, "step": 2},
        "run-2/checkpoint-10": {"mlflow_run_id": first.info.run_id, "complete": True, "step": 10},
        "run-2/checkpoint-12": {"mlflow_run_id": "half written", "complete": False, "step": 12},
    }.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "lm_tuning_checkpoint.json").write_text(json.dumps(facts))
    (folder / "run-3/checkpoint-1").mkdir(parents=True)
    run_session(project, pipelines=["train"], params=resume_params())
    assert len(all_runs()) == 1


def test_a_run_that_is_gone_is_replaced_with_a_warning(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_session(project)
    client().delete_run(all_runs()[0].info.run_id)
    with caplog.at_level(logging.WARNING):
        run_session(project, pipelines=["train"], params=resume_params())
    (run,) = all_runs()
    assert run.info.status == "FINISHED"
    assert "is gone, so a new one is started" in caplog.text


def test_a_run_that_the_user_has_opened_is_used_and_left_open(project: Path) -> None:
    import mlflow

    mlflow.set_tracking_uri(os.environ["MLFLOW_TRACKING_URI"])
    mlflow.set_experiment(
        experiment_id=mlflow.create_experiment("mine", artifact_location=(project / "mlruns").as_uri())
    )
    with mlflow.start_run() as mine:
        run_session(project)
        assert mlflow.active_run().info.run_id == mine.info.run_id
    (run,) = all_runs()
    assert run.info.run_id == mine.info.run_id
    assert run.info.status == "FINISHED"
    assert run.data.params["train.max_steps"] == "2"


def test_pipelines_can_be_left_untracked(project: Path) -> None:
    write_project(project, mlflow={"tracking": {"disable_tracking": {"pipelines": ["split"]}}})
    run_session(project, pipelines=["split"])
    assert all_runs() == []
    run_session(project)
    assert len(all_runs()) == 1


def test_unknown_key_in_mlflow_yml_is_a_users_error(project: Path) -> None:
    write_project(project, mlflow={"tracking": {"runs": {"nested": False}}})
    with pytest.raises(UserError, match=r"mlflow\.yml: tracking\.runs"):
        run_session(project)


def test_refused_parameters_leave_no_run(project: Path) -> None:
    write_project(project, parameters={**PARAMETERS, "seed": "many"})
    with pytest.raises(UserError, match="seed"):
        run_session(project)
    assert all_runs() == []


def test_relative_artifact_folder_is_for_local_databases_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    creation = {"artifact_location": "mlruns"}
    config = {"tracking": {"experiment": {"create_experiment_kwargs": creation}, "run": {"nested": False}}}
    local = complete_mlflow_config(config, "mine", tmp_path)
    assert local["server"]["mlflow_tracking_uri"] == f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert local["tracking"]["experiment"] == {"name": "mine", "create_experiment_kwargs": creation}
    assert local["tracking"]["run"] == {"nested": False}
    server = complete_mlflow_config({**config, "server": {"mlflow_tracking_uri": "http://host:5000"}}, "mine", tmp_path)
    assert server["tracking"]["experiment"]["create_experiment_kwargs"] == {}
    creation["artifact_location"] = "s3://bucket/runs"
    bucket = complete_mlflow_config({**config, "server": {"mlflow_tracking_uri": "http://host:5000"}}, "mine", tmp_path)
    assert bucket["tracking"]["experiment"]["create_experiment_kwargs"] == creation
    assert complete_mlflow_config({}, "mine", tmp_path)["tracking"]["experiment"]["name"] == "mine"
