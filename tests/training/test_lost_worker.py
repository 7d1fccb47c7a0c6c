"""A loader worker that is killed ends the run with one message; checkpoints are kept and no process stays behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from lm_tuning.batching.step_loader import describe_lost_worker, find_lost_worker
from lm_tuning.errors import MachineFault
from lm_tuning.progress import OnProgress
from lm_tuning.training.checkpoints import format as checkpoints
from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
from tests.support.settings import vary


def workers() -> list[int]:
    return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


def kill_one(at: int, killed: list[int]) -> OnProgress:
    """Return an ``on_progress`` that kills one of the workers once a step is done, and waits until it is gone."""

    def on_progress(what: str, done: int, total: int | None, unit: str) -> None:
        if what == "Training" and done == at and not killed:
            killed.extend(sorted(workers()))
            os.kill(killed[0], signal.SIGKILL)
            for _ in range(1200):  # PyTorch's report interrupts this from its signal handler
                time.sleep(0.1)

    return on_progress


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_killed_worker_is_explained_and_the_run_goes_on_from_its_checkpoint(
    paths: TrainingPaths, settings: TrainingSettings, tmp_path: Path, num_workers: int
) -> None:
    settings = vary(settings, save_every_steps=2, num_loader_workers=num_workers)
    unbroken = run_training(TrainingPaths(paths.tokens, tmp_path / "unbroken"), settings)
    assert workers() == [], "the workers of a finished training end with it"
    killed: list[int] = []
    with pytest.raises(MachineFault) as error:
        run_training(paths, settings, on_progress=kill_one(3, killed))
    [message] = error.value.problems
    assert len(killed) == num_workers
    assert message.startswith(f"The loader worker {killed[0]} was killed from outside.")
    assert "ran out of memory" in message
    assert f"train.num_loader_workers is {num_workers}; " in message
    assert "3 steps of 6 were done. The checkpoint of step 2 is kept in " in message
    assert "train.resume=true" in message
    assert workers() == [], "no other worker survives"
    latest = checkpoints.find_latest(paths.checkpoints)
    assert latest is not None
    assert latest.step == 2
    resumed = run_training(paths, vary(settings, resume=True, num_loader_workers=0))
    assert [row["loss_nats_per_token"] for row in resumed.steps] == [
        row["loss_nats_per_token"] for row in unbroken.steps
    ]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", "The loader worker 7 was killed from outside."),
        ("DataLoader worker (pid(s) 7, 8) exited unexpectedly", "The loader workers 7, 8 were killed from outside."),
        ("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible", "/dev/shm is full"),
        ("DataLoader worker (pid 7) is killed by signal: Segmentation fault. ", "by the signal 'Segmentation fault'"),
        ("DataLoader worker (pid 7) exited unexpectedly with exit code 3. Details", "worker 7 ended with exit code 3"),
    ],
)
def test_each_end_of_a_worker_is_told(said: str, told: str) -> None:
    try:
        try:
            raise RuntimeError(said)
        except RuntimeError:
            raise ValueError("something that ran at that moment") from None
    except ValueError as error:
        lost = find_lost_worker(error)
    assert lost is not None
    assert told in describe_lost_worker(lost, num_workers=2)


def test_other_errors_are_left_alone() -> None:
    assert find_lost_worker(RuntimeError("shapes do not fit")) is None
