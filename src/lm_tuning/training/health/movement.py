"""Whether training changes anything: the loss of a row before the first step and after some."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lm_tuning.batching.held_out_loss import evaluating
from lm_tuning.batching.losses import PLAIN
from lm_tuning.batching.tasks.base import TrainingTask
from lm_tuning.runtime.precision import autocast
from lm_tuning.training.health.records import Finding
from lm_tuning.training.health.report import HealthReport

if TYPE_CHECKING:
    from lm_tuning.text.records import TokenRow
    from lm_tuning.training.settings import TrainingSettings

logger = logging.getLogger(__name__)

# Steps at the full learning rate, or as many more at a lower one, after which the loss is measured again.
FULL_STEPS = 20.0

# Relative change of the loss below which nothing was learned; twenty steps at 1e-7 change it a hundred times more.
UNMOVED = 1e-5

# Below this loss there is nothing left to learn, and it need not move.
NOTHING_LEFT_NATS = 1e-3


# Findings that say already why nothing moves.
_EXPLAINED_BY = ("learning-rate-tiny", "loss-not-finite", "gradient-not-finite", "fp16-overflows", "gradient-zero")


@dataclass
class Movement:
    """The loss of a row of the first step, to be measured again.

    Attributes:
        task: which logits carry loss.
        row: of the first step, the shortest.
        nats: its loss before step 1, per supervised token, or of the row.
        settings: of the training.
        summed_rates: of the steps so far.
        num_steps: steps so far.
        is_done: whether it was measured again; once per run.
    """

    task: TrainingTask
    row: TokenRow
    nats: float
    settings: TrainingSettings
    summed_rates: float = 0.0
    num_steps: int = 0
    is_done: bool = False

    def count(self, learning_rate: float, *, is_last: bool = False) -> bool:
        """Add the rate of a step, and say whether it is time to measure.

        Args:
            learning_rate: of the step.
            is_last: whether it is the run's last; a run that decays early is measured there, unless it is very short.
        """
        self.num_steps += 1
        self.summed_rates += learning_rate
        # In units of the peak, so that a warm-up or a decay counts as the part of a full step that it is.
        peak = self.settings.train.learning_rate
        is_time = self.summed_rates >= FULL_STEPS * peak or (is_last and self.num_steps >= FULL_STEPS)
        return is_time and not self.is_done

    def check(self, health: HealthReport, model: Any) -> None:
        """Measure again, and add a finding if the loss is where it was.

        Args:
            health: receives the fact and the finding.
            model: as trained by now.
        """
        self.is_done = True
        after = measure_nats(self.task, model, self.row, self.settings)
        unit = self.task.unit
        health.facts["shortest_row_before_and_after"] = {
            "step": self.num_steps,
            f"before_nats_per_{unit}": self.nats,
            f"after_nats_per_{unit}": after,
        }
        finding = check_movement(self.nats, after, num_steps=self.num_steps, row_id=self.row.row_id, unit=unit)
        # One cause, one finding: these say already why the weights stay.
        if finding is not None and not any(map(health.has, _EXPLAINED_BY)):
            health.add(finding)


def begin_movement(
    task: TrainingTask, model: Any, row: TokenRow, nats: float, settings: TrainingSettings
) -> Movement | None:
    """Keep a row and its loss; ``None`` where its loss says nothing.

    Args:
        task: which logits carry loss.
        model: before step 1.
        row: of the first step.
        nats: its loss, measured perhaps beside others of its length.
        settings: of the training.
    """
    if settings.device != "cpu" and math.isfinite(nats):
        # Kernels round otherwise for one row than for several, and it is alone when it is measured again.
        nats = measure_nats(task, model, row, settings)
    if not math.isfinite(nats) or nats < NOTHING_LEFT_NATS:
        return None
    return Movement(task, row, nats, settings)


@contextmanager
def measuring(settings: TrainingSettings) -> Iterator[None]:
    """Compute as training does, and leave the run's random numbers as they were.

    Args:
        settings: of the training: device and compute dtype.
    """
    # Without a list, the states of all visible GPUs are copied, and each of them gets a context for it.
    on_gpu = [torch.cuda.current_device()] if settings.device == "cuda" else []
    with torch.random.fork_rng(devices=on_gpu), autocast(settings.device, settings.compute_dtype):
        yield


def measure_nats(task: TrainingTask, model: Any, row: TokenRow, settings: TrainingSettings) -> float:
    """Measure the plain loss of a row, without the run's random numbers.

    Returns:
        Nats per supervised token, or of the row.
    """
    with evaluating(model), measuring(settings):
        logits, targets = task.logits_of_alike(model, [row], device=settings.device)  # (targets, classes), (targets,)
        return float(PLAIN.sum_nats(logits, targets)) / max(len(targets), 1)


def check_movement(before: float, after: float, *, num_steps: int, row_id: int, unit: str) -> Finding | None:
    """Compare the loss of a row before and after some steps.

    Args:
        before: nats before step 1.
        after: nats after ``num_steps`` steps.
        num_steps: steps in between.
        row_id: of the row.
        unit: ``token`` or ``row``.
    """
    # Relative to the loss: the same kernels measured the same row before, so rounding changes next to nothing.
    if not math.isfinite(after) or abs(after - before) > UNMOVED * before:
        return None
    return Finding(
        code="loss-does-not-move",
        measured=f"after {num_steps} steps row {row_id} of the first step has {after:.6f} nats per {unit}, and had "
        f"{before:.6f} before",
        expected="another loss: the row was trained on",
        cause="The updates do not reach the weights that are used, or are too small for their dtype.",
        change="Raise train.learning_rate; with 16-bit weights set model.dtype=float32 or train.method=lora; look at "
        "what the optimizer was given.",
    )
