from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_tuning.batching.micro_batches import choose_batching, choose_micro_batch_tokens, split_rows


@pytest.mark.parametrize(
    ("asked", "device", "attention", "chosen"),
    [
        ("auto", "cpu", "auto", "packed"),
        ("auto", "cpu", "flash_attention_2", "padded"),
        ("auto", "cuda", "auto", "packed"),
        ("auto", "cuda", "sdpa", "padded"),
        ("auto", "cpu", "sdpa", "packed"),
        ("packed", "cuda", "sdpa", "packed"),
        ("padded", "cpu", "auto", "padded"),
    ],
)
def test_rows_are_packed_where_nothing_is_lost_by_it(asked: Any, device: str, attention: str, chosen: str):
    assert choose_batching(asked, device=device, attention=attention) == chosen


def test_the_size_of_a_micro_batch_goes_by_the_device():
    assert choose_micro_batch_tokens(None, device="cpu") == 512
    assert choose_micro_batch_tokens(None, device="cuda") == 8192
    assert choose_micro_batch_tokens(None, device="mps") == 512
    assert choose_micro_batch_tokens(100, device="cuda") == 100


def test_packed_rows_fill_the_fewest_micro_batches_evenly():
    lengths = [60, 50, 40, 30, 20, 10]
    groups = split_rows(range(6), lengths, budget_tokens=110, batching="packed")
    assert sorted(row for group in groups for row in group) == list(range(6))
    assert [sum(lengths[row] for row in group) for group in groups] == [110, 100]
    # Rows that only fit one way: 70 + 30 and 60 + 40, where the emptiest first would give 70 + 40.
    groups = split_rows(range(4), [70, 60, 40, 30], budget_tokens=100, batching="packed")
    assert sorted(map(sorted, groups)) == [[0, 3], [1, 2]]


def test_a_row_longer_than_the_budget_stands_alone():
    assert sorted(map(sorted, split_rows([7, 8, 9], [200, 30, 40], budget_tokens=100, batching="packed"))) == [
        [7],
        [8, 9],
    ]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(100, 300))
def test_packing_keeps_every_row_whole_and_within_the_budget(lengths: list[int], budget: int):
    groups = split_rows(range(len(lengths)), lengths, budget_tokens=budget, batching="packed")
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    sums = [sum(lengths[row] for row in group) for group in groups]
    assert all(0 < total <= budget for total in sums)
    assert len(sums) <= 2 * sum(lengths) / budget + 1, "no two of those that best fit makes would fit into one"
