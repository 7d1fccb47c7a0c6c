"""What an optimizer cannot do on a device is said."""

from __future__ import annotations

import pytest

from lm_tuning.runtime.backend import describe_optimizer_limit


def test_paging_without_a_gpu_is_said_to_be_none() -> None:
    text = describe_optimizer_limit("paged_adamw_8bit", device="cpu")
    assert text is not None
    assert "train.trainer.optim = paged_adamw_8bit" in text and "runs on the CPU" in text and "adamw_8bit" in text


@pytest.mark.parametrize(
    ("name", "device"), [(None, "cpu"), ("adamw_8bit", "cpu"), ("adamw_torch", "cpu"), ("paged_adamw_8bit", "cuda")]
)
def test_nothing_is_said_where_an_optimizer_does_what_it_is_called(name: str | None, device: str) -> None:
    assert describe_optimizer_limit(name, device=device) is None
