"""On a GPU, rows and frozen parts are checked before the batch planner sends anything through the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.training import job
from lm_tuning.training.run import TrainingPaths, TrainingSettings
from tests.support.planted import Planted, World
from tests.training.planted_model import MODEL
from tests.training.planted_rows import ROWS, classify, translate

NAMES = [
    "added tokens in one row",
    "a classifier's text",
    "a held-out row",
    "a target of an encoder-decoder",
    "too large",
    "20 percent masked",
    "texts without a class",
    "everything frozen by train.freeze",
]
FAULTS = [next(fault for fault in [*ROWS, *MODEL] if fault.name == name) for name in NAMES]
SOUND: dict[str, Callable[[World], object]] = {
    "chats": lambda world: None,
    "classes": classify,
    "sources and targets": translate,
    "some frozen": lambda world: world.set(freeze=["layers.0"]),
}


def plan_as_on_a_gpu(world: World) -> list[str]:
    """Let the batch planner be asked, and end the run there; return what it was asked."""
    asked: list[str] = []

    def choose(*_: Any, **__: Any) -> None:
        asked.append("a size")
        raise LookupError

    world.patch.setattr(job, "plans_on_device", lambda settings: True)
    world.patch.setattr(job, "choose_batches", choose)
    return asked


@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_a_fault_is_named_before_the_planner_begins(
    fault: Planted, paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(paths, settings, monkeypatch, tmp_path)
    fault.plant(world)
    asked = plan_as_on_a_gpu(world)
    error = world.run()
    assert f"[{fault.code}]" in str(error)
    assert fault.code in [finding["code"] for finding in world.reports[-1]["findings"]]
    assert (asked, world.rows_seen) == ([], 0)


@pytest.mark.parametrize("kind", SOUND)
def test_sound_rows_reach_the_planner_without_a_finding(
    kind: str, paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(paths, settings, monkeypatch, tmp_path)
    SOUND[kind](world)
    asked = plan_as_on_a_gpu(world)
    with pytest.raises(LookupError):
        world.run()
    assert asked == ["a size"]
    assert world.reports[-1]["findings"] == []
