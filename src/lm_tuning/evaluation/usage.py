"""What measuring a model takes: the memory of its weights, and the tokens that it gets through in a second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Usage:
    """What one model took.

    Attributes:
        weights_bytes: memory of the weights, scales of quantized ones included.
        loss_tokens_per_second: tokens of the rows whose loss was measured; ``None`` without rows.
        answer_tokens_per_second: tokens of all answers together; ``None`` without answers.
    """

    weights_bytes: int
    loss_tokens_per_second: float | None
    answer_tokens_per_second: float | None


class Stopwatch:
    """Measures the time of parts of a measurement, until the device is done with them."""

    def __init__(self, device: str) -> None:
        """Begin with no time.

        Args:
            device: where the model lies.
        """
        self._device = device
        self._seconds = {"loss": 0.0, "answers": 0.0}

    @contextmanager
    def timing(self, part: Literal["loss", "answers"]) -> Iterator[None]:
        """Add the time of the block."""
        began = time.perf_counter()
        yield
        if self._device == "cuda":
            torch.cuda.synchronize()
        self._seconds[part] += time.perf_counter() - began

    def speed(self, part: Literal["loss", "answers"], num_tokens: int) -> float | None:
        """Return tokens per second; ``None`` where there were none.

        Args:
            part: of the measurement.
            num_tokens: that it got through.
        """
        seconds = self._seconds[part]
        return num_tokens / seconds if num_tokens and seconds else None
