"""The best held-out figure of a run, and which way is better."""

from __future__ import annotations

import math
from dataclasses import dataclass

HIGHER_IS_BETTER = {"nats_per_token": False, "nats_per_row": False, "accuracy": True, "macro_f1": True}
"""Every figure that a checkpoint can be the best by, and which way is better."""


@dataclass
class BestCheckpoint:
    """The best held-out figure seen so far.

    Attributes:
        metric: which figure.
        value: the best one; ``None`` before the first evaluation.
        step: optimizer step that it was measured after.
    """

    metric: str
    value: float | None = None
    step: int = 0

    def is_beaten_by(self, value: float) -> bool:
        """Say whether another figure is better; one that is not a number never is."""
        if math.isnan(value):
            return False
        if self.value is None:
            return True
        return value > self.value if HIGHER_IS_BETTER[self.metric] else value < self.value
