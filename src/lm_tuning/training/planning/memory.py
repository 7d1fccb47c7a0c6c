"""What a training's memory goes into, part by part: counted where it can be, measured or estimated where not.

What a probe cannot measure without training is the optimizer's state, which is exact here. The rest serves where a
probe could not run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lm_tuning.parameters.train import TrainerSettings
from lm_tuning.parameters.trainer_arguments import DEFAULT_OPTIMIZER
from lm_tuning.training.planning.plan import BatchPlan
from lm_tuning.training.planning.records import MemoryRow
from lm_tuning.training.settings import TrainingSettings
from lm_tuning.training.setup.adapters import is_targeted, linear_layers, output_head

logger = logging.getLogger(__name__)

REST = "allocator and other programs"
"""What a card has given out beyond the tensors that are known: unused blocks, CUDA's own, other programs."""

# Numbers that are kept for each trained number, in its dtype: torch makes them like the parameter.
_TORCH_MOMENTS = {"adamw_torch": 2, "adamw_torch_fused": 2, "adagrad": 1, "rmsprop": 1, "sgd": 0}
# Those of bitsandbytes, by the beginning of the name; 32 bits each unless the name says 8.
_MOMENTS = {"adamw": 2, "lion": 1}
# Optimizers that go through all weights at once and hold a copy of them while they do.
_COPYING = ("adamw_torch", "adagrad", "rmsprop", "sgd")
# bitsandbytes keeps smaller tensors in 32 bits, and a scale in float32 for each block of larger ones.
_SMALLEST_8_BIT = 4096
_8_BIT_BLOCK = 256
_FLOAT32_BYTES = 4

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_ACTIVATION_FACTOR = 1.3
"""Activations over the inputs and outputs of all linear layers; what norms and gates keep comes on top of those."""
_HEAD_BYTES = 8
_HEAD_POSITIONS = 4096
_QUANTIZED_OVERHEAD = 1.05
_GIB = 2**30


@dataclass(frozen=True)
class Parameter:
    """A trained tensor of numbers.

    Attributes:
        shape: of the tensor.
        element_bytes: bytes of one number.
    """

    shape: tuple[int, ...]
    element_bytes: int

    @property
    def numel(self) -> int:
        """Return how many numbers the tensor holds."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that they take."""
        return self.numel * self.element_bytes


@dataclass(frozen=True)
class ModelBytes:
    """What a model holds in training beside activations, in bytes.

    Attributes:
        weights: all of them, as they lie in memory.
        gradients: of the trained ones.
        optimizer_state: what the optimizer keeps from step to step.
        optimizer_extra: what it holds besides while it makes a step, when activations are gone.
        buffers: what a model keeps beside its weights, such as rotary positions.
    """

    weights: int
    gradients: int
    optimizer_state: int
    optimizer_extra: int
    buffers: int = 0


def measure_model(model: torch.nn.Module, trainer: TrainerSettings) -> ModelBytes:
    """Count the bytes of a loaded model and of the optimizer that it will get.

    Args:
        model: with adapters or frozen parts in place; shared weights count once.
        trainer: group ``train.trainer``, which names the optimizer.
    """
    trained = [
        Parameter(tuple(parameter.shape), parameter.element_size())
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    # parameters() and buffers() name a shared tensor once, as it lies in memory once.
    gradients = sum(parameter.num_bytes for parameter in trained)
    return ModelBytes(
        weights=sum(tensor.nbytes for tensor in model.parameters()),
        gradients=gradients,
        optimizer_state=count_optimizer_state(trained, trainer),
        optimizer_extra=gradients if trainer.get("optim", DEFAULT_OPTIMIZER) in _COPYING else 0,
        buffers=sum(tensor.nbytes for tensor in model.buffers()),
    )


def count_optimizer_state(parameters: Iterable[Parameter], trainer: TrainerSettings) -> int:
    """Count the bytes that an optimizer keeps from step to step.

    A paged state counts in full: it can leave the card, at the price of travelling there and back in every step. An
    optimizer that is not known counts as AdamW in float32.

    Args:
        parameters: what is trained.
        trainer: group ``train.trainer``, which names the optimizer and its further arguments.
    """
    name = trainer.get("optim", DEFAULT_OPTIMIZER)
    parameters = list(parameters)
    if name == "adafactor":
        return sum(_adafactor_bytes(parameter) for parameter in parameters)
    if name in _TORCH_MOMENTS:
        moments = _TORCH_MOMENTS[name] + _extra_moments(name, trainer.get("optim_args", ""))
        return sum(moments * parameter.num_bytes for parameter in parameters)
    plain = name.removeprefix("paged_")
    # AdamW in float32 where the name is not known.
    moments = next((count for start, count in _MOMENTS.items() if plain.startswith(start)), 2)
    in_8_bits = "8bit" in plain
    return sum(moments * _moment_bytes(parameter.numel, in_8_bits) for parameter in parameters)


def extrapolate(points: Sequence[tuple[int, int]], *, base: int, at: int) -> int:
    """Continue the memory of micro-batches by a straight line.

    Args:
        points: token budget and bytes of each measured one, in any order, at least one.
        base: bytes without activations, through which a single point's line goes.
        at: token budget to continue to.

    Returns:
        Bytes; never less than the most that was measured at a smaller budget.
    """
    points = sorted(points)
    (last_tokens, last_bytes) = points[-1]
    (first_tokens, first_bytes) = points[0] if len(points) > 1 else (0, min(base, last_bytes))
    # The steepest of the line through all and that through the last two: memory may grow faster than tokens do.
    slopes = [(last_bytes - first_bytes) / max(last_tokens - first_tokens, 1)]
    if len(points) > 1:
        before_tokens, before_bytes = points[-2]
        slopes.append((last_bytes - before_bytes) / max(last_tokens - before_tokens, 1))
    expected = round(last_bytes + max(slopes) * (at - last_tokens))
    return max([expected, *(size for tokens, size in points if tokens <= at)])


@dataclass(frozen=True)
class TrainingEstimate:
    """What a training would hold, by arithmetic alone, in bytes.

    Attributes:
        fixed: weights, gradients and optimizer state; 0 where activations alone are estimated.
        per_token: activations of one token, kept for the backward pass.
        per_checkpointed_token: the same with gradient checkpointing.
        head: logits, in chunks of positions.
    """

    fixed: int
    per_token: int
    per_checkpointed_token: int
    head: int

    def total(self, micro_batch_tokens: int, *, gradient_checkpointing: bool) -> int:
        """Return the bytes with micro-batches of a size.

        Args:
            micro_batch_tokens: positions of a micro-batch.
            gradient_checkpointing: whether it is on.
        """
        per_token = self.per_checkpointed_token if gradient_checkpointing else self.per_token
        return self.fixed + per_token * micro_batch_tokens + self.head


def estimate_training(skeleton: Any, settings: TrainingSettings) -> TrainingEstimate:
    """Estimate what a training holds from the shapes of its model.

    Activations are taken as the inputs and outputs of all linear layers, and some more for norms and gates.

    Args:
        skeleton: the model without weights, as :func:`lm_tuning.models.loading.build_skeleton` makes it.
        settings: of the training.
    """
    train, linear = settings.train, _linear_shapes(skeleton)
    numel = sum(parameter.numel() for parameter in skeleton.parameters())
    in_linear = sum(a * b for a, b in linear.values())
    weights_bytes = _DTYPE_BYTES.get(settings.weights_dtype, _FLOAT32_BYTES)
    weights: float = numel * weights_bytes
    if train.method == "qlora":
        weights = (numel - in_linear) * weights_bytes + in_linear * train.qlora.bits / 8 * _QUANTIZED_OVERHEAD
    if train.method == "full":
        trained = [Parameter(tuple(each.shape), weights_bytes) for each in skeleton.parameters()]
    else:
        adapted = [shape for name, shape in linear.items() if is_targeted(name, train.lora.target_modules)]
        trained = [Parameter((train.lora.r, side), _FLOAT32_BYTES) for shape in adapted for side in shape]
        weights += sum(parameter.num_bytes for parameter in trained)
    state = count_optimizer_state(trained, train.trainer)
    gradients = sum(parameter.num_bytes for parameter in trained)
    return replace(estimate_activations(skeleton, settings), fixed=round(weights) + gradients + state)


def estimate_activations(model: Any, settings: TrainingSettings) -> TrainingEstimate:
    """Estimate what the passes of a training hold besides what :class:`ModelBytes` counts.

    Args:
        model: a skeleton or a loaded model, with adapters or without; quantized layers count by their true shapes.
        settings: of the training.
    """
    linear = _linear_shapes(model)
    head = output_head(model)
    compute_bytes = _DTYPE_BYTES.get(settings.compute_dtype, _FLOAT32_BYTES)
    config = model.config.get_text_config()
    layers = int(getattr(config, "num_hidden_layers", 1) or 1)
    hidden = int(getattr(config, "hidden_size", 0) or 0)
    passing = _ACTIVATION_FACTOR * compute_bytes * sum(a + b for a, b in linear.values())
    classes = head.weight.shape[0] if head is not None and settings.task != "sequence_classification" else 0
    return TrainingEstimate(
        fixed=0,
        per_token=round(passing),
        per_checkpointed_token=round(passing / layers + layers * hidden * compute_bytes),
        head=classes * _HEAD_BYTES * _HEAD_POSITIONS,
    )


def _moment_bytes(numel: int, in_8_bits: bool) -> int:
    """Return the bytes of one moment in bitsandbytes: in 8 bits a byte a number and a scale a block, if it is large."""
    if not in_8_bits or numel < _SMALLEST_8_BIT:
        return numel * _FLOAT32_BYTES
    return numel + -(-numel // _8_BIT_BLOCK) * _FLOAT32_BYTES


def _adafactor_bytes(parameter: Parameter) -> int:
    """Return a number for each row and each column of a matrix, and one for each number of a vector, in float32."""
    *rest, rows, columns = (1, 1, *parameter.shape)
    if len(parameter.shape) < 2:
        return parameter.numel * _FLOAT32_BYTES
    return math.prod(rest) * (rows + columns) * _FLOAT32_BYTES


def _extra_moments(name: str, optimizer_args: str) -> int:
    """Count the moments that further arguments ask for."""
    given = dict(pair.split("=", 1) for pair in optimizer_args.replace(" ", "").split(",") if "=" in pair)
    if name not in {"sgd", "rmsprop"}:
        return 0
    centered = name == "rmsprop" and given.get("centered", "").lower() in {"true", "1", "yes"}
    return int(given.get("momentum", "0") not in {"0", "0.0"}) + int(centered)


def _linear_shapes(model: Any) -> dict[str, tuple[int, int]]:
    """Return both sides of every linear layer by its name, without the output head and the matrices of adapters."""
    head = output_head(model)
    shapes = {}
    for name, module in linear_layers(model).items():
        if module is head or ".lora_" in name:
            continue
        weight: Any = module.weight
        rows, columns = weight.shape if weight.dim() == 2 else (0, 0)
        # A quantized layer's weight is packed, so its sides are told by the layer itself.
        shapes[name] = (getattr(module, "out_features", rows), getattr(module, "in_features", columns))
    return shapes


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

    def table(self, plan: BatchPlan) -> list[MemoryRow]:
        """Return the memory of a training, one row per part.

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
        rows = [MemoryRow(part=part, bytes=size, source="counted") for part, size in counted.items()]
        if choice is None or choice.peak_memory_bytes is None:
            return [*rows, MemoryRow(part="activations", bytes=self.activations, source="estimated")]
        # A peak of compiled layers after a resume was measured with the optimizer's state in memory already.
        optimizer = held.optimizer_state if choice.compiled and plan.facts.get("peaks_hold_optimizer") else 0
        fixed = held.weights + held.buffers + held.gradients + optimizer
        activations = max(choice.peak_memory_bytes - fixed, 0)
        rows.append(MemoryRow(part="activations", bytes=activations, source="measured"))
        rest = (choice.predicted_total_bytes or 0) - sum(row["bytes"] for row in rows)
        return [*rows, MemoryRow(part=REST, bytes=rest, source="measured")] if rest > 0 else rows


def count_memory(model: Any, settings: TrainingSettings, plan: BatchPlan) -> MemoryParts:
    """Count what a model holds.

    Args:
        model: as it will be trained, before the first step.
        settings: of the training.
        plan: how steps are split.
    """
    estimate = estimate_activations(model, settings)
    return MemoryParts(
        measure_model(model, settings.train.trainer),
        estimate.total(plan.micro_batch_tokens, gradient_checkpointing=plan.gradient_checkpointing),
    )


def log_memory(table: list[MemoryRow]) -> None:
    """Log a table of memory in one line.

    Args:
        table: see :meth:`MemoryParts.table`.
    """
    parts = [
        f"{row['part']} {row['bytes'] / _GIB:.2f}{' (estimated)' if row['source'] == 'estimated' else ''}"
        for row in table
    ]
    logger.info("Memory in GiB: %s; %.2f in all.", ", ".join(parts), sum(row["bytes"] for row in table) / _GIB)
