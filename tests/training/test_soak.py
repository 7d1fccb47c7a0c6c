"""Training processes that are killed at random moments and resumed until they are done end like the unbroken one."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.training.checkpoints import format as checkpoints
from lm_tuning.training.settings import TrainingSettings
from tests.support.patience import PATIENCE_SECONDS
from tests.support.settings import vary
from tests.training.test_resume import LABELS, LORA, write_labelled

# One training, described by {"paths": …, "settings": …, "result": …}. With "--serve" one for each line of input, as a
# fork of a process that has imported everything, so that many start in the time of one.
SCRIPT = """
import json, os, pickle, sys
from pathlib import Path

import peft
import torch
import transformers
from lm_tuning.errors import Interrupted
from lm_tuning.runtime.backend import apply_backend
from lm_tuning.training import trainer
from lm_tuning.training.run import TrainingPaths, run_training


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())


def train(request):
    apply_backend(reproducibility="deterministic", num_threads=1)
    paths = TrainingPaths(*map(Path, request["paths"]))
    say("pid", os.getpid())
    try:
        result = run_training(
            paths,
            pickle.loads(Path(request["settings"]).read_bytes()),
            on_progress=lambda what, done, total, unit: say("step", done) if what == "Training" else None,
        )
    except Interrupted as stopped:
        say(stopped)
        return 143
    Path(request["result"]).write_text(json.dumps({"steps": result.steps, "folder": str(result.model_folder)}))
    return 0


if sys.argv[1] == "--serve":
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = train(json.loads(line))
            finally:
                os._exit(code)
        say("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    sys.exit(train(json.loads(sys.argv[1])))
"""


class Trainings:
    """Start trainings of one set of tokens one after another, and watch them."""

    def __init__(self, folder: Path, settings: TrainingSettings, *, forks: bool) -> None:
        self.folder = folder
        self.settings = settings
        self.script = folder / "train.py"
        self.script.write_text(SCRIPT)
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.server = self._popen("--serve") if forks else None
        self.process: subprocess.Popen[str] | None = None
        self.pid = 0

    def _popen(self, argument: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(self.script), argument],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.folder / "stderr.txt").open("w"),
            text=True,
        )

    def close(self) -> None:
        """End what still runs; only processes that were started here."""
        for process in (self.process, self.server):
            if process is not None:
                process.kill()
                process.wait(timeout=PATIENCE_SECONDS)

    def start(self, name: str) -> Iterator[str]:
        """Start or resume the training of a name; return the lines that it prints."""
        checkpoint = checkpoints.find_latest(self.folder / name)
        settings = self.folder / f"{name}.pickle"
        settings.write_bytes(pickle.dumps(vary(self.settings, resume=checkpoint is not None)))
        request = {
            "paths": [str(self.folder / "tokens"), str(self.folder / name)],
            "settings": str(settings),
            "result": str(self.folder / f"{name}.json"),
        }
        if self.server is None:
            self.process = self._popen(json.dumps(request))
            source = self.process.stdout
        else:
            assert self.server.stdin is not None
            self.server.stdin.write(json.dumps(request) + "\n")
            self.server.stdin.flush()
            source = self.server.stdout
        assert source is not None
        lines = iter(source.readline, "")
        word, pid = next(lines, f"none {self.printed()}").split(maxsplit=1)
        assert word == "pid", pid
        self.pid = int(pid)
        return lines

    def end(self, lines: Iterator[str]) -> int:
        """Wait for the end of a training and return its exit code."""
        if self.process is not None:
            return self.process.wait(timeout=PATIENCE_SECONDS)
        for line in lines:
            if line.startswith("ended"):
                return int(line.split()[1])
        raise AssertionError(self.printed())

    def finish(self, name: str) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
        """Run a training to its end; return its steps and its stored weights."""
        assert self.end(self.start(name)) == 0, self.printed()
        result = json.loads((self.folder / f"{name}.json").read_text())
        stored = {path.name: path.read_bytes() for path in Path(result["folder"]).glob("*.safetensors")}
        assert stored
        return result["steps"], stored

    def interrupt(self, name: str, number: signal.Signals, *, after: int, seconds: float) -> tuple[int, int]:
        """Send a signal to a training.

        Args:
            name: of the training.
            number: the signal.
            after: steps after which it is sent; 0 does not wait for the first.
            seconds: waited on top.

        Returns:
            The last step that was reported before, and the exit code.
        """
        lines = self.start(name)
        step = 0
        for _ in range(after + 1 if after else 0):  # the first line says where it begins
            line = next(lines, "ended early")
            assert line.startswith("step"), line + self.printed()
            step = int(line.split()[1])
        time.sleep(seconds)
        os.kill(self.pid, number)
        return step, self.end(lines)

    def printed(self) -> str:
        return (self.folder / "stderr.txt").read_text()[-4000:]


def latest_step(trainings: Trainings, name: str) -> int:
    latest = checkpoints.find_latest(trainings.folder / name)
    return latest.step if latest is not None else 0


@pytest.fixture
def busy(settings: TrainingSettings, tmp_path: Path) -> TrainingSettings:
    """A classifier's adapter with dropout, several micro-batches per step, padded rows, two loader processes."""
    for seed, (split, count) in enumerate((("train", 20), ("validation", 6), ("test", 0))):
        write_labelled(tmp_path / "tokens", split, count, seed=seed)
    return vary(
        settings,
        task="sequence_classification",
        label_map=LABELS,
        method="lora",
        lora=LORA,
        learning_rate=1e-3,
        micro_batch_tokens=60,
        batching="padded",
        num_loader_workers=2,
        save_every_steps=3,
        keep_checkpoints=2,
        eval_every_steps=None,
        health={"on_mismatch": "warn"},
        trainer={"lr_scheduler_type": "cosine", "warmup_steps": 4},
    )


def check_soak(trainings: Trainings, *, num_kills: int, most_steps: int, seed: int) -> None:
    """Kill a training at random moments, resume it each time, and compare its end with an unbroken one."""
    chance = random.Random(seed)
    total = trainings.settings.train.max_steps
    assert total is not None
    kept = 0
    for kill in range(num_kills):
        # Now and then while it still loads, else some steps on; checkpoints take longer than steps, so many die in one.
        after = 0 if kill % 5 == 3 else chance.randint(1, most_steps)
        _, code = trainings.interrupt(
            "broken", signal.SIGKILL, after=after, seconds=chance.uniform(0, 0.5 if after == 0 else 0.05)
        )
        assert code == -signal.SIGKILL, trainings.printed()
        step = latest_step(trainings, "broken")
        assert kept <= step < total, "a kill loses no checkpoint, and comes before the end"
        kept = step
    step, code = trainings.interrupt("broken", signal.SIGTERM, after=2, seconds=0)
    assert code == 143, trainings.printed()
    assert step <= latest_step(trainings, "broken") < total, "SIGTERM writes a checkpoint first"
    assert latest_step(trainings, "broken") > kept
    steps, weights = trainings.finish("broken")
    whole_steps, whole_weights = trainings.finish("unbroken")
    assert steps == whole_steps
    assert len(steps) == total
    assert weights == whole_weights
    runs = [run for run in (trainings.folder / "broken").glob("run-*") if checkpoints.list_complete(run)]
    assert len(runs) == 1
    assert not list(runs[0].glob(".writing-*"))


@pytest.mark.slow
def test_three_kills_change_nothing(busy: TrainingSettings, tmp_path: Path) -> None:
    trainings = Trainings(tmp_path, vary(busy, max_steps=50, save_every_steps=4), forks=True)
    try:
        check_soak(trainings, num_kills=3, most_steps=6, seed=1)
    finally:
        trainings.close()


@pytest.mark.slow
def test_twenty_kills_change_nothing(busy: TrainingSettings, tmp_path: Path) -> None:
    trainings = Trainings(tmp_path, vary(busy, max_steps=800), forks=False)
    try:
        check_soak(trainings, num_kills=20, most_steps=15, seed=2)
    finally:
        trainings.close()
