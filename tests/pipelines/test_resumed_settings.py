"""A whole ``kedro run`` that resumes with other settings of its optimizer trains with them; MLflow's tags tell it."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.pipelines.test_whole_run import Project
from tests.support.shell import Shell

CHECKPOINTS = "data/06_models/smoke/checkpoints"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    project = Project(tmp_path_factory.mktemp("resumed") / "project")
    with Shell(project.folder.parent, project.environment) as project.shell:
        yield project


def groups_of(project: Project, step: int) -> list[dict[str, Any]]:
    """Return the groups of the optimizer in the newest run's checkpoint of a step."""
    newest = max((project.folder / CHECKPOINTS).glob("run-*"))
    stored = torch.load(newest / f"checkpoint-{step}/optimizer.pt", map_location="cpu", weights_only=True)
    groups: list[dict[str, Any]] = stored["param_groups"]
    return groups


def train(project: Project, exit_code: int = 0, **params: object) -> str:
    return project.run("--pipelines=split,train", exit_code=exit_code, train__save_every_steps=1, **params)


def resume_tags(project: Project) -> dict[str, str]:
    """Return what the newest MLflow run says of its first resume."""
    tags = project.mlflow_runs()[0].data.tags
    return {name.removeprefix("resume.1."): value for name, value in tags.items() if name.startswith("resume.1.train.")}


def test_betas_epsilon_decay_and_rate_of_both_groups_are_the_present_ones(project: Project) -> None:
    """The default optimizer has two groups: weights, and norms and biases, which never decay."""
    first = {"train__method": "full", "train__learning_rate": 1e-4, "train__trainer__weight_decay": 0.25}
    train(project, **first, train__max_steps=2)
    began = groups_of(project, 2)
    assert [group["weight_decay"] for group in began] == [0.25, 0.0]
    assert [group["betas"] for group in began] == [(0.9, 0.999)] * 2
    assert {group["initial_lr"] for group in began} == {1e-4}
    changed = {
        "train.learning_rate": "0.0002",
        "train.trainer.weight_decay": "0.5",
        "train.trainer.adam_beta1": "0.5",
        "train.trainer.adam_beta2": "0.75",
        "train.trainer.adam_epsilon": "0.001",
    }
    present = {name.replace(".", "__"): value for name, value in changed.items()}
    printed = train(project, **{**first, **present}, train__max_steps=4, train__resume="true")
    assert "step 2 of 4." in printed
    now = groups_of(project, 4)
    assert [group["weight_decay"] for group in now] == [0.5, 0.0]
    assert [(group["betas"], group["eps"]) for group in now] == [((0.5, 0.75), 0.001)] * 2
    assert [(group["initial_lr"], group["lr"]) for group in now] == [(2e-4, 0.0)] * 2, "the end of a linear schedule"
    with (project.folder / "data/08_reporting/smoke/training_summary.csv").open() as file:
        rates = [float(row["learning_rate"]) for row in csv.DictReader(file)]
    # Two steps of the first schedule, then the third and fourth of one of four steps under the present peak.
    assert rates == pytest.approx([1e-4, 5e-5, 1e-4, 5e-5])
    tags = resume_tags(project)
    assert {name: float(tags[name]) for name in changed} == {name: float(value) for name, value in changed.items()}
    frozen = {"train__freeze": "[layers.0]", "train__effective_batch_tokens": 256}
    printed = train(project, exit_code=2, **{**first, **frozen}, train__max_steps=6, train__resume="true")
    assert "another effective batch: train.effective_batch_tokens: 128 -> 256" in printed
    assert "other frozen parts: train.freeze: null -> ['layers.0']" in printed


def test_the_momentum_of_an_adapter_is_the_present_one(project: Project) -> None:
    first = {"train__trainer__optim": "sgd", "train__trainer__optim_args": "momentum=0.1"}
    train(project, **first, train__max_steps=2)
    assert {(group["momentum"], group["weight_decay"]) for group in groups_of(project, 2)} == {(0.1, 0.0)}
    present = {**first, "train__trainer__optim_args": "momentum=0.9", "train__trainer__weight_decay": 0.5}
    train(project, **present, train__max_steps=4, train__resume="true")
    now = groups_of(project, 4)
    assert now[0]["momentum"] == 0.9
    assert now[0]["weight_decay"] == 0.5
    tags = resume_tags(project)
    assert tags["train.trainer.optim_args"] == "momentum=0.9"
    assert tags["train.trainer.weight_decay"] == "0.5"
    wider = {**first, "train__lora__r": 8, "train__lora__use_dora": "true"}
    printed = train(project, exit_code=2, **wider, train__max_steps=6, train__resume="true")
    assert "another method or adapter: train.lora.r: 4 -> 8, train.lora.use_dora: false -> true" in printed
