"""What a training's memory goes into, part by part: counted where it can be, measured or estimated where not."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lm_tuning.training.planning.memory import ModelBytes, estimate_activations, measure_model

if TYPE_CHECKING:
    from lm_tuning.training.planning.plan import BatchPlan
    from lm_tuning.training.settings import TrainingSettings

logger = logging.getLogger(__name__)

REST = "allocator and other programs"
"""What a card has given out beyond the tensors that are known: unused blocks, CUDA's own, other programs."""

_GIB = 2**30


@dataclass(frozen=True)
class MemoryParts:
    """What a model holds in training.

    Attributes:
        held: weights, buffers, gradients and optimizer state, in bytes.
        activations: estimated bytes of a micro-batch of the planned size, for where no plan has measured them.
    """

    held: ModelBytes
    activations: int

    def complete(self, plan: BatchPlan) -> BatchPlan:
        """Return a plan with the table of its memory.

        Args:
            plan: measured or not.
        """
        return replace(plan, memory=self.table(plan))

    def table(self, plan: BatchPlan) -> list[dict[str, Any]]:
        """Return one row a part: ``part``, ``bytes`` and ``source`` (``counted``, ``measured`` or ``estimated``).

        Args:
            plan: measured or not. Of a measured one the activations are what the heaviest micro-batch held besides the
                parts that are counted, and the rest is what the device had given out beyond that.
        """
        held, choice = self.held, plan.choice
        counted = {
            "weights": held.weights,
            "buffers": held.buffers,
            "gradients": held.gradients,
            "optimizer state": held.optimizer_state,
        }
        rows: list[dict[str, Any]] = [
            {"part": part, "bytes": size, "source": "counted"} for part, size in counted.items()
        ]
        if choice is None or choice["peak_memory_bytes"] is None:
            return [*rows, {"part": "activations", "bytes": self.activations, "source": "estimated"}]
        optimizer = held.optimizer_state if choice["compiled"] and plan.facts.get("peaks_hold_optimizer") else 0
        fixed = held.weights + held.buffers + held.gradients + optimizer
        activations = max(choice["peak_memory_bytes"] - fixed, 0)
        rows.append({"part": "activations", "bytes": activations, "source": "measured"})
        rest = (choice["predicted_total_bytes"] or 0) - sum(row["bytes"] for row in rows)
        return [*rows, {"part": REST, "bytes": rest, "source": "measured"}] if rest > 0 else rows


def count_memory(model: Any, settings: TrainingSettings) -> MemoryParts:
    """Count what a model holds, and say it.

    Args:
        model: as it will be trained, before the first step.
        settings: with micro-batches and checkpointing settled.
    """
    estimate = estimate_activations(model, settings)
    assert settings.micro_batch_tokens is not None, "it is settled before a model is loaded"
    return MemoryParts(
        measure_model(
            model,
            optimizer=settings.trainer.get("optim"),
            optimizer_args=settings.trainer.get("optim_args") or "",
        ),
        estimate.total(settings.micro_batch_tokens, activation_checkpointing=bool(settings.activation_checkpointing)),
    )


def say_memory(table: list[dict[str, Any]]) -> None:
    """Log a table of memory in one line.

    Args:
        table: see :meth:`MemoryParts.table`.
    """
    parts = [
        f"{row['part']} {row['bytes'] / _GIB:.2f}{' (estimated)' if row['source'] == 'estimated' else ''}"
        for row in table
    ]
    logger.info("Memory in GiB: %s; %.2f in all.", ", ".join(parts), sum(row["bytes"] for row in table) / _GIB)
