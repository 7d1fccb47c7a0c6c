"""What holds for all tests: threads of parallel workers, a folder that they share, and which files start first."""

from __future__ import annotations

import os
import shutil
import tempfile
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
    "test_planted_secrets.py",
    "test_foreign_text.py",
    "test_whole_run.py",
    "test_accounting.py",
    "test_recipes.py",
    "test_resume.py",
    "test_tracking.py",
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
