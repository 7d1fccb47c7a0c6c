from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from lm_tuning.errors import UserError
from lm_tuning.parameters import DataParameters, Parameters, SourceParameters, TrainParameters, validate_parameters
from lm_tuning.parameters.schema import describe_allowed, find_entry, walk_keys


def merged(base: dict[str, Any], **groups: Any) -> dict[str, Any]:
    result = copy.deepcopy(base)
    for name, value in groups.items():
        if isinstance(value, dict) and isinstance(result.get(name), dict):
            result[name] |= value
        else:
            result[name] = value
    return result


def one_problem(raw: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        validate_parameters(raw)
    assert len(caught.value.problems) == 1, caught.value.problems
    return caught.value.problems[0]


def test_valid_parameters_keep_values_and_fill_defaults(valid: dict[str, Any]) -> None:
    parameters = validate_parameters(merged(valid, seed=7, split={"validation": 10, "test": 0.2}))
    assert parameters.seed == 7
    assert parameters.train.effective_batch_tokens == 512
    assert parameters.split.validation == 10 and isinstance(parameters.split.validation, int)
    assert parameters.split.test == 0.2
    assert parameters.model.name_or_path == "data/06_models/base/SmolLM2-135M-Instruct"


def test_parameters_cannot_be_changed(valid: dict[str, Any]) -> None:
    parameters = validate_parameters(valid)
    with pytest.raises(ValidationError, match="frozen"):
        parameters.train.max_steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("groups", "key", "allowed"),
    [
        ({"seed": "42"}, "seed = '42'", "an integer of at least 0"),
        ({"seed": True}, "seed = true", "an integer of at least 0"),
        ({"train": {"max_steps": 3.0}}, "train.max_steps = 3.0", "an integer of at least 1, or null"),
        ({"train": {"max_steps": 0}}, "train.max_steps = 0", "an integer of at least 1, or null"),
        ({"train": {"learning_rate": True}}, "train.learning_rate = true", "a number above 0"),
        ({"train": {"learning_rate": "fast"}}, "train.learning_rate = 'fast'", "a number above 0"),
        ({"train": {"learning_rate": float("inf")}}, "train.learning_rate = inf", "a number above 0"),
        ({"train": {"learning_rate": -1e-4}}, "train.learning_rate = -0.0001", "a number above 0"),
        ({"train": {"resume": "yes"}}, "train.resume = 'yes'", "true or false"),
        ({"train": {"resume": 1}}, "train.resume = 1", "true or false"),
        ({"train": {"method": "dora"}}, "train.method = 'dora'", "full, lora or qlora"),
        ({"train": {"lora": {"init": "eva"}}}, "train.lora.init = 'eva'", "default, gaussian, orthogonal, pissa, "),
        ({"train": {"qlora": {"bits": 5}}}, "train.qlora.bits = 5", "4 or 8"),
        ({"train": {"qlora": {"bits": "4"}}}, "train.qlora.bits = '4'", "4 or 8"),
        ({"train": {"freeze": []}}, "train.freeze = []", "a list of strings, or null"),
        ({"train": {"neftune_noise_alpha": 0}}, "train.neftune_noise_alpha = 0", "a number above 0, or null"),
        ({"train": {"label_smoothing": 1}}, "train.label_smoothing = 1", "a number of at least 0 and below 1"),
        ({"train": {"best_metric": "f1"}}, "train.best_metric = 'f1'", "loss, accuracy or macro_f1"),
        ({"train": {"early_stopping_evals": 0}}, "train.early_stopping_evals = 0", "an integer of at least 1, or"),
        (
            {"train": {"class_weights": "equal"}},
            "train.class_weights = 'equal'",
            "balanced, a mapping of names, each with a number above 0, or null",
        ),
        ({"train": {"class_weights": {"a": 0}}}, "train.class_weights.a = 0", "a number above 0"),
        (
            {"train": {"health": {"severity": {"first-loss-off": "loud"}}}},
            "train.health.severity.first-loss-off = 'loud'",
            "note, warn, stop or off",
        ),
        ({"train": {"micro_batch_tokens": "some"}}, "train.micro_batch_tokens = 'some'", "auto, or an integer"),
        (
            {"train": {"lora": {"target_modules": []}}},
            "train.lora.target_modules = []",
            "all-linear, or a list of strings",
        ),
        ({"train": {"health": None}}, "train.health = null", "a mapping of the keys probe"),
        (
            {"split": {"validation": 1.0}},
            "split.validation = 1.0",
            "an integer of at least 0, or a number of at least 0 ",
        ),
        ({"split": {"test": -1}}, "split.test = -1", "an integer of at least 0"),
        ({"task": "classification"}, "task = 'classification'", "causal_lm, sequence_classification or seq2seq_lm"),
        ({"output": "../other"}, "output = '../other'", "a folder name"),
        ({"output": ""}, "output = ''", "a folder name"),
        ({"data": None}, "data = null", "a mapping of the keys path"),
        ({"data": {"path": ""}}, "data.path = ''", "a string"),
        (
            {"environment": {"variables": ["A"]}},
            "environment.variables = ['A']",
            "a mapping of names, each with a string",
        ),
    ],
)
def test_a_wrong_value_names_key_value_and_what_is_allowed(
    valid: dict[str, Any], groups: dict[str, Any], key: str, allowed: str
) -> None:
    problem = one_problem(merged(valid, **groups))
    assert problem.startswith(key)
    assert f"It takes {allowed}" in problem


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        (
            {"train": {"max_length_tokens": 9}},
            "train.max_length_tokens: there is no such key. Did you mean tokenize.max_",
        ),
        ({"train": {"lr": 1e-4}}, "train.lr: there is no such key. Did you mean train.learning_rate?"),
        ({"train": {"lora": {"rank": 4}}}, "train.lora.rank: there is no such key. Did you mean train.lora.r?"),
        (
            {"train": {"warmup_steps": 4}},
            "train.warmup_steps: there is no such key. Did you mean train.trainer.warmup_",
        ),
        ({"train": {"patience": 4}}, "train.patience: there is no such key. Did you mean train.early_stopping_evals?"),
        ({"train": {"use_dora": True}}, "train.use_dora: there is no such key. Did you mean train.lora.use_dora?"),
        ({"train": {"gradient_accumulation_steps": 4}}, "train.gradient_accumulation_steps: there is no such key. Not"),
        ({"modle": {}}, "modle: there is no such key. Did you mean model?"),
        ({"learning_rate": 1e-4}, "learning_rate: there is no such key. Did you mean train.learning_rate?"),
        ({"split": {"stratfy": "x"}}, "split.stratfy: there is no such key. Did you mean split.stratify?"),
        (
            {"tokenize": {"xyzzy": 1}},
            "tokenize.xyzzy: there is no such key. Keys of tokenize: max_length_tokens, max_target_",
        ),
        ({"xyzzy": 1}, "xyzzy: there is no such key. Keys of the top level: seed, output, task, model, environment"),
        ({"evaluate": {5: 1}}, "evaluate[5]: there is no such key. Keys of evaluate: split, max_loss_rows"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(
    valid: dict[str, Any], groups: dict[str, Any], problem: str
) -> None:
    assert one_problem(merged(valid, **groups)).startswith(problem)


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("per_device_train_batch_size", "Use train.effective_batch_rows"),
        ("gradient_accumulation_steps", "Not needed: set train.effective_batch_rows"),
        ("num_train_epochs", "Use train.num_epochs"),
        ("bf16", "Use train.precision: bfloat16"),
        ("eval_steps", "Use train.eval_every_steps"),
        ("neftune_noise_alpha", "Use train.neftune_noise_alpha"),
        ("label_smoothing_factor", "Use train.label_smoothing"),
        ("load_best_model_at_end", "Use train.load_best"),
        ("metric_for_best_model", "Use train.best_metric"),
        ("greater_is_better", "Not needed: train.best_metric knows which way is better"),
        ("early_stopping_patience", "Use train.early_stopping_evals"),
        ("freeze_layers", "Use train.freeze"),
        ("load_in_4bit", "Use train.method: qlora, with train.qlora.bits: 4"),
        ("eval_strategy", "Use train.eval_every_steps"),
        ("bnb_4bit_compute_dtype", "Use train.precision"),
    ],
)
def test_trainer_settings_that_are_ours_are_refused_with_our_key(valid: dict[str, Any], key: str, advice: str) -> None:
    problem = one_problem(merged(valid, train={"trainer": {key: 4}}))
    assert problem.startswith(f"train.trainer.{key} is set by this project. {advice}")


def test_every_key_that_advice_names_exists() -> None:
    from lm_tuning.parameters.trainer_arguments import OWNED_BY_US
    from lm_tuning.parameters.validation import _HABITS

    known = {".".join(path) for path, _ in walk_keys()}
    assert set(_HABITS.values()) <= known
    named = [
        word.strip(".,;:")
        for advice in OWNED_BY_US.values()
        for word in advice.split()
        if word.startswith(("train.", "tokenize.", "evaluate.", "environment.", "tracking.", "split."))
    ]
    assert named and set(named) <= known


def test_trainer_choices_exist_in_transformers() -> None:
    from dataclasses import fields

    from transformers import TrainingArguments
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    allowed = find_entry(("train", "trainer"))["properties"]
    assert set(allowed) <= {field.name for field in fields(TrainingArguments)}
    assert set(allowed["optim"]["enum"]) <= {item.value for item in OptimizerNames}
    assert set(allowed["lr_scheduler_type"]["enum"]) <= {item.value for item in SchedulerType}


def test_trainer_settings_hold_only_what_was_set(valid: dict[str, Any]) -> None:
    parameters = validate_parameters(merged(valid, train={"trainer": {"warmup_steps": 0.1, "optim": "adamw_torch"}}))
    assert parameters.train.trainer == {"warmup_steps": 0.1, "optim": "adamw_torch"}
    assert validate_parameters(valid).train.trainer == {}


@pytest.mark.parametrize(("written", "read"), [("1e-4", 1e-4), ("5E+2", 500.0), ("2.5e-05", 2.5e-5)])
def test_scientific_notation_that_a_yaml_loader_left_as_text_is_the_number(
    valid: dict[str, Any], written: str, read: float
) -> None:
    assert validate_parameters(merged(valid, train={"learning_rate": written})).train.learning_rate == read


def test_other_numbers_in_quotes_are_refused_with_the_fix(valid: dict[str, Any]) -> None:
    assert "Leave the quotes out." in one_problem(merged(valid, train={"learning_rate": "0.1"}))
    assert "Leave the quotes out." in one_problem(merged(valid, train={"max_steps": "3"}))
    assert "Leave the quotes out." not in one_problem(merged(valid, train={"max_steps": "three"}))
    # YAML takes none of these for a number, so nobody had to quote them.
    for written in ("nan", "inf", "-Infinity", "\u0663"):
        assert "quotes" not in one_problem(merged(valid, train={"learning_rate": written}))


@pytest.mark.parametrize(
    ("groups", "quoted"),
    [
        ({"model": {"revision": 1}}, '"1"'),
        ({"data": {"columns": {"label": False}}}, '"no"'),
        ({"environment": {"variables": {"NCCL_DEBUG": 0}}}, '"0"'),
    ],
)
def test_a_number_or_boolean_where_a_string_is_wanted_says_how_to_quote(
    valid: dict[str, Any], groups: dict[str, Any], quoted: str
) -> None:
    problem = one_problem(merged(valid, **groups))
    assert "It takes a string" in problem
    assert f"for a string put it in quotes: {quoted}." in problem


def test_empty_text_and_empty_lists_are_named_as_such(valid: dict[str, Any]) -> None:
    assert one_problem(merged(valid, data={"template": ""})).endswith("It takes a string, or null, not empty.")
    problem = one_problem(merged(valid, train={"lora": {"target_modules": []}}))
    assert problem.endswith("It takes all-linear, or a list of strings, not empty.")


def test_null_where_a_string_is_wanted_is_not_told_to_be_quoted(valid: dict[str, Any]) -> None:
    assert "quotes" not in one_problem(merged(valid, data={"path": None}))


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["all-linear"], "all-linear"),
        ("all-linear", "all-linear"),
        ("q_proj,v_proj", ["q_proj", "v_proj"]),
        ("q_proj", ["q_proj"]),
        (["q_proj", "v_proj"], ["q_proj", "v_proj"]),
    ],
)
def test_adapter_targets_are_read_as_they_were_meant(valid: dict[str, Any], given: Any, read: Any) -> None:
    parameters = validate_parameters(merged(valid, train={"lora": {"target_modules": given}}))
    assert parameters.train.lora.target_modules == read


@pytest.mark.parametrize(
    ("given", "read"), [("embed_tokens,layers.0", ["embed_tokens", "layers.0"]), (["*.mlp"], ["*.mlp"]), (None, None)]
)
def test_frozen_parts_are_read_as_a_list(valid: dict[str, Any], given: Any, read: Any) -> None:
    assert validate_parameters(merged(valid, train={"method": "full", "freeze": given})).train.freeze == read


@pytest.mark.parametrize("name", [0, False, 1.5])
def test_class_names_that_are_no_text_say_how_to_quote(valid: dict[str, Any], name: Any) -> None:
    problem = one_problem(merged(valid, task="sequence_classification", train={"class_weights": {name: 2.0}}))
    assert f'class names are text, and YAML does not read {name!r} as text: write "{name}"' in problem


def test_class_weights_are_a_word_or_numbers_by_class(valid: dict[str, Any]) -> None:
    for given in ("balanced", {"yes": 2.0, "no": 1}, None):
        parameters = validate_parameters(merged(valid, task="sequence_classification", train={"class_weights": given}))
        assert parameters.train.class_weights == given


def test_severities_are_set_for_findings_that_exist(valid: dict[str, Any]) -> None:
    from lm_tuning.parameters.health_codes import CODES

    code = min(CODES)
    parameters = validate_parameters(merged(valid, train={"health": {"severity": {code: "off"}}}))
    assert parameters.train.health.severity == {code: "off"}
    problem = one_problem(merged(valid, train={"health": {"severity": {f"{code}x": "off"}}}))
    assert problem.startswith("train.health.severity = ")
    assert f"no finding has the code {code}x; did you mean {code}?" in problem
    assert ", ".join(sorted(CODES)) in one_problem(merged(valid, train={"health": {"severity": {"qqq": "off"}}}))


def test_the_codes_of_findings_import_no_torch() -> None:
    script = "import sys, lm_tuning.parameters.health_codes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_all_linear_among_names_is_refused(valid: dict[str, Any]) -> None:
    problem = one_problem(merged(valid, train={"lora": {"target_modules": ["all-linear", "q_proj"]}}))
    assert problem.startswith("train.lora.target_modules = ['all-linear', 'q_proj']: all-linear already means every")


def test_backslashes_name_the_same_file() -> None:
    assert DataParameters(path="data\\01_raw\\train.jsonl").path == "data/01_raw/train.jsonl"


def test_all_problems_come_in_one_message(valid: dict[str, Any]) -> None:
    raw = merged(
        valid,
        seed=-1,
        modle={"name": "x"},
        split={"validation": 0.6, "test": 0.5},
        train={"max_steps": 0, "load_best": True},
    )
    with pytest.raises(UserError) as caught:
        validate_parameters(raw)
    problems = caught.value.problems
    assert [problem.split(" ")[0] for problem in problems] == [
        "seed",
        "train.max_steps",
        "modle:",
        "train.load_best",
        "split.validation",
    ]


def test_a_conflict_that_rests_on_a_wrong_value_is_not_reported_beside_it(valid: dict[str, Any]) -> None:
    raw = merged(valid, train={"effective_batch_tokens": "many", "max_steps": 40})
    assert one_problem(raw).startswith("train.effective_batch_tokens = 'many'")


def test_a_broken_group_does_not_hide_problems_of_others(valid: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        validate_parameters(merged(valid, tokenize=7, tracking={"log_model": "maybe"}))
    assert len(caught.value.problems) == 2


def test_long_values_are_shortened(valid: dict[str, Any]) -> None:
    problem = one_problem(merged(valid, train={"method": "x" * 500}))
    assert len(problem) < 200


def test_the_second_guard_validates_a_group_alone() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        TrainParameters.model_validate({"learning_rte": 1e-4})
    assert TrainParameters.model_validate({"learning_rate": 1e-4}).learning_rate == 1e-4


def test_validation_does_not_touch_what_it_is_given(valid: dict[str, Any]) -> None:
    raw = merged(valid, seed=-1, modle={})
    before = copy.deepcopy(raw)
    with pytest.raises(UserError):
        validate_parameters(raw)
    assert raw == before


def test_every_field_says_what_it_means_and_every_type_has_words() -> None:
    for path, entry in walk_keys():
        assert entry.get("description"), path
        assert describe_allowed(entry) != "any value", path
    assert Parameters.model_fields["seed"].description


def test_rows_are_a_path_a_source_or_a_list_of_both(valid: dict[str, Any]) -> None:
    source = {"path": "data\\b.jsonl", "weight": "2e-1"}
    parameters = validate_parameters(merged(valid, data={"path": ["a.jsonl", source]}))
    assert parameters.data.model_dump()["path"] == [
        "a.jsonl",
        {"path": "data/b.jsonl", "weight": 0.2, "config": None, "split": None, "revision": None, "field": None},
    ]
    assert isinstance(validate_parameters(merged(valid, data={"path": source})).data.path, SourceParameters)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (
            [{"path": "a", "weight": 0}],
            "data.path[0].weight = 0 (an integer) is not allowed. It takes a number above 0.",
        ),
        (["a", 3], "data.path[1] = 3 (an integer) is not allowed. It takes a string, or a mapping of the keys path,"),
        (
            {"path": "a", "wieght": 2},
            "data.path.wieght: there is no such key. Keys of data.path: path, weight, config,",
        ),
    ],
)
def test_a_wrong_source_is_named_by_its_index(valid: dict[str, Any], rows: Any, expected: str) -> None:
    assert one_problem(merged(valid, data={"path": rows})).startswith(expected)


def test_a_traceback_shows_no_part_of_a_wrong_value(valid: dict[str, Any]) -> None:
    """Pydantic cuts long values in the middle, and half a secret is not known for one; our message has the value."""
    with pytest.raises(UserError) as caught:
        validate_parameters(
            merged(valid, data={"template": {"prompt": "Key s3cret-Passw0rd-of-the-store: {question}"}})
        )
    assert "s3cret" in caught.value.problems[0]
    assert caught.value.__cause__ is None or "s3cr" not in str(caught.value.__cause__)
