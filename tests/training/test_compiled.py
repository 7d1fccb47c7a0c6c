"""With compiled layers, larger micro-batches are tried before step 1, and nothing of it is left in the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_tuning.batching.step_loader import StepDataset
from lm_tuning.text.store.table import open_split
from lm_tuning.training.health.report import HealthReport
from lm_tuning.training.planning.out_of_memory import MemoryUse
from lm_tuning.training.planning.plan import BatchPlan
from lm_tuning.training.planning.probe import BudgetProbe
from lm_tuning.training.planning.records import ProbePoint
from lm_tuning.training.planning.replanning import CompiledPlanner
from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
from lm_tuning.training.settings import step_plan_of
from lm_tuning.training.setup.model import set_up_model
from tests.support.settings import vary

GIB = 2**30
SPEEDS = {64: 100.0, 128: 120.0, 192: 150.0, 256: 151.0, 384: 200.0}


def planned(tmp_path: Path, tokens: int = 64, **changes: Any) -> BatchPlan:
    point = ProbePoint(tokens, False, "measured", 90.0, peak_memory_bytes=1, predicted_total_bytes=2, fits=True)
    values: dict[str, Any] = {
        "micro_batch_tokens": tokens,
        "gradient_checkpointing": False,
        "curve": [point],
        "reason": f"{tokens} tokens",
        "seconds": 3.0,
        "cached": True,
        "facts": {"total_bytes": 100 * GIB, "memory_fraction": 0.88},
        "file": str(tmp_path / "plan.json"),
    }
    return BatchPlan(**(values | changes))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the clock and the memory of measurements, not the passes; collect the sizes that were measured."""
    sizes: list[int] = []
    measure = BudgetProbe.measure

    def measure_as_said(self: BudgetProbe, budget: int, *, seconds: float) -> tuple[float, int, int]:
        measure(self, budget, seconds=0.01)
        sizes.append(budget)
        return SPEEDS[budget], budget, budget

    monkeypatch.setattr(BudgetProbe, "measure", measure_as_said)
    return sizes


def make_look(paths: TrainingPaths, settings: TrainingSettings, plan: BatchPlan) -> CompiledPlanner:
    settings = vary(settings, effective_batch_rows=40)
    ready = set_up_model(settings)
    table = open_split(paths.tokens, "train")
    steps = StepDataset(
        table,
        step_plan_of(settings, table),
        ready.task,
        micro_batch_tokens=plan.micro_batch_tokens,
        batching="packed",
    )
    memory = MemoryUse("cpu", "full", "float32", False, plan.micro_batch_tokens, int(table.lengths.max()))
    health = HealthReport(facts={"first_step_micro_batches": len(steps[0].micro_batches)})
    return CompiledPlanner(ready, settings, steps, memory, health, plan)


def test_the_fastest_size_is_taken_and_the_search_ends_when_nothing_is_gained(
    paths: TrainingPaths, settings: TrainingSettings, tmp_path: Path, measured: list[int]
) -> None:
    look = make_look(paths, settings, planned(tmp_path))
    before = look.health.facts["first_step_micro_batches"]
    look.take(optimizer_is_made=False)
    assert measured == [64, 128, 192, 256], "256 gains nothing, so that no more is looked at"
    assert look.plan.micro_batch_tokens == 192, "256 is hardly faster and takes more"
    assert look.steps.micro_batch_tokens == look.memory.micro_batch_tokens == 192
    assert look.health.facts["first_step_micro_batches"] == len(look.steps[0].micro_batches) < before
    assert [point.compiled for point in look.plan.curve] == [False] + [True] * 4
    assert "192 tokens: 150 tokens/s" in look.plan.reason
    assert "compiled" in look.plan.reason
    assert not look.plan.cached
    assert look.plan.seconds > 3.0


def test_nothing_of_it_is_left_in_the_training(
    paths: TrainingPaths, settings: TrainingSettings, tmp_path: Path, measured: list[int]
) -> None:
    look = make_look(paths, settings, planned(tmp_path))
    model = look.ready.model
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    torch.manual_seed(3)
    state = torch.get_rng_state()
    look.take(optimizer_is_made=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_was_found_is_kept_beside_the_plan(
    paths: TrainingPaths, settings: TrainingSettings, tmp_path: Path, measured: list[int]
) -> None:
    first = make_look(paths, settings, planned(tmp_path))
    first.take(optimizer_is_made=False)
    measured.clear()
    again = make_look(paths, settings, planned(tmp_path))
    again.take(optimizer_is_made=False)
    assert not measured
    assert again.plan.cached
    assert again.plan.micro_batch_tokens == again.steps.micro_batch_tokens == 192
    assert again.plan.curve == first.plan.curve
    other = make_look(paths, settings, planned(tmp_path, tokens=128))
    other.take(optimizer_is_made=False)
    assert measured[0] == 128, "another plan has a look of its own"


def test_a_share_of_the_memory_is_not_passed(
    paths: TrainingPaths, settings: TrainingSettings, tmp_path: Path, measured: list[int]
) -> None:
    look = make_look(paths, vary(settings, memory_fraction=1e-9), planned(tmp_path))
    look.take(optimizer_is_made=False)
    assert measured == [64]
    assert look.plan == planned(tmp_path), "it stays as it was planned"
    assert not (tmp_path / "plan.compiled.json").exists()


def test_an_optimizer_that_is_there_is_not_added_again(
    paths: TrainingPaths, settings: TrainingSettings, tmp_path: Path, measured: list[int]
) -> None:
    totals = []
    for there in (False, True):
        look = make_look(paths, settings, planned(tmp_path, file=None))
        look.take(optimizer_is_made=there)
        totals.append(look.plan.curve[1].predicted_total_bytes)
        trained = sum(p.numel() * p.element_size() for p in look.ready.model.parameters() if p.requires_grad)
    assert totals[0] - totals[1] == 2 * trained, "the two moments of AdamW"


def test_after_a_resume_the_fact_of_the_first_step_stays(
    paths: TrainingPaths, settings: TrainingSettings, tmp_path: Path, measured: list[int]
) -> None:
    look = make_look(paths, settings, planned(tmp_path))
    look.health.facts = {"first_step_micro_batches": 17, "resumed_from_step": 3}
    look.take(optimizer_is_made=True)
    assert look.steps.micro_batch_tokens == 192
    assert look.health.facts["first_step_micro_batches"] == 17


def test_a_plan_that_was_not_measured_stays(
    paths: TrainingPaths, settings: TrainingSettings, tmp_path: Path, measured: list[int]
) -> None:
    plan = planned(tmp_path, curve=[], file=None, warning="not measured")
    look = make_look(paths, settings, plan)
    look.take(optimizer_is_made=False)
    assert look.plan is plan
    assert not measured


def test_a_run_goes_on_with_the_size_that_was_found(
    paths: TrainingPaths,
    settings: TrainingSettings,
    tmp_path: Path,
    measured: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers had prepared steps before; those and all later ones are cut anew, and losses stay what they were."""
    import lm_tuning.training.run as run_module
    from lm_tuning.training.kernels import compiled_layers as layer_compile

    settings = vary(settings, effective_batch_rows=20, max_steps=12, num_epochs=None, micro_batch_tokens=64)
    plain = run_training(paths, settings)

    def look(run: Any) -> CompiledPlanner:
        open_to_choice = vary(run.job.settings, micro_batch_tokens="auto")
        return CompiledPlanner(run.ready, open_to_choice, run.steps, run.memory, run.health, planned(tmp_path))

    monkeypatch.setattr(run_module, "_plan_compiled", look)

    def switch_on(self: layer_compile.CompiledLayers) -> None:
        for layer in self.layers:
            layer.compile(backend="eager")

    monkeypatch.setattr(layer_compile.CompiledLayers, "switch_on", switch_on)
    result = run_training(paths, vary(settings, compile=True, num_loader_workers=1))
    assert "compile_failure" not in result.health["facts"]
    found = result.batch_plan.micro_batch_tokens
    assert found > 64
    assert json.loads((tmp_path / "plan.compiled.json").read_text())["micro_batch_tokens"] == found
    cuts = [row["num_micro_batches"] for row in result.efficiency]
    before = [row["num_micro_batches"] for row in plain.efficiency]
    assert all(now < then for now, then in zip(cuts, before, strict=True))
    assert result.health["facts"]["first_step_micro_batches"] == cuts[0]
    assert [row["loss_nats_per_token"] for row in result.steps] == pytest.approx(
        [row["loss_nats_per_token"] for row in plain.steps], rel=1e-4
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_compiled_training_looks_again(
    paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So small a step is not measured otherwise.
    monkeypatch.setattr("lm_tuning.training.planning.planner.plan_whole_step", lambda *given: None)
    settings = vary(
        settings,
        device="cuda",
        compute_dtype="bfloat16",
        effective_batch_rows=20,
        max_steps=6,
        num_epochs=None,
        micro_batch_tokens="auto",
        compile=True,
    )
    for is_kept in (False, True):
        result = run_training(paths, settings)
        facts, plan = result.health["facts"], result.batch_plan
        assert "compile_failure" not in facts
        assert plan.warning is None
        assert any(point.compiled and point.outcome == "measured" for point in plan.curve)
        assert plan.cached == is_kept
        for row in result.efficiency:
            assert row["num_tokens"] <= row["num_micro_batches"] * plan.micro_batch_tokens
        assert result.efficiency[0]["num_micro_batches"] == facts["first_step_micro_batches"]
