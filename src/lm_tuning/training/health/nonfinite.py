"""Leave out an update whose gradient is NaN or infinite, and keep what the step was made of.

The decision stays on the device where the optimizer can take it there: fused optimizers of PyTorch read a tensor named
``found_inf`` and leave weights, moments and step counts alone when it is 1. Others are asked on the host, which waits
for the gradient.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import torch

from lm_tuning.batching.batch import MicroBatch, StepBatch
from lm_tuning.storage.atomic import write_json_atomic
from lm_tuning.training.health.records import Facts

# Who leaves the update out: the gradient scaler of float16, the optimizer on its device, or the host.
Guard = Literal["scaler", "device", "host"]


def guard_update(optimizer: Any, gradient_norm: torch.Tensor | float) -> Guard:
    """Make the next ``optimizer.step()`` change nothing if the gradient is NaN or infinite.

    Call it once per step, after clipping and before the optimizer's step.

    Args:
        optimizer: of PyTorch, bitsandbytes or transformers, possibly wrapped by accelerate. With a gradient scaler
            (float16) nothing is done: the scaler makes this decision itself, and lowers its scale.
        gradient_norm: before clipping; equal on all ranks.

    Returns:
        Who decides.

    Source:
        ``torch.amp.GradScaler.step`` hands ``found_inf`` to the same optimizers.
    """
    # accelerate's wrapper of the optimizer has it. It looks at the gradients itself, and sets found_inf from that.
    if getattr(optimizer, "scaler", None) is not None:
        return "scaler"
    inner = getattr(optimizer, "optimizer", optimizer)
    # Fused SGD is asked on the host: when its first step is skipped, its momentum starts from uninitialised memory
    # (``_fused_sgd`` of PyTorch 2.13).
    if getattr(inner, "_step_supports_amp_scaling", False) and not isinstance(inner, torch.optim.SGD):
        # 0 times NaN or infinity is NaN, which differs from 0: half as many kernels per step as isfinite launches.
        inner.found_inf = (torch.as_tensor(gradient_norm).detach() * 0 != 0).float()
        return "device"
    # This waits for the device at every step, which fused optimizers spare.
    if not math.isfinite(float(gradient_norm)):
        # Every optimizer passes over parameters without a gradient: no decay, no moments, no step count.
        for group in inner.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
    return "host"


class GuardsUpdates:
    """Guard every update of a transformers Trainer; stands before ``Trainer`` among the base classes.

    The Trainer asks for the gradient norm once per step, whether it clips or not, after clipping and right before
    ``self.optimizer.step()`` (``Trainer._inner_training_loop`` of transformers 5.24).
    """

    optimizer: Any

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the gradient norm, after a look at whether it is finite."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]
        guard_update(self.optimizer, norm)
        return norm


def save_reproduction(folder: Path, step: int, batch: StepBatch, *, seed: int, facts: Facts | None = None) -> Path:
    """Write what a step was made of, so that it can be run again.

    Args:
        folder: where the file goes; made if missing.
        step: optimizer step from 1.
        batch: its rows.
        seed: of the run; dropout of the step came from it.
        facts: loss, gradient norm and the like.

    Returns:
        The file, ``step-<step>.json``, for :func:`load_reproduction`.
    """
    content = {
        "step": step,
        "row_ids": batch.row_ids,
        "seed": seed,
        # JSON knows neither NaN nor infinity.
        "facts": {
            name: repr(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in (facts or {}).items()
        },
        # Tensors as lists of integers, since a file of JSON is read without running anything.
        "micro_batches": [
            {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in vars(micro).items()}
            for micro in batch.micro_batches
        ],
    }
    path = folder / f"step-{step}.json"
    write_json_atomic(path, content, indent=None)
    return path


def load_reproduction(path: Path) -> StepBatch:
    """Read a step back, as :func:`save_reproduction` wrote it.

    Args:
        path: the file.

    Returns:
        The step's rows and micro-batches, on the CPU.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    for micro in content["micro_batches"]:
        for name, value in micro.items():
            if isinstance(value, list):
                # The variable-length kernel takes int32 alone.
                micro[name] = torch.tensor(value, dtype=torch.int32 if name == "row_bounds" else torch.int64)
    micro_batches = [MicroBatch(**micro) for micro in content["micro_batches"]]
    return StepBatch(content["step"] - 1, content["row_ids"], micro_batches)
