"""What schedules and optimizers of transformers take as further arguments, known without importing them.

The tables are checked against the installed transformers by a test.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

SCHEDULE_KEY = "train.trainer.lr_scheduler_kwargs"
OPTIMIZER_KEY = "train.trainer.optim_args"

DEFAULT_SCHEDULE = "linear"
#: What the Trainer takes where ``train.trainer.optim`` is left out.
DEFAULT_OPTIMIZER = "adamw_torch_fused"

BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True)
class Argument:
    """What one argument takes.

    Attributes:
        least: smallest number; ``None`` where the argument takes no number.
        most: largest number; ``None`` for no limit.
        above_least: whether ``least`` itself is refused.
        is_whole: whether fractions are refused.
        is_boolean: whether it is true or false, written as text.
        words: the texts that it takes; none where it takes a number.
        may_be_null: whether null leaves it out.
    """

    least: float | None = 0
    most: float | None = None
    above_least: bool = False
    is_whole: bool = False
    is_boolean: bool = False
    words: tuple[str, ...] = ()
    may_be_null: bool = False

    def allows(self, value: object) -> bool:
        """Return whether the argument takes a value."""
        if value is None:
            return self.may_be_null
        if self.words:
            return value in self.words
        if self.is_boolean or self.least is None:
            return isinstance(value, bool)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return False
        if self.is_whole and not isinstance(value, int):
            return False
        high_enough = value > self.least if self.above_least else value >= self.least
        return high_enough and (self.most is None or value <= self.most)

    def describe(self) -> str:
        """Describe what the argument takes."""
        if self.words:
            return ", ".join(self.words[:-1]) + f" or {self.words[-1]}"
        if self.is_boolean or self.least is None:
            return "true or false"
        kind = "an integer" if self.is_whole else "a number"
        limits = f"above {self.least:g}" if self.above_least else f"of {self.least:g} or more"
        if self.most is not None:
            limits = f"from {self.least:g} to {self.most:g}"
        return f"{kind} {limits}" + (", or null to leave it out" if self.may_be_null else "")


_RATE = Argument()
_RATE_OR_NULL = Argument(may_be_null=True)
_SHARE = Argument(most=1)
_SHARE_OR_NULL = Argument(most=1, may_be_null=True)
_CYCLES = Argument(above_least=True)
_STEPS = Argument(least=1, is_whole=True)
_COURSES = Argument(words=("linear", "cosine", "1-sqrt"))

#: What each schedule takes beyond the steps of warm-up and run, which are set elsewhere.
SCHEDULE_ARGUMENTS: dict[str, dict[str, Argument]] = {
    "linear": {},
    "constant": {},
    "constant_with_warmup": {},
    "cosine": {"num_cycles": _CYCLES},
    "cosine_with_restarts": {"num_cycles": _STEPS},
    "polynomial": {"lr_end": _RATE, "power": Argument(above_least=True)},
    "inverse_sqrt": {"timescale": Argument(least=1, is_whole=True, may_be_null=True)},
    "cosine_with_min_lr": {"num_cycles": _CYCLES, "min_lr": _RATE_OR_NULL, "min_lr_rate": _SHARE_OR_NULL},
    "cosine_warmup_with_min_lr": {
        "num_cycles": _CYCLES,
        "min_lr": _RATE_OR_NULL,
        "min_lr_rate": _SHARE_OR_NULL,
        "warmup_lr_rate": _SHARE_OR_NULL,
    },
    "warmup_stable_decay": {
        "num_decay_steps": _STEPS,
        "num_stable_steps": Argument(is_whole=True, may_be_null=True),
        "warmup_type": _COURSES,
        "decay_type": _COURSES,
        "min_lr_ratio": _SHARE,
        "num_cycles": _CYCLES,
    },
}

#: Of which a schedule needs exactly one.
NEEDED_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}

_END_RATES = ("lr_end", "min_lr")

_OWN_KEYS = {
    "num_warmup_steps": "train.trainer.warmup_steps",
    "num_training_steps": "train.max_steps or train.num_epochs",
    "last_epoch": "train.resume",
    "lr": "train.learning_rate",
    "learning_rate": "train.learning_rate",
    "weight_decay": "train.trainer.weight_decay",
    "beta1": "train.trainer.adam_beta1",
    "beta2": "train.trainer.adam_beta2",
    "betas": "train.trainer.adam_beta1 and train.trainer.adam_beta2",
    "adam_beta1": "train.trainer.adam_beta1",
    "adam_beta2": "train.trainer.adam_beta2",
    "adam_epsilon": "train.trainer.adam_epsilon",
}

_BOOLEAN = Argument(least=None, is_boolean=True)

#: What transformers reads of ``optim_args``, by optimizer; of those not named here it reads nothing. ``weight_decay``
#: is left out: the Trainer writes ``train.trainer.weight_decay`` over it.
OPTIMIZER_ARGUMENTS: dict[str, dict[str, Argument]] = {
    "sgd": {"momentum": _RATE, "dampening": _RATE, "nesterov": _BOOLEAN},
    "adagrad": {"lr_decay": _RATE, "eps": _RATE},
    "rmsprop": {"momentum": _RATE, "alpha": _RATE, "eps": _RATE, "centered": _BOOLEAN},
}


def find_schedule_problems(schedule: str, given: Mapping[str, object], *, learning_rate: float) -> list[str]:
    """Describe what is wrong with the further arguments of a schedule.

    Args:
        schedule: ``train.trainer.lr_scheduler_type``.
        given: ``train.trainer.lr_scheduler_kwargs``.
        learning_rate: the peak, which the rate at the end must be below.

    Returns:
        A sentence for each problem.
    """
    known = SCHEDULE_ARGUMENTS[schedule]
    where = f"train.trainer.lr_scheduler_type = {schedule}"
    problems = []
    for name, value in given.items():
        argument = known.get(name)
        if argument is None:
            problems.append(f"{SCHEDULE_KEY}.{name}: {where} has no such argument.{_say_known(name, known)}")
        elif not argument.allows(value):
            problems.append(f"{SCHEDULE_KEY}.{name} = {_write(value)} is not allowed. It takes {argument.describe()}.")
        elif name in _END_RATES and isinstance(value, int | float) and value >= learning_rate:
            problems.append(
                f"{SCHEDULE_KEY}.{name} = {value:g} is the rate at the end, which must be below the peak, "
                f"train.learning_rate = {learning_rate:g}."
            )
    names = NEEDED_ARGUMENTS.get(schedule, ())
    if names and sum(given.get(name) is not None for name in names) != 1:
        problems.append(
            f"{where} needs {'one of ' if len(names) > 1 else ''}{' and '.join(names)} in {SCHEDULE_KEY}, which is "
            f"{dict(given)}."
        )
    return problems


def find_optimizer_problems(optimizer: str | None, text: str) -> list[str]:
    """Describe what is wrong with the further arguments of an optimizer.

    Args:
        optimizer: ``train.trainer.optim``; ``None`` for the Trainer's default.
        text: ``train.trainer.optim_args``.

    Returns:
        A sentence for each problem.
    """
    name = optimizer or DEFAULT_OPTIMIZER
    known = OPTIMIZER_ARGUMENTS.get(name, {})
    where = f"train.trainer.optim = {name}" + ("" if optimizer else " (the default)")
    parts = text.replace(" ", "").split(",")
    malformed = [part for part in parts if part.count("=") != 1 or part.startswith("=") or part.endswith("=")]
    if malformed:
        return [
            f"{OPTIMIZER_KEY} = {text!r}: {malformed[0]!r} is no argument. Write it as key=value,key=value."
            + _list_read(known, where)
        ]
    problems = []
    values: dict[str, object] = {}
    for key, written in (part.split("=") for part in parts):
        argument = known.get(key)
        if key in values:
            problems.append(f"{OPTIMIZER_KEY} = {text!r} sets {key} twice.")
        elif argument is None:
            problems.append(
                f"{OPTIMIZER_KEY} = {text!r}: {key} would be ignored by transformers.{_say_read(key, known, where)}"
            )
        elif not argument.allows(values.setdefault(key, _read(written, argument))):
            problems.append(
                f"{OPTIMIZER_KEY} = {text!r}: {key} = {written} is not allowed. It takes {argument.describe()}."
            )
    return problems or list(_find_nesterov_problems(text, values))


def _find_nesterov_problems(text: str, values: Mapping[str, object]) -> Iterator[str]:
    if values.get("nesterov") and (not values.get("momentum") or values.get("dampening")):
        yield f"{OPTIMIZER_KEY} = {text!r}: nesterov=true needs a momentum above 0 and no dampening."


def _read(written: str, argument: Argument) -> object:
    """Read a value as transformers would; text where it could not."""
    if argument.is_boolean:
        return BOOLEANS.get(written.lower(), written)
    try:
        return float(written)
    except ValueError:
        return written


def _say_known(name: str, known: Mapping[str, Argument]) -> str:
    """Describe which argument of a schedule was meant, or which ones there are."""
    if name in _OWN_KEYS:
        return f" Use {_OWN_KEYS[name]}."
    near = get_close_matches(name, known, n=1)
    if near:
        return f" Did you mean {near[0]}?"
    if known:
        return f" It takes {', '.join(known)}."
    others = [schedule for schedule, arguments in SCHEDULE_ARGUMENTS.items() if name in arguments]
    return " It takes none." + (f" Schedules with {name}: {', '.join(others)}." if others else "")


def _say_read(name: str, known: Mapping[str, Argument], where: str) -> str:
    """Describe which argument of an optimizer was meant, and which ones transformers reads."""
    meant = f" Use {_OWN_KEYS[name]}." if name in _OWN_KEYS else ""
    near = get_close_matches(name, known, n=1)
    return (meant or (f" Did you mean {near[0]}?" if near else "")) + _list_read(known, where)


def _list_read(known: Mapping[str, Argument], where: str) -> str:
    if known:
        return f" With {where} it reads {', '.join(known)}."
    return f" With {where} it reads none of them: leave {OPTIMIZER_KEY} out."


def _write(value: object) -> str:
    """Write a value as YAML does."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)
