"""A plan of micro-batches that version 0.1.0 kept is found by its key, read, and saves the planning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from lm_tuning.parameters.groups import EnvironmentParameters
from lm_tuning.training.planning import planner
from lm_tuning.training.planning.out_of_memory import MemoryReading
from lm_tuning.training.planning.records import ProbePoint
from lm_tuning.training.settings import TrainingPaths
from tests.support.settings import make_settings

STORED = Path(__file__).parents[1] / "fixtures" / "stored_0_1"
KEY = "23ae025cfc949581"
"""Made by commit 2f5724d under the machine that the test pretends to be."""


def test_a_plan_of_version_0_1_is_found_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "read_memory", lambda device: MemoryReading("CPU", 16 * 2**30, 0, 0))
    monkeypatch.setattr(planner, "_read_switches", lambda: EnvironmentParameters(tf32=False, num_threads=1))
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(transformers, "__version__", "5.24.0")
    # Where the plan is not found, sizes would be measured.
    monkeypatch.setattr(planner, "run_process", lambda *_, **__: pytest.fail("planned again"))
    (tmp_path / "plans").mkdir()
    shutil.copy(STORED / "batch_plan.json", tmp_path / "plans" / f"{KEY}.json")
    (tokens,) = (STORED / "project" / "data" / "05_model_input" / "adapter" / "tokens").glob("*/")
    settings = make_settings(
        STORED / "project" / "models" / "decoder",
        method="lora",
        lora={"r": 4, "alpha": 8},
        effective_batch_rows=8,
        max_steps=2,
        gradient_checkpointing="auto",
    )
    plan = planner.plan_batches(
        TrainingPaths(tokens, tmp_path / "checkpoints"), settings, cache_folder=tmp_path / "plans"
    )
    assert plan.cached
    stored = json.loads((STORED / "batch_plan.json").read_text())
    assert (plan.micro_batch_tokens, plan.gradient_checkpointing) == (192, stored["activation_checkpointing"])
    assert plan.choice == plan.curve[1]
    assert plan.curve[1] == ProbePoint(
        192,
        False,
        "measured",
        tokens_per_second=stored["curve"][1]["tokens_per_second"],
        peak_memory_bytes=stored["curve"][1]["peak_memory_bytes"],
        predicted_total_bytes=stored["curve"][1]["predicted_total_bytes"],
        fits=True,
    )
    # Written again, it has the names that version 0.1 gave.
    assert plan.to_json()["curve"] == stored["curve"]
