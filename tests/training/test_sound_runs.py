"""Sound trainings of every kind raise nothing above a note, and every check has had its look."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
from lm_tuning.training.trainer import StepPlanTrainer
from tests.support.planted import World
from tests.support.settings import vary
from tests.training.planted_model import LORA
from tests.training.planted_rows import classify, translate

SOUND: dict[str, Callable[[World], object]] = {
    "full": lambda world: world.set(learning_rate=1e-3),
    "full at a low rate": lambda world: world.set(learning_rate=1e-6),
    "full, some frozen": lambda world: world.set(freeze=["embed_tokens", "layers.0"]),
    "all but the norms frozen": lambda world: world.set(freeze=["embed_tokens", "*_proj"]),
    "padded": lambda world: world.set(batching="padded", micro_batch_tokens=100),
    "cut small": lambda world: world.set(micro_batch_tokens=1),
    "noise": lambda world: world.set(neftune_noise_alpha=5.0),
    "smoothed": lambda world: world.set(label_smoothing=0.1),
    "LoRA": lambda world: world.set(method="lora", lora=LORA),
    "LoRA at a low rate": lambda world: world.set(method="lora", lora=LORA, learning_rate=1e-6),
    "LoRA with dropout": lambda world: world.set(method="lora", lora={**LORA, "dropout": 0.2}),
    "LoRA on one kind of layer": lambda world: world.set(method="lora", lora={**LORA, "target_modules": ["q_proj"]}),
    "LoRA on one layer": lambda world: world.set(
        method="lora", lora={**LORA, "target_modules": ["layers.1.self_attn.q_proj"]}
    ),
    "MiCA": lambda world: world.set(method="lora", lora={**LORA, "init": "mica"}),
    "PiSSA": lambda world: world.set(method="lora", lora={**LORA, "init": "pissa"}),
    "DoRA": lambda world: world.set(method="lora", lora={**LORA, "use_dora": True}),
    "a classifier": classify,
    "a classifier with weights": lambda world: (classify(world), world.set(class_weights="balanced")),
    # Its random weights are so wide that it is worse than an untrained model, which it is told.
    "an encoder-decoder": lambda world: (
        translate(world),
        world.set(health={"severity": {"worse-than-untrained": "note"}}),
    ),
}


@pytest.mark.parametrize("kind", SOUND)
def test_a_sound_training_raises_nothing(
    kind: str, paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(paths, settings, monkeypatch, tmp_path)
    world.set(max_steps=24)
    SOUND[kind](world)
    assert world.run() is None
    report = world.reports[-1]
    assert [finding for finding in report["findings"] if finding["severity"] != "note"] == []
    facts = report["facts"]
    moved = facts["shortest_row_before_and_after"]
    assert moved["step"] in {20, 21, 24}
    assert facts["last_layer_gradient_norm"] > 0
    assert report["run"]["state"] == "finished"
    if kind in {"full", "cut small", "padded", "LoRA", "a classifier", "an encoder-decoder"}:
        expected = facts["last_layer_measured_gradient_norm"]
        assert facts["last_layer_gradient_norm"] == pytest.approx(expected, rel=1e-3)


def test_more_epochs_of_a_finished_model_raise_nothing(
    paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its loss moves and does not fall any more, which is no fault."""
    settings = vary(settings, learning_rate=1e-3, max_steps=80)
    finished = run_training(paths, settings)
    world = World(paths, settings, monkeypatch, tmp_path)
    world.set(base={**settings.base, "name_or_path": str(finished.model_folder)})
    assert world.run() is None
    assert [finding for finding in world.reports[-1]["findings"] if finding["severity"] != "note"] == []


@pytest.mark.parametrize("method", ["full", "lora"])
def test_every_module_trains_in_every_step_whatever_was_evaluated_before(
    method: str, paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout is off in modules that evaluate: from_pretrained leaves them so, and so does an evaluation."""
    sound, modes = StepPlanTrainer.micro_batch_loss, []

    def note(self: StepPlanTrainer, model: torch.nn.Module, *arguments: Any) -> Any:
        modes.append(all(module.training for module in model.modules()))
        return sound(self, model, *arguments)

    monkeypatch.setattr(StepPlanTrainer, "micro_batch_loss", note)
    lora = {**LORA, "dropout": 0.2} if method == "lora" else {}
    settings = vary(settings, method=method, lora=lora, max_steps=24, eval_every_steps=5)
    result = run_training(paths, settings)
    assert result.evaluations
    assert "shortest_row_before_and_after" in result.health["facts"]
    assert len(modes) >= 24
    assert all(modes)
