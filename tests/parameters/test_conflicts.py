from __future__ import annotations

import copy
from typing import Any, get_args

import pytest

from lm_tuning.errors import UserError
from lm_tuning.parameters import conflicts, validate_parameters
from lm_tuning.parameters.base import TASK_FORMATS, TaskName
from lm_tuning.parameters.data import DataParameters
from lm_tuning.wording import count_of


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
def test_a_micro_batch_may_be_shorter_than_a_row_may_be(valid: dict[str, Any], group: str) -> None:
    assert problems(valid, **{group: {"micro_batch_tokens": 64}}) == []


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
    assert problems(valid, train=best, split={"validation": 0, "num_folds": 5}) == []


def test_an_evaluation_once_an_epoch_is_pointed_to_steps(valid: dict[str, Any]) -> None:
    train = {"load_best": True, "save_every_steps": 5, "trainer": {"eval_strategy": "epoch"}}
    refused, conflict = problems(valid, train=train)
    assert "train.trainer.eval_strategy is set by this project. Use train.eval_every_steps" in refused
    assert "train.eval_every_steps and train.save_every_steps, which are null and 5" in conflict


def test_early_stopping_needs_evaluations_of_validation_rows(valid: dict[str, Any]) -> None:
    (problem,) = problems(valid, train={"early_stopping_evals": 3})
    assert "train.early_stopping_evals = 3" in problem and "train.eval_every_steps is null" in problem
    stopping = {"early_stopping_evals": 3, "eval_every_steps": 2}
    (problem,) = problems(valid, train=stopping, split={"validation": 0})
    assert "train.early_stopping_evals = 3 needs validation rows" in problem
    assert problems(valid, train=stopping) == []
    assert problems(valid, train=stopping | {"load_best": True, "save_every_steps": 2}) == []
    (problem,) = problems(valid, train=stopping | {"load_best": True, "save_every_steps": 5})
    assert "train.save_every_steps = 5" in problem and "train.eval_every_steps = 2" in problem


@pytest.mark.parametrize("task", ["causal_lm", "seq2seq_lm"])
def test_what_needs_classes_is_refused_without(valid: dict[str, Any], task: str) -> None:
    common: dict[str, Any] = {"effective_batch_tokens": 1024}
    for settings, words in (
        ({"class_weights": "balanced"}, f"train.class_weights = balanced needs classes, but task = {task}"),
        ({"best_metric": "macro_f1"}, f"train.best_metric = macro_f1 needs classes, but task = {task}"),
        ({"best_metric": "accuracy"}, f"train.best_metric = accuracy needs classes, but task = {task}"),
    ):
        raw = merged_task(valid, task)
        (problem,) = problems(raw, train=common | settings)
        assert words in problem
        assert problems(merged_task(valid, "sequence_classification"), train=settings) == []


def merged_task(valid: dict[str, Any], task: str) -> dict[str, Any]:
    return {**valid, "task": task}


def test_class_weights_and_label_smoothing_go_together(valid: dict[str, Any]) -> None:
    raw = merged_task(valid, "sequence_classification")
    assert problems(raw, train={"class_weights": {"a": 2}, "label_smoothing": 0.1}) == []


def test_noise_that_would_not_arrive_is_refused(valid: dict[str, Any]) -> None:
    raw = merged_task(valid, "seq2seq_lm")
    (problem,) = problems(raw, train={"neftune_noise_alpha": 5.0, "effective_batch_tokens": 1024})
    assert "train.neftune_noise_alpha = 5.0" in problem and "task = seq2seq_lm" in problem
    assert problems(raw, train={"neftune_noise_alpha": None, "effective_batch_tokens": 1024}) == []
    assert problems(valid, train={"neftune_noise_alpha": 5.0}) == []


@pytest.mark.parametrize("task", ["seq2seq_lm", "sequence_classification"])
def test_settings_of_chat_templates_are_refused_where_none_is_used(valid: dict[str, Any], task: str) -> None:
    raw = merged_task(valid, task)
    for name, value in (("template_arguments", {"enable_thinking": False}), ("system_turn", "merge_into_user")):
        (problem,) = problems(raw, tokenize={name: value}, train={"effective_batch_tokens": 1024})
        assert f"tokenize.{name} = {value}" in problem and f"task = {task}" in problem
        assert problems(valid, tokenize={name: value}) == []


def test_packed_rows_are_refused_for_an_encoder(valid: dict[str, Any]) -> None:
    raw = merged_task(valid, "seq2seq_lm")
    (problem,) = problems(raw, train={"batching": "packed", "effective_batch_tokens": 1024})
    assert "train.batching = packed" in problem and "task = seq2seq_lm" in problem
    assert problems(raw, train={"batching": "padded", "effective_batch_tokens": 1024}) == []


def test_a_pair_of_full_length_fits_a_step(valid: dict[str, Any]) -> None:
    (problem,) = problems(merged_task(valid, "seq2seq_lm"), tokenize={"max_target_tokens": 100})
    assert "train.effective_batch_tokens = 512 is less than tokenize.max_length_tokens = 512 with" in problem
    assert "tokenize.max_target_tokens = 100" in problem
    raw = merged_task(valid, "seq2seq_lm")
    assert problems(raw, tokenize={"max_target_tokens": 100, "max_length_tokens": 412}) == []


@pytest.mark.parametrize(
    ("task", "wanted"), [("sequence_classification", "text_label"), ("seq2seq_lm", "prompt_response")]
)
def test_rows_have_what_the_task_learns_from(valid: dict[str, Any], task: str, wanted: str) -> None:
    common = {"train": {"effective_batch_tokens": 1024}}
    raw = merged_task(valid, task)
    (problem,) = problems(raw, **common, data={"format": "messages"})
    assert f"data.format = messages has nothing for task = {task}" in problem and wanted in problem
    assert problems(raw, **common, data={"format": wanted}) == []
    assert problems(valid, data={"format": "messages"}) == []


def test_each_task_names_the_formats_that_it_learns_from() -> None:
    from lm_tuning.data.format.columns import FORMATS

    assert TASK_FORMATS.keys() == set(get_args(TaskName))
    assert set(TASK_FORMATS["causal_lm"]) == set(FORMATS) >= {one for many in TASK_FORMATS.values() for one in many}
    assert {"auto", *FORMATS} == set(get_args(DataParameters.model_fields["format"].annotation))


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_freezing_belongs_to_full_training(valid: dict[str, Any], method: str) -> None:
    (problem,) = problems(valid, train={"method": method, "freeze": ["embed_tokens"]})
    assert "train.freeze = ['embed_tokens']" in problem and f"train.method = {method}" in problem
    assert problems(valid, train={"method": "full", "freeze": ["embed_tokens"]}) == []


def test_a_format_of_four_bits_is_none_of_eight(valid: dict[str, Any]) -> None:
    (problem,) = problems(valid, train={"method": "qlora", "qlora": {"bits": 8, "quant_type": "fp4"}})
    assert "train.qlora.quant_type = fp4" in problem and "train.qlora.bits = 8" in problem
    assert problems(valid, train={"method": "qlora", "qlora": {"bits": 4, "quant_type": "fp4"}}) == []
    assert problems(valid, train={"method": "qlora", "qlora": {"bits": 8}}) == []


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "pissa_niter_16", "olora", "mica", "orthogonal"])
def test_a_start_from_the_weights_needs_them_unquantized(valid: dict[str, Any], init: str) -> None:
    (problem,) = problems(valid, train={"method": "qlora", "lora": {"init": init}})
    assert f"train.lora.init = {init}" in problem and "train.method = qlora" in problem
    assert problems(valid, train={"method": "lora", "lora": {"init": init}}) == []


def test_an_adapter_that_cannot_be_made_is_refused(valid: dict[str, Any]) -> None:
    (problem,) = problems(valid, train={"lora": {"init": "orthogonal", "r": 3}})
    assert "train.lora.init = orthogonal" in problem and "train.lora.r = 3" in problem
    (problem,) = problems(valid, train={"lora": {"init": "mica", "use_dora": True}})
    assert "train.lora.use_dora = true" in problem
    assert problems(valid, train={"method": "full", "lora": {"init": "orthogonal", "r": 3}}) == []


@pytest.mark.parametrize(
    ("schedule", "needed"),
    [
        ("cosine_with_min_lr", "min_lr and min_lr_rate"),
        ("cosine_warmup_with_min_lr", "min_lr and min_lr_rate"),
        ("warmup_stable_decay", "num_decay_steps"),
    ],
)
def test_a_schedule_gets_what_it_needs(valid: dict[str, Any], schedule: str, needed: str) -> None:
    (problem,) = problems(valid, train={"trainer": {"lr_scheduler_type": schedule}})
    assert f"train.trainer.lr_scheduler_type = {schedule} needs" in problem and needed in problem
    given = {needed.partition(" ")[0]: 1 if schedule == "warmup_stable_decay" else 1e-5}
    trainer = {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": given}
    assert problems(valid, train={"trainer": trainer}) == []


def test_every_schedule_is_made_with_what_the_checks_let_pass() -> None:
    import torch
    from transformers import get_scheduler

    from lm_tuning.parameters.schema import find_entry

    entry = find_entry(("train", "trainer", "lr_scheduler_type"))
    assert entry is not None
    needed = {"cosine_with_min_lr": {"min_lr": 1e-6}, "cosine_warmup_with_min_lr": {"min_lr": 1e-6}}
    needed["warmup_stable_decay"] = {"num_decay_steps": 2}
    for name in entry["enum"]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
        made = get_scheduler(name, optimizer, 1, 5, scheduler_specific_kwargs=needed.get(name))
        rates = []
        for _ in range(5):
            rates.append(made.get_last_lr()[0])
            optimizer.step()
            made.step()
        assert max(rates) == pytest.approx(1e-3), name


def test_a_constant_rate_has_no_warmup(valid: dict[str, Any]) -> None:
    trainer = {"lr_scheduler_type": "constant", "warmup_steps": 4}
    (problem,) = problems(valid, train={"trainer": trainer})
    assert "train.trainer.warmup_steps = 4 would be left out" in problem and "constant_with_warmup" in problem
    assert problems(valid, train={"trainer": trainer | {"lr_scheduler_type": "constant_with_warmup"}}) == []


@pytest.mark.parametrize(
    ("train", "key"),
    [
        ({"trainer": {"optim": "adamw_bnb_8bit"}}, "train.trainer.optim = adamw_bnb_8bit"),
        ({"method": "qlora"}, "qlora"),
    ],
)
def test_a_missing_package_is_said_before_anything_runs(
    valid: dict[str, Any], train: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert problems(valid, train=train) == []
    monkeypatch.setattr(conflicts, "find_spec", lambda name: None)
    (problem,) = problems(valid, train=train)
    assert key in problem and "pip install bitsandbytes" in problem
    assert problems(valid, train={"trainer": {"optim": "adamw_torch_fused"}}) == []


def test_the_optimizers_of_bitsandbytes_are_those_that_transformers_takes_from_it() -> None:
    from transformers.trainer_optimizer import _BITSANDBYTES_OPTIMIZERS

    from lm_tuning.parameters.schema import find_entry
    from lm_tuning.parameters.trainer_arguments import BITSANDBYTES_OPTIMIZERS

    offered = set(find_entry(("train", "trainer", "optim"))["enum"])  # type: ignore[index]
    assert offered & {str(getattr(name, "value", name)) for name in _BITSANDBYTES_OPTIMIZERS} == BITSANDBYTES_OPTIMIZERS


def test_products_are_no_finer_than_the_weights(valid: dict[str, Any]) -> None:
    (problem,) = problems(valid, train={"precision": "float32"}, model={"dtype": "bfloat16"})
    assert "train.precision = float32" in problem and "model.dtype = bfloat16" in problem
    assert problems(valid, train={"precision": "bfloat16"}, model={"dtype": "float32"}) == []
    assert problems(valid, train={"precision": "auto"}, model={"dtype": "bfloat16"}) == []


@pytest.mark.parametrize(("warmup", "steps", "num_steps"), [(10, 3, 10), (0.1, 1, 1), (3, 3, 3)])
def test_warmup_ends_before_training_does(valid: dict[str, Any], warmup: float, steps: int, num_steps: int) -> None:
    (problem,) = problems(valid, train={"max_steps": steps, "trainer": {"warmup_steps": warmup}})
    assert f"train.trainer.warmup_steps = {warmup} is a warm-up of {count_of(num_steps, 'step')}" in problem
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


def test_settings_of_classes_are_refused_beside_a_language_model(valid: dict[str, Any]) -> None:
    found = problems(valid, evaluate={"top_k": 50, "abstain_below": 0.5})
    assert len(found) == 2
    assert "set evaluate.generation.top_k" in found[0]
    assert "evaluate.abstain_below = 0.5 is about the classes of a classifier" in found[1]
    assert problems(valid, evaluate={"top_k": "auto"}) == []


def test_the_gate_names_scores_that_will_be_measured(valid: dict[str, Any]) -> None:
    def gate(task: str, bounds: dict[str, Any], **evaluate: Any) -> list[str]:
        common = {"effective_batch_tokens": 1024} if task == "seq2seq_lm" else {}
        return problems(merged_task(valid, task), train=common, evaluate={"gate": bounds, **evaluate})

    fine = {"rouge_l": 0.3, "nats_per_token": "better", "bits_per_byte": "not_worse", "perplexity": "1e1"}
    assert gate("causal_lm", fine) == gate("seq2seq_lm", fine) == []
    assert gate("sequence_classification", {"accuracy": 0.9, "macro_f1": "better", "calibration_error": 0.1}) == []
    (mistyped,) = gate("causal_lm", {"rouge_L": 0.3})
    assert mistyped == "evaluate.gate.rouge_L: there is no such score. Did you mean rouge_l?"
    (other_task,) = gate("sequence_classification", {"bleu": 30.0})
    assert "evaluate.gate.bleu: there is no such score. Scores of this run: accuracy, macro_f1," in other_task
    (not_asked_for,) = gate("causal_lm", {"chrf": 30.0})
    assert "evaluate.gate.chrf: there is no such score." in not_asked_for
    assert gate("causal_lm", {"chrf": 30.0}, scores={"names": ["chrf"]}) == []
    (no_rows,) = gate("causal_lm", {"perplexity": "better"})
    assert "evaluate.gate.perplexity = better is not allowed: it is no score of rows. It takes a number." in no_rows
    (no_answers,) = gate("causal_lm", {"rouge_l": 0.3, "nats_per_token": 2.0}, num_generate_rows=0)
    assert "evaluate.gate.rouge_l = 0.3: answers are left out by evaluate.num_generate_rows = 0." in no_answers
    for wrong in ("good", True, None, float("nan")):
        (problem,) = gate("causal_lm", {"rouge_l": wrong})
        assert "It takes a number, or better or not_worse." in problem
