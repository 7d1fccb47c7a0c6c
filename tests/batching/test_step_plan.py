"""The step plan: every row once per epoch, the same number of steps every epoch, and nothing but the seed decides."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_tuning.batching.step_plan import StepPlan, cut_at_limit, split_fullest
from lm_tuning.errors import UserError

LENGTHS = [5, 9, 3, 7, 7, 2, 8, 6, 4, 1]


def rows_of_epoch(plan: StepPlan, epoch: int) -> list[list[int]]:
    first = epoch * plan.steps_per_epoch
    return [plan.rows_of_step(step).tolist() for step in range(first, first + plan.steps_per_epoch)]


def test_rows_batch_has_the_rest_in_its_last_step() -> None:
    plan = StepPlan(LENGTHS, seed=1, effective_batch_rows=4, num_epochs=2)
    assert (plan.steps_per_epoch, plan.total_steps) == (3, 6)
    assert [len(rows) for rows in rows_of_epoch(plan, 0)] == [4, 4, 2]


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    limit=st.integers(1, 120),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
)
def test_token_batches_use_every_row_once_and_keep_the_limit(
    lengths: list[int], limit: int, seed: int, epoch: int
) -> None:
    plan = StepPlan(lengths, seed=seed, effective_batch_tokens=limit, num_epochs=4)
    steps = rows_of_epoch(plan, epoch)
    assert sorted(row for rows in steps for row in rows) == list(range(len(lengths)))
    assert all(rows for rows in steps)
    assert all(len(rows) == 1 or sum(lengths[row] for row in rows) <= limit for rows in steps)


def test_epochs_differ_and_repeat_with_the_seed() -> None:
    plan = StepPlan(range(1, 101), seed=3, effective_batch_rows=10, num_epochs=2)
    again = StepPlan(range(1, 101), seed=3, effective_batch_rows=10, num_epochs=2)
    other = StepPlan(range(1, 101), seed=4, effective_batch_rows=10, num_epochs=2)
    assert rows_of_epoch(plan, 0) == rows_of_epoch(again, 0)
    assert rows_of_epoch(plan, 0) != rows_of_epoch(plan, 1)
    assert rows_of_epoch(plan, 0) != rows_of_epoch(other, 0)


def test_a_copy_in_another_process_draws_the_same_steps() -> None:
    plan = StepPlan(LENGTHS, seed=1, effective_batch_tokens=12, num_epochs=3)
    copy = pickle.loads(pickle.dumps(plan))
    assert rows_of_epoch(copy, 2) == rows_of_epoch(plan, 2)


def test_max_steps_caps_the_epochs() -> None:
    assert StepPlan(LENGTHS, seed=1, effective_batch_rows=4, num_epochs=2, max_steps=5).total_steps == 5
    assert StepPlan(LENGTHS, seed=1, effective_batch_rows=4, num_epochs=2, max_steps=50).total_steps == 6
    assert StepPlan(LENGTHS, seed=1, effective_batch_rows=4, max_steps=50).total_steps == 50


def test_digest_tells_effective_batches_apart_but_not_run_lengths() -> None:
    plan = StepPlan(LENGTHS, seed=1, effective_batch_rows=4, num_epochs=2)
    assert plan.digest() == StepPlan(LENGTHS, seed=1, effective_batch_rows=4, num_epochs=3).digest()
    for other in (
        StepPlan(LENGTHS, seed=1, effective_batch_rows=8, num_epochs=2),
        StepPlan(LENGTHS, seed=2, effective_batch_rows=4, num_epochs=2),
        StepPlan(LENGTHS[:-1], seed=1, effective_batch_rows=4, num_epochs=2),
    ):
        assert other.digest() != plan.digest()


def test_problems_are_reported_together() -> None:
    with pytest.raises(UserError) as caught:
        StepPlan([], seed=1, effective_batch_rows=4, effective_batch_tokens=9)
    assert len(caught.value.problems) == 3
    assert "effective_batch_rows" in str(caught.value)


def test_three_million_rows_are_planned_without_a_loop_over_rows() -> None:
    lengths = np.random.default_rng(0).integers(30, 287, 3_000_000)
    plan = StepPlan(lengths, seed=0, effective_batch_tokens=65_536, num_epochs=1)
    step = plan.rows_of_step(100)
    assert lengths[step].sum() <= 65_536
    assert lengths[step].sum() > 65_536 - 287


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=200),
    limit=st.integers(1, 400),
)
def test_steps_are_filled_in_order_up_to_the_limit(lengths: list[int], limit: int) -> None:
    bounds, tokens = [0], 0
    for row, length in enumerate(lengths):
        if row > bounds[-1] and tokens + length > limit:
            bounds.append(row)
            tokens = 0
        tokens += length
    assert cut_at_limit(np.cumsum(lengths), limit).tolist() == [*bounds, len(lengths)]


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=30), more=st.integers(0, 60))
def test_the_fullest_steps_are_split_one_after_another(sizes: list[int], more: int) -> None:
    num_steps = min(len(sizes) + more, sum(sizes))
    expected = list(sizes)
    while len(expected) < num_steps:
        at = expected.index(max(expected))
        expected[at : at + 1] = [expected[at] // 2, expected[at] - expected[at] // 2]
    bounds = split_fullest(np.cumsum([0, *sizes]), num_steps)
    assert np.diff(bounds).tolist() == expected
