"""Keep what the host does for a step short: replay it from a CUDA graph, and pass over the model's modules once.

A model of thirty layers with adapters has thousands of modules. Going through them for their parameters takes two
milliseconds, which the Trainer does several times a step: as long as a fifth of a small step that is replayed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
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

    args: Any
    loop: LoopSettings
    step_log: StepLog
    stop: StopRequest
    accelerator: Any
    micro_batch_loss: Any
    _batch: StepBatch | None
    _step_loss: torch.Tensor | None
    _run_micro_batches: Any
    _trained: list[torch.nn.Parameter] | None = None

    def _run_with_graphs(self, graphs: StepGraphs, model: torch.nn.Module, inputs: StepBatch) -> None:
        """Replay a step; run it without a graph, and record it where that is wanted, if none covers it."""
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
        is_recorded = graphs.begin_trial(inputs)
        self._run_micro_batches(model, inputs)
        if not is_recorded:
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

    def _clip_grad_norm(self, model: Any) -> Any:
        """Clip the gradients, and return their norm before; neither waits for the device."""
        # The scaler of float16, and processes that share a model, have rules of their own.
        if self.accelerator.scaler is not None or str(self.accelerator.distributed_type.value) != "NO":
            return super()._clip_grad_norm(model)  # type: ignore[misc]
        if self._trained is None:
            self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.nn.utils.clip_grad_norm_(self._trained, self.args.max_grad_norm)


@contextmanager
def quick_zero_grad(model: torch.nn.Module) -> Iterator[None]:
    """Let ``model.zero_grad()`` pass over the trained parameters alone while the block runs.

    Args:
        model: what of it is trained must stay so.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def zero_grad(set_to_none: bool = True) -> None:
        if not set_to_none:
            type(model).zero_grad(model, set_to_none=False)
            return
        for parameter in trained:
            parameter.grad = None

    # On the instance, as the Trainer calls it; nothing else of the model changes.
    model.zero_grad = zero_grad  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.zero_grad
