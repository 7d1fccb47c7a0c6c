"""Steps replayed from recordings are the steps of a training without them; what speaks against them is said."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_tuning.training import run as run_module
from lm_tuning.training.kernels import fast_path, step_graph
from lm_tuning.training.kernels.recording import CudaRecorder, Outputs
from lm_tuning.training.kernels.step_graph import Trial
from lm_tuning.training.results import TrainingResult
from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
from lm_tuning.training.settings import TrainingPaths as Paths
from tests.support.replaying import CallingRecorder
from tests.support.settings import base_record, make_settings, vary
from tests.support.task_rows import label_map, write_task_rows
from tests.support.tiny_tasks import make_classifier, save_base

LORA: dict[str, Any] = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"}
STEPS = 50


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> CallingRecorder:
    """Replace what records on a GPU."""
    stand_in = CallingRecorder()
    for module in (fast_path, run_module):
        monkeypatch.setattr(module, "find_recorder", lambda device: stand_in)
    return stand_in


@pytest.fixture(params=["causal_lm", "sequence_classification"])
def job(request: pytest.FixtureRequest, tmp_path: Path, tiny_model_folder: Path) -> tuple[Paths, TrainingSettings]:
    """A training of fifty small steps of one micro-batch each."""
    task = request.param
    tokens = write_task_rows(task, tmp_path / "tokens", num_train=60)
    changes: dict[str, Any] = {"task": task, "max_steps": STEPS, "learning_rate": 3e-3, "micro_batch_tokens": 4096}
    settings = make_settings(tiny_model_folder, effective_batch_rows=7, cuda_graphs=True, **changes)
    if task == "sequence_classification":
        folder = save_base(make_classifier(num_labels=3), tmp_path / "classifier")
        settings = replace(settings, base=base_record(folder), label_map=label_map())
    return TrainingPaths(tokens=tokens, checkpoints=tmp_path / "checkpoints"), settings


def losses_of(result: TrainingResult) -> list[float]:
    return [next(value for name, value in row.items() if name.startswith("loss_")) for row in result.steps]  # type: ignore[misc]


def verdict(result: TrainingResult) -> str:
    facts: Any = result.health["facts"]["fast_path"]
    return str(facts["cuda_graphs"])


def train(job: tuple[Paths, TrainingSettings], name: str, **changes: Any) -> TrainingResult:
    paths, settings = job
    return run_training(replace(paths, checkpoints=paths.checkpoints / name), vary(settings, **changes))


@pytest.mark.parametrize("batching", ["packed", "padded"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_fifty_replayed_steps_are_the_steps_without(
    job: tuple[Paths, TrainingSettings], recorder: CallingRecorder, batching: str, method: str
) -> None:
    options = {"batching": batching, "method": method, "lora": LORA, "label_smoothing": 0.1}
    eager = train(job, "eager", cuda_graphs=False, **options)
    assert verdict(eager) == "no, as train.cuda_graphs says"
    assert not recorder.recordings
    replayed = train(job, "replayed", **options)
    assert sum(each.num_replays for each in recorder.recordings) > STEPS // 2
    assert "replayed" in verdict(replayed)
    torch.testing.assert_close(losses_of(replayed), losses_of(eager), rtol=1e-5, atol=1e-6)
    norms = [[row["gradient_norm"] for row in result.steps] for result in (replayed, eager)]
    torch.testing.assert_close(*norms, rtol=1e-4, atol=1e-6)
