"""A pipeline whose inputs are not stored stops before its first node and says what makes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lm_tuning.datasets.entry import find_way
from lm_tuning.errors import UserError
from lm_tuning.pipeline_registry import register_pipelines
from tests.support.tiny_project import run_session


def test_every_missing_input_is_named_with_path_node_and_pipeline(project: Path) -> None:
    with pytest.raises(UserError) as caught:
        run_session(project, pipelines=["train", "evaluate"])
    (problem,) = caught.value.problems
    assert "'example_splits' is not stored yet" in problem
    assert "data/default/splits" in problem
    assert "split_rows" in problem
    assert "kedro run --pipelines=split" in problem
    assert not (project / "data/default").exists()


def test_a_slice_runs_from_what_an_earlier_session_stored(project: Path) -> None:
    run_session(project, pipelines=["split"])
    run_session(project, pipelines=["train"])
    run_session(project, pipelines=["evaluate"])
    assert (project / "data/default/evaluation.json").is_file()


def test_damaged_folder_counts_as_missing(project: Path) -> None:
    run_session(project, pipelines=["split"])
    (project / "data/default/splits/k1/train.arrow").unlink()
    with pytest.raises(UserError, match="kedro run --pipelines=split"):
        run_session(project, pipelines=["train"])
    run_session(project, pipelines=["split", "train"])


def test_the_way_starts_from_what_is_stored(project: Path) -> None:
    with pytest.raises(UserError) as caught:
        run_session(project, pipelines=["evaluate"])
    (problem,) = caught.value.problems
    assert "'tuned_model' is not stored yet" in problem
    assert "kedro run --pipelines=split,train (" in problem
    run_session(project, pipelines=["split"])
    with pytest.raises(UserError, match=r"kedro run --pipelines=train \("):
        run_session(project, pipelines=["evaluate"])


def test_a_pipeline_that_is_part_of_another_is_not_named_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedro.framework.project.pipelines", register_pipelines())
    missing = {"tokenized_examples", "tuned_model", "example_splits"}
    assert find_way(["tokenized_examples", "tuned_model"], is_missing=missing.__contains__) == ["split", "train"]
