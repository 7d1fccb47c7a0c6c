"""Further arguments of schedules and optimizers are known before anything runs, and known rightly."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from lm_tuning.parameters import validate_parameters
from lm_tuning.parameters.schema import find_entry
from lm_tuning.parameters.trainer_arguments import (
    DEFAULT_OPTIMIZER,
    OPTIMIZER_ARGUMENTS,
    SCHEDULE_ARGUMENTS,
    TABLE_FILE,
    find_optimizer_problems,
    find_schedule_problems,
)
from tests.parameters.test_conflicts import problems

RATE = 1e-3
# What get_scheduler passes by itself.
SET_ELSEWHERE = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
SOUND = {
    "num_cycles": 2,
    "lr_end": 1e-5,
    "power": 2.0,
    "timescale": 4,
    "min_lr": 1e-5,
    "warmup_lr_rate": 0.1,
    "num_decay_steps": 2,
    "num_stable_steps": 1,
    "warmup_type": "1-sqrt",
    "decay_type": "linear",
    "min_lr_ratio": 0.1,
}


def offered(key: str) -> list[str]:
    entry = find_entry(("train", "trainer", key))
    assert entry is not None
    return entry["enum"]  # type: ignore[no-any-return]


def test_the_committed_table_is_what_the_installed_transformers_takes() -> None:
    from lm_tuning.training.transformers_table import render_table

    assert TABLE_FILE.read_text(encoding="utf-8") == render_table(), "run: kedro schema"


def test_the_schedules_take_what_transformers_takes() -> None:
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    assert set(SCHEDULE_ARGUMENTS) == set(offered("lr_scheduler_type"))
    functions = {str(getattr(name, "value", name)): function for name, function in TYPE_TO_SCHEDULER_FUNCTION.items()}
    for name, known in SCHEDULE_ARGUMENTS.items():
        parameters = inspect.signature(functions[name]).parameters
        assert set(known) == set(parameters) - SET_ELSEWHERE, name
        for argument in known:
            may_be_null = parameters[argument].default is None
            assert known[argument].may_be_null == may_be_null, (name, argument)


@pytest.mark.parametrize("schedule", SCHEDULE_ARGUMENTS)
def test_a_schedule_is_made_with_every_argument_that_passes(schedule: str) -> None:
    import torch
    from transformers import get_scheduler

    given = {name: SOUND[name] for name in SCHEDULE_ARGUMENTS[schedule] if name in SOUND}
    assert find_schedule_problems(schedule, given, learning_rate=RATE) == []
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    made = get_scheduler(schedule, optimizer, 1, 5, scheduler_specific_kwargs=given)
    for _ in range(5):
        optimizer.step()
        made.step()


@pytest.mark.parametrize(
    ("schedule", "given", "words"),
    [
        ("cosine", {"num_cycels": 3}, "num_cycels: .*cosine has no such argument. Did you mean num_cycles"),
        ("linear", {"min_lr": 0.1}, "takes none. Schedules with min_lr: cosine_with_min_lr, cosine_warmup_with"),
        ("constant_with_warmup", {"num_cycles": 1}, "takes none"),
        ("cosine", {"num_warmup_steps": 3}, "Use train.trainer.warmup_steps"),
        ("cosine_with_restarts", {"num_cycles": "abc"}, "num_cycles = 'abc' is not allowed. It takes an integer"),
        ("cosine_with_restarts", {"num_cycles": 1.5}, "an integer of 1 or more"),
        ("cosine", {"num_cycles": True}, "num_cycles = true is not allowed. It takes a number above 0"),
        ("cosine", {"num_cycles": None}, "num_cycles = null is not allowed"),
        ("cosine", {"num_cycles": float("nan")}, "num_cycles = nan is not allowed"),
        ("cosine", {"num_cycles": [1]}, r"num_cycles = \[1\] is not allowed"),
        ("polynomial", {"lr_end": 1.0}, "lr_end = 1 is the rate at the end.*below.*train.learning_rate = 0.001"),
        ("cosine_with_min_lr", {"min_lr": 0.1}, "min_lr = 0.1 is the rate at the end"),
        ("cosine_with_min_lr", {"min_lr_rate": 2}, "a number from 0 to 1"),
        ("cosine_with_min_lr", {"min_lr": 1e-5, "min_lr_rate": 0.1},
         "needs exactly one of min_lr and min_lr_rate in .*, and both are set: min_lr = .*, min_lr_rate = 0.1"),
        ("cosine_with_min_lr", {"min_lr": None}, "exactly one of .* and neither is set. Set min_lr or min_lr_rate."),
        ("warmup_stable_decay", {}, "needs num_decay_steps in .*, and it is not set. Set num_decay_steps."),
        ("warmup_stable_decay", {"num_decay_steps": 2, "decay_type": "exp"}, "It takes linear, cosine or 1-sqrt"),
    ],
)  # fmt: skip
def test_a_wrong_argument_of_a_schedule_is_refused(schedule: str, given: dict[str, Any], words: str) -> None:
    (problem,) = find_schedule_problems(schedule, given, learning_rate=RATE)
    assert "train.trainer.lr_scheduler_kwargs" in problem
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(problem)


def test_null_takes_an_argument_of_an_overlay_back() -> None:
    given = {"min_lr": None, "min_lr_rate": 0.1}
    assert find_schedule_problems("cosine_with_min_lr", given, learning_rate=RATE) == []


def test_arguments_are_checked_with_all_other_parameters(valid: dict[str, Any]) -> None:
    trainer = {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycels": 3}, "optim_args": "foo=bar"}
    schedule, optimizer = problems(valid, train={"trainer": trainer})
    assert "Did you mean num_cycles" in schedule and "foo" in optimizer


def test_a_rate_may_be_written_as_plain_yaml_loaders_leave_it(valid: dict[str, Any]) -> None:
    trainer = {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": "1e-7"}}
    read = validate_parameters({"train": {**valid["train"], "trainer": trainer}})
    assert read.train.trainer["lr_scheduler_kwargs"] == {"lr_end": 1e-7}


class _Recorder(dict[str, str]):
    """Note what is looked up, and have none of it."""

    def __init__(self) -> None:
        super().__init__(something="there")
        self.asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return False

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return default


def test_the_optimizers_read_what_transformers_reads() -> None:
    from transformers import TrainingArguments
    from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS, OptimizerContext

    handlers = {str(getattr(name, "value", name)): handler for name, handler in _OPTIMIZER_HANDLERS.items()}
    assert set(OPTIMIZER_ARGUMENTS) <= set(offered("optim"))
    for name in offered("optim"):
        recorder = _Recorder()
        args = TrainingArguments(output_dir="unused", optim=name, report_to="none")
        handlers[str(getattr(args.optim, "value", args.optim))](
            OptimizerContext(args=args, model=None, optimizer_kwargs={}, adam_kwargs={}, optim_args=recorder)
        )
        # The Trainer sets the weight decay of every parameter group, whatever an optimizer's own is.
        assert recorder.asked - {"weight_decay"} == set(OPTIMIZER_ARGUMENTS.get(name, {})), name
    assert TrainingArguments(output_dir="unused", report_to="none").optim == DEFAULT_OPTIMIZER


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        ("sgd", "momentum=0.9, nesterov=True"),
        ("sgd", "momentum=0.9,dampening=0.1,nesterov=no"),
        ("adagrad", "lr_decay=1e-3,eps=1e-8"),
        ("rmsprop", "momentum=0.9,alpha=0.9,eps=1e-8,centered=1"),
    ],
)
def test_an_optimizer_is_made_with_what_passes(optimizer: str, text: str) -> None:
    import torch
    from transformers import Trainer, TrainingArguments

    assert find_optimizer_problems(optimizer, text) == []
    args = TrainingArguments(output_dir="unused", optim=optimizer, optim_args=text, report_to="none")
    made, options = Trainer.get_optimizer_cls_and_kwargs(args)
    made([torch.nn.Parameter(torch.zeros(1))], **options)
    assert len(options) == 1 + text.count("=")


@pytest.mark.parametrize(
    ("optimizer", "text", "words"),
    [
        (None, "foo=bar", "foo would be ignored by transformers. With train.trainer.optim = adamw_torch_fused"),
        ("adamw_torch", "beta1=0.5", "Use train.trainer.adam_beta1. With .* reads none of them"),
        ("adafactor", "clip_treshold=2.0", "clip_treshold would be ignored.* reads none of them"),
        ("adafactor", "garbage", "'garbage' is no argument. Write it as key=value"),
        ("lion_8bit", "momentum=0.9", "reads none of them"),
        ("sgd", "momentun=0.9", "Did you mean momentum.* it reads momentum, dampening, nesterov"),
        ("sgd", "momentum=abc", "momentum = abc is not allowed. It takes a number of 0 or more"),
        ("sgd", "momentum=nan", "momentum = nan is not allowed"),
        ("sgd", "momentum=-1", "momentum = -1 is not allowed"),
        ("sgd", "momentum=0.9,", "'' is no argument"),
        ("sgd", "momentum=", "'momentum=' is no argument"),
        ("sgd", "momentum=0.9=1", "is no argument"),
        ("sgd", "momentum=0.9,momentum=0.5", "sets momentum twice"),
        ("sgd", "momentum=0.9,nesterov=on", "nesterov = on is not allowed. It takes true or false"),
        ("sgd", "nesterov=true", "nesterov=true needs a momentum above 0 and no dampening"),
        ("sgd", "weight_decay=0.1", "Use train.trainer.weight_decay"),
    ],
)
def test_a_wrong_argument_of_an_optimizer_is_refused(optimizer: str | None, text: str, words: str) -> None:
    (problem,) = find_optimizer_problems(optimizer, text)
    assert "train.trainer.optim_args" in problem
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(problem)
