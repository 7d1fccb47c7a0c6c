"""Damaged checkpoints in a whole ``kedro run``: exit code 2, one message, and no step with a fresh optimizer."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.pipelines.test_whole_run import Project
from tests.support.damage import DAMAGES, DAMAGES_OF_METHOD, forget_files
from tests.support.shell import Shell

CHECKPOINTS = "data/06_models/smoke/checkpoints"


class Stopped:
    """A project with the checkpoints of steps 1 and 2 of a training of 3 steps."""

    def __init__(self, project: Project, method: str) -> None:
        self.project, self.method = project, method
        self.checkpoints = project.folder / CHECKPOINTS
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        self.train(train__max_steps=2)
        self.kept = project.folder / f"kept-{method}"
        shutil.copytree(self.checkpoints, self.kept)

    def train(self, exit_code: int = 0, **params: object) -> str:
        given = {"train__method": self.method, "train__save_every_steps": 1, "train__max_steps": 3, **params}
        printed = self.project.run("--pipelines=split,train", exit_code=exit_code, **given)
        assert "Traceback" not in printed, printed[-6000:]
        return printed

    def restore(self) -> Path:
        """Put the checkpoints there as they were written; return the folder of the newest."""
        shutil.rmtree(self.checkpoints)
        shutil.copytree(self.kept, self.checkpoints)
        (newest,) = self.checkpoints.glob("run-*/checkpoint-2")
        return newest


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    project = Project(tmp_path_factory.mktemp("damaged") / "project")
    with Shell(project.folder.parent, project.environment) as project.shell:
        yield project


@pytest.fixture(scope="module")
def stopped(project: Project) -> Callable[[str], Stopped]:
    made: dict[str, Stopped] = {}
    return lambda method: made[method] if method in made else made.setdefault(method, Stopped(project, method))


@pytest.mark.parametrize(
    ("method", "name"),
    [
        # Every third one in each run of the tests; the same code reads them all, and `make test-slow` tries the rest.
        pytest.param(method, name, marks=pytest.mark.slow if index % 3 else ())
        for index, (method, name) in enumerate(
            [
                *(("lora", name) for name in [*DAMAGES, *DAMAGES_OF_METHOD["lora"]]),
                *(("full", name) for name in DAMAGES_OF_METHOD["full"]),
            ]
        )
    ],
)
def test_a_damaged_checkpoint_is_told_before_anything_is_loaded(
    stopped: Callable[[str], Stopped], method: str, name: str
) -> None:
    run = stopped(method)
    newest = run.restore()
    damage, words = {**DAMAGES, **DAMAGES_OF_METHOD[method]}[name]
    damage(newest)
    printed = run.train(exit_code=2, train__resume="true")
    assert printed.count(f"train.resume: the checkpoint {newest} cannot be used.") == 1, printed[-3000:]
    for word in words:
        assert word in printed
    assert f"The checkpoint of step 1 of the same run is whole: {newest.with_name('checkpoint-1')}." in printed
    assert f"move checkpoint-2 out of {newest.parent} and give the same command again" in printed
    for begun in ("Rows reused", "Going on from", "trained;"):
        assert begun not in printed
    assert sorted(path.name for path in newest.parent.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]


def test_the_way_on_that_is_named_leads_on(stopped: Callable[[str], Stopped]) -> None:
    run = stopped("lora")
    newest = run.restore()
    (newest / "optimizer.pt").unlink()
    newest.rename(newest.with_name("checkpoint-2.damaged"))
    printed = run.train(train__resume="true")
    assert f"Going on from {newest.with_name('checkpoint-1')}, step 1 of 3." in printed
    assert newest.with_name("checkpoint-2.damaged").is_dir(), "what a user keeps aside is not ours to delete"


def test_an_earlier_checkpoint_without_a_list_of_files_goes_on(stopped: Callable[[str], Stopped]) -> None:
    run = stopped("full")
    newest = run.restore()
    forget_files(newest)
    assert f"Going on from {newest}, step 2 of 3." in run.train(train__resume="true")


def test_without_another_checkpoint_the_message_says_so(stopped: Callable[[str], Stopped]) -> None:
    run = stopped("lora")
    newest = run.restore()
    (newest / "optimizer.pt").unlink()
    (newest.with_name("checkpoint-1") / "rng_state.pth").unlink()
    printed = run.train(exit_code=2, train__resume="true")
    assert "optimizer.pt is missing." in printed
    assert "This run has no other whole checkpoint; train.resume=false starts a new run" in printed
