"""Micro-batches: exactly which ids are trained, however a step is split."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_tuning.batching.batch import StepBatch
from lm_tuning.batching.micro_batches import split_pairs, split_rows
from lm_tuning.batching.step_loader import StepDataset, StepLoader
from lm_tuning.batching.step_plan import StepPlan
from lm_tuning.batching.tasks.registry import get_task
from lm_tuning.text.store.table import IGNORE_INDEX, TokenTable, TokenTableWriter
from tests.support.patience import PATIENCE_SECONDS

TASK = get_task("causal_lm", pad_id=2)


@pytest.fixture
def table(tmp_path: Path) -> TokenTable:
    """Two rows: all but the first token supervised, and two separate turns."""
    with TokenTableWriter(tmp_path / "train.arrow") as writer:
        writer.append(11, [1, 5, 6, 2], [(0, 4)])
        writer.append(12, [1, 9, 2, 8, 2], [(1, 2), (4, 5)])
    return TokenTable(tmp_path / "train.arrow")


def test_packed_rows_score_nothing_across_their_border(table: TokenTable) -> None:
    batch = TASK.lay_out(table, [0, 1], batching="packed")
    assert batch.input_ids.tolist() == [[1, 5, 6, 2, 1, 9, 2, 8, 2]]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4]]
    # Position 3, the end of the first row, predicts nothing: the next id belongs to another row.
    assert batch.kept_positions.tolist() == [0, 1, 2, 4, 7]
    assert batch.targets.tolist() == [[5, 6, 2, 9, 2]]
    assert (batch.num_supervised, batch.num_tokens, batch.num_positions) == (5, 9, 9)


def test_padded_rows_keep_their_own_eos_when_pad_is_eos(table: TokenTable) -> None:
    batch = TASK.lay_out(table, [0, 1], batching="padded")
    assert batch.input_ids.tolist() == [[1, 5, 6, 2, 2], [1, 9, 2, 8, 2]]
    assert batch.position_ids is None
    assert batch.kept_positions.tolist() == [0, 1, 2, 3]
    ignored = IGNORE_INDEX
    assert batch.targets.tolist() == [[5, 6, 2, ignored], [9, ignored, ignored, 2]]
    assert (batch.num_supervised, batch.num_tokens, batch.num_positions) == (5, 9, 10)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    budget=st.integers(1, 100),
    batching=st.sampled_from(["packed", "padded"]),
)
def test_cutting_positions_every_row_once_within_the_budget(lengths: list[int], budget: int, batching: str) -> None:
    groups = split_rows(range(len(lengths)), lengths, budget_tokens=budget, batching=batching)  # type: ignore[arg-type]
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[row] for row in group)
        slots = sum(lengths[row] for row in group) if batching == "packed" else longest * len(group)
        assert len(group) == 1 or slots <= budget


@given(
    pairs=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=40),
    budget=st.integers(1, 200),
)
def test_cutting_pairs_counts_the_padding_of_both_sides(pairs: list[tuple[int, int]], budget: int) -> None:
    sources, targets = zip(*pairs, strict=True)
    groups = split_pairs(range(len(pairs)), sources, targets, budget_tokens=budget)
    assert sorted(row for group in groups for row in group) == list(range(len(pairs)))
    for group in groups:
        slots = len(group) * (max(sources[row] for row in group) + max(targets[row] for row in group))
        assert len(group) == 1 or slots <= budget


def test_first_fit_fills_gaps() -> None:
    assert split_rows([0, 1, 2, 3], [6, 6, 4, 4], budget_tokens=10, batching="packed") == [[0, 2], [1, 3]]


def test_a_step_holds_the_rows_of_the_plan_and_counts_them_once(table: TokenTable) -> None:
    plan = StepPlan(table.lengths, seed=0, effective_batch_rows=2, num_epochs=1)
    whole = StepDataset(table, plan, TASK, micro_batch_tokens=100, batching="packed")[0]
    cut = StepDataset(table, plan, TASK, micro_batch_tokens=5, batching="padded")[0]
    assert sorted(whole.row_ids) == sorted(cut.row_ids) == [11, 12]
    assert (len(whole.micro_batches), len(cut.micro_batches)) == (1, 2)
    assert whole.num_supervised == cut.num_supervised == 5
    assert whole.num_tokens == cut.num_tokens == int(np.sum(table.lengths))


def start_worker(table: TokenTable) -> tuple[Iterator[StepBatch], Any]:
    """Begin a run of twelve steps and take the first; return the others and the process that builds them."""
    plan = StepPlan(table.lengths, seed=0, effective_batch_rows=2, max_steps=12)
    steps = StepDataset(table, plan, TASK, micro_batch_tokens=5, batching="packed")
    batches = iter(StepLoader(steps, start_step=0, num_workers=1, pin_memory=False, prefetch_factor=1))
    next(batches)
    [worker] = multiprocessing.active_children()
    return batches, worker


def test_a_worker_outlives_one_signal_and_not_two(table: TokenTable) -> None:
    batches, worker = start_worker(table)

    def send(number: signal.Signals) -> None:  # the kill of another process: PyTorch takes one of the parent as the end
        subprocess.run(["kill", f"-{number.value}", str(worker.pid)], check=True)

    send(signal.SIGINT)
    send(signal.SIGTERM)
    assert len(list(batches)) == 11, "all that are left"
    assert worker.is_alive()
    send(signal.SIGTERM)
    worker.join(timeout=PATIENCE_SECONDS)
    assert worker.exitcode == 0, "which PyTorch does not take for a crash"


def test_a_worker_ends_when_its_training_ends_it(table: TokenTable) -> None:
    """So does Python with the workers of a program that ends."""
    _batches, worker = start_worker(table)
    worker.terminate()
    worker.join(timeout=PATIENCE_SECONDS)
    assert worker.exitcode == 0


def test_worker_processes_see_that_the_budget_changed(table: TokenTable) -> None:
    plan = StepPlan(table.lengths, seed=0, effective_batch_rows=2, max_steps=12)
    steps = StepDataset(table, plan, TASK, micro_batch_tokens=5, batching="packed")
    batches = iter(StepLoader(steps, start_step=0, num_workers=1, pin_memory=False, prefetch_factor=1))
    first = next(batches)
    steps.micro_batch_tokens = 100
    *_, last = batches
    assert (first.micro_batch_tokens, len(first.micro_batches)) == (5, 2)
    assert (last.micro_batch_tokens, len(last.micro_batches)) == (100, 1)
    assert last.num_supervised == first.num_supervised == 5
