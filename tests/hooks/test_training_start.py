"""What a training asks of the device and of its checkpoints is checked before the first node."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from kedro.io import DataCatalog, MemoryDataset
from kedro.pipeline import Pipeline, node

from lm_tuning.datasets import FolderDataset
from lm_tuning.errors import UserError
from lm_tuning.hooks import validation as training_start
from lm_tuning.hooks.validation import TrainingStartHook, find_device_problems
from lm_tuning.parameters import ModelParameters, TrainParameters
from lm_tuning.runtime.device import Device

STORED = Path(__file__).resolve().parents[1] / "fixtures/stored_0_1/project"
CPU = Device("cpu", "a processor", 1, 0, False, 2, "neither amx_bf16 nor avx512_bf16")
UNKNOWN_CARD = Device("cuda", "a card", 1, 0, False, 2, "compute capability unknown")


def train_model(rows: Any, checkpoints: Any, train: Any, model: Any) -> None: ...


def inspect_examples(rows: Any, checkpoints: Any, train: Any, model: Any) -> None: ...


def before_run(folder: Path, function: Any = train_model, dtype: str = "auto", **train: Any) -> None:
    catalog = DataCatalog(
        {
            "checkpoints": FolderDataset(filepath=str(folder / "checkpoints")),
            "params:train": MemoryDataset(TrainParameters(**train)),
            "params:model": MemoryDataset(ModelParameters.model_validate({"dtype": dtype})),
        }
    )
    inputs = ["rows", "checkpoints", "params:train", "params:model"]
    TrainingStartHook().before_pipeline_run(Pipeline([node(function, inputs, None, name="one")]), catalog)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_start, "probe_device", lambda: CPU)


def test_what_the_device_cannot_do_is_refused(tmp_path: Path) -> None:
    before_run(tmp_path)
    with pytest.raises(UserError, match=r"train.precision=float16 needs a CUDA graphics card"):
        before_run(tmp_path, precision="float16")
    with pytest.raises(UserError, match=r"model.dtype=float16 needs a CUDA graphics card"):
        before_run(tmp_path, dtype="float16")
    eight_bits = {"method": "qlora", "qlora": {"bits": 8}, "lora": {"use_dora": True}}
    with pytest.raises(UserError, match=r"train.lora.use_dora = true .* train.qlora.bits = 8 on a CPU"):
        before_run(tmp_path, **eight_bits)
    before_run(tmp_path, **eight_bits | {"qlora": {"bits": 4}})


def test_a_card_of_unknown_capability_is_left_to_torch() -> None:
    assert find_device_problems(UNKNOWN_CARD, TrainParameters(precision="bfloat16"), ModelParameters()) == []


def test_pipelines_that_train_nothing_run_on_any_device(tmp_path: Path) -> None:
    before_run(tmp_path, inspect_examples, precision="float16", resume=True)


def test_a_resume_needs_a_complete_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train.resume is true, but .*checkpoints holds no complete checkpoint"):
        before_run(tmp_path, resume=True)
    assert not (tmp_path / "checkpoints").exists(), "a refused run leaves no folder"
    shutil.copytree(STORED / "data/06_models/adapter/checkpoints", tmp_path / "checkpoints")
    before_run(tmp_path, resume=True)


def test_a_resume_needs_a_whole_checkpoint(tmp_path: Path) -> None:
    shutil.copytree(STORED / "data/06_models/adapter/checkpoints", tmp_path / "checkpoints")
    (folder,) = tmp_path.glob("checkpoints/run-*/checkpoint-10")
    (folder / "optimizer.pt").unlink()
    (folder / "step_log.json").write_text("[")
    with pytest.raises(UserError) as caught:
        before_run(tmp_path, resume=True)
    head, optimizer, log, fix = caught.value.problems
    assert head == f"train.resume: the checkpoint {folder} cannot be used."
    assert optimizer == "  - optimizer.pt is missing."
    assert "step_log.json is damaged: it is no JSON" in log
    assert "This run has no other whole checkpoint" in fix
    before_run(tmp_path, inspect_examples, resume=True)
    before_run(tmp_path)


def test_every_problem_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        before_run(tmp_path, resume=True, precision="float16")
    assert len(caught.value.problems) == 2
