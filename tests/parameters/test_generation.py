"""Settings of generation: what is refused, what it is called now, and what cannot hold together."""

from __future__ import annotations

from typing import Any

import pytest

from lm_tuning.errors import UserError
from lm_tuning.parameters import validate_parameters

VALID: dict[str, Any] = {"train": {"effective_batch_tokens": 512, "max_steps": 40}}


def problems_of(evaluate: dict[str, Any], **groups: Any) -> list[str]:
    train = VALID["train"] | groups.pop("train", {})
    with pytest.raises(UserError) as raised:
        validate_parameters({**VALID, **groups, "train": train, "evaluate": evaluate})
    return list(raised.value.problems)


@pytest.mark.parametrize("name", ["max_new_tokens", "num_beams"])
def test_keys_that_moved_say_where_they_are(name: str) -> None:
    assert problems_of({name: 4}) == [f"evaluate.{name}: there is no such key. It is evaluate.generation.{name} now."]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("temperature", 0),
        ("temperature", -1.0),
        ("top_k", 0),
        ("repetition_penalty", 0.0),
        ("no_repeat_ngram_size", -1),
        ("max_new_tokens", 0),
        ("num_beams", 0),
        ("stop_strings", [""]),
        ("stop_strings", "text"),
        ("seed", -1),
        ("seed", 2**32),
        ("length_penalty", float("inf")),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: Any) -> None:
    generation = {"do_sample": True, name: value} if name != "num_beams" else {name: value}
    (problem,) = problems_of({"generation": generation})
    assert problem.startswith(f"evaluate.generation.{name}")


@pytest.mark.parametrize(
    ("generation", "said"),
    [
        (
            {"temperature": 0.7},
            "evaluate.generation.temperature = 0.7 has no effect, since evaluate.generation.do_",
        ),
        ({"top_p": 0.9}, "evaluate.generation.top_p = 0.9 has no effect"),
        ({"top_k": 5}, "evaluate.generation.top_k = 5 has no effect"),
        ({"do_sample": True, "num_beams": 2}, "draws one answer at a time, but evaluate.generation.num_beams = 2"),
        ({"length_penalty": 1.5}, "evaluate.generation.length_penalty = 1.5 has no effect"),
    ],
)
def test_settings_that_cannot_act_are_refused(generation: dict[str, Any], said: str) -> None:
    (problem,) = problems_of({"generation": generation})
    assert said in problem


def test_what_goes_together_is_taken() -> None:
    generation = {
        "do_sample": True,
        "temperature": 1e-1,
        "top_p": 1.0,
        "top_k": 1,
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "stop_strings": ["\n", "END"],
        "seed": 0,
    }
    parameters = validate_parameters({**VALID, "evaluate": {"generation": generation}})
    assert parameters.evaluate.generation.model_dump(exclude_defaults=True) == generation
    beams = {"num_beams": 4, "length_penalty": -1.0}
    validate_parameters({**VALID, "evaluate": {"generation": beams}})


def test_a_split_without_rows_is_refused_before_any_work() -> None:
    rows = {"validation": 0, "test": 0.1}
    (problem,) = problems_of({"split": "validation"}, split=rows)
    assert problem == (
        "evaluate.split = validation needs validation rows, but split.validation = 0 and data.validation_path is null."
    )
    (problem,) = problems_of({"split": "test"}, split={"validation": 0.1, "test": 0})
    assert problem.startswith("evaluate.split = test needs test rows")
    for taken in ({"split": "auto"}, {"split": "test"}):
        validate_parameters({**VALID, "evaluate": taken, "split": rows})


def test_quantization_that_would_show_nothing_is_refused() -> None:
    (problem,) = problems_of({"quantization": "nf4"}, train={"method": "qlora"})
    assert "train.method = qlora holds the weights so anyway" in problem
    (problem,) = problems_of({"quantization": "int8"}, train={"method": "qlora", "qlora": {"bits": 8}})
    assert problem.endswith("set evaluate.quantization = none.")
    validate_parameters({**VALID, "evaluate": {"quantization": "int8"}})
