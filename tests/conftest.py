"""What holds for all tests: threads of parallel workers, a folder that they share, and which files start first."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tracking_store import SHARED_FOLDER

# Before anything imports torch: workers share the cores, and two teams of threads on them slow each other down many
# times over. Tests of thread counts set their own variables.
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if IS_WORKER:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

MOST_WORKERS = 8
"""Each holds torch and MLflow, about a gigabyte."""

LONG_FILES = (
    "test_whole_run.py",
    "test_accounting.py",
    "test_recipes.py",
    "test_resume.py",
    "test_tracking.py",
    "test_tracking_away.py",
    "test_stopping.py",
    "test_run.py",
    "test_quantized.py",
    "test_soak.py",
    "test_comparison.py",
    "test_environment.py",
    "test_planner.py",
    "test_probe.py",
    "test_fast_path.py",
    "test_profile.py",
)
"""Files of half a minute and more. A worker takes whole files; the last one should not be long."""


REPOSITORY = Path(__file__).resolve().parents[1]
PRIVATE = ("mlflow.db", "mlruns", "data", "logs")
"""What belongs to the runs of whoever works in this repository."""


def _look_at_private() -> dict[str, int]:
    """Return when each of these, and what lies in them two levels deep, was last changed."""
    found: dict[str, int] = {}
    for name in PRIVATE:
        path = REPOSITORY / name
        for each in (path, *path.glob("*"), *path.glob("*/*")):
            if each.exists():
                found[str(each.relative_to(REPOSITORY))] = each.stat().st_mtime_ns
    return found


@pytest.fixture(autouse=True)
def _repository_is_left_alone() -> Iterator[None]:
    """Fail a test that writes to the runs, results or logs of this repository: they are the user's own."""
    before = _look_at_private()
    yield
    after = _look_at_private()
    touched = sorted(name for name in before | after if before.get(name) != after.get(name))
    assert not touched, f"changed in {REPOSITORY} during this test: {touched}. Tests work in folders of their own."


def pytest_configure() -> None:
    """Make the shared folder; workers inherit the variable."""
    if not IS_WORKER:
        os.environ[SHARED_FOLDER] = tempfile.mkdtemp(prefix="lm-tuning-tests-")


def pytest_unconfigure() -> None:
    """Remove the shared folder."""
    if not IS_WORKER:
        shutil.rmtree(os.environ.pop(SHARED_FOLDER), ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Count the processors that this process may use; xdist's own count knows no quota and no hyper-threads."""
    from lm_tuning.runtime.processor import read_processor

    quota = read_processor().quota
    num_allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(num_allowed, MOST_WORKERS, num_allowed if quota is None else round(quota)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long files first; inside a file the order stays."""
    places = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(Path(item.path).name, len(places)))
