from __future__ import annotations

from typing import Any

import pytest

from tests.preflight.conftest import Look, questions


def schedule(look: Look, *sources: Any, **settings: Any) -> dict[str, Any]:
    return dict(look(*sources, **settings)["schedule"])


def test_steps_rows_and_tokens_are_counted(look: Look):
    facts = schedule(look, questions(7), num_epochs=2, warmup_steps=0.25)
    assert (facts["steps_per_epoch"], facts["total_steps"], facts["epochs"]) == (4, 8, 2.0)
    assert (facts["rows_per_epoch"], facts["tokens_per_epoch"], facts["tokens_of_run"]) == (7, 63, 126)
    assert facts["warmup_steps_of_run"] == 2
    assert facts["rows_per_step"] == {"mean": 1.75, "min": 1, "max": 2}
    assert facts["tokens_per_step"] == {"mean": 15.75, "min": 9, "max": 18}
    assert facts["supervised_tokens_per_step"] == {"mean": 3.5, "min": 2, "max": 4}
    assert (facts["last_step_rows"], facts["last_step_tokens"]) == (1, 9)


def test_a_run_may_end_within_an_epoch(look: Look):
    facts = schedule(look, questions(10), num_epochs=None, max_steps=8)
    assert (facts["total_steps"], facts["epochs"], facts["tokens_of_run"]) == (8, 1.6, 9 * 16)


def test_rows_of_a_source_come_up_as_often_as_its_weight_says(look: Look):
    facts = schedule(look, questions(4), questions(10, answer="55"), weights=[2.5, 0.5])
    first, second = facts["sources"]
    assert (first["num_rows"], first["times_each"], first["rows_drawn"], first["rows_per_epoch"]) == (4, 2, 2, 10)
    assert (second["num_rows"], second["times_each"], second["rows_drawn"], second["rows_per_epoch"]) == (10, 0, 5, 5)
    assert (first["tokens_per_epoch"], second["tokens_per_epoch"]) == (90, 50)
    assert (facts["rows_per_epoch"], facts["tokens_per_epoch"]) == (15, 140)


@pytest.mark.parametrize("settings", [{"num_epochs": None, "max_steps": 2}, {"num_epochs": 2}, {"num_epochs": 1}])
def test_least_mean_and_most_of_a_step_are_of_the_same_steps(look: Look, settings: dict[str, Any]):
    rows = [{"prompt": "x" * (index + 1), "response": "y" * (1 + index // 7)} for index in range(21)]
    facts = schedule(look, rows, effective_batch_rows=4, **settings)
    num_steps = min(facts["total_steps"], facts["steps_per_epoch"])
    assert facts["steps_measured"]["num_steps"] == num_steps
    assert facts["steps_measured"]["of"] == ("first epoch" if facts["total_steps"] > num_steps else "run")
    for name in ("rows", "tokens", "supervised_tokens"):
        spread = facts[f"{name}_per_step"]
        assert spread["min"] <= spread["mean"] <= spread["max"]
    if facts["total_steps"] == num_steps:
        assert facts["tokens_per_step"]["mean"] * num_steps == pytest.approx(facts["tokens_of_run"])
        assert facts["rows_per_step"]["mean"] * num_steps == pytest.approx(facts["rows_of_run"])
