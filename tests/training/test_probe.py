"""What a probe measures: real rows, the heaviest ones, nothing trained, and every way to run out."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm_tuning.batching.batch import MicroBatch
from lm_tuning.batching.step_plan import StepPlan
from lm_tuning.batching.tasks.registry import get_task
from lm_tuning.parameters.groups import EnvironmentParameters
from lm_tuning.text.store.table import TokenTableWriter, open_split
from lm_tuning.training.planning.memory import measure_model
from lm_tuning.training.planning.out_of_memory import read_memory
from lm_tuning.training.planning.probe import BudgetProbe, main, probe_budgets, run_probe, switch_checkpointing
from lm_tuning.training.planning.probe_rows import (
    evenly_by_size,
    extreme_rows,
    full_group,
    heaviest_groups,
    sample_steps,
)
from lm_tuning.training.planning.records import ProbeAnswer, ProbeRequest
from lm_tuning.training.run import TrainingPaths, TrainingSettings
from lm_tuning.training.settings import step_plan_of
from lm_tuning.training.setup.model import set_up_model
from tests.support.patience import PATIENCE_SECONDS
from tests.support.settings import vary
from tests.support.task_rows import WRITERS, label_map, save_tiny_bart

LORA = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"}


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Keep the number of threads, which a probe sets as it is told."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def request_for(paths: TrainingPaths, settings: TrainingSettings, **changes: Any) -> ProbeRequest:
    values: dict[str, Any] = {
        "budgets": [64, 128, 192],
        "start": 0,
        "checkpointing": [False],
        "ends_at": time.time() + PATIENCE_SECONDS,
        "backend": EnvironmentParameters(num_threads=1),
    }
    return ProbeRequest(tokens=paths.tokens, settings=settings, **(values | changes))


def run(request: ProbeRequest) -> ProbeAnswer:
    return run_probe(request, on_answer=lambda answer: None)


def test_every_budget_is_measured(paths: TrainingPaths, settings: TrainingSettings) -> None:
    seen: list[int] = []
    answer = run_probe(request_for(paths, settings), on_answer=lambda answer: seen.append(len(answer.points)))
    assert [point.micro_batch_tokens for point in answer.points] == [64, 128, 192]
    assert all(point.outcome == "measured" and point.fits for point in answer.points)
    assert all((point.tokens_per_second or 0) > 0 for point in answer.points)
    assert all((point.peak_memory_bytes or 0) > 2**26 for point in answer.points), "a process with torch is larger"
    held = answer.facts["optimizer_state_bytes"]
    assert held == 2 * answer.facts["gradients_bytes"] > 0
    assert all((point.predicted_total_bytes or 0) >= (point.peak_memory_bytes or 0) + held for point in answer.points)
    assert answer.facts["total_bytes"] == read_memory("cpu").total
    assert answer.finished
    assert seen == [0, 1, 2, 3, 3], "the answer is written after each of them"


def test_nothing_is_trained_and_nothing_written(
    paths: TrainingPaths, settings: TrainingSettings, tiny_model_folder: Path, tmp_path: Path
) -> None:
    def contents() -> dict[Path, bytes]:
        return {
            path: path.read_bytes()
            for folder in (tiny_model_folder, tmp_path)
            for path in folder.rglob("*")
            if path.is_file()
        }

    before = contents()
    table = open_split(paths.tokens, "train")
    ready = set_up_model(settings)
    weights = {name: tensor.clone() for name, tensor in ready.model.state_dict().items()}
    BudgetProbe(ready, settings, table, "packed").measure(128, seconds=0.1)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in ready.model.state_dict().items())
    assert any(parameter.grad is not None for parameter in ready.model.parameters()), "it ran backward"
    run(request_for(paths, settings))
    assert contents() == before


@pytest.mark.parametrize("task", ["sequence_classification", "seq2seq_lm"])
def test_other_tasks_are_measured_too(task: str, settings: TrainingSettings, tmp_path: Path) -> None:
    write: Any = WRITERS[task]
    write(tmp_path / "tokens", "train", 20)
    base = settings.base
    if task == "seq2seq_lm":
        base = {**base, "name_or_path": str(save_tiny_bart(tmp_path / "bart"))}
    settings = vary(
        settings,
        task=task,  # type: ignore[arg-type]
        base=base,
        label_map=label_map() if task == "sequence_classification" else None,
    )
    answer = run(request_for(TrainingPaths(tmp_path / "tokens", tmp_path / "runs"), settings, budgets=[64, 128]))
    assert [point.outcome for point in answer.points] == ["measured", "measured"], answer.error


def test_a_share_that_is_too_small_ends_the_search(paths: TrainingPaths, settings: TrainingSettings) -> None:
    answer = run(request_for(paths, vary(settings, memory_fraction=1e-9), start=1))
    assert [point.micro_batch_tokens for point in answer.points] == [128, 64], "downwards, and nothing larger"
    assert not any(point.fits for point in answer.points)


class HinderedProbe(BudgetProbe):
    """Something else takes the machine's time during the first micro-batch of every measurement."""

    def _time(self, batches: Sequence[MicroBatch]) -> list[float]:
        self.timed = batches
        assert len(super()._time(batches)) == len(batches)
        return [9.0, *(1.0 for _ in batches[1:])]


def test_what_passes_does_not_speak_against_a_size(paths: TrainingPaths, settings: TrainingSettings) -> None:
    probe = HinderedProbe(set_up_model(settings), settings, open_split(paths.tokens, "train"), "packed")
    speed, _, _ = probe.measure(128, seconds=0.1)
    batches = probe.timed[: len(probe.timed) // 2]
    assert probe.timed == [*batches, *batches], "each twice"
    assert speed == pytest.approx(sum(batch.num_tokens for batch in batches) / len(batches))


class GreedyProbe(BudgetProbe):
    """Asks for real memory that no machine has, from a budget on, unless gradient checkpointing is on."""

    limit = 128

    def measure(self, budget: int, *, seconds: float) -> tuple[float, int, int]:
        if budget >= self.limit and not self.model.is_activation_checkpointing:
            torch.empty(1 << 50, dtype=torch.uint8)
        return super().measure(budget, seconds=0.05)


def probe_greedily(paths: TrainingPaths, settings: TrainingSettings, request: ProbeRequest, limit: int) -> ProbeAnswer:
    probe = GreedyProbe(set_up_model(settings), settings, open_split(paths.tokens, "train"), "packed")
    probe.limit = limit
    answer = ProbeAnswer()
    probe_budgets(request, probe, answer, lambda: None)
    return answer


def test_running_out_of_memory_is_a_point_of_the_curve(paths: TrainingPaths, settings: TrainingSettings) -> None:
    answer = probe_greedily(paths, settings, request_for(paths, settings, checkpointing=[False, True]), 192)
    assert [(point.micro_batch_tokens, point.outcome) for point in answer.points] == [
        (64, "measured"),
        (128, "measured"),
        (192, "out of memory"),
    ]
    assert not answer.points[-1].fits
    assert answer.points[-1].tokens_per_second is None


def test_checkpointing_is_tried_when_the_first_size_does_not_fit(
    paths: TrainingPaths, settings: TrainingSettings
) -> None:
    request = request_for(paths, settings, checkpointing=[False, True], start=1)
    answer = probe_greedily(paths, settings, request, 128)
    assert [(p.micro_batch_tokens, p.gradient_checkpointing, p.outcome) for p in answer.points] == [
        (128, False, "out of memory"),
        (64, False, "measured"),
        (128, True, "measured"),
        (192, True, "measured"),
    ]


def test_the_end_of_time_leaves_the_rest_untried(paths: TrainingPaths, settings: TrainingSettings) -> None:
    answer = run(request_for(paths, settings, ends_at=time.time()))
    assert [point.micro_batch_tokens for point in answer.points] == [64], "one is always measured"
    assert answer.not_tried == [128, 192]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_checkpointing_is_switched_as_in_training(
    paths: TrainingPaths, settings: TrainingSettings, method: str
) -> None:
    settings = vary(settings, method=method, lora=LORA)
    ready = set_up_model(settings)
    probe = BudgetProbe(ready, settings, open_split(paths.tokens, "train"), "packed")
    calls = []
    layer = next(module for name, module in ready.model.named_modules() if name.endswith("layers.0.mlp"))
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    counts = []
    for wanted in (False, True, False):
        switch_checkpointing(ready.model, wanted)
        calls.clear()
        probe._run(probe._lay_out([0, 1]))
        counts.append(len(calls))
    assert counts == [1, 2, 1]


def test_the_heaviest_micro_batches_are_the_fullest_and_those_with_most_loss(tmp_path: Path) -> None:
    with TokenTableWriter(tmp_path / "train.arrow") as writer:
        for length, supervised in ((30, 5), (40, 5), (20, 19)):
            writer.append(0, [9] * length, [(length - supervised, length)])
    table = open_split(tmp_path, "train")
    task = get_task("causal_lm", pad_id=0)
    assert heaviest_groups([[0], [1], [2]], table, task, "packed") == [[1], [2]]
    assert heaviest_groups([[0], [1]], table, task, "packed") == [[1]]
    assert heaviest_groups([[0, 0], [1]], table, task, "packed")[0] == [0, 0]
    # Two rows side by side, padded to the longer one, take more slots than two of the shorter one.
    assert heaviest_groups([[0, 0], [0, 1], [2]], table, task, "padded")[0] == [0, 1]


def test_a_micro_batch_is_filled_up_to_its_budget(tmp_path: Path) -> None:
    with TokenTableWriter(tmp_path / "train.arrow") as writer:
        for length, supervised in ((30, 5), (40, 5), (20, 15), (7, 1), (3, 1)):
            writer.append(0, [9] * length, [(length - supervised, length)])
    table = open_split(tmp_path, "train")
    plan = StepPlan(table.lengths, seed=0, effective_batch_rows=2, num_epochs=1)
    longest, most_loss = extreme_rows(plan, table, 2)
    assert longest.tolist()[:2] == [1, 0]
    assert most_loss.tolist()[0] == 2
    language, pairs = get_task("causal_lm", pad_id=0), get_task("seq2seq_lm", pad_id=0, decoder_start_id=1)
    rows = np.array([1, 0, 2, 3, 4])
    assert full_group(rows, table, language, "packed", budget=75) == [1, 0, 4]
    assert full_group(rows, table, language, "packed", budget=10) == [1], "a longer row stands alone"
    assert full_group(rows, table, language, "padded", budget=119) == [1, 0]
    assert full_group(rows, table, pairs, "padded", budget=109) == [1, 0], "35 + 5 wide, then 35 + 15"


def test_ordinary_micro_batches_keep_their_proportions() -> None:
    lengths = np.array([10] * 20 + [1] * 10)
    groups = [[row] for row in range(30)]
    chosen = evenly_by_size(groups, lengths, most=6)
    assert sorted(int(lengths[group[0]]) for group in chosen) == [1, 1, 10, 10, 10, 10]
    assert len(evenly_by_size(groups, lengths, most=100)) == 30


def test_sampled_steps_are_steps_of_the_run(paths: TrainingPaths, settings: TrainingSettings) -> None:
    plan = step_plan_of(settings, open_split(paths.tokens, "train"))
    steps = sample_steps(plan, 3)
    assert [list(rows) for rows in steps] == [
        list(plan.rows_of_step(step)) for step in (0, round(1.5), plan.steps_per_epoch - 1)
    ]


def test_the_command_writes_an_error_that_can_be_read(
    paths: TrainingPaths, settings: TrainingSettings, tmp_path: Path
) -> None:
    settings = vary(settings, base={**settings.base, "name_or_path": str(tmp_path / "nowhere")})
    request, answer = tmp_path / "request.pickle", tmp_path / "answer.json"
    request.write_bytes(pickle.dumps(request_for(paths, settings)))
    assert main([str(request), str(answer)]) == 0
    read = ProbeAnswer(**json.loads(answer.read_text()))
    assert "nowhere" in (read.error or "")
    assert not read.finished
    assert read.points == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["full", "lora"])
def test_on_a_gpu_memory_grows_with_the_budget(paths: TrainingPaths, settings: TrainingSettings, method: str) -> None:
    settings = vary(settings, method=method, lora=LORA, device="cuda", compute_dtype="bfloat16")
    answer = run(request_for(paths, settings, budgets=[64, 128, 192]))
    peaks = [point.peak_memory_bytes or 0 for point in answer.points]
    assert peaks == sorted(peaks)
    assert peaks[0] > measure_model(set_up_model(settings).model, settings.train.trainer).weights
    assert all((point.predicted_total_bytes or 0) > peak for point, peak in zip(answer.points, peaks, strict=True))
