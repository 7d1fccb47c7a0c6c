"""Arguments of transformers: those that this project sets itself, and those that schedules and optimizers take.

Names and kinds are read off the installed transformers by ``kedro schema`` and lie in ``transformers_arguments.json``.
Limits are ours: transformers states none, and fails late, or trains on, with a value that makes no sense.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, TypedDict

from lm_tuning.json_types import JsonValue
from lm_tuning.parameters.base import join_words, write_value

SCHEDULE_KEY = "train.trainer.lr_scheduler_kwargs"
OPTIMIZER_KEY = "train.trainer.optim_args"

#: Texts that transformers takes for true; it takes any other one for false.
BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

Kind = Literal["number", "integer", "boolean", "text"]


class Signature(TypedDict):
    """One argument, as transformers declares it.

    Attributes:
        kind: of value.
        may_be_null: whether its default is None, so that null leaves it out.
    """

    kind: Kind
    may_be_null: bool


class TransformersTable(TypedDict):
    """What ``transformers_arguments.json`` holds, for the schedules and optimizers that this project offers.

    Attributes:
        default_schedule: what the Trainer takes where ``train.trainer.lr_scheduler_type`` is left out.
        default_optimizer: the same for ``train.trainer.optim``.
        bitsandbytes_optimizers: those that are made by that package.
        schedules: arguments by schedule, beyond the steps of warm-up and run, which are set elsewhere.
        optimizers: what is read of ``optim_args``, by optimizer; of those not named here nothing is.
    """

    default_schedule: str
    default_optimizer: str
    bitsandbytes_optimizers: list[str]
    schedules: dict[str, dict[str, Signature]]
    optimizers: dict[str, dict[str, Signature]]


TABLE_FILE = Path(__file__).with_name("transformers_arguments.json")
_TABLE: TransformersTable = json.loads(TABLE_FILE.read_text(encoding="utf-8"))

DEFAULT_SCHEDULE = _TABLE["default_schedule"]
DEFAULT_OPTIMIZER = _TABLE["default_optimizer"]
BITSANDBYTES_OPTIMIZERS = frozenset(_TABLE["bitsandbytes_optimizers"])


@dataclass(frozen=True)
class Argument:
    """What one argument takes.

    Attributes:
        kind: of value.
        least: smallest number.
        most: largest number; ``None`` for no limit.
        above_least: whether ``least`` itself is refused.
        words: the texts that it takes, where it takes texts.
        may_be_null: whether null leaves it out.
    """

    kind: Kind = "number"
    least: float = 0
    most: float | None = None
    above_least: bool = False
    words: tuple[str, ...] = ()
    may_be_null: bool = False

    def allows(self, value: object) -> bool:
        """Return whether the argument takes a value."""
        if value is None:
            return self.may_be_null
        if self.kind == "text":
            return value in self.words
        if self.kind == "boolean" or isinstance(value, bool):
            return self.kind == "boolean" and isinstance(value, bool)
        if not isinstance(value, int if self.kind == "integer" else int | float):
            return False
        is_high_enough = value > self.least if self.above_least else value >= self.least
        # Neither NaN nor an infinity passes: YAML writes them .nan and .inf, and a schedule would train on with them.
        return math.isfinite(value) and is_high_enough and (self.most is None or value <= self.most)

    def describe(self) -> str:
        """Describe what the argument takes."""
        if self.kind == "text":
            return join_words(self.words)
        if self.kind == "boolean":
            return "true or false"
        limits = f"above {self.least:g}" if self.above_least else f"of {self.least:g} or more"
        if self.most is not None:
            limits = f"from {self.least:g} to {self.most:g}"
        kind = "an integer" if self.kind == "integer" else "a number"
        return f"{kind} {limits}" + (", or null to leave it out" if self.may_be_null else "")


_SHARE = Argument(most=1)
_ABOVE_ZERO = Argument(above_least=True)
_FROM_ONE = Argument(least=1)
_COURSES = Argument(words=("linear", "cosine", "1-sqrt"))

# By argument; one that is not here is a number of 0 or more, or a boolean. Half a cosine is the usual one, so cycles
# may be a fraction; where they are whole ones there is at least one.
_LIMITS = {
    "num_cycles": _ABOVE_ZERO,
    "power": _ABOVE_ZERO,
    "timescale": _FROM_ONE,
    "num_decay_steps": _FROM_ONE,
    "min_lr_rate": _SHARE,
    "min_lr_ratio": _SHARE,
    "warmup_lr_rate": _SHARE,
    "warmup_type": _COURSES,
    "decay_type": _COURSES,
}


def _limit(name: str, signature: Signature) -> Argument:
    """Build an argument from what transformers declares of it and from our limits."""
    limits = _LIMITS.get(name, Argument())
    if limits is _ABOVE_ZERO and signature["kind"] == "integer":
        limits = _FROM_ONE
    return replace(limits, **signature)


def _limit_all(table: Mapping[str, Mapping[str, Signature]]) -> dict[str, dict[str, Argument]]:
    return {
        owner: {name: _limit(name, signature) for name, signature in arguments.items()}
        for owner, arguments in table.items()
    }


SCHEDULE_ARGUMENTS = _limit_all(_TABLE["schedules"])
OPTIMIZER_ARGUMENTS = _limit_all(_TABLE["optimizers"])

#: Of which a schedule needs exactly one. It says so in its body, so no signature tells.
NEEDED_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}

_END_RATES = ("lr_end", "min_lr")

# TrainingArguments (past and present) that this project sets itself -> what to use instead. Looked up for keys under
# train as well, where people who know the Trainer write them first.
OWNED_BY_US: dict[str, str] = {
    "output_dir": "use output",
    "per_device_train_batch_size": "use train.effective_batch_rows; train.micro_batch_tokens says how a step is split",
    "per_device_eval_batch_size": "use evaluate.micro_batch_tokens",
    "gradient_accumulation_steps": "not needed: set train.effective_batch_rows, and a step is split to fit the memory",
    "average_tokens_across_devices": "not needed: losses are always divided by the global count of supervised tokens",
    "auto_find_batch_size": "use train.micro_batch_tokens: auto",
    "num_train_epochs": "use train.num_epochs",
    "max_steps": "use train.max_steps",
    "learning_rate": "use train.learning_rate",
    "warmup_ratio": "use train.trainer.warmup_steps, which takes a fraction below 1 too",
    "bf16": "use train.precision: bfloat16",
    "fp16": "use train.precision: float16",
    "bf16_full_eval": "use train.precision",
    "fp16_full_eval": "use train.precision",
    "tf32": "use environment.tf32",
    "gradient_checkpointing": "use train.gradient_checkpointing",
    "gradient_checkpointing_kwargs": "use train.gradient_checkpointing",
    "activation_checkpointing": "use train.gradient_checkpointing",
    "activation_checkpointing_kwargs": "use train.gradient_checkpointing",
    "eval_strategy": "use train.eval_every_steps",
    "evaluation_strategy": "use train.eval_every_steps",
    "eval_steps": "use train.eval_every_steps",
    "eval_on_start": "not needed: the health report measures the first loss",
    "save_strategy": "use train.save_every_steps",
    "save_steps": "use train.save_every_steps",
    "save_total_limit": "use train.keep_checkpoints",
    "save_only_model": "not offered: a checkpoint that cannot be resumed from is not one",
    "load_best_model_at_end": "use train.load_best",
    "metric_for_best_model": "use train.best_metric",
    "greater_is_better": "not needed: train.best_metric knows which way is better",
    "early_stopping_patience": "use train.early_stopping_evals",
    "early_stopping_threshold": "not offered: any better value counts; see train.early_stopping_evals",
    "resume_from_checkpoint": "use train.resume",
    "ignore_data_skip": "not needed: the step plan starts at the right step by itself",
    "seed": "use seed",
    "data_seed": "use seed",
    "full_determinism": "use environment.reproducibility: deterministic",
    "use_cpu": "not needed: the device is chosen by what is there; hide a GPU with CUDA_VISIBLE_DEVICES",
    "dataloader_num_workers": "use train.num_loader_workers",
    "dataloader_pin_memory": "not needed: on where it helps",
    "dataloader_persistent_workers": "not needed: on where it helps",
    "dataloader_prefetch_factor": "not needed: on where it helps",
    "dataloader_drop_last": "not offered: every row is used, and steps are weighted by their tokens",
    "group_by_length": "use train.batching",
    "train_sampling_strategy": "use train.batching",
    "length_column_name": "not needed: lengths are stored with the tokens",
    "remove_unused_columns": "not needed: batches hold only what the model takes",
    "label_names": "not needed: labels come from the stored spans",
    "report_to": "not needed: MLflow gets every step; see tracking",
    "run_name": "use tracking.run_name",
    "logging_steps": "not needed: every step is logged",
    "logging_strategy": "not needed: every step is logged",
    "logging_first_step": "not needed: every step is logged",
    "logging_nan_inf_filter": "not offered: it hides NaN",
    "logging_dir": "use output",
    "disable_tqdm": "not needed: progress is shown by this project",
    "use_cache": "not needed: off while training, on while generating",
    "torch_empty_cache_steps": "not offered: emptying the cache on the way costs more than it frees",
    "overwrite_output_dir": "use output: results of another output name are never touched",
    "label_smoothing_factor": "use train.label_smoothing",
    "neftune_noise_alpha": "use train.neftune_noise_alpha",
    "freeze_layers": "use train.freeze",
    "freeze_modules": "use train.freeze",
    "freeze_trainable_layers": "use train.freeze, which names what stays as it is",
    "load_in_4bit": "use train.method: qlora, with train.qlora.bits: 4",
    "load_in_8bit": "use train.method: qlora, with train.qlora.bits: 8",
    "bnb_4bit_quant_type": "use train.qlora.quant_type",
    "bnb_4bit_use_double_quant": "use train.qlora.double_quant",
    "bnb_4bit_compute_dtype": "use train.precision",
    "torch_compile": "not offered yet",
    "use_liger_kernel": "not offered yet",
    "fsdp": "not offered yet",
    "deepspeed": "not offered yet",
    "ddp_backend": "not offered yet",
    "push_to_hub": "not offered: upload data/06_models/<output>/tuned_model yourself",
}

# What people who know transformers or torch write there, although it is set elsewhere.
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


def find_schedule_problems(schedule: str, given: Mapping[str, JsonValue], *, learning_rate: float) -> list[str]:
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
            problems.append(
                f"{SCHEDULE_KEY}.{name} = {write_value(value)} is not allowed. It takes {argument.describe()}."
            )
        # With such an end the rate would rise after the warm-up, which no schedule here is for.
        elif name in _END_RATES and isinstance(value, int | float) and value >= learning_rate:
            problems.append(
                f"{SCHEDULE_KEY}.{name} = {value:g} is the rate at the end, which must be below the peak, "
                f"train.learning_rate = {learning_rate:g}."
            )
    # Neither, and transformers raises after the model is loaded; both, and it takes one without a word.
    names = NEEDED_ARGUMENTS.get(schedule, ())
    set_names = [name for name in names if given.get(name) is not None]
    if names and len(set_names) != 1:
        needed = f"exactly one of {' and '.join(names)}" if len(names) > 1 else names[0]
        if len(set_names) > 1:
            state = f"both are set: {', '.join(f'{name} = {write_value(given[name])}' for name in set_names)}"
            remedy = "Leave one of them out."
        else:
            state = "neither is set" if len(names) > 1 else "it is not set"
            remedy = f"Set {' or '.join(names)}."
        problems.append(f"{where} needs {needed} in {SCHEDULE_KEY}, and {state}. {remedy}")
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
    # As transformers splits it; what it cannot split it drops, or raises with a traceback.
    parts = text.replace(" ", "").split(",")
    malformed = [part for part in parts if part.count("=") != 1 or part.startswith("=") or part.endswith("=")]
    if malformed:
        return [
            f"{OPTIMIZER_KEY} = {text!r}: {malformed[0]!r} is no argument. Write it as key=value,key=value."
            + _list_read(known, where)
        ]
    problems = []
    values: dict[str, float | str] = {}
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
    # torch raises for this pair when it makes the optimizer, after everything has been loaded.
    if not problems and values.get("nesterov") and (not values.get("momentum") or values.get("dampening")):
        problems.append(f"{OPTIMIZER_KEY} = {text!r}: nesterov=true needs a momentum above 0 and no dampening.")
    return problems


def _read(written: str, argument: Argument) -> float | str:
    """Read a value as transformers would; text where it could not."""
    if argument.kind == "boolean":
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
