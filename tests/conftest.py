"""What holds for all tests: threads of parallel workers, a folder that they share, what no test may write, the machine
that the code is told it runs on, and which files start first."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from tests.support import guard, machine
from tests.support.tracking_store import SHARED_FOLDER

# Before anything imports torch: workers share the cores, and two teams of threads on them slow each other down many
# times over. Tests of thread counts set their own variables.
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if IS_WORKER:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["tests.support.fixtures"]

MOST_WORKERS = 8
"""Each holds torch and MLflow, about a gigabyte."""

LONG_FILES = (
    "test_health_of_runs.py",
    "test_machine_faults.py",
    "test_planted_secrets.py",
    "test_foreign_text.py",
    "test_whole_run.py",
    "test_stored_by_earlier.py",
    "test_damaged_checkpoints.py",
    "test_accounting.py",
    "test_recipes.py",
    "test_resume.py",
    "test_tracking.py",
    "test_tracking_away.py",
    "test_stopping.py",
    "test_run.py",
    "test_quantized.py",
    "test_soak.py",
    "test_language.py",
    "test_environment.py",
    "test_export.py",
    "test_planner.py",
    "test_probe.py",
    "test_fast_path.py",
    "test_profile.py",
)
"""Files of half a minute and more. A worker takes whole files; the last one should not be long."""


# How long an example takes says how busy the machine is, and nothing of the code.
hypothesis_settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
hypothesis_settings.load_profile("tests")


def pytest_configure() -> None:
    """Make the shared folder, and watch what this process and its children write; workers inherit the variables."""
    if not IS_WORKER:
        # A store, a server or an environment that the user's shell names is the user's.
        for name in [name for name in os.environ if name.startswith(("MLFLOW_", "KEDRO_"))]:
            del os.environ[name]
        os.environ[SHARED_FOLDER] = tempfile.mkdtemp(prefix="lm-tuning-tests-")
        # Its list of fonts takes seconds to make and is kept; its settings are the user's.
        os.environ["MPLCONFIGDIR"] = str(Path.home() / ".cache" / "matplotlib")
        # Read before anything else by every Python that a test starts.
        children = str(Path(guard.__file__).parent / "child")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [children, os.environ.get("PYTHONPATH")]))
    worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
    os.environ[guard.NOTES] = str(Path(os.environ[SHARED_FOLDER]) / f"forbidden-{worker}.txt")
    if not IS_WORKER:  # which are children, and have both
        guard.watch_writes()
        machine.pretend()


def pytest_unconfigure() -> None:
    """Remove the shared folder."""
    if not IS_WORKER:
        shutil.rmtree(os.environ.pop(SHARED_FOLDER), ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None]:
    """Fail the test in which something was written that is the user's, also by a process that it started."""
    try:
        yield
    finally:
        noted = guard.take_notes()
    if noted:
        pytest.fail("written into the user's own folders:\n" + "\n".join(noted), pytrace=False)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Count the processors that this process may use; xdist's own count knows no quota and no hyper-threads."""
    from lm_tuning.runtime.device import read_processor

    quota = read_processor().quota
    num_allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(num_allowed, MOST_WORKERS, num_allowed if quota is None else round(quota)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Write the long files first; inside a file the order stays."""
    indices = {name: index for index, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: indices.get(Path(item.path).name, len(indices)))


@pytest.fixture(scope="module", autouse=True)
def packages_are_not_searched_for_garbage() -> None:
    """Take what was imported out of the collector's sight: a million objects of packages, searched time and again."""
    if len(sys.modules) > _frozen["modules"] + 200:
        gc.freeze()
        _frozen["modules"] = len(sys.modules)


_frozen = {"modules": 0}
