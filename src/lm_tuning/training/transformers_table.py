"""Read off the installed transformers what its schedules and optimizers take, for ``kedro schema`` to keep.

It lies apart from the checks of parameters that read the table: transformers takes seconds and brings torch, and a
parameter error should be there at once.
"""

from __future__ import annotations

import inspect
import json
from typing import Any, get_args

from lm_tuning.parameters.train import Optimizer, Schedule
from lm_tuning.parameters.trainer_arguments import Kind, Signature, TransformersTable

# What the Trainer passes to each schedule by itself.
_SET_ELSEWHERE = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
# The Trainer sets the weight decay of every parameter group, whatever an optimizer's own is.
_OVERWRITTEN = {"weight_decay"}
_KINDS: dict[type, Kind] = {float: "number", int: "integer", str: "text", bool: "boolean"}


def render_table() -> str:
    """Write ``transformers_arguments.json``."""
    return json.dumps(read_table(), indent=2) + "\n"


def read_table() -> TransformersTable:
    """Read what the schedules and optimizers that this project offers take."""
    from transformers import TrainingArguments
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
    from transformers.trainer_optimizer import _BITSANDBYTES_OPTIMIZERS

    schedules = {_text(name): function for name, function in TYPE_TO_SCHEDULER_FUNCTION.items()}
    read = {name: _read_optimizer(name) for name in get_args(Optimizer)}
    defaults: Any = TrainingArguments(output_dir="unused", report_to="none")
    return {
        "default_schedule": _text(defaults.lr_scheduler_type),
        "default_optimizer": _text(defaults.optim),
        "bitsandbytes_optimizers": sorted({*map(_text, _BITSANDBYTES_OPTIMIZERS)} & {*get_args(Optimizer)}),
        "schedules": {name: _read_schedule(schedules[name]) for name in get_args(Schedule)},
        "optimizers": {name: arguments for name, arguments in read.items() if arguments},
    }


def _text(name: Any) -> str:
    """Return the text of a name, which transformers keeps as an enumeration here and as text there."""
    return str(getattr(name, "value", name))


def _read_schedule(function: Any) -> dict[str, Signature]:
    """Read the arguments of a schedule off its signature; one without annotations goes by the type of its defaults."""
    arguments: dict[str, Signature] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if name not in _SET_ELSEWHERE:
            hint = parameter.annotation
            declared = type(parameter.default) if hint is parameter.empty else next(iter(get_args(hint)), hint)
            arguments[name] = {"kind": _KINDS[declared], "may_be_null": parameter.default is None}
    return arguments


class _Given(str):
    """The value of an argument, which notes that it was read as a boolean: by comparing it in small letters."""

    was_compared = False

    def lower(self) -> str:
        self.was_compared = True
        return super().lower()


class _Recorder(dict[str, str]):
    """Further arguments of an optimizer, which has whatever is looked up and notes it."""

    def __init__(self) -> None:
        super().__init__(something="there")  # an empty one would not be looked into
        self.asked: dict[str, _Given] = {}

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: str) -> str:
        return self.asked.setdefault(key, _Given("0"))

    def get(self, key: str, default: Any = None) -> Any:
        return self[key]


def _read_optimizer(name: str) -> dict[str, Signature]:
    """Have transformers look its arguments up, which it does in a function's body, and note what it looks for."""
    from transformers import TrainingArguments
    from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS, OptimizerContext

    handlers = {_text(handled): handler for handled, handler in _OPTIMIZER_HANDLERS.items()}
    recorder = _Recorder()
    arguments: Any = TrainingArguments(output_dir="unused", optim=name, report_to="none")
    handlers[_text(arguments.optim)](
        OptimizerContext(args=arguments, model=None, optimizer_kwargs={}, adam_kwargs={}, optim_args=recorder)
    )
    return {
        argument: {"kind": "boolean" if given.was_compared else "number", "may_be_null": False}
        for argument, given in recorder.asked.items()
        if argument not in _OVERWRITTEN
    }
