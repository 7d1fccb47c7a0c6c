"""Checks of parameters against each other: settings that are fine alone and wrong together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lm_tuning.parameters.data import SourceParameters

if TYPE_CHECKING:
    from lm_tuning.parameters.root import Parameters


@dataclass(frozen=True)
class Conflict:
    """Settings that cannot hold together.

    Attributes:
        keys: every key that took part, so that a conflict is dropped when one of them is already known to be wrong.
        problem: the sentence for the user, which names the keys, their values and the ways out.
    """

    keys: tuple[str, ...]
    problem: str


def find_conflicts(parameters: Parameters) -> list[Conflict]:
    """List every conflict between parameters that are valid one by one."""
    checks = (
        _check_length_of_training,
        _check_batch,
        _check_best_checkpoint,
        _check_warmup,
        _check_precision,
        _check_split,
        _check_folds,
        _check_sources,
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
    train, longest = parameters.train, parameters.tokenize.max_length_tokens
    both = ("train.effective_batch_rows", "train.effective_batch_tokens")
    if train.effective_batch_rows is None and train.effective_batch_tokens is None:
        yield Conflict(both, f"{both[0]} and {both[1]} are both null: set exactly one of them.")
    if train.effective_batch_rows is not None and train.effective_batch_tokens is not None:
        yield Conflict(
            both,
            f"{both[0]} = {train.effective_batch_rows} and {both[1]} = {train.effective_batch_tokens} are both set: "
            "set exactly one of them and write null for the other.",
        )
    budgets = {
        "train.effective_batch_tokens": train.effective_batch_tokens,
        "train.micro_batch_tokens": train.micro_batch_tokens,
        "evaluate.micro_batch_tokens": parameters.evaluate.micro_batch_tokens,
    }
    for key, budget in budgets.items():
        if isinstance(budget, int) and budget < longest:
            yield Conflict(
                (key, "tokenize.max_length_tokens"),
                f"{key} = {budget} is less than tokenize.max_length_tokens = {longest}, so a row of full length would "
                f"not fit: raise {key}, or lower tokenize.max_length_tokens.",
            )


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
            f"{_word(evaluated)} and {_word(saved)}: set both.",
        )
    elif saved % evaluated:
        yield Conflict(
            keys,
            "train.load_best = true needs a validation loss for every checkpoint, but train.save_every_steps = "
            f"{saved} is not a multiple of train.eval_every_steps = {evaluated}.",
        )
    if parameters.split.validation == 0 and parameters.data.validation_path is None:
        yield Conflict(
            ("train.load_best", "split.validation", "data.validation_path"),
            "train.load_best = true needs validation rows, but split.validation = 0 and data.validation_path is null.",
        )


def _check_warmup(parameters: Parameters) -> Iterator[Conflict]:
    train = parameters.train
    warmup = train.trainer.get("warmup_steps", 0)
    if not warmup or train.max_steps is None:
        return
    num_steps = math.ceil(warmup * train.max_steps) if isinstance(warmup, float) else warmup
    if num_steps >= train.max_steps:
        yield Conflict(
            ("train.trainer.warmup_steps", "train.max_steps"),
            f"train.trainer.warmup_steps = {warmup} is a warm-up of {num_steps} steps, and train.max_steps = "
            f"{train.max_steps}: the learning rate would never reach its peak. Shorten the warm-up or train longer.",
        )


def _check_precision(parameters: Parameters) -> Iterator[Conflict]:
    train, model = parameters.train, parameters.model
    if train.method == "full" and model.dtype == "float16":
        yield Conflict(
            ("train.method", "model.dtype"),
            "train.method = full cannot update weights held in float16 (model.dtype): small updates round to nothing "
            "and gradients overflow. Use model.dtype = float32 with train.precision = float16, or bfloat16.",
        )
    if model.attention == "flash_attention_2" and train.precision == "float32":
        yield Conflict(
            ("model.attention", "train.precision"),
            "model.attention = flash_attention_2 computes in 16 bits only, but train.precision = float32: use "
            "model.attention = sdpa, or train.precision = bfloat16.",
        )


def _check_split(parameters: Parameters) -> Iterator[Conflict]:
    split, data = parameters.split, parameters.data
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
        if any(isinstance(source, SourceParameters) and source.weight != 1 for source in several):
            yield Conflict(
                (key,),
                f"{key} has a source with a weight, but held-out rows are each measured once: weights belong to "
                "data.path.",
            )


def _word(value: int | None) -> str:
    """Write a value as YAML does."""
    return "null" if value is None else str(value)
