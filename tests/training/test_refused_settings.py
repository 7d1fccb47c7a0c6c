"""Settings that contradict each other are refused without Kedro too, in the same words and before a model is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from lm_tuning.errors import UserError
from lm_tuning.parameters.conflicts import find_conflicts
from lm_tuning.parameters.groups import Parameters
from lm_tuning.training.checkpoints import format as checkpoints
from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
from tests.support.settings import vary

NOWHERE = {"name_or_path": "/nowhere"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"trainer": {"optim": "sgd", "optim_args": "momentun=0.9"}}, "train.trainer.optim_args"),
        ({"load_best": True, "eval_every_steps": 1}, "train.load_best = true needs both"),
        (
            {"class_weights": {"a": 2.0}},
            "train.class_weights = {'a': 2.0} needs classes, but task = causal_lm",
        ),
        ({"effective_batch_tokens": 8}, "train.effective_batch_tokens = 8 are both set"),
        ({"max_steps": None}, "train.num_epochs and train.max_steps are both null"),
    ],
    ids=["a mistyped argument", "no checkpoints", "no classes", "two batches", "no end"],
)
def test_a_contradiction_is_refused_as_kedro_run_does(
    paths: TrainingPaths, settings: TrainingSettings, changes: dict[str, Any], told: str
) -> None:
    wrong = vary(settings, base={**settings.base, **NOWHERE}, **changes)
    reports: list[Any] = []
    with pytest.raises(UserError) as caught:
        run_training(paths, wrong, on_health=reports.append)
    [problem] = caught.value.problems
    assert told in problem
    same = find_conflicts(Parameters(task=wrong.task, train=wrong.train))
    assert problem in [conflict.problem for conflict in same]
    assert not paths.checkpoints.exists()
    assert reports[-1]["run"]["state"] == "refused"


def test_all_contradictions_are_told_together(paths: TrainingPaths, settings: TrainingSettings) -> None:
    wrong = vary(settings, load_best=True, class_weights="balanced", early_stopping_evals=2)
    with pytest.raises(UserError) as caught:
        run_training(paths, wrong)
    assert [problem.partition(" ")[0] for problem in caught.value.problems] == [
        "train.class_weights",
        "train.early_stopping_evals",
        "train.load_best",
    ]


def test_a_resume_that_is_refused_for_it_leaves_the_report(paths: TrainingPaths, settings: TrainingSettings) -> None:
    run_training(paths, vary(settings, max_steps=1, save_every_steps=1))
    reports: list[Any] = []
    with pytest.raises(UserError, match=r"train\.load_best = true needs both"):
        run_training(paths, vary(settings, load_best=True, resume=True), on_health=reports.append)
    assert reports == []
    assert checkpoints.find_latest(paths.checkpoints) is not None


def test_groups_that_a_training_is_not_told_refuse_nothing(paths: TrainingPaths, settings: TrainingSettings) -> None:
    """The steps are smaller than what rows may have by default, and all rows fit all the same."""
    small = vary(settings, effective_batch_rows=None, effective_batch_tokens=100, max_steps=1)
    assert find_conflicts(Parameters(train=small.train)), "tokenize.max_length_tokens is larger"
    assert len(run_training(paths, small).steps) == 1
