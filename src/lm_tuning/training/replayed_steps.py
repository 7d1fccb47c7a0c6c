"""Run the steps of a training from CUDA graphs where there is one for them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from lm_tuning.batching.batch import MicroBatch, StepBatch

if TYPE_CHECKING:
    from lm_tuning.training.checkpoints.signals import StopRequest
    from lm_tuning.training.job import LoopSettings
    from lm_tuning.training.kernels.step_graph import StepGraphs
    from lm_tuning.training.step_log import StepLog


class ReplaysSteps:
    """Steps of a transformers Trainer that are replayed; stands before ``Trainer`` among the bases.

    Attributes:
        loop: its ``memory`` is told which step runs.
        step_log: numbers of the steps so far; time spent on recording is left out of them.
        stop: a signal's request to stop.
        accelerator: of the Trainer, which scales what is passed backward.
    """

    loop: LoopSettings
    step_log: StepLog
    stop: StopRequest
    accelerator: Any
    micro_batch_loss: Any
    _batch: StepBatch | None
    _step_loss: torch.Tensor | None
    _run_micro_batches: Any

    def _run_with_graphs(self, graphs: StepGraphs, model: torch.nn.Module, inputs: StepBatch) -> None:
        """Replay a step; run it without a graph, and record it where that is due, if none covers it."""
        phases = self.step_log.phases
        shape = graphs.find(inputs)
        if shape is not None:
            self.loop.memory.begin_step(inputs.step + 1)
            self.stop.acknowledge()
            # The backward pass is in it: nothing marks where that begins.
            phases.enter("forward")
            loss = graphs.replay(shape, inputs)
            phases.enter("optimizer")
            self.loop.memory.end_step()
            self._batch, self._step_loss = inputs, loss
            return
        is_due = graphs.begin_trial(inputs)
        self._run_micro_batches(model, inputs)
        if not is_due:
            return
        phases.leave()
        began = time.perf_counter()

        def run(micro_batch: MicroBatch, total: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.micro_batch_loss(model, micro_batch, total)
            self.accelerator.backward(loss)
            return loss

        assert self._step_loss is not None
        graphs.record(inputs, self._step_loss, run)
        self.step_log.paused(time.perf_counter() - began)
        phases.enter("optimizer")
