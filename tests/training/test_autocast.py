"""Training computes in the precision that it names, whichever part of the model a task runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
from lm_tuning.training.trainer import StepPlanTrainer
from tests.support.settings import vary
from tests.support.task_rows import label_map, save_tiny_bart, save_tiny_qwen3, write_task_rows


@pytest.mark.parametrize("task", ["causal_lm", "sequence_classification", "seq2seq_lm"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_products_of_a_step_are_of_the_named_type(
    tmp_path: Path, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch, task: str, compute: str
) -> None:
    model = save_tiny_bart(tmp_path / "model") if task == "seq2seq_lm" else save_tiny_qwen3(tmp_path / "model")
    settings = vary(
        settings,
        base={**settings.base, "name_or_path": str(model)},
        task=task,
        label_map=label_map() if task == "sequence_classification" else None,
        compute_dtype=compute,
        max_steps=1,
        health={"probe": False},
    )
    seen = set()
    plain = StepPlanTrainer._run_micro_batches

    def watch(self: StepPlanTrainer, model: Any, inputs: Any) -> None:
        layers = [
            module
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and not name.endswith(("lm_head", "score"))
        ]
        hooks = [layer.register_forward_hook(lambda layer, given, out: seen.add(out.dtype)) for layer in layers]
        plain(self, model, inputs)
        for hook in hooks:
            hook.remove()

    monkeypatch.setattr(StepPlanTrainer, "_run_micro_batches", watch)
    run_training(TrainingPaths(write_task_rows(task, tmp_path / "tokens"), tmp_path / "runs"), settings)
    assert seen == {getattr(torch, compute)}
