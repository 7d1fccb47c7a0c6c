"""Mixtures: every source gives exactly its weight in rows to every epoch, and weights of 1 change nothing."""

from __future__ import annotations

import pickle
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_tuning.batching.step_plan import SourceMix, StepPlan
from lm_tuning.errors import UserError

WEIGHTS = st.sampled_from([0.1, 0.3, 0.5, 0.75, 1.0, 1.1, 1.5, 2.0, 2.3, 3.0])

DIGEST = "308a9f7bdc8f1d45"
ORDER_BY_EPOCH = [
    [[8, 4], [7, 0], [1, 2], [5, 9, 6], [3]],
    [[7], [6, 2, 9], [0, 3], [5, 1], [4, 8]],
    [[7, 2, 5], [1], [4, 8], [6, 9], [3, 0]],
]


def rows_of_epoch(plan: StepPlan, epoch: int) -> list[int]:
    first = epoch * plan.steps_per_epoch
    return [row for step in range(first, first + plan.steps_per_epoch) for row in plan.rows_of_step(step).tolist()]


@st.composite
def mixtures(draw: st.DrawFn) -> dict[str, Any]:
    """Rows of up to four sources in any order, at least one row of a weight of 1 or more."""
    weights = [draw(st.sampled_from([1.0, 1.5, 2.0])), *draw(st.lists(WEIGHTS, max_size=3))]
    sources = [0, *draw(st.lists(st.integers(0, len(weights) - 1), max_size=60))]
    lengths = draw(st.lists(st.integers(1, 50), min_size=len(sources), max_size=len(sources)))
    size = draw(st.sampled_from(["effective_batch_rows", "effective_batch_tokens"]))
    return {
        "lengths": lengths,
        "sources": sources,
        "weights": weights,
        "seed": draw(st.integers(0, 5)),
        size: draw(st.integers(1, 120)),
    }


@given(mixture=mixtures(), epoch=st.integers(0, 3))
def test_every_epoch_holds_each_row_as_often_as_its_weight_says(mixture: dict[str, Any], epoch: int) -> None:
    plan = StepPlan(**mixture, num_epochs=4)
    repeats = Counter(rows_of_epoch(plan, epoch))
    for source, weight in enumerate(mixture["weights"]):
        rows = [row for row, of in enumerate(mixture["sources"]) if of == source]
        exact = Fraction(str(weight)) * len(rows)
        counts = Counter(repeats[row] for row in rows)
        whole = int(weight)
        num_more = sum(repeats[row] for row in rows) - whole * len(rows)
        assert abs(whole * len(rows) + num_more - exact) <= Fraction(1, 2)
        expected = Counter({whole: len(rows) - num_more, whole + 1: num_more})
        assert counts == +expected
        assert plan.mix.rows_per_epoch[source] == whole * len(rows) + num_more
    assert repeats.total() == plan.rows_per_epoch == plan.mix.rows_per_epoch.sum()


@given(mixture=mixtures())
def test_every_epoch_has_the_same_number_of_steps_within_the_limit(mixture: dict[str, Any]) -> None:
    plan = StepPlan(**mixture, num_epochs=5)
    assert plan.total_steps == 5 * plan.steps_per_epoch
    limit = mixture.get("effective_batch_tokens")
    for step in range(plan.total_steps):
        rows = plan.rows_of_step(step)
        assert len(rows) > 0
        if limit is not None:
            assert len(rows) == 1 or sum(mixture["lengths"][row] for row in rows) <= limit
    if limit is None:
        assert plan.steps_per_epoch == -(-plan.rows_per_epoch // mixture["effective_batch_rows"])


@given(mixture=mixtures())
def test_weights_of_one_change_neither_order_nor_digest(mixture: dict[str, Any]) -> None:
    sources, weights = mixture.pop("sources"), mixture.pop("weights")
    without = StepPlan(**mixture, num_epochs=3)
    with_ones = StepPlan(**mixture, num_epochs=3, sources=sources, weights=[1] * len(weights))
    assert with_ones.digest() == without.digest()
    assert with_ones.total_steps == without.total_steps
    for step in range(without.total_steps):
        assert with_ones.rows_of_step(step).tolist() == without.rows_of_step(step).tolist()


def test_the_digest_and_order_of_earlier_versions_stay() -> None:
    plan = StepPlan([5, 9, 3, 7, 7, 2, 8, 6, 4, 1], seed=1, effective_batch_tokens=12, num_epochs=3)
    assert plan.digest() == DIGEST
    for epoch, steps in enumerate(ORDER_BY_EPOCH):
        assert [plan.rows_of_step(5 * epoch + step).tolist() for step in range(plan.steps_per_epoch)] == steps


def test_weights_by_hand() -> None:
    sources = [0] * 5 + [1] * 4 + [2] * 3
    mix = SourceMix(sources, [2.3, 0.5, 1])
    assert mix.num_rows.tolist() == [5, 4, 3]
    assert mix.rows_per_epoch.tolist() == [12, 2, 3]  # 2.3 x 5 = 11.5, a half goes up
    drawn = mix.draw_rows(np.random.default_rng(0))
    assert Counter(Counter(drawn[drawn < 5].tolist()).values()) == {3: 2, 2: 3}
    assert Counter(drawn[drawn >= 9].tolist()) == {9: 1, 10: 1, 11: 1}
    assert mix.count(drawn).tolist() == [12, 2, 3]


def test_half_of_a_source_is_another_half_each_epoch() -> None:
    plan = StepPlan([1] * 100, seed=3, effective_batch_rows=10, num_epochs=9, sources=[0] * 100, weights=[0.5])
    assert (plan.rows_per_epoch, plan.steps_per_epoch, plan.total_steps) == (50, 5, 45)
    epochs = [set(rows_of_epoch(plan, epoch)) for epoch in range(9)]
    assert all(len(rows) == 50 for rows in epochs)
    assert len({frozenset(rows) for rows in epochs}) == 9
    assert set.union(*epochs) == set(range(100))


def test_rows_are_counted_up_to_any_step() -> None:
    sources = [0] * 6 + [1] * 4
    plan = StepPlan(range(1, 11), seed=2, effective_batch_tokens=15, num_epochs=3, sources=sources, weights=[0.5, 2])
    for num_steps in range(plan.total_steps + 1):
        rows = [row for step in range(num_steps) for row in plan.rows_of_step(step).tolist()]
        expected = [sum(sources[row] == source for row in rows) for source in (0, 1)]
        assert plan.rows_by_source(num_steps).tolist() == expected
    assert plan.rows_by_source(plan.total_steps).tolist() == [9, 24]


def test_a_copy_in_another_process_mixes_the_same() -> None:
    plan = StepPlan(
        range(1, 31), seed=1, effective_batch_tokens=40, max_steps=50, sources=[0, 1] * 15, weights=[1.5, 1]
    )
    copy = pickle.loads(pickle.dumps(plan))
    assert rows_of_epoch(copy, 2) == rows_of_epoch(plan, 2)
    assert copy.digest() == plan.digest()


def test_the_digest_tells_mixtures_apart() -> None:
    def digest(sources: list[int], weights: list[float]) -> str:
        return StepPlan([3] * 4, seed=1, effective_batch_rows=2, max_steps=1, sources=sources, weights=weights).digest()

    digests = {digest([0, 0, 1, 1], weights) for weights in ([1, 1], [2, 1], [1, 2], [1, 1.5])}
    digests |= {digest([0, 1, 1, 1], [2, 1]), digest([0, 0, 0, 0], [2])}
    assert len(digests) == 6
    assert digest([0, 0, 1, 1], [2.0, 1]) == digest([0, 0, 1, 1], [2, 1.0])


def test_weights_that_leave_no_row_are_refused() -> None:
    with pytest.raises(UserError, match=r"weights of data.path \(0.1, 0.2\) leave none of the 3 training rows"):
        StepPlan([1, 2, 3], seed=1, effective_batch_rows=2, max_steps=4, sources=[0, 0, 1], weights=[0.1, 0.2])


def test_what_is_reported_of_each_source() -> None:
    mix = SourceMix([0, 0, 0, 1], [2, 0.5])
    sources = [{"path": "a.jsonl", "weight": 2, "num_rows": 5}, {"path": "b/*.csv", "weight": 0.5}]
    assert mix.describe(sources, np.array([15, 2])) == [
        {"path": "a.jsonl", "weight": 2, "num_rows": 3, "rows_per_epoch": 6, "num_rows_trained": 15},
        {"path": "b/*.csv", "weight": 0.5, "num_rows": 1, "rows_per_epoch": 1, "num_rows_trained": 2},
    ]
