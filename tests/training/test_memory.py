"""Bytes by arithmetic against what torch really holds."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_tuning.models.loading import build_skeleton
from lm_tuning.parameters.train import TrainerSettings
from lm_tuning.training.planning.memory import (
    Parameter,
    count_optimizer_state,
    estimate_activations,
    estimate_training,
    extrapolate,
    measure_model,
)
from lm_tuning.training.run import TrainingPaths, TrainingSettings
from lm_tuning.training.setup.model import set_up_model
from tests.support.settings import vary
from tests.support.tiny import make_model

LORA = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"}


def held_by(optimizer: torch.optim.Optimizer) -> int:
    """Add up the tensors in an optimizer's state, but for the counters of steps."""
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.dim())


def make_optimizer(name: str, optimizer_args: str, model: torch.nn.Module, folder: Path) -> Any:
    """Let the Trainer make it, as training does; a Trainer makes its output folder as well."""
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(output_dir=str(folder), optim=name, optim_args=optimizer_args or None, report_to="none")
    return Trainer(model=model, args=args).create_optimizer()


@pytest.mark.parametrize(
    ("name", "optimizer_args"),
    [
        ("adamw_torch_fused", ""),
        ("adamw_torch", ""),
        ("adafactor", ""),
        ("sgd", ""),
        ("sgd", "momentum=0.9"),
        ("adagrad", ""),
        ("rmsprop", ""),
        ("rmsprop", "momentum=0.5, centered=true"),
    ],
)
def test_the_state_is_what_the_trainers_optimizer_holds(
    name: str, optimizer_args: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = make_model()
    optimizer = make_optimizer(name, optimizer_args, model, tmp_path / "trainer")
    assert os.listdir() == ["trainer"]  # nothing is left where the tests are started
    ids = torch.arange(20)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    counted = measure_model(model, TrainerSettings(optim=name, optim_args=optimizer_args))
    assert counted.optimizer_state == held_by(optimizer)
    assert counted.gradients == sum(p.grad.numel() * p.grad.element_size() for p in model.parameters())


def test_eight_bits_take_a_byte_and_a_scale_for_each_block_but_not_in_small_tensors() -> None:
    large, small = Parameter((1000, 1000), 2), Parameter((4095,), 2)
    assert count_optimizer_state([large], TrainerSettings(optim="adamw_8bit")) == 2 * (1_000_000 + 3907 * 4)
    assert count_optimizer_state([small], TrainerSettings(optim="adamw_bnb_8bit")) == 2 * 4095 * 4
    assert count_optimizer_state([large], TrainerSettings(optim="paged_lion_8bit")) == 1_000_000 + 3907 * 4
    assert count_optimizer_state([large], TrainerSettings(optim="lion_32bit")) == 4_000_000
    assert count_optimizer_state([large], TrainerSettings(optim="paged_adamw_32bit")) == 8_000_000


def test_only_what_is_trained_has_gradients_and_state(settings: TrainingSettings) -> None:
    whole = measure_model(set_up_model(settings).model, {})
    ready = set_up_model(vary(settings, method="lora", lora=LORA))
    adapter = measure_model(ready.model, {})
    trained = sum(parameter.numel() for parameter in ready.model.parameters() if parameter.requires_grad)
    assert adapter.gradients == 4 * trained
    assert adapter.optimizer_state == 8 * trained
    assert adapter.weights == pytest.approx(whole.weights + 4 * trained, rel=0.01)


def test_memory_goes_on_in_a_straight_line() -> None:
    assert extrapolate([(100, 1100), (200, 1200)], base=0, at=400) == 1400
    assert extrapolate([(100, 1100)], base=1000, at=400) == 1400
    assert extrapolate([(100, 1000), (200, 1100), (400, 1500)], base=0, at=800) == 2300, "the steeper end counts"
    assert extrapolate([(100, 1500), (200, 1400)], base=0, at=400) == 1500, "never below what was seen"


@pytest.mark.parametrize("method", ["full", "lora"])
def test_an_estimate_without_weights_agrees_with_the_loaded_model(
    paths: TrainingPaths, settings: TrainingSettings, method: str
) -> None:
    settings = vary(settings, method=method, lora=LORA)
    estimate = estimate_training(build_skeleton(settings.base["name_or_path"]), settings)
    model = set_up_model(settings).model
    held = measure_model(model, {})
    assert replace(estimate, fixed=0) == estimate_activations(model, settings), "adapters count with their layers"
    assert estimate.fixed == pytest.approx(held.weights + held.gradients + held.optimizer_state, rel=0.02)
    plain = [estimate.total(size, gradient_checkpointing=False) for size in (128, 256)]
    checkpointed = [estimate.total(size, gradient_checkpointing=True) for size in (128, 256)]
    assert plain[0] < plain[1]
    assert checkpointed[1] - checkpointed[0] < plain[1] - plain[0]


def test_four_bits_count_as_half_a_byte(settings: TrainingSettings) -> None:
    skeleton = build_skeleton(settings.base["name_or_path"])
    lora = estimate_training(skeleton, vary(settings, method="lora", lora=LORA))
    qlora = estimate_training(skeleton, vary(settings, method="qlora", lora=LORA, qlora={"bits": 4}))
    in_linear = sum(
        module.weight.numel()
        for name, module in skeleton.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    )
    assert lora.fixed - qlora.fixed == pytest.approx(in_linear * (4 - 0.5 * 1.05), abs=1)
