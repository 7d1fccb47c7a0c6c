"""Tracking stores and tiny projects for hook tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiny_project import PACKAGE, forget_project, write_project
from tests.support.tracking_store import new_store


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tiny project with an empty MLflow store; afterwards this process is as it was."""
    import mlflow
    from kedro.framework import project as kedro_project

    uri, folder = mlflow.get_tracking_uri(), Path.cwd()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", new_store(tmp_path / "store"))
    monkeypatch.delenv("TINY_NODE", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # Kedro puts the project's src before it
    # Kedro sets logging up for each package once, which takes the handler of caplog away: not in the middle of a test.
    kedro_project.LOGGING.set_project_logging(PACKAGE)
    before = {name: getattr(kedro_project, name) for name in ("PACKAGE_NAME", "settings", "pipelines")}
    os.chdir(tmp_path)  # where MLflow puts artifacts of experiments that say nothing else
    yield write_project(tmp_path / "project")
    while mlflow.active_run():
        mlflow.end_run()
    mlflow.set_tracking_uri(uri)
    for name, value in before.items():
        setattr(kedro_project, name, value)
    forget_project()
    os.chdir(folder)
