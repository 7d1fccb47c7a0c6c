"""Losses as sums of nats, divided once by what a step supervises: tokens, or rows for a classifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from lm_tuning.text.store.table import IGNORE_INDEX


@dataclass(frozen=True)
class LossShape:
    """What is made of the negative log-likelihood while training; held-out losses are always plain.

    Attributes:
        label_smoothing: share of each target's probability that is spread over all classes.
        class_weights: weight of each class, mean 1 over the training rows, so that the loss of an uninformed model
            stays where it is; ``None`` for equal ones.

    Source:
        Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2016 (label smoothing).
    """

    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None

    @property
    def fits_chunks(self) -> bool:
        """Whether a head's loss in chunks computes it: nothing but label smoothing differs from the plain loss."""
        # By what is allowed, not by what is not: a new field goes through all logits until the chunks know it too.
        return self == type(self)(label_smoothing=self.label_smoothing)

    def sum_nats(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum the loss of targets.

        Args:
            logits: ``(*targets.shape, classes)``, any float type; computed with in float32.
            targets: class of each, ``IGNORE_INDEX`` for none.

        Returns:
            A scalar in nats, float32.
        """
        # (classes,), on the logits' device
        weights = None if self.class_weights is None else logits.new_tensor(self.class_weights, dtype=torch.float32)
        # Summed, not averaged: cross_entropy would divide by this micro-batch's weights, and the step divides once.
        return cross_entropy(
            logits.flatten(0, -2).float(),
            targets.flatten(),
            weight=weights,
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )


PLAIN = LossShape()


def balance_classes(counts: Any) -> tuple[float, ...]:
    """Weigh classes by how rare they are.

    Args:
        counts: training rows of each class, ``(classes,)``.

    Returns:
        Rows over classes with rows over the class's rows, so their mean over the rows is 1; 0 for a class without rows.
    """
    # Classes without rows must not pull the mean of the others down.
    total, num_used = sum(counts), sum(1 for count in counts if count)
    return tuple(total / (num_used * count) if count else 0.0 for count in counts)
