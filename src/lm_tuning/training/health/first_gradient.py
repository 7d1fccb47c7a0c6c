"""The gradient that the first step must have: measured by an ordinary backward pass, compared before any update.

A loss that is right may still be sent backward scaled: by what wraps the backward pass, adds gradients up or averages
them over ranks. The norm that is clipped and logged then is off by a factor that the loss does not show. It is enough
to look at the last layer for that, whose gradient costs little beside the forward pass that is made anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lm_tuning.training.health.records import SHOWN_NAMES, Finding, listing
from lm_tuning.wording import count_of, name_first

# A norm this many times the measured one, or this part of it, is no rounding.
FACTOR = 4.0

# Likewise where dropout or noise makes the gradient of the step another one.
RANDOM_FACTOR = 8.0

# Relative difference of the logged norm from that of the gradients themselves: it is the same number.
SAME_NORM = 0.05

# Logits of rows that go backward together; a longer row would need several gigabytes for them, which the training
# itself never makes.
MOST_LOGITS = {"cpu": 2**28, "cuda": 2**30}

# Small gradients vanish in float16 unless the loss is scaled up.
FP16_SCALE = 1024.0


@dataclass(frozen=True)
class ExpectedGradient:
    """What the gradient of the first step must be.

    Attributes:
        norm: of the gradients of ``parameters``, of the mean loss over the step.
        parameters: those of the last layer that are trained.
        is_random: whether training draws random zeros or noise, so that its gradient is another one.
    """

    norm: float
    parameters: list[torch.nn.Parameter]
    is_random: bool


class GradientMeasure:
    """Collect the gradient of the last layer over rows of a plain forward pass.

    Attributes:
        is_complete: whether every row went backward.
    """

    def __init__(self, model: Any, *, device: str, compute_dtype: str, vocabulary: int) -> None:
        """Find the parameters; nothing runs.

        Args:
            model: as it will be trained.
            device: ``cpu`` or ``cuda``.
            compute_dtype: type of the forward pass.
            vocabulary: logits of a position; 0 where they are few.
        """
        self.parameters = last_trained_parameters(model)
        self.is_complete = bool(self.parameters)
        self._model = model
        # Logits (tokens, vocabulary) in float32 and their gradient are by far the largest tensors of a backward pass.
        self._most_tokens = MOST_LOGITS.get(device, MOST_LOGITS["cpu"]) // max(vocabulary, 1)
        self._scale = FP16_SCALE if compute_dtype == "float16" else 1.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Let nothing but the last layer ask for gradients, and throw these away afterwards."""
        # By identity: tensors compare element by element, and tied weights are one parameter under two names.
        wanted = {id(parameter) for parameter in self.parameters}
        others = [
            parameter
            for parameter in self._model.parameters()
            if parameter.requires_grad and id(parameter) not in wanted
        ]
        # Autograd then stops at the last layer: layers below it keep no activations, and the pass costs little more
        # than one without gradient.
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)
            for parameter in self.parameters:
                parameter.grad = None

    def takes(self, num_tokens: int) -> bool:
        """Return whether rows with so many tokens are to go backward; one that is too long ends the measure."""
        self.is_complete = self.is_complete and num_tokens <= self._most_tokens
        return self.is_complete

    def add(self, nats: torch.Tensor) -> None:
        """Send the summed loss of rows backward; one that the last layer has no part in ends the measure."""
        if not nats.requires_grad:
            self.is_complete = False
            return
        # Each call adds to .grad, so that the rows of a step need not be in memory together. The division by the step's
        # count comes at the end, since the norm is linear in it.
        (self._scale * nats).backward()  # type: ignore[no-untyped-call]

    def finish(self, count: int, *, is_random: bool) -> ExpectedGradient | None:
        """Return what was measured; ``None`` where it cannot be told. Call it while still watching.

        Args:
            count: supervised tokens, or rows of a classifier.
            is_random: whether training draws random zeros or noise.
        """
        if not self.is_complete or not count:
            return None
        norm = norm_of(self.parameters) / (self._scale * count)
        return ExpectedGradient(norm, self.parameters, is_random) if math.isfinite(norm) and norm > 0 else None


def last_trained_parameters(model: Any) -> list[torch.nn.Parameter]:
    """Return the trained parameters of the last layer that has any; the classification head's where no layer has."""
    # The nearest to the loss first: its gradient passes through the head alone. A decoder comes after its encoder.
    for _, layers in reversed([*layer_lists(model)]):
        for layer in reversed(layers):
            trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
            if trained:
                return trained
    return []


def layer_lists(model: Any) -> Iterator[tuple[str, list[torch.nn.Module]]]:
    """Return the outermost lists of layers with parameters, with their names: decoder layers, an encoder's too."""
    seen: list[str] = []
    # Modules are named from the outside inwards, so a list comes before what lies within its layers.
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in seen):
            seen.append(name)
            yield name, [layer for layer in module if any(True for _ in layer.parameters())]


def norm_of(parameters: Sequence[torch.nn.Parameter]) -> float:
    """Return the norm of the gradients of parameters together; 0 where none has one."""
    norms = [
        torch.linalg.vector_norm(each.grad.detach(), dtype=torch.float32)
        for each in parameters
        if each.grad is not None
    ]
    # The norm of norms is the norm of all elements; one number, so that the device is waited for once.
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


def check_first_gradient(expected: ExpectedGradient, norm: float, *, num_micro_batches: int) -> Finding | None:
    """Compare the gradients of step 1, before clipping, with what is expected.

    Args:
        expected: what was measured before the step.
        norm: of the gradients of the same parameters, without the factor of float16's scaler.
        num_micro_batches: micro-batches of the step.
    """
    factor = RANDOM_FACTOR if expected.is_random else FACTOR
    ratio = norm / expected.norm
    # Wide bounds: the micro-batches' kernels round otherwise, while real faults are factors of ranks, micro-batches or
    # a loss scale.
    if not math.isfinite(norm) or 1 / factor <= ratio <= factor:
        return None  # NaN and infinity are another check's
    cause = (
        "The gradient is scaled on its way back, although the loss is right: by what wraps the backward pass, adds "
        "gradients up or averages them."
    )
    if num_micro_batches > 1 and math.isclose(ratio, num_micro_batches, rel_tol=SAME_NORM):
        cause += f" The factor equals the {num_micro_batches} micro-batches of the step."
    return Finding(
        code="first-gradient-off",
        measured=f"the gradient of step 1 has a norm of {norm:.4g} in the last layer, {ratio:.3g} times what its rows "
        "have",
        expected=f"about {expected.norm:.4g} (a factor of {factor:g} either way), by a backward pass over the same "
        "rows before it",
        cause=cause,
        change="Look at what changes the backward pass; the learning rate and train.trainer.max_grad_norm would only "
        "hide it.",
    )


def check_logged_norm(actual: float, logged: float) -> Finding | None:
    """Compare the norm that step 1 logs and is clipped by with that of the gradients themselves.

    Args:
        actual: of all gradients, after the backward pass.
        logged: by the Trainer.
    """
    if not (math.isfinite(actual) and math.isfinite(logged)) or math.isclose(actual, logged, rel_tol=SAME_NORM):
        return None
    ratio = logged / actual if actual else math.inf
    return Finding(
        code="first-gradient-off",
        measured=f"step 1 logs a gradient norm of {logged:.4g}, {ratio:.3g} times that of its gradients",
        expected=f"{actual:.4g}, as they are after the backward pass",
        cause="Something between the backward pass and clipping scales them, or the norm alone.",
        change="Look at what changes clipping or the optimizer's step.",
    )


@listing
def check_gradients(model: torch.nn.Module) -> Iterator[Finding]:
    """Check after a backward pass, before the weights change, that what is trained has a gradient and nothing else.

    A gradient of zeros is fine: an adapter's first matrix has one as long as its second is zero.

    Args:
        model: after the backward pass of step 1.
    """
    missing, frozen, num_trained = [], [], 0
    for name, parameter in model.named_parameters():
        # None, not zeros: a gradient that is all zeros was reached by the backward pass.
        if parameter.requires_grad:
            num_trained += 1
            if parameter.grad is None:
                missing.append(name)
        elif parameter.grad is not None:
            frozen.append(name)
    if len(missing) == num_trained:
        yield Finding(
            code="nothing-has-gradient",
            measured=f"none of {num_trained} trained parameters has a gradient after the first backward pass",
            expected="a gradient for each",
            cause="The loss does not reach them: everything is frozen, or the graph is cut, as activation "
            "checkpointing does when no input asks for a gradient.",
            change="Look at train.freeze and train.lora.target_modules, and try train.gradient_checkpointing=false.",
        )
    elif missing:
        yield Finding(
            code="parameter-without-gradient",
            measured=f"{len(missing)} of {count_of(num_trained, 'trained parameter')} "
            f"{'has' if len(missing) == 1 else 'have'} no gradient: {name_first(missing, SHOWN_NAMES)}",
            expected="a gradient for each",
            cause="The forward pass does not use them, so they stay as they are.",
            change="Name them in train.freeze, or leave them out of train.lora.target_modules.",
        )
    if frozen:
        yield Finding(
            code="frozen-parameter-has-gradient",
            measured=f"{count_of(len(frozen), 'frozen parameter')} {'has' if len(frozen) == 1 else 'have'} a gradient: "
            f"{name_first(frozen, SHOWN_NAMES)}",
            expected="none, which would cost memory and count in the gradient norm",
            cause="They were frozen after a backward pass, or a custom backward pass writes to them.",
            change="Freeze through train.freeze or train.method alone.",
        )
