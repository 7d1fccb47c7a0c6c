from __future__ import annotations

from typing import Any

import pytest

from lm_tuning.training.cutting import choose_batching, choose_micro_batch_tokens


@pytest.mark.parametrize(
    ("asked", "device", "attention", "chosen"),
    [
        ("auto", "cpu", "auto", "packed"),
        ("auto", "cpu", "flash_attention_2", "padded"),
        ("auto", "cuda", "auto", "padded"),
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
