"""When memory runs out in the middle of training: split the steps further and do the same step again.

How a step is split never changes what it computes, so nothing is lost but the time of the failed attempt.
"""

from __future__ import annotations

import logging
import traceback
from dataclasses import dataclass

import torch

from lm_tuning.batching.batch import StepBatch
from lm_tuning.batching.step_loader import StepDataset
from lm_tuning.training.health.records import Finding
from lm_tuning.training.health.report import HealthReport
from lm_tuning.training.planning.out_of_memory import (
    MemoryUse,
    estimate_fitting_positions,
    is_out_of_memory,
    read_asked_bytes,
    read_memory,
)

logger = logging.getLogger(__name__)


@dataclass
class Replanner:
    """Lowers the budget of a micro-batch when a step did not fit.

    Attributes:
        steps: the run's steps; their budget is lowered.
        memory: what the training asks of the memory.
        health: receives a finding for each time.
        may_lower: whether the budget is ours to choose; a number that the user set is kept, and the run ends.
    """

    steps: StepDataset
    memory: MemoryUse
    health: HealthReport
    may_lower: bool

    def lower(self, error: BaseException) -> bool:
        """Lower the budget after an error, if it was for lack of memory and a smaller budget is left.

        Args:
            error: raised by a step's forward or backward pass. Its frames are cleared, since they hold the failed
                step's tensors.

        Returns:
            Whether the step should be done again.
        """
        longest = self.memory.longest_row_tokens
        budget = self.steps.micro_batch_tokens
        if not self.may_lower or not is_out_of_memory(error) or budget <= longest:
            return False
        asked = read_asked_bytes(error)
        fitting = estimate_fitting_positions(self.memory, read_memory(self.memory.device), asked_bytes=asked)
        # At least a quarter less each time, so that a wrong estimate ends soon; never less than the longest row.
        new = max(min(fitting or budget // 2, budget * 3 // 4), longest)
        where, micro_batch = self.memory.doing, self.memory.micro_batch
        traceback.clear_frames(error.__traceback__)
        self.steps.micro_batch_tokens = self.memory.micro_batch_tokens = new
        positions = f" with {micro_batch.num_positions:,} positions in the model" if micro_batch is not None else ""
        self.health.add(
            Finding(
                code="memory-ran-out",
                measured=f"memory ran out {where}{positions}",
                expected=f"micro-batches of {budget:,} tokens fit",
                cause="Other rows were longer than those tried, or something else took memory.",
                change=f"Nothing has to be changed: steps are split to {new:,} tokens from here on, which changes "
                f"their memory and speed alone. train.micro_batch_tokens={new} does so from the start.",
            )
        )
        return True

    def split_again(self, batch: StepBatch) -> StepBatch:
        """Split a step again that was prepared before the budget changed."""
        return batch if batch.micro_batch_tokens == self.steps.micro_batch_tokens else self.steps[batch.step]


def release(model: torch.nn.Module) -> None:
    """Let go of what a failed step left: gradients, and memory that the allocator kept in the wrong sizes."""
    model.zero_grad(set_to_none=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
