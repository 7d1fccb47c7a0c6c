"""A run out of memory says what was asked, what would fit and how to go on, and loses no checkpoint."""

from __future__ import annotations

import gc
import re
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm_tuning.batching.batch import MicroBatch
from lm_tuning.errors import UserError
from lm_tuning.runtime.memory_errors import is_out_of_memory
from lm_tuning.text.store.table import TokenTableWriter
from lm_tuning.training.checkpoints.format import RunIdentity, publish_checkpoint
from lm_tuning.training.planning import out_of_memory
from lm_tuning.training.planning.out_of_memory import (
    MemoryReading,
    MemoryUse,
    describe,
    estimate_fitting_positions,
    explain_out_of_memory,
    read_asked_bytes,
    read_memory,
)
from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
from lm_tuning.training.trainer import StepPlanTrainer
from tests.support.settings import vary

GIB = 2**30
GPU_MESSAGE = (
    "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 1.00 GiB is free."
)


def padded(rows: int, length: int) -> MicroBatch:
    return MicroBatch(
        input_ids=torch.zeros(rows, length, dtype=torch.long),
        position_ids=None,
        kept_positions=torch.arange(length),
        targets=torch.zeros(rows, length, dtype=torch.long),
        num_supervised=rows * length,
        num_tokens=rows * length,
        num_rows=rows,
    )


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryUse:
    """A card of 24 GiB: 8 before the step, 22 when a micro-batch of 16 rows of 512 tokens asks for 3 more."""
    monkeypatch.setattr(out_of_memory, "read_usage", lambda device: (8 * GIB, 8 * GIB))
    failed = MemoryReading("Card 24", 24 * GIB, 22 * GIB, 22 * GIB, GIB)
    monkeypatch.setattr(out_of_memory, "read_memory", lambda device: failed)
    use = MemoryUse(
        device="cuda",
        method="lora",
        precision="bfloat16 weights, bfloat16 arithmetic",
        gradient_checkpointing=False,
        micro_batch_tokens=8192,
        longest_row_tokens=512,
        run_folder=tmp_path,
    )
    use.begin_step(7)
    use.begin_micro_batch(padded(16, 512))
    return use


def fail(use: MemoryUse, error: Exception) -> UserError:
    with pytest.raises(UserError) as caught, explain_out_of_memory(use):
        raise error
    assert caught.value.__cause__ is error
    return caught.value


def test_the_message_says_what_was_asked_and_what_would_fit(use: MemoryUse) -> None:
    said = str(fail(use, torch.OutOfMemoryError(GPU_MESSAGE)))
    for words in (
        "The graphics card ran out of memory in step 7",
        "16 rows in 8,192 positions, the longest row of 512 tokens (train.micro_batch_tokens = 8,192)",
        "method lora, bfloat16 weights, bfloat16 arithmetic, without gradient checkpointing",
        "3.00 GiB more were asked for",
        "Card 24 has 24.00 GiB: this run had 22.00 GiB in use, 8.00 GiB of it before the step",
        "other programs hold 1.00 GiB",
        "estimate",
        "train.gradient_checkpointing=true",
        "train.method=qlora",
    ):
        assert words in said, words
    # 17 GiB for 8192 slots, of which 0.9 x (23 - 8) = 13.5 GiB are there: 6505, but nobody knows how far the
    # micro-batch was from its end when none has gone through before: a quarter.
    assert "train.micro_batch_tokens=2048." in said


def test_what_went_through_before_sharpens_the_estimate(use: MemoryUse) -> None:
    failed = out_of_memory.read_memory("cuda")
    use.end_step()  # 8192 slots went through
    use.peak_bytes = 20 * GIB
    use.begin_micro_batch(padded(24, 512))
    fitting = estimate_fitting_positions(use, failed, asked_bytes=None)
    # 12 GiB for 8192 slots are more than 14 GiB for 12288: 13.5 GiB give 9216.
    assert fitting == 9216
    # What is known of a smaller one never suggests the size that has just failed.
    use.peak_bytes = 9 * GIB
    assert (
        estimate_fitting_positions(use, replace(failed, used=9 * GIB, peak=9 * GIB), asked_bytes=None)
        == 12287 // 64 * 64
    )


def test_a_row_that_does_not_fit_alone_is_said_to_be_one(use: MemoryUse) -> None:
    use.longest_row_tokens = 8192
    said = str(fail(use, torch.OutOfMemoryError(GPU_MESSAGE)))
    assert "not even one row of full length (8,192 tokens)" in said
    assert "train.micro_batch_tokens=" not in said


def test_no_checkpoint_is_lost_and_the_message_goes_on_from_the_last(use: MemoryUse, tmp_path: Path) -> None:
    assert "No checkpoint was written yet" in str(fail(use, torch.OutOfMemoryError(GPU_MESSAGE)))
    for step in (4, 6):
        staging = tmp_path / ".writing"
        staging.mkdir()
        publish_checkpoint(
            staging,
            tmp_path,
            step=step,
            identity=RunIdentity("t", "b", "p", "4 rows", "lora"),
            run_id=None,
            progress={},
        )
    said = str(fail(use, torch.OutOfMemoryError(GPU_MESSAGE)))
    assert f"step 6 is kept in {tmp_path / 'checkpoint-6'}" in said
    assert "train.resume=true,train.micro_batch_tokens=2048" in said


def test_outside_a_micro_batch_it_says_when(use: MemoryUse) -> None:
    use.end_step()
    said = str(fail(use, torch.OutOfMemoryError(GPU_MESSAGE)))
    assert "ran out of memory after the backward pass of step 7;" in said
    assert "train.micro_batch_tokens=" not in said
    loading = MemoryUse("cuda", "full", "float32", True, 8192, 512)
    said = str(fail(loading, torch.OutOfMemoryError(GPU_MESSAGE)))
    assert "while the model was loaded; method full, float32, with gradient checkpointing" in said
    assert "train.trainer.optim=adamw_8bit" in said
    assert "train.gradient_checkpointing=true" not in said


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (torch.OutOfMemoryError(GPU_MESSAGE), 3 * GIB),
        (RuntimeError("CUDA error: out of memory"), None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None),
        (MemoryError(), None),
    ],
)
def test_each_library_has_its_words(error: Exception, asked: int | None) -> None:
    assert is_out_of_memory(error)
    assert read_asked_bytes(error) == asked


def test_the_errors_of_a_cpu_are_known_as_they_come() -> None:
    with pytest.raises(RuntimeError) as torchs:
        torch.empty(2**55)
    assert is_out_of_memory(torchs.value)
    assert read_asked_bytes(torchs.value) == 4 * 2**55
    for exponent in (45, 55):  # written in TiB and in PiB
        with pytest.raises(MemoryError) as numpys:
            np.empty(2**exponent)
        assert is_out_of_memory(numpys.value)
        assert read_asked_bytes(numpys.value) == 8 * 2**exponent


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), KeyError("x")])
def test_other_errors_pass_unchanged(use: MemoryUse, error: Exception) -> None:
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)) as caught, explain_out_of_memory(use):
        raise error
    assert caught.value is error


def test_the_tensors_of_the_failed_step_are_given_back(use: MemoryUse) -> None:
    held: list[Any] = []

    def step() -> None:
        activations = torch.zeros(8)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError(GPU_MESSAGE)

    with pytest.raises(UserError) as caught, explain_out_of_memory(use):
        step()
    gc.collect()
    assert caught.value.__cause__ is not None
    assert held[0]() is None


def test_a_packed_row_is_measured_by_its_positions(use: MemoryUse) -> None:
    packed = replace(padded(1, 30), position_ids=torch.cat([torch.arange(10), torch.arange(20)])[None], num_rows=2)
    use.begin_micro_batch(packed)
    said = describe(use, out_of_memory.read_memory("cuda"), asked_bytes=None)[0]
    assert "2 rows in 30 positions, the longest row of 20 tokens" in said


def test_a_training_out_of_memory_goes_on_in_smaller_chunks(
    paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = vary(settings, save_every_steps=2, micro_batch_tokens=150, batching="padded")
    whole = run_training(replace(paths, checkpoints=paths.checkpoints.with_name("whole")), settings)
    step = StepPlanTrainer.micro_batch_loss

    def run_out_at_step_4(self: StepPlanTrainer, model: Any, micro_batch: Any, total: int) -> torch.Tensor:
        if self.state.global_step == 3:
            torch.empty(2**55)  # what a CPU says of its own
        return step(self, model, micro_batch, total)

    with monkeypatch.context() as patch:
        patch.setattr(StepPlanTrainer, "micro_batch_loss", run_out_at_step_4)
        with pytest.raises(
            UserError, match=r"The machine ran out of memory in step 4, with a micro-batch of"
        ) as caught:
            run_training(paths, settings)
    said = str(caught.value)
    (kept,) = paths.checkpoints.glob("run-*/checkpoint-2")
    assert f"step 2 is kept in {kept}" in said
    assert "train.resume=true" in said
    assert "float32 weights, float32 arithmetic" in said
    resumed = run_training(paths, vary(settings, micro_batch_tokens=75, resume=True))
    losses = [row["loss_nats_per_token"] for row in resumed.steps]
    assert losses == pytest.approx([row["loss_nats_per_token"] for row in whole.steps], rel=1e-5)


def test_this_machine_says_what_it_has() -> None:
    reading = read_memory("cpu")
    assert reading.total > reading.peak >= reading.used > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_suggested_micro_batch_fits(settings: TrainingSettings, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = shutil.copytree(settings.base["name_or_path"], tmp_path / "model")
    config = AutoModelForCausalLM.from_pretrained(folder).config
    config.update({"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "head_dim": 128})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (tmp_path / "tokens").mkdir()
    for split, count in (("train", 256), ("validation", 0), ("test", 0)):
        with TokenTableWriter(tmp_path / "tokens" / f"{split}.arrow") as writer:
            for row in range(count):
                writer.append(row + 1, [8 + row % 90] * 500, [(1, 500)])
    chosen = vary(
        settings,
        base={**settings.base, "name_or_path": str(folder)},
        device="cuda",
        effective_batch_rows=256,
        micro_batch_tokens=128_000,
        batching="padded",
        max_steps=2,
        learning_rate=1e-4,
        health={"on_mismatch": "warn"},
    )
    paths = TrainingPaths(tmp_path / "tokens", tmp_path / "checkpoints")
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(free - 3 * GIB, dtype=torch.uint8, device="cuda")
    tokens, num_refusals, result = 128_000, 0, None
    while result is None:
        try:
            result = run_training(paths, vary(chosen, micro_batch_tokens=tokens))
        except UserError as error:
            problem = str(error)
            assert "The graphics card ran out of memory in step 1, with a micro-batch of" in problem
            found = re.search(r"train\.micro_batch_tokens=(\d+)", problem)
            assert found is not None, problem
            assert 500 <= int(found.group(1)) <= tokens // 4
            tokens, num_refusals = int(found.group(1)), num_refusals + 1
    assert 1 <= num_refusals <= 4
    assert len(result.steps) == 2
    del ballast
