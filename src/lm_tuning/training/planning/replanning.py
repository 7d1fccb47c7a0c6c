"""Split the steps otherwise in the middle of a training: larger once layers are compiled, smaller when memory runs out.

How a step is split never changes what it computes, so nothing is lost but the time of the failed attempt.

The planner measures the model as it is, since compiling takes longer than all its measurements. Compiled layers take a
fifth to a quarter less memory, and other sizes are fastest for them. So a training that has compiled its layers, and
has not made its first step, goes on from the planned size upwards: the same measurements, of the model that it will
run. What they choose is kept beside the plan.
"""

from __future__ import annotations

import logging
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lm_tuning.batching.batch import StepBatch
from lm_tuning.batching.step_loader import StepDataset
from lm_tuning.runtime.memory_errors import is_out_of_memory
from lm_tuning.training.health.records import Finding
from lm_tuning.training.health.report import HealthReport
from lm_tuning.training.planning.out_of_memory import (
    MemoryUse,
    estimate_fitting_positions,
    read_asked_bytes,
    read_memory,
)
from lm_tuning.training.planning.plan import (
    SAME_SPEED,
    BatchPlan,
    choose_point,
    explain_choice,
    keep_plan,
    list_budgets,
    read_plan,
)
from lm_tuning.training.planning.probe import BudgetProbe, try_budget
from lm_tuning.training.planning.records import ProbeAnswer, ProbePoint

if TYPE_CHECKING:
    from lm_tuning.training.settings import TrainingSettings
    from lm_tuning.training.setup.model import ReadyModel

logger = logging.getLogger(__name__)

_SPEED_SECONDS = 1.0


@dataclass
class CompiledPlanner:
    """Changes how the steps of a training are split, upwards only.

    Attributes:
        ready: model and task, as they are trained.
        settings: of the training.
        steps: the run's steps; their budget is raised.
        memory: what the training asks of the memory; kept true.
        health: its fact of the first step's micro-batches is kept true.
        plan: by which the steps are split; afterwards the one that was chosen.
    """

    ready: ReadyModel
    settings: TrainingSettings
    steps: StepDataset
    memory: MemoryUse
    health: HealthReport
    plan: BatchPlan

    def take(self, *, optimizer_is_made: bool) -> None:
        """Measure from the planned size upwards until nothing is gained, and take what is fastest.

        Gradients are thrown away, and the run's random state is left as it was. A plan that was not measured stays.

        Args:
            optimizer_is_made: whether the optimizer's state is in memory already, as after a resume.
        """
        # Where nothing could be measured something is unusual, and a training is not the place to find out what.
        if not any(point.outcome == "measured" for point in self.plan.curve):
            return
        # Weights in 8 bits take other memory and time.
        kind = ".fp8.json" if self.settings.train.fp8 else ".compiled.json"
        file = Path(self.plan.file).with_suffix(kind) if self.plan.file else None
        known = read_plan(file, read_memory(self.settings.device)) if file else None
        # A plan that went on from other measurements than these is another one.
        if known is not None and known.curve[: len(self.plan.curve)] == self.plan.curve:
            self._use(replace(known, cached=True, seconds=self.plan.seconds, file=self.plan.file))
            return
        began = time.time()
        on_gpu = [torch.cuda.current_device()] if self.settings.device == "cuda" else []
        # The passes draw dropout, which must not move the random state that the run goes on with.
        with torch.random.fork_rng(devices=on_gpu):
            answer = self._measure(optimizer_is_made)
        self.ready.model.zero_grad(set_to_none=True)
        choice = choose_point(answer.points)
        if choice is None or not choice.fits:
            return
        plan = replace(
            self.plan,
            micro_batch_tokens=choice.micro_batch_tokens,
            curve=[*self.plan.curve, *answer.points],
            facts={**self.plan.facts, "peaks_hold_optimizer": optimizer_is_made},
            reason=f"{explain_choice(choice, answer)}, with compiled layers",
            seconds=self.plan.seconds + time.time() - began,
            cached=False,
        )
        if file is not None:
            keep_plan(file, plan)
        self._use(plan)

    def _measure(self, optimizer_is_made: bool) -> ProbeAnswer:
        """Measure sizes that a step can fill, the planned one first."""
        planned, checkpointing = self.plan.micro_batch_tokens, self.plan.gradient_checkpointing
        probe = BudgetProbe(self.ready, self.settings, self.steps.table, self.steps.batching)
        # It is among the measured bytes then, and would be added once more.
        if optimizer_is_made:
            probe.held = replace(probe.held, optimizer_state=0)
        answer = ProbeAnswer(facts=self.plan.facts)
        fastest = 0.0
        budgets, _ = list_budgets(self.settings, self.steps.table, self.steps.plan)
        # Upwards only: the planned size fits without compiled layers, which take more.
        for budget in [planned, *(size for size in budgets if size > planned)]:
            point = ProbePoint(budget, checkpointing, "predicted", compiled=True)
            try_budget(probe, answer, point, seconds=_SPEED_SECONDS)
            if not point.fits or SAME_SPEED * (point.tokens_per_second or 0.0) < fastest:
                break
            fastest = max(fastest, point.tokens_per_second or 0.0)
        return answer

    def _use(self, plan: BatchPlan) -> None:
        """Split the steps by a plan from here on."""
        before, tokens = self.plan.micro_batch_tokens, plan.micro_batch_tokens
        self.plan = plan
        if tokens != before:
            self.steps.micro_batch_tokens = self.memory.micro_batch_tokens = tokens
            # After a resume, step 1 was split by another process.
            if "first_step_micro_batches" in self.health.facts and "resumed_from_step" not in self.health.facts:
                self.health.facts["first_step_micro_batches"] = len(self.steps[0].micro_batches)
        logger.info(
            "Micro-batches: %s%s.",
            plan.reason,
            f" (planned without: {before:,})" if tokens != before else ", as planned without",
        )


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
