from __future__ import annotations

import copy
from typing import Any

import pytest

from lm_tuning.errors import UserError
from lm_tuning.parameters import validate_parameters


def problems(valid: dict[str, Any], **groups: dict[str, Any]) -> list[str]:
    raw = copy.deepcopy(valid)
    for name, group in groups.items():
        raw[name] = raw.get(name, {}) | group
    try:
        validate_parameters(raw)
    except UserError as error:
        return error.problems
    return []


def test_the_valid_start_has_no_conflict(valid: dict[str, Any]) -> None:
    assert problems(valid) == []


def test_training_needs_an_end(valid: dict[str, Any]) -> None:
    (problem,) = problems(valid, train={"max_steps": None})
    assert "train.num_epochs and train.max_steps are both null" in problem
    assert problems(valid, train={"max_steps": None, "num_epochs": 1}) == []
    assert problems(valid, train={"max_steps": 5, "num_epochs": 1}) == []


def test_exactly_one_batch_size_is_set(valid: dict[str, Any]) -> None:
    (both,) = problems(valid, train={"effective_batch_rows": 16})
    assert "train.effective_batch_rows = 16 and train.effective_batch_tokens = 512 are both set" in both
    (neither,) = problems(valid, train={"effective_batch_tokens": None})
    assert "both null" in neither
    assert problems(valid, train={"effective_batch_rows": 16, "effective_batch_tokens": None}) == []


@pytest.mark.parametrize("group", ["train", "evaluate"])
def test_a_row_of_full_length_fits_a_micro_batch(valid: dict[str, Any], group: str) -> None:
    (problem,) = problems(valid, **{group: {"micro_batch_tokens": 511}})
    assert f"{group}.micro_batch_tokens = 511 is less than tokenize.max_length_tokens = 512" in problem
    assert problems(valid, **{group: {"micro_batch_tokens": 512}}) == []


def test_a_row_of_full_length_fits_a_step(valid: dict[str, Any]) -> None:
    (problem,) = problems(valid, tokenize={"max_length_tokens": 513})
    assert "train.effective_batch_tokens = 512 is less than tokenize.max_length_tokens = 513" in problem


def test_the_best_checkpoint_needs_evaluations_and_checkpoints(valid: dict[str, Any]) -> None:
    (problem,) = problems(valid, train={"load_best": True, "save_every_steps": 5})
    assert "train.eval_every_steps and train.save_every_steps, which are null and 5" in problem


def test_the_best_checkpoint_needs_a_loss_for_every_checkpoint(valid: dict[str, Any]) -> None:
    (problem,) = problems(valid, train={"load_best": True, "eval_every_steps": 2, "save_every_steps": 5})
    assert "train.save_every_steps = 5" in problem and "train.eval_every_steps = 2" in problem
    assert problems(valid, train={"load_best": True, "eval_every_steps": 2, "save_every_steps": 6}) == []
    assert problems(valid, train={"eval_every_steps": 2, "save_every_steps": 5}) == []


def test_the_best_checkpoint_needs_validation_rows(valid: dict[str, Any]) -> None:
    best = {"load_best": True, "eval_every_steps": 2, "save_every_steps": 2}
    (problem,) = problems(valid, train=best, split={"validation": 0})
    assert "split.validation = 0" in problem
    assert problems(valid, train=best, split={"validation": 0}, data={"validation_path": "held_out.jsonl"}) == []


@pytest.mark.parametrize(("warmup", "steps", "num_steps"), [(10, 3, 10), (0.1, 1, 1), (3, 3, 3)])
def test_warmup_ends_before_training_does(valid: dict[str, Any], warmup: float, steps: int, num_steps: int) -> None:
    (problem,) = problems(valid, train={"max_steps": steps, "trainer": {"warmup_steps": warmup}})
    assert f"train.trainer.warmup_steps = {warmup} is a warm-up of {num_steps} steps" in problem
    assert f"train.max_steps = {steps}" in problem


def test_a_warmup_within_training_is_fine(valid: dict[str, Any]) -> None:
    assert problems(valid, train={"trainer": {"warmup_steps": 4}}) == []
    assert problems(valid, train={"trainer": {"warmup_steps": 0.1}}) == []
    assert problems(valid, train={"max_steps": 1, "trainer": {"warmup_steps": 0}}) == []


def test_full_training_refuses_float16_weights(valid: dict[str, Any]) -> None:
    (problem,) = problems(valid, train={"method": "full"}, model={"dtype": "float16"})
    assert "train.method = full" in problem and "model.dtype" in problem
    assert problems(valid, train={"method": "lora"}, model={"dtype": "float16"}) == []


def test_flash_attention_refuses_float32(valid: dict[str, Any]) -> None:
    (problem,) = problems(valid, train={"precision": "float32"}, model={"attention": "flash_attention_2"})
    assert "model.attention = flash_attention_2" in problem and "train.precision = float32" in problem
    assert problems(valid, train={"precision": "bfloat16"}, model={"attention": "flash_attention_2"}) == []


def test_fractions_leave_rows_for_training(valid: dict[str, Any]) -> None:
    (problem,) = problems(valid, split={"validation": 0.5, "test": 0.5})
    assert "split.validation = 0.5 and split.test = 0.5" in problem
    assert problems(valid, split={"validation": 0.5, "test": 0.5}, data={"test_path": "test.jsonl"}) == []
    assert problems(valid, split={"validation": 0.5, "test": 500}) == []


def test_a_fold_is_one_of_the_folds(valid: dict[str, Any]) -> None:
    (problem,) = problems(valid, split={"num_folds": 3, "fold": 3})
    assert "split.fold = 3 is none of the split.num_folds = 3 folds" in problem
    (problem,) = problems(valid, split={"fold": 1})
    assert "split.num_folds is null" in problem
    assert problems(valid, split={"num_folds": 3, "fold": 2}) == []


def test_folds_and_a_validation_file_exclude_each_other(valid: dict[str, Any]) -> None:
    (problem,) = problems(valid, split={"num_folds": 3}, data={"validation_path": "a.jsonl"})
    assert "split.num_folds = 3" in problem and "data.validation_path" in problem


@pytest.mark.parametrize("rows", [{"path": "a.jsonl", "weight": 2.0}, ["b.jsonl", {"path": "a.jsonl", "weight": 0.5}]])
def test_held_out_rows_have_no_weight(valid: dict[str, Any], rows: Any) -> None:
    (problem,) = problems(valid, data={"test_path": rows})
    assert problem.startswith("data.test_path has a source with a weight")
    assert problems(valid, data={"path": rows}) == []


@pytest.mark.parametrize("key", ["path", "validation_path", "test_path"])
def test_a_list_of_sources_names_one(valid: dict[str, Any], key: str) -> None:
    (problem,) = problems(valid, data={key: []})
    assert problem.startswith(f"data.{key} is an empty list")
