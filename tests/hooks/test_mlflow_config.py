"""What ``mlflow.yml`` says and the parameters decide is refused; what is wrong in it is a user's error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lm_tuning.errors import UserError
from tests.hooks.test_tracking import all_runs, client
from tests.support.tiny_project import run_session, write_project


@pytest.mark.parametrize(
    ("tracking", "told"),
    [
        ({"experiment": {"name": "mine"}}, "tracking.experiment.name = 'mine', but runs go to the experiment of"),
        ({"run": {"name": "first"}}, "tracking.run.name = 'first' would not be used: set the parameter"),
        ({"run": {"id": "0123"}}, "tracking.run.id = '0123' would not be used"),
    ],
)
def test_names_that_are_parameters_are_refused_before_anything_runs(
    project: Path, tracking: dict[str, Any], told: str
) -> None:
    write_project(project, mlflow={"tracking": tracking})
    with pytest.raises(UserError) as caught:
        run_session(project)
    (problem,) = caught.value.problems
    assert problem.startswith(f"mlflow.yml: {told}"), problem
    assert not (project / "data/default").exists()


def test_names_that_agree_with_the_parameters_and_empty_groups_pass(project: Path) -> None:
    names = {"experiment": {"name": "mine"}, "run": {"name": "first", "id": None}}
    write_project(project, mlflow={"server": None, "tracking": {**names, "params": None}})
    run_session(project, pipelines=["split"], params={"tracking": {"experiment": "mine", "run_name": "first"}})
    (run,) = all_runs()
    assert run.info.run_name == "first"
    assert client().get_experiment(run.info.experiment_id).name == "mine"


@pytest.mark.parametrize("content", [{"server": "http://host"}, {"tracking": 5}, {"tracking": {"experiment": "mine"}}])
def test_a_value_in_place_of_a_group_is_a_users_error(project: Path, content: dict[str, Any]) -> None:
    write_project(project, mlflow=content)
    with pytest.raises(UserError, match=r"mlflow\.yml: (server|tracking)"):
        run_session(project)
