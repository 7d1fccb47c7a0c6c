"""Every health code: the fault is planted in a whole training, which must name it, in time, and end as it should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lm_tuning.parameters.health_codes import CODES
from lm_tuning.training.run import TrainingPaths, TrainingSettings
from tests.support.planted import Planted, World
from tests.training.planted_model import MODEL
from tests.training.planted_rows import ROWS
from tests.training.planted_running import RUNNING

PLANTED = [*ROWS, *MODEL, *RUNNING]


def test_every_code_has_a_planted_fault() -> None:
    assert {fault.code for fault in PLANTED} == set(CODES)


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: f"{fault.code} {fault.name}".strip())
def test_a_planted_fault_is_named(
    fault: Planted, paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(paths, settings, monkeypatch, tmp_path)
    fault.plant(world)
    error = world.run()
    report = world.reports[-1]
    assert world.reports[0]["run"]["state"] == "running"
    assert world.reports[0]["findings"] == []
    json.dumps(report, allow_nan=False)
    found = {finding["code"]: finding for finding in report["findings"]}
    assert fault.code in found, (error, found)
    severity = fault.severity or CODES[fault.code].severity
    assert found[fault.code]["severity"] == severity
    if fault.alone:
        loud = {code for code, finding in found.items() if finding["severity"] != "note"}
        assert loud <= {fault.code}
    if severity == "stop":
        assert error is not None
        assert f"[{fault.code}]" in str(error)
        assert report["run"]["state"] == "stopped"
        assert fault.code in report["run"]["ended_by"].split(", ")
    elif fault.alone:
        assert error is None
        assert report["run"]["state"] == "finished"
    if fault.before_any_row:
        assert world.rows_seen == 0


def test_a_fault_that_would_crash_stops_whatever_the_user_says(
    paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(paths, settings, monkeypatch, tmp_path)
    next(fault for fault in ROWS if fault.name == "a negative id").plant(world)
    world.set(health={"severity": {"id-beyond-vocabulary": "note"}})
    error = world.run()
    assert error is not None
    assert "train.health.severity cannot make it note: the run would crash" in str(error)


def test_masked_rows_can_be_let_pass(
    paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(paths, settings, monkeypatch, tmp_path)
    next(fault for fault in ROWS if fault.name == "20 percent masked").plant(world)
    world.set(health={"severity": {"rows-teach-nothing": "warn"}})
    assert world.run() is None
    assert world.reports[-1]["run"]["state"] == "finished"


def test_the_rows_and_tokens_of_foreign_ids_are_named(
    paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(paths, settings, monkeypatch, tmp_path)
    next(fault for fault in ROWS if fault.name == "added tokens in one row").plant(world)
    said = str(world.run())
    for words in ("1 of 20 rows holds such ids (row 20)", "'[[ticket]]'", "resize_token_embeddings"):
        assert words in said, said


def test_broken_weights_are_named(
    paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(paths, settings, monkeypatch, tmp_path)
    next(fault for fault in MODEL if fault.name == "one weight").plant(world)
    said = str(world.run())
    assert "The weights hold NaN or infinities: model.layers.1.mlp.down_proj.weight." in said
    assert "train.precision" not in said, "no precision makes numbers of NaN"
    assert world.reports[-1]["facts"]["logits"]["mean"] == "nan"
