"""Settings, commands, digests and figures as plain values."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lm_tuning.storage.folders import FolderStore
from lm_tuning.tracking.names import clean_name
from lm_tuning.tracking.run_description import (
    data_digests,
    find_changes,
    flatten_settings,
    name_pipelines,
    numbers_of,
    rerun_command,
    shorten_value,
)


def test_settings_are_flat_and_lists_stay_whole() -> None:
    nested = {
        "seed": 1,
        "train": {"lora": {"targets": ["q", "v"]}, "rate": 1e-4, "on": True, "x": None},
        "bad*key": "a",
    }
    assert flatten_settings(nested) == {
        "seed": "1",
        "train.lora.targets": '["q", "v"]',
        "train.rate": "0.0001",
        "train.on": "true",
        "train.x": "null",
        "bad_key": "a",
    }


def test_names_that_mlflow_does_not_take_stay_different() -> None:
    weights = {"c++": 1.0, "c##": 2.0, "c__": 3.0, "a//b": 4.0, "../x": 5.0, "k" * 300: 6.0, "k" * 299: 7.0}
    flat = flatten_settings({"weights": weights})
    assert sorted(flat.values()) == [f"{number}.0" for number in range(1, 8)]
    assert flat["weights.c__"] == "3.0", "a name that MLflow takes is kept"
    assert all(name == clean_name(name) for name in flat)
    assert flatten_settings({"weights": weights}) == flat, "the same names each time"
    assert sorted(numbers_of({"f1": weights}).values()) == sorted(weights.values())


def test_large_map_is_one_setting_and_says_that_it_is_shortened() -> None:
    flat = flatten_settings({"labels": {f"label_{number}": number for number in range(400)}})
    assert list(flat) == ["labels"]
    assert len(flat["labels"]) <= 500
    assert "characters, all in parameters.yml" in flat["labels"]
    assert shorten_value("x" * 500) == "x" * 500
    assert len(shorten_value("x" * 501)) == 500


def test_changes_leave_out_what_is_new_and_the_switch_itself() -> None:
    old = {"train.rate": "1e-4", "train.resume": "false", "seed": "1"}
    new = {"train.rate": "5e-5", "train.resume": "true", "seed": "1", "added": "2"}
    assert find_changes(old, new) == {"train.rate": "5e-5"}


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        (
            {"train.weights.a": "5"},
            {"train.weights": "balanced"},
            {"train.weights": "balanced", "train.weights.a": "not set"},
        ),
        ({"train.weights": "null"}, {"train.weights.a": "5"}, {"train.weights.a": "5", "train.weights": "not set"}),
        ({"train.weights.a": "5", "train.weights.b": "1"}, {"train.weights.a": "5"}, {"train.weights.b": "not set"}),
        ({"train.gone_with_a_version": "1"}, {"train.came_with_a_version": "2"}, {}),
    ],
)
def test_a_group_that_changes_its_shape_is_a_change(
    old: dict[str, str], new: dict[str, str], changes: dict[str, str]
) -> None:
    assert find_changes(old, new) == changes


@pytest.mark.parametrize("program", ["/env/bin/kedro", "/lib/kedro/__main__.py"])
def test_command_line_is_kept_as_typed(program: str) -> None:
    arguments = [program, "run", "--pipelines=split,train", "--params", "data.template=Sum: {x} 'y'"]
    command = rerun_command(arguments, {})
    assert command == "kedro run --pipelines=split,train --params 'data.template=Sum: {x} '\"'\"'y'\"'\"''"


def test_command_of_a_notebook_is_put_together() -> None:
    run_params = {
        "env": "smoke",
        "pipeline_names": ["split", "train"],
        "tags": [],
        "from_nodes": ["a"],
        "runtime_params": {"train": {"max_steps": 2}, "output": "x"},
    }
    assert rerun_command(["ipykernel_launcher.py", "-f"], run_params) == (
        "kedro run --env=smoke --pipelines=split,train --from-nodes=a --params=train.max_steps=2,output=x"
    )
    assert rerun_command([], {}) == "kedro run"
    assert rerun_command(["/lib/pytest/__main__.py", "-q"], {}) == "kedro run"


def test_pipelines_are_named_in_one_order() -> None:
    assert name_pipelines({"pipeline_names": ["train", "split"]}) == "split+train"
    assert name_pipelines({"pipeline_names": None}) == "all"


def test_digests_of_files_models_and_folders(tmp_path: Path) -> None:
    raw = {"train": {"path": "a", "digest": "d1"}, "validation": None, "is_example": True}
    assert data_digests("raw_examples", raw) == {"data.raw_examples.train": "d1"}
    several = {"train": [{"path": "a", "digest": "d1"}, {"path": "b", "digest": "d2"}]}
    assert data_digests("raw_examples", several) == {
        "data.raw_examples.train": "58b4e659870a35e0bd2d2562fbec02f7d3d41429d63c27dba88e4b5f4fd74dbf"
    }
    assert data_digests("base_model", {"digest": "d", "revision": None}) == {"data.base_model": "d"}
    store = FolderStore(tmp_path)
    staged = store.stage("k1")
    assert data_digests("tokens", staged) == {"data.tokens": "k1"}
    assert data_digests("tokens", store.publish(staged)) == {"data.tokens": "k1"}
    assert data_digests("checkpoints", tmp_path) == {}
    assert data_digests("report", "text") == {}


def test_numbers_are_found_in_nested_values() -> None:
    value = {"base": {"loss": 1.5, "n": 2, "ok": True, "bad": math.nan, "text": "x", "list": [1]}, "top": 3}
    assert numbers_of(value) == {"base.loss": 1.5, "base.n": 2.0, "top": 3.0}
    assert numbers_of([1, 2]) == {}
