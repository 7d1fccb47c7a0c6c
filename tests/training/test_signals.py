"""A request to stop waits for the step in hand, and for nothing else."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from lm_tuning.errors import Interrupted
from lm_tuning.runtime.stopping import ECHO_SECONDS
from lm_tuning.training.checkpoints import format as checkpoints
from lm_tuning.training.results import TrainingResult
from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
from lm_tuning.training.trainer import StepPlanTrainer
from tests.support.settings import vary


def held_out(result: TrainingResult) -> list[tuple[int, float]]:
    return [(row["step"], row["validation_nats_per_token"]) for row in result.evaluations]


def signal_in_evaluation(patch: pytest.MonkeyPatch, step: int) -> None:
    """Have SIGTERM come while the held-out rows of a step are measured."""
    plain = StepPlanTrainer.run_evaluation

    def signalled(self: StepPlanTrainer, at: int) -> dict[str, float]:
        if at == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, at)

    patch.setattr(StepPlanTrainer, "run_evaluation", signalled)


def test_an_evaluation_is_broken_off_and_made_up_for(
    paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    settings = vary(settings, eval_every_steps=2)
    unbroken = run_training(TrainingPaths(paths.tokens, tmp_path / "unbroken"), settings)
    with monkeypatch.context() as patch:
        signal_in_evaluation(patch, 4)
        with pytest.raises(Interrupted, match="Step 4 of 6"):
            run_training(paths, settings)
    latest = checkpoints.find_latest(paths.checkpoints)
    assert latest is not None
    assert (latest.step, latest.facts["owes_evaluation"]) == (4, True)
    resumed = run_training(paths, vary(settings, resume=True))
    assert held_out(resumed) == held_out(unbroken)
    assert [row["loss_nats_per_token"] for row in resumed.steps] == [
        row["loss_nats_per_token"] for row in unbroken.steps
    ]


def test_an_evaluation_that_is_made_up_for_can_be_broken_off_again(
    paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = vary(settings, eval_every_steps=2)
    for resume in (False, True):
        with monkeypatch.context() as patch:
            signal_in_evaluation(patch, 4)
            with pytest.raises(Interrupted):
                run_training(paths, vary(settings, resume=resume))
        latest = checkpoints.find_latest(paths.checkpoints)
        assert latest is not None
        assert (latest.step, latest.facts["owes_evaluation"]) == (4, True), "no further step is made for it"
    resumed = run_training(paths, vary(settings, resume=True))
    assert [step for step, _ in held_out(resumed)] == [0, 2, 4, 6]


def test_an_evaluation_that_is_broken_off_at_its_very_end_counts_once(
    paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = StepPlanTrainer.run_evaluation

    def signalled(self: StepPlanTrainer, at: int) -> dict[str, float]:
        figures = plain(self, at)
        if at == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return figures

    settings = vary(settings, eval_every_steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(StepPlanTrainer, "run_evaluation", signalled)
        with pytest.raises(Interrupted):
            run_training(paths, settings)
    resumed = run_training(paths, vary(settings, resume=True))
    assert [step for step, _ in held_out(resumed)] == [0, 2, 4, 6]


def test_the_evaluation_of_the_last_step_is_made_up_for_as_well(
    paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    settings = vary(settings, eval_every_steps=3, save_every_steps=3)
    unbroken = run_training(TrainingPaths(paths.tokens, tmp_path / "unbroken"), settings)
    with monkeypatch.context() as patch:
        signal_in_evaluation(patch, 6)
        done = run_training(paths, settings)
    assert held_out(done) == held_out(unbroken)[:-1], "all steps are done, so the model is kept"
    resumed = run_training(paths, vary(settings, resume=True))
    assert held_out(resumed) == held_out(unbroken)


def test_before_the_first_step_there_is_nothing_to_finish(
    paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []

    def signalled(self: StepPlanTrainer, *_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(StepPlanTrainer, "create_scheduler", signalled)
    monkeypatch.setattr(StepPlanTrainer, "training_step", lambda *_: steps.append(1))
    with pytest.raises(Interrupted, match="SIGTERM"):
        run_training(paths, settings)
    assert steps == []
    assert checkpoints.find_latest(paths.checkpoints) is None


def test_a_signal_that_is_sent_twice_at_once_is_one(paths: TrainingPaths, settings: TrainingSettings) -> None:
    """As by ``timeout``, to the process and to its group; a moment later it is a second request."""

    def interrupt(what: str, done: int, total: int | None, unit: str) -> None:
        if what == "Training" and done == 3:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match="Step 3 of 6"):
        run_training(paths, settings, on_progress=interrupt)

    def insist(what: str, done: int, total: int | None, unit: str) -> None:
        if what == "Training" and done == 4:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(ECHO_SECONDS)

    with pytest.raises(Interrupted, match="on the second signal"):
        run_training(paths, vary(settings, resume=True), on_progress=insist)
