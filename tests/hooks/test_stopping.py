"""Signals are heard while the main thread hears nothing, and end a run that cannot end itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.runtime import stopping
from lm_tuning.runtime.stopping import watch_signals
from lm_tuning.storage.locks import is_alive
from tests.support.patience import PATIENCE_SECONDS
from tests.support.tiny_project import send_what_is_kept_by


@contextmanager
def stuck_run(project: Path, behaviour: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a run whose node is stuck in a call of the C library; yield it and the id of its child.

    What has not ended after half an hour, the child among it, is ended from here, and the test has failed.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "kedro", "run"],
        cwd=project,
        env={**os.environ, "TINY_NODE": behaviour, "DO_NOT_TRACK": "1", "COLUMNS": "200", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    is_late = threading.Event()

    def end() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def end_late() -> None:
        is_late.set()
        end()

    limit = threading.Timer(PATIENCE_SECONDS, end_late)
    limit.start()
    try:
        *_, child = read_until(process, "waiting beside").split()
        time.sleep(0.5)  # until it is in the call
        yield process, int(child)
    finally:
        limit.cancel()
        end()
        process.wait()
    assert not is_late.is_set(), "something did not end by itself"


def read_until(process: subprocess.Popen[str], words: str) -> str:
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if words in line:
            return printed
    raise AssertionError(printed)


def status_in_mlflow(project: Path) -> Any:
    from mlflow import MlflowClient

    assert send_what_is_kept_by(project) == []
    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return run.info.status


def wait_for_end(pid: int) -> None:
    """Return when a process that was killed is gone; one that was not ends with the patience of ``stuck_run``."""
    while is_alive(pid):
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stuck_run_says_that_it_stops_and_is_ended(project: Path, number: signal.Signals) -> None:
    with stuck_run(project, "stuck") as (process, child):
        process.send_signal(number)
        printed, _ = process.communicate()
        wait_for_end(child)
    assert f"{number.name}: the run stops." in printed
    assert f"Stopped by {number.name}" in printed
    assert process.returncode == 128 + number
    assert status_in_mlflow(project) == "KILLED"


def test_a_stuck_step_is_ended_by_the_second_signal(project: Path) -> None:
    with stuck_run(project, "stuck step") as (process, child):
        process.send_signal(signal.SIGTERM)
        printed = read_until(process, "a second signal stops at once")
        assert "SIGTERM: the step in hand is finished" in printed
        time.sleep(0.5)
        assert process.poll() is None, "the step is not finished"
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate()
        wait_for_end(child)
    assert process.returncode == 128 + signal.SIGINT, printed
    assert status_in_mlflow(project) == "KILLED"


def test_a_run_that_cannot_end_itself_is_ended_within_five_seconds() -> None:
    """The clock is the code's own; the tests above show that it is heeded."""
    assert 0 < stopping.LAST_WORDS_SECONDS < stopping.MAX_STOP_SECONDS < 5


def test_a_signal_to_a_forked_process_is_none_of_its_parent(caplog: pytest.LogCaptureFixture) -> None:
    """Ctrl-C reaches the workers of a loader as well: the parent must not take theirs for second ones."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with caplog.at_level("WARNING", logger="lm_tuning"), watch_signals():
            child = os.fork()
            if child == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            time.sleep(0.3)
            assert caplog.messages == []
            os.kill(os.getpid(), signal.SIGTERM)
            while not caplog.messages:
                time.sleep(0.01)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caplog.messages == ["SIGTERM: the run stops."]
