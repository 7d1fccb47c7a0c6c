"""One run at a time writes to an output, and a refused one leaves no trace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lm_tuning.errors import UserError
from lm_tuning.storage.locks import OutputLock
from tests.support.tiny_project import run_session


def runs_of(uri: str) -> int:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    return len(client.search_runs([experiment.experiment_id for experiment in client.search_experiments()]))


def test_second_run_on_the_same_output_is_refused(project: Path) -> None:
    with OutputLock(project / "data/.locks/default.lock"):
        with pytest.raises(UserError, match=rf"output 'default' \(folders data/\*/default\).*process {os.getpid()} "):
            run_session(project)
        assert runs_of(os.environ["MLFLOW_TRACKING_URI"]) == 0
        assert not (project / "data/default").exists()
        run_session(project, params={"output": "other"})
    assert (project / "data/other/evaluation.json").is_file()
    run_session(project)


def test_lock_is_free_after_success_failure_and_refusal(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = OutputLock(project / "data/.locks/default.lock")
    with pytest.raises(UserError, match="tuned_model"):
        run_session(project, pipelines=["evaluate"])  # an input is missing: refused before the first node
    with lock:
        pass
    monkeypatch.setenv("TINY_NODE", "raise")
    with pytest.raises(RuntimeError):
        run_session(project)
    with lock:
        pass
    monkeypatch.delenv("TINY_NODE")
    run_session(project)
    with lock:
        pass
