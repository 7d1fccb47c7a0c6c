"""Steps replayed from recordings are the steps of a training without them; what speaks against them is said."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from lm_tuning.batching.batch import MicroBatch, StepBatch
from lm_tuning.batching.tasks.classification import SequenceClassification
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.training import job as job_module
from lm_tuning.training.kernels import fast_path, step_graph
from lm_tuning.training.kernels.recording import Outputs
from lm_tuning.training.kernels.step_graph import StepGraphs, Trial
from lm_tuning.training.results import TrainingResult
from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
from lm_tuning.training.trainer import StepPlanTrainer
from tests.support.replaying import CallingRecorder
from tests.support.settings import base_record, make_settings, vary
from tests.support.task_rows import label_map, write_task_rows
from tests.support.tiny_tasks import make_classifier, save_base

LORA: dict[str, Any] = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"}
STEPS = 48
Job: TypeAlias = tuple[TrainingPaths, TrainingSettings]


class PowerFailure(BaseException):
    """What a test ends a training with; nothing between may catch it."""


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> CallingRecorder:
    """Replace what records on a GPU."""
    stand_in = CallingRecorder()
    for module in (fast_path, job_module):
        monkeypatch.setattr(module, "find_recorder", lambda device: stand_in)
    return stand_in


@pytest.fixture(params=["causal_lm", "sequence_classification"])
def job(request: pytest.FixtureRequest, tmp_path: Path, tiny_model_folder: Path) -> Job:
    """A training of small steps of one micro-batch each."""
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


def norms_of(result: TrainingResult) -> list[float]:
    return [row["gradient_norm"] for row in result.steps]


def verdict(result: TrainingResult) -> str:
    facts: Any = result.health["facts"]["fast_path"]
    return str(facts["cuda_graphs"])


def train(job: Job, name: str, *, on_progress: OnProgress = ignore_progress, **changes: Any) -> TrainingResult:
    paths, settings = job
    where = replace(paths, checkpoints=paths.checkpoints / name)
    return run_training(where, vary(settings, **changes), on_progress=on_progress)


def compare(found: TrainingResult, wanted: TrainingResult, *, exactly: bool = False) -> None:
    """Compare losses and gradient norms of all steps."""
    tolerance = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 1e-4, "atol": 1e-5}
    for numbers in (losses_of, norms_of):
        torch.testing.assert_close(numbers(found), numbers(wanted), equal_nan=True, **tolerance)


RUNS = [("full", "packed", 0.0), ("lora", "padded", 0.1)]


@pytest.mark.parametrize(("method", "batching", "smoothing"), RUNS)
def test_fifty_replayed_steps_are_the_steps_without(
    job: Job, recorder: CallingRecorder, method: str, batching: str, smoothing: float
) -> None:
    options = {"method": method, "lora": LORA, "batching": batching, "label_smoothing": smoothing, "max_steps": 50}
    eager = train(job, "eager", cuda_graphs=False, **options)
    assert verdict(eager) == "no, as train.cuda_graphs says"
    assert not recorder.recordings
    replayed = train(job, "replayed", **options)
    assert sum(each.num_replays for each in recorder.recordings) > 25
    assert "of 49 steps replayed" in verdict(replayed)
    compare(replayed, eager)
    rows = [row for row in replayed.efficiency if row["backward_seconds"] is None]
    assert len(rows) > 20, "a replayed step has no backward pass of its own"
    assert all(row["forward_seconds"] and row["optimizer_seconds"] for row in rows)


def test_a_resume_replays_on(job: Job, recorder: CallingRecorder) -> None:
    whole = train(job, "whole", cuda_graphs=False)

    def fail(what: str, step: int, total: int, unit: str) -> None:
        if what == "Training" and step == 14:
            raise PowerFailure

    with pytest.raises(PowerFailure):
        train(job, "broken", on_progress=fail, save_every_steps=12)
    num_before = len(recorder.recordings)
    resumed = train(job, "broken", resume=True, save_every_steps=12)
    assert resumed.health["facts"]["resumed_from_step"] == 12
    assert len(recorder.recordings) > num_before, "recordings belong to a process"
    assert "replayed" in verdict(resumed)
    compare(resumed, whole)


def test_evaluations_between_steps_change_nothing(job: Job, recorder: CallingRecorder) -> None:
    options = {"eval_every_steps": 6, "max_steps": 30}
    eager = train(job, "eager", cuda_graphs=False, **options)
    replayed = train(job, "replayed", **options)
    assert recorder.recordings[0].num_replays > 10
    compare(replayed, eager)
    assert [row["step"] for row in replayed.evaluations] == [0, 6, 12, 18, 24, 30]
    for found, wanted in zip(replayed.evaluations, eager.evaluations, strict=True):
        name = next(name for name in found if name.startswith("validation_nats"))
        assert found[name] == pytest.approx(wanted[name], rel=1e-4)  # type: ignore[literal-required]


def test_a_step_that_is_not_finite_is_skipped(
    job: Job, recorder: CallingRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = StepPlanTrainer.micro_batch_loss

    def spoil(self: StepPlanTrainer, *given: Any) -> torch.Tensor:
        loss = compute(self, *given)
        return loss * math.nan if self.state.global_step in {1, 14} else loss

    monkeypatch.setattr(StepPlanTrainer, "micro_batch_loss", spoil)
    options = {"max_steps": 30, "health": {"on_mismatch": "warn"}}
    eager = train(job, "eager", cuda_graphs=False, **options)
    replayed = train(job, "replayed", **options)
    assert recorder.recordings[0].num_replays > 10, "a first try that was not finite says nothing"
    skipped: Any = replayed.health["facts"]["steps_not_finite"]
    assert [each["step"] for each in skipped] == [2, 15]
    compare(replayed, eager)


def test_memory_that_runs_out_takes_the_graphs_first(job: Job, recorder: CallingRecorder) -> None:
    options = {"max_steps": 30}
    eager = train(job, "eager", cuda_graphs=False, **options)

    def fail(what: str, step: int, total: int, unit: str) -> None:
        if what == "Training" and step == 12:
            recorder.spoil = run_out

    def run_out(outputs: Outputs) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    replayed = train(job, "replayed", on_progress=fail, **options)
    assert verdict(replayed) == "no more, since memory ran out"
    assert recorder.num_cleared
    assert not [finding for finding in replayed.health["findings"] if finding["code"] == "memory-ran-out"]
    compare(replayed, eager)


FAILURES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a recording fails": (
        {"failure": RuntimeError("operation not permitted when stream is capturing\nmore")},
        {},
        "no, since recording a step failed (RuntimeError: operation not permitted when stream is capturing)",
    ),
    "no memory for it": (
        {"failure": torch.OutOfMemoryError("CUDA out of memory.")},
        {},
        "no, since recording a step failed (OutOfMemoryError: CUDA out of memory.)",
    ),
    "another loss": ({"spoil": lambda outputs: outputs[0].mul_(1.01)}, {}, "no, since a replayed step had a loss of"),
    "another gradient": (
        {"spoil": lambda outputs: outputs[1].add_(1.0)},
        {},
        "no, since the gradient of a replayed step was off by",
    ),
    "too little memory": ({"lack": "a step holds half"}, {"cuda_graphs": "auto"}, "no, since a step holds half"),
    "nothing gained": ({}, {"cuda_graphs": "auto"}, "gains too little"),
    "too few steps": ({}, {"max_steps": 12}, "no, since the run has 12 steps"),
    "resumed near the end": ({}, {"max_steps": 20}, "no, since fewer than 20 steps were left"),
    "several micro-batches": ({}, {"micro_batch_tokens": 16}, "no, since no step was one micro-batch"),
    "a mask": ({}, {"attention": "eager", "batching": "packed"}, "no, since packed rows are kept apart by a mask"),
    "noise": ({}, {"neftune_noise_alpha": 5.0}, "no, since NEFTune's noise depends on"),
    "checkpointing": ({}, {"gradient_checkpointing": True}, "no, since gradient checkpointing keeps random states"),
}


@pytest.mark.parametrize("case", FAILURES)
@pytest.mark.parametrize("job", ["sequence_classification"], indirect=True)
def test_what_speaks_against_it_is_said_and_the_run_goes_on(
    job: Job, recorder: CallingRecorder, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    of_recorder, changes, said = FAILURES[case]
    if case == "nothing gained":
        # Whatever the two passes take here, on a machine as busy as it may be.
        monkeypatch.setattr(step_graph, "SPEED_UP", math.inf)
    for name, value in of_recorder.items():
        setattr(recorder, name, value)
    options = {"max_steps": 22, **changes}
    replayed = train(job, "replayed", **options)
    assert said in verdict(replayed)
    assert sum(each.num_replays for each in recorder.recordings) <= 2, "no more than the try"
    assert len(replayed.steps) == options["max_steps"]
    if case in {"a recording fails", "another gradient"}:
        compare(replayed, train(job, "eager", **options | {"cuda_graphs": False}), exactly=True)


def test_dropout_goes_on_from_the_same_random_state(
    job: Job, recorder: CallingRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "failure", RuntimeError("no"))
    options = {"method": "lora", "lora": LORA | {"dropout": 0.3}, "max_steps": 22}
    eager = train(job, "eager", cuda_graphs=False, **options)
    compare(train(job, "replayed", **options), eager, exactly=True)


def test_on_a_cpu_nothing_is_recorded(job: Job) -> None:
    assert verdict(train(job, "cpu", max_steps=3)) == "no, since training runs on the CPU"


def test_the_try_decides() -> None:
    good = Trial(0.2, 0.01, loss=4.0, filled_loss=4.001, replayed_loss=4.001, gradient_difference=0.001)
    assert good.why_not(even_if_slow=False) is None
    assert good.describe() == "forward and backward pass take 10.0 ms replayed and 200.0 ms otherwise"
    slow = replace(good, eager_seconds=0.0129)
    assert "gains too little" in str(slow.why_not(even_if_slow=False))
    assert slow.why_not(even_if_slow=True) is None
    assert "a loss of 4.01 instead of 4.001" in str(replace(good, replayed_loss=4.01).why_not(even_if_slow=True))
    assert "off by 20.0%" in str(replace(good, gradient_difference=0.2).why_not(even_if_slow=True))
    apart = replace(good, loss=4.1)
    assert "filled up, a step had a loss of" in str(apart.why_not(even_if_slow=True))
    assert replace(apart, is_random=True).why_not(even_if_slow=True) is None, "dropout draws other numbers"
    for name in ("replayed_loss", "gradient_difference", "loss"):
        assert replace(good, **{name: math.nan}).why_not(even_if_slow=True) is not None


def one_row() -> MicroBatch:
    grid = torch.zeros(1, 100, dtype=torch.int64)
    return MicroBatch(grid, None, grid[0, :1], grid[0, :1], 1, 100, 1)


@pytest.mark.parametrize("case", ["a recording fails", "no memory for it"])
def test_a_further_shape_that_cannot_be_recorded_leaves_the_others(case: str) -> None:
    model, recorder, told = torch.nn.Linear(2, 2), CallingRecorder(), []
    graphs = StepGraphs(model, SequenceClassification(pad_id=0), recorder, "cpu", 100, always=True, tell=told.append)

    def run(batch: MicroBatch, total: torch.Tensor) -> torch.Tensor:
        loss = (model.weight**2).sum()
        loss.backward()
        return loss

    wide, narrow = one_row(), replace(one_row(), input_ids=torch.zeros(1, 16, dtype=torch.int64), num_tokens=16)
    first, other = StepBatch(1, [0], [wide]), StepBatch(2, [1], [narrow])
    assert graphs.begin_trial(first)
    graphs.record(first, run(wide, torch.tensor(1)).detach(), run)
    shape = graphs.find(first)
    assert shape is not None
    assert not graphs.begin_trial(other), "a shape must come up again to be worth it"
    assert graphs.begin_trial(other)
    recorder.failure = RuntimeError("no") if case == "a recording fails" else None
    recorder.lack = "a step holds half of the card's memory" if case == "no memory for it" else None
    graphs.record(other, run(narrow, torch.tensor(1)).detach(), run)
    assert graphs.find(first) == shape
    assert graphs.find(other) is None
    assert not graphs.begin_trial(other)
    graphs.replay(shape, first)
    graphs.close()
    assert "no further shape, since" in told[-1]
    assert "1 of 3 steps replayed, 1 recorded shape" in told[-1]


def test_what_the_host_draws_is_not_recorded() -> None:
    """Layers that are left out at random would be the same ones at each replay."""
    graphs = StepGraphs(
        torch.nn.Linear(2, 2), SequenceClassification(pad_id=0), CallingRecorder(), "cuda", 100, always=True
    )
    inputs = StepBatch(1, [0], [one_row()])
    assert graphs.begin_trial(inputs)
    torch.rand(())
    graphs.record(inputs, torch.tensor(1.0), lambda batch, total: torch.tensor(1.0))
    assert graphs._verdict == "no, since the model draws random numbers on the host, such as which layers it leaves out"
    assert not graphs.begin_trial(inputs)


def test_work_that_does_not_wait_for_launches_is_not_tried() -> None:
    graphs = StepGraphs(
        torch.nn.Linear(1000, 1000), SequenceClassification(pad_id=0), CallingRecorder(), "cpu", 100, flops=1e9
    )
    batch = one_row()
    # 5 operations of a million parameters and 100 positions take half a second at this speed.
    assert "does not wait for launches" in str(graphs._why_not_tried(batch, 0.6))
    assert graphs._why_not_tried(batch, 1.1) is None


needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def job_on_gpu(job: Job) -> Job:
    paths, settings = job
    return paths, vary(settings, device="cuda", compute_dtype="bfloat16", num_loader_workers=0, learning_rate=1e-4)


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("batching", ["packed", "padded"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_on_a_gpu_fifty_replayed_steps_are_the_steps_without(job_on_gpu: Job, method: str, batching: str) -> None:
    options = {"method": method, "lora": LORA, "batching": batching, "max_steps": 50}
    if batching == "padded":
        # In 16 bits rows filled up round otherwise, which fifty steps add up; packed rows have no kernel in 32.
        options["compute_dtype"] = "float32"
    eager = train(job_on_gpu, "eager", cuda_graphs=False, **options)
    replayed = train(job_on_gpu, "replayed", **options)
    assert verdict(replayed).startswith("yes"), verdict(replayed)
    torch.testing.assert_close(losses_of(replayed), losses_of(eager), rtol=1e-3, atol=0)


@pytest.mark.gpu
@needs_card
def test_on_a_gpu_a_resume_replays_on(job_on_gpu: Job) -> None:
    whole = train(job_on_gpu, "whole", cuda_graphs=False)

    def fail(what: str, step: int, total: int, unit: str) -> None:
        if what == "Training" and step == 14:
            raise PowerFailure

    with pytest.raises(PowerFailure):
        train(job_on_gpu, "broken", on_progress=fail, save_every_steps=12)
    resumed = train(job_on_gpu, "broken", resume=True, save_every_steps=12)
    assert verdict(resumed).startswith("yes"), verdict(resumed)
    torch.testing.assert_close(losses_of(resumed), losses_of(whole), rtol=1e-3, atol=0)


@pytest.mark.gpu
@needs_card
def test_on_a_gpu_dropout_draws_other_numbers_at_each_replay(job_on_gpu: Job) -> None:
    options = {"method": "lora", "lora": LORA | {"dropout": 0.5}, "max_steps": 30}
    replayed = train(job_on_gpu, "replayed", **options)
    assert verdict(replayed).startswith("yes"), verdict(replayed)
    assert len({round(row["gradient_norm"], 6) for row in replayed.steps}) > 20


@pytest.mark.gpu
@needs_card
def test_on_a_gpu_a_recording_that_fails_leaves_the_run_as_it_was(
    job_on_gpu: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With dropout, since a generator whose recording failed refuses to draw.
    options = {"method": "lora", "lora": LORA | {"dropout": 0.3}, "max_steps": 25}
    eager = train(job_on_gpu, "eager", cuda_graphs=False, **options)
    compute = StepPlanTrainer.micro_batch_loss

    def wait(self: StepPlanTrainer, *given: Any) -> torch.Tensor:
        loss = compute(self, *given)
        if torch.cuda.is_current_stream_capturing():
            loss.item()
        return loss

    monkeypatch.setattr(StepPlanTrainer, "micro_batch_loss", wait)
    stream = torch.cuda.current_stream()
    failed = train(job_on_gpu, "failed", **options)
    assert torch.cuda.current_stream() == stream
    assert "no, since recording a step failed" in verdict(failed)
    torch.testing.assert_close(losses_of(failed), losses_of(eager), rtol=1e-3, atol=0)


@pytest.mark.gpu
@needs_card
def test_on_a_gpu_class_weights_and_smoothing_are_recorded(job_on_gpu: Job) -> None:
    is_classifier = job_on_gpu[1].task == "sequence_classification"
    options = {"label_smoothing": 0.1, "class_weights": "balanced" if is_classifier else None}
    eager = train(job_on_gpu, "eager", cuda_graphs=False, **options)
    replayed = train(job_on_gpu, "replayed", **options)
    assert verdict(replayed).startswith("yes"), verdict(replayed)
    torch.testing.assert_close(losses_of(replayed), losses_of(eager), rtol=1e-3, atol=0)
