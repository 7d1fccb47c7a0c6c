"""A real MLflow store in SQLite for one test, from a template that is made once and shared by parallel workers."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path
from typing import Any

SHARED_FOLDER = "LM_TUNING_TEST_FOLDER"
"""Variable that names a folder of this test run, the same in all workers."""


@functools.cache
def _template() -> Path:
    """Return a database with MLflow's tables, which take seconds to make."""
    from filelock import FileLock
    from mlflow import MlflowClient

    folder = Path(os.environ[SHARED_FOLDER])
    path = folder / "mlflow.db"
    with FileLock(folder / "lock"):
        if not path.exists():
            making = folder / "making.db"
            MlflowClient(tracking_uri=f"sqlite:///{making}").search_experiments()
            making.rename(path)
    return path


def new_store(folder: Path) -> str:
    """Write an empty store into a folder.

    Args:
        folder: a folder of the test's own.

    Returns:
        Its tracking URI.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "mlflow.db"
    shutil.copy(_template(), path)
    return f"sqlite:///{path}"


def new_run(uri: str, folder: Path) -> str:
    """Create a run in an experiment whose artifacts lie in the test's folder, and return its id."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.create_experiment(f"test-{folder.name}", artifact_location=(folder / "artifacts").as_uri())
    return str(client.create_run(experiment).info.run_id)


def history(uri: str, run_id: str, name: str) -> list[tuple[int, float]]:
    """Return step and value of a metric, in the order of steps."""
    from mlflow import MlflowClient

    points: list[Any] = MlflowClient(tracking_uri=uri).get_metric_history(run_id, name)
    return sorted((point.step, point.value) for point in points)
