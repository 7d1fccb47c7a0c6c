"""The parts of a training's memory, in the plan that a run leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from lm_tuning.training.planning.memory import REST, MemoryParts, ModelBytes
from lm_tuning.training.planning.plan import BatchPlan
from lm_tuning.training.planning.records import ProbePoint
from lm_tuning.training.planning.report import draw_plan, tabulate_plan
from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
from tests.support.settings import vary


def plan_of(curve: list[ProbePoint], **facts: Any) -> BatchPlan:
    return BatchPlan(
        micro_batch_tokens=64,
        gradient_checkpointing=False,
        curve=curve,
        reason="64 tokens",
        seconds=0.0,
        cached=False,
        facts=facts,
    )


def point(*, peak: int | None, total: int | None, compiled: bool = False) -> ProbePoint:
    return ProbePoint(64, False, "measured", 10.0, peak, total, fits=True, compiled=compiled)


HELD = ModelBytes(weights=1000, gradients=200, optimizer_state=400, optimizer_extra=200, buffers=10)


def test_a_training_lists_its_parts_and_estimates_what_nobody_measured(
    paths: TrainingPaths, settings: TrainingSettings, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level("INFO", logger="lm_tuning")
    lora = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"}
    result = run_training(paths, vary(settings, method="lora", lora=lora))
    table = {row["part"]: row for row in result.batch_plan.memory}
    assert list(table) == ["weights", "buffers", "gradients", "optimizer state", "activations"]
    [file] = result.model_folder.glob("adapter_model.safetensors")
    adapter = sum(weights.numel() for weights in load_file(file).values())
    assert table["gradients"]["bytes"] == 4 * adapter
    assert table["optimizer state"]["bytes"] == 2 * 4 * adapter  # AdamW's two moments
    assert table["weights"]["bytes"] > 4 * adapter
    assert table["activations"]["source"] == "estimated"
    assert table["activations"]["bytes"] > 0
    assert any(message.startswith("Memory in GiB: weights 0.00") for message in caplog.messages)
    assert result.batch_plan.to_json()["memory"] == result.batch_plan.memory
    size = table["activations"]["bytes"] / 2**30
    assert f"| activations | {size:.2f} | estimated |" in tabulate_plan(result.batch_plan)
    draw_plan(result.batch_plan).savefig(tmp_path / "plan.png")


def test_the_activations_of_a_measured_plan_are_what_the_passes_held_beside(tmp_path: Path) -> None:
    plan = plan_of([point(peak=5210, total=7000)])
    table = MemoryParts(HELD, activations=99).table(plan)
    sizes = {row["part"]: row["bytes"] for row in table}
    assert sizes["activations"] == 5210 - 1000 - 10 - 200
    assert sum(sizes.values()) == 7000
    assert sizes[REST] == 7000 - 5210 - 400
    figure = draw_plan(MemoryParts(HELD, activations=99).complete(plan))
    figure.savefig(tmp_path / "plan.png")
    labels = [text.get_text() for text in figure.axes[-1].get_legend().get_texts()]
    assert [label.rsplit(" ", 1)[0] for label in labels] == list(sizes)


def test_after_a_resume_the_optimizers_state_is_not_taken_for_activations() -> None:
    curve = [point(peak=5210, total=7000), point(peak=5610, total=7000, compiled=True)]
    table = MemoryParts(HELD, activations=99).table(plan_of(curve, peaks_hold_optimizer=True))
    assert {row["part"]: row["bytes"] for row in table}["activations"] == 5610 - 1610


def test_without_a_measured_size_the_activations_are_estimated() -> None:
    table = MemoryParts(HELD, activations=99).table(plan_of([point(peak=None, total=None)]))
    assert table[-1] == {"part": "activations", "bytes": 99, "source": "estimated"}


def test_plans_that_were_kept_before_there_was_a_table_are_read(settings: TrainingSettings) -> None:
    stored = plan_of([]).to_json()
    del stored["memory"]
    assert BatchPlan.from_json(stored).memory == []
