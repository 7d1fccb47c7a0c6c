"""Checks of parameters against each other: settings that are fine alone and wrong together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain

from lm_tuning.parameters.base import TASK_FORMATS, write_value
from lm_tuning.parameters.data import SourceParameters
from lm_tuning.parameters.evaluate_checks import find_evaluate_problems
from lm_tuning.parameters.export import find_alias_problems
from lm_tuning.parameters.fp8 import find_fp8_problems
from lm_tuning.parameters.generation import find_generation_problems
from lm_tuning.parameters.gguf import find_gguf_contradictions
from lm_tuning.parameters.groups import Parameters
from lm_tuning.parameters.trainer_arguments import (
    BITSANDBYTES_OPTIMIZERS,
    DEFAULT_SCHEDULE,
    find_optimizer_problems,
    find_schedule_problems,
)
from lm_tuning.wording import count_of


@dataclass(frozen=True)
class Conflict:
    """Settings that cannot hold together.

    Attributes:
        keys: every key that took part, so that a conflict is dropped when one of them is already known to be wrong.
        problem: the sentence for the user, which names the keys, their values and how to fix them.
    """

    keys: tuple[str, ...]
    problem: str


# Each check may take for granted that every value is valid alone, and reports what it finds whatever the others found.
def find_conflicts(parameters: Parameters) -> list[Conflict]:
    """List every conflict between parameters that are valid one by one."""
    checks = (
        _check_length_of_training,
        _check_batch,
        _check_task,
        _check_method,
        _check_adapter,
        _check_evaluations,
        _check_best_checkpoint,
        _check_warmup,
        _check_schedule,
        _check_optimizer,
        _check_precision,
        _check_split,
        _check_folds,
        _check_sources,
        _check_groups,
    )
    return [conflict for check in checks for conflict in check(parameters)]


def _check_length_of_training(parameters: Parameters) -> Iterator[Conflict]:
    train = parameters.train
    if train.num_epochs is None and train.max_steps is None:
        yield Conflict(
            ("train.num_epochs", "train.max_steps"),
            "train.num_epochs and train.max_steps are both null: set at least one of them, else training has no end.",
        )


def _check_batch(parameters: Parameters) -> Iterator[Conflict]:
    train, tokenize = parameters.train, parameters.tokenize
    longest, lengths = tokenize.max_length_tokens, f"tokenize.max_length_tokens = {tokenize.max_length_tokens}"
    length_keys = ["tokenize.max_length_tokens"]
    if parameters.task == "seq2seq_lm":
        longest += tokenize.max_target_tokens
        length_keys.append("tokenize.max_target_tokens")
        lengths += f" with tokenize.max_target_tokens = {tokenize.max_target_tokens}, {longest} together"
    # A value of conf/base that an overlay's alternative replaces is null by now, see loading.settle_alternatives().
    both = ("train.effective_batch_rows", "train.effective_batch_tokens")
    if train.effective_batch_rows is None and train.effective_batch_tokens is None:
        yield Conflict(both, f"{both[0]} and {both[1]} are both null: set exactly one of them.")
    if train.effective_batch_rows is not None and train.effective_batch_tokens is not None:
        yield Conflict(
            both,
            f"{both[0]} = {train.effective_batch_rows} and {both[1]} = {train.effective_batch_tokens} are both set: "
            "set exactly one of them and write null for the other.",
        )
    # The step plan never cuts a row, and a step of one row that is longer than the step would break its own limit.
    if train.effective_batch_tokens is not None and train.effective_batch_tokens < longest:
        yield Conflict(
            ("train.effective_batch_tokens", *length_keys),
            f"train.effective_batch_tokens = {train.effective_batch_tokens} is less than {lengths}, so a row of full "
            f"length would not fit: raise train.effective_batch_tokens, or lower {' or '.join(length_keys)}.",
        )


def _check_task(parameters: Parameters) -> Iterator[Conflict]:
    train, task = parameters.train, parameters.task
    if task != "sequence_classification":
        only_classes = {
            "train.class_weights": (train.class_weights or None, "null"),
            "train.best_metric": (None if train.best_metric == "loss" else train.best_metric, "loss"),
        }
        for key, (value, way) in only_classes.items():
            if value is not None:
                yield Conflict(
                    (key, "task"),
                    f"{key} = {value} needs classes, but task = {task} has none: set {key} = {way}, or task = "
                    "sequence_classification.",
                )
    if parameters.data.format not in ("auto", *TASK_FORMATS[task]):
        wanted = " or ".join(TASK_FORMATS[task])
        yield Conflict(
            ("data.format", "task"),
            f"data.format = {parameters.data.format} has nothing for task = {task}, which learns from rows of "
            f"{wanted}: set data.format = auto or {wanted}, or another task.",
        )
    if task != "causal_lm":
        tokenize = parameters.tokenize
        for key, given, way in (
            ("tokenize.template_arguments", tokenize.template_arguments, "{}"),
            ("tokenize.system_turn", "" if tokenize.system_turn == "keep" else tokenize.system_turn, "keep"),
        ):
            if given:
                yield Conflict(
                    (key, "task"),
                    f"{key} = {given} is for chat templates, but task = {task} tokenizes texts without one: set "
                    f"{key} = {way}, or task = causal_lm.",
                )
    if task == "seq2seq_lm" and train.neftune_noise_alpha is not None:
        yield Conflict(
            ("train.neftune_noise_alpha", "task"),
            f"train.neftune_noise_alpha = {train.neftune_noise_alpha} would have no effect with task = seq2seq_lm: its "
            "encoder and decoder do not take their embeddings from where the noise is added. Set "
            "train.neftune_noise_alpha = null.",
        )
    if task == "seq2seq_lm" and train.batching == "packed":
        yield Conflict(
            ("train.batching", "task"),
            "train.batching = packed puts rows end to end, which an encoder that looks both ways cannot keep apart, "
            "and task = seq2seq_lm has one: set train.batching = auto or padded.",
        )


def _check_method(parameters: Parameters) -> Iterator[Conflict]:
    train, quantization = parameters.train, parameters.train.qlora
    if train.freeze is not None and train.method != "full":
        yield Conflict(
            ("train.freeze", "train.method"),
            f"train.freeze = {train.freeze} leaves parts of a full training out, but train.method = {train.method} "
            "trains an adapter beside weights that are all frozen: set train.freeze = null, choose layers with "
            "train.lora.target_modules, or set train.method = full.",
        )
    # nf4 is the default, so it cannot be told from a wish and passes.
    if quantization.bits == 8 and quantization.quant_type == "fp4":
        yield Conflict(
            ("train.qlora.bits", "train.qlora.quant_type"),
            "train.qlora.quant_type = fp4 is a format of 4 bits, but train.qlora.bits = 8: set one of them back.",
        )


def _check_adapter(parameters: Parameters) -> Iterator[Conflict]:
    train, lora = parameters.train, parameters.train.lora
    if train.method == "full":
        return  # the group is not read then
    if train.method == "qlora" and lora.init not in ("default", "gaussian"):
        why = (
            "writes its half of the matrices in the dtype of the frozen weights, which qlora packs into bytes"
            if lora.init == "orthogonal"
            else "takes the adapter out of the frozen weights, and what is left would be quantized once more, "
            "so that the stored adapter would not fit the base model"
        )
        yield Conflict(
            ("train.lora.init", "train.method"),
            f"train.lora.init = {lora.init} {why}, but train.method = qlora: set train.lora.init = default or "
            "gaussian, or train.method = lora.",
        )
    if lora.init == "orthogonal" and lora.r % 2:
        yield Conflict(
            ("train.lora.init", "train.lora.r"),
            f"train.lora.init = orthogonal divides the rank into two halves, but train.lora.r = {lora.r} is odd: set "
            "an even rank.",
        )
    if lora.init == "mica" and lora.use_dora:
        yield Conflict(
            ("train.lora.init", "train.lora.use_dora"),
            "train.lora.init = mica and train.lora.use_dora = true are two different adapters: set one of them back.",
        )


def _check_evaluations(parameters: Parameters) -> Iterator[Conflict]:
    train = parameters.train
    evals = train.early_stopping_evals
    if evals is None:
        return
    key = "train.early_stopping_evals"
    if train.eval_every_steps is None:
        yield Conflict(
            (key, "train.eval_every_steps"),
            f"{key} = {evals} counts evaluations, but train.eval_every_steps is null, so there are none: set "
            f"train.eval_every_steps, or {key} = null.",
        )
    yield from _check_validation_rows(parameters, key, evals)


def _check_best_checkpoint(parameters: Parameters) -> Iterator[Conflict]:
    train = parameters.train
    if not train.load_best:
        return
    keys = ("train.load_best", "train.eval_every_steps", "train.save_every_steps")
    evaluated, saved = train.eval_every_steps, train.save_every_steps
    if evaluated is None or saved is None:
        yield Conflict(
            keys,
            "train.load_best = true needs both train.eval_every_steps and train.save_every_steps, which are "
            f"{write_value(evaluated)} and {write_value(saved)}: set both.",
        )
    # The best checkpoint is chosen by what was measured at its own step, and not at one near it.
    elif saved % evaluated:
        yield Conflict(
            keys,
            "train.load_best = true needs a validation loss for every checkpoint, but train.save_every_steps = "
            f"{saved} is not a multiple of train.eval_every_steps = {evaluated}.",
        )
    yield from _check_validation_rows(parameters, "train.load_best", True)


def _check_validation_rows(parameters: Parameters, key: str, value: object) -> Iterator[Conflict]:
    split = parameters.split
    # Folds make validation one of them, whatever split.validation says.
    if split.validation == 0 and parameters.data.validation_path is None and split.num_folds is None:
        yield Conflict(
            (key, "split.validation", "data.validation_path"),
            f"{key} = {write_value(value)} needs validation rows, but split.validation = 0 and data.validation_path "
            "is null.",
        )


def _check_warmup(parameters: Parameters) -> Iterator[Conflict]:
    train = parameters.train
    warmup = train.trainer.get("warmup_steps", 0)
    if not warmup or train.max_steps is None:
        return  # where epochs alone decide, the number of steps is known and looked at before the model is loaded
    # As transformers does: a fraction is rounded up. One of 1 or more is refused by the parameter's own type.
    num_steps = math.ceil(warmup * train.max_steps) if isinstance(warmup, float) else warmup
    if num_steps >= train.max_steps:
        yield Conflict(
            ("train.trainer.warmup_steps", "train.max_steps"),
            f"train.trainer.warmup_steps = {warmup} is a warm-up of {count_of(num_steps, 'step')}, and "
            "train.max_steps = "
            f"{train.max_steps}: the learning rate would never reach its peak. Shorten the warm-up or train longer.",
        )


def _check_schedule(parameters: Parameters) -> Iterator[Conflict]:
    train, trainer = parameters.train, parameters.train.trainer
    # What is left out keeps the Trainer's default, which the arguments have to go with all the same.
    schedule, given = trainer.get("lr_scheduler_type", DEFAULT_SCHEDULE), trainer.get("lr_scheduler_kwargs", {})
    keys = ("train.trainer.lr_scheduler_type", "train.trainer.lr_scheduler_kwargs")
    for problem in find_schedule_problems(schedule, given, learning_rate=train.learning_rate):
        yield Conflict((*keys, "train.learning_rate") if "train.learning_rate" in problem else keys, problem)
    if schedule == "constant" and trainer.get("warmup_steps", 0):
        yield Conflict(
            (keys[0], "train.trainer.warmup_steps"),
            f"{keys[0]} = constant has no warm-up, so train.trainer.warmup_steps = {trainer['warmup_steps']} would be "
            f"left out: set {keys[0]} = constant_with_warmup.",
        )


def _check_optimizer(parameters: Parameters) -> Iterator[Conflict]:
    trainer = parameters.train.trainer
    name, arguments = trainer.get("optim"), trainer.get("optim_args")
    for problem in find_optimizer_problems(name, arguments) if arguments else ():
        yield Conflict(("train.trainer.optim", "train.trainer.optim_args"), problem)
    # Found, not imported: bitsandbytes brings torch.
    if name in BITSANDBYTES_OPTIMIZERS and find_spec("bitsandbytes") is None:
        yield Conflict(
            ("train.trainer.optim",),
            f"train.trainer.optim = {name} is made by the package bitsandbytes, which is not installed: pip install "
            "bitsandbytes, or set train.trainer.optim = adamw_torch_fused.",
        )
    if parameters.train.method == "qlora" and find_spec("bitsandbytes") is None:
        yield Conflict(
            ("train.method",),
            "train.method = qlora needs the package bitsandbytes, which is not installed: pip install bitsandbytes, "
            "or set train.method = lora.",
        )


def _check_precision(parameters: Parameters) -> Iterator[Conflict]:
    train, model = parameters.train, parameters.model
    if train.method == "full" and model.dtype == "float16":
        yield Conflict(
            ("train.method", "model.dtype"),
            "train.method = full cannot update weights held in float16 (model.dtype): small updates round to nothing "
            "and gradients overflow. Use model.dtype = float32 with train.precision = float16, or bfloat16.",
        )
    # Weights of fewer digits cannot give products of more; the other way round is what mixed precision does.
    if "auto" not in (train.precision, model.dtype) and model.dtype not in ("float32", train.precision):
        yield Conflict(
            ("train.precision", "model.dtype"),
            f"train.precision = {train.precision} cannot be had from weights held in model.dtype = {model.dtype}: set "
            f"model.dtype = auto or float32, or train.precision = auto or {model.dtype}.",
        )
    if model.attention == "flash_attention_2" and train.precision == "float32":
        yield Conflict(
            ("model.attention", "train.precision"),
            "model.attention = flash_attention_2 computes in 16 bits only, but train.precision = float32: use "
            "model.attention = sdpa, or train.precision = bfloat16.",
        )


def _check_split(parameters: Parameters) -> Iterator[Conflict]:
    split, data = parameters.split, parameters.data
    # Numbers of rows are compared once the rows are counted; a split with a file of its own takes none.
    fractions = [
        value
        for value, path in ((split.validation, data.validation_path), (split.test, data.test_path))
        if isinstance(value, float) and path is None
    ]
    if sum(fractions) >= 1:
        yield Conflict(
            ("split.validation", "split.test", "data.validation_path", "data.test_path"),
            f"split.validation = {split.validation} and split.test = {split.test} leave no rows for training: their "
            "sum must be below 1.",
        )


def _check_folds(parameters: Parameters) -> Iterator[Conflict]:
    split, data = parameters.split, parameters.data
    if split.num_folds is None:
        if split.fold:
            yield Conflict(
                ("split.fold", "split.num_folds"),
                f"split.fold = {split.fold} names a fold, but split.num_folds is null: set the number of folds, or "
                "split.fold = 0.",
            )
        return
    if split.fold >= split.num_folds:
        yield Conflict(
            ("split.fold", "split.num_folds"),
            f"split.fold = {split.fold} is none of the split.num_folds = {split.num_folds} folds, which are counted "
            f"from 0 to {split.num_folds - 1}.",
        )
    if data.validation_path is not None:
        yield Conflict(
            ("split.num_folds", "data.validation_path"),
            f"split.num_folds = {split.num_folds} makes validation one of the folds, but data.validation_path names "
            "rows of its own: set one of them to null.",
        )


def _check_sources(parameters: Parameters) -> Iterator[Conflict]:
    data = parameters.data
    held_out = (("data.validation_path", data.validation_path), ("data.test_path", data.test_path))
    for key, rows in (("data.path", data.path), *held_out):
        if isinstance(rows, list) and not rows:
            way = "" if key == "data.path" else ", or write null for none"
            yield Conflict((key,), f"{key} is an empty list: name at least one source of rows{way}.")
    for key, rows in held_out:
        several = rows if isinstance(rows, list) else [rows]
        # A weight of 1 is the default and does nothing.
        if any(isinstance(source, SourceParameters) and source.weight != 1 for source in several):
            yield Conflict(
                (key,),
                f"{key} has a source with a weight, but held-out rows are each measured once: weights belong to "
                "data.path.",
            )


def _check_groups(parameters: Parameters) -> Iterator[Conflict]:
    found = (
        find_evaluate_problems(parameters),
        find_generation_problems(parameters.generate.generation, "generate.generation"),
        find_fp8_problems(parameters.train, parameters.task),
        find_alias_problems(parameters.export),
        find_gguf_contradictions(parameters.export),
    )
    return (Conflict(keys, problem) for keys, problem in chain.from_iterable(found))
