"""Make the products of frozen layers in 8-bit floats (FP8), forward and backward, beside adapters in 16 bits.

A frozen weight is quantized once, in both layouts. What changes from step to step, activations and the gradients of
outputs, is quantized where it is needed, with a scale of each row. Such a scale is known from the row alone: nothing is
kept from step to step, and a row has the same scale whichever rows lie beside it, so that how a step is split, a resume
and gradient checkpointing compute what they would without. It is a few operations between tensors, which compiled
layers fuse into what writes the activation; layers with one input share its quantized form there, since the compiler
makes equal operations once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch.nn.functional import linear

from lm_tuning.errors import UserError

FP8 = torch.float8_e4m3fn
"""4 bits of exponent and 3 of mantissa, for gradients too: a row has its own scale, so that digits matter more than
range. With 5 and 2 the gradients of adapters were off by more."""
FP8_MAX = 448.0
"""Largest number of that format."""
MULTIPLE = 16
"""Both sides of a weight must be a multiple of it, which the products' kernels ask for."""
MIN_CAPABILITY = (8, 9)
"""Compute capability from which on a card has such products: Ada Lovelace and Hopper."""

KEPT_SHARE = 0.1
"""Share of a card's memory that the frozen weights in 16 bits may take beside those in 8; larger ones wait in the
host's memory, from where an evaluation brings them back in seconds. Compiled layers save more than that of what the
batch planner has measured."""

# Rows of padding are zero; a gradient of one token among a million is not as small as this.
_SMALLEST = 1e-30


@dataclass(frozen=True)
class Fp8Weight:
    """A frozen weight in 8 bits, twice: products read both of their matrices along the summed side.

    Attributes:
        forward: ``(out, in)``.
        forward_scale: of each output, ``(1, out)``.
        backward: ``(in, out)``.
        backward_scale: of each input, ``(1, in)``.
    """

    forward: torch.Tensor
    forward_scale: torch.Tensor
    backward: torch.Tensor
    backward_scale: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Return the memory that it takes."""
        return sum(tensor.nbytes for tensor in (self.forward, self.forward_scale, self.backward, self.backward_scale))


def quantize_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in 8 bits, and what each row of it is to be multiplied with.

    A row that holds NaN or an infinity becomes NaN.

    Args:
        matrix: ``(rows, columns)``, of any float.

    Returns:
        The matrix, ``(rows, columns)``, and the scales in float32, ``(rows, 1)``.
    """
    wide = matrix.float()
    largest = wide.abs().amax(dim=-1, keepdim=True).clamp(min=_SMALLEST)  # (rows, 1)
    return (wide * (FP8_MAX / largest)).to(FP8), largest / FP8_MAX


def quantize_weight(weight: torch.Tensor) -> Fp8Weight:
    """Quantize a frozen weight in both layouts.

    Args:
        weight: ``(out, in)``.
    """
    forward, forward_scale = quantize_rows(weight)
    backward, backward_scale = quantize_rows(weight.t().contiguous())
    return Fp8Weight(forward, forward_scale.t().contiguous(), backward, backward_scale.t().contiguous())


def scaled_product(
    left: torch.Tensor, right: torch.Tensor, left_scale: torch.Tensor, right_scale: torch.Tensor
) -> torch.Tensor:
    """Return ``left @ right.t()`` of two quantized matrices in bfloat16, ``(rows, outputs)``.

    Args:
        left: ``(rows, summed)`` in 8 bits.
        right: ``(outputs, summed)`` in 8 bits.
        left_scale: ``(rows, 1)``.
        right_scale: ``(1, outputs)``.
    """
    if not left.is_cuda:
        # The same numbers without such products, so that all but the kernel itself can be run anywhere.
        return (linear(left.float(), right.float()).float() * left_scale * right_scale).bfloat16()
    return torch._scaled_mm(
        left, right.t(), scale_a=left_scale, scale_b=right_scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


class _FrozenProduct(torch.autograd.Function):
    """Multiply with a frozen weight; only the input has a gradient, and nothing of it is kept for that."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        turned: torch.Tensor,
        turned_scale: torch.Tensor,
    ) -> torch.Tensor:
        """Return the product, ``(rows, out)``; ``x`` is ``(rows, in)`` in bfloat16."""
        ctx.save_for_backward(turned, turned_scale)
        quantized, scale = quantize_rows(x)
        return scaled_product(quantized, weight, scale, weight_scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        """Return the gradient of the input, ``(rows, in)``; ``grad`` is ``(rows, out)``."""
        turned, turned_scale = ctx.saved_tensors
        quantized, scale = quantize_rows(grad)
        return scaled_product(quantized, turned, scale, turned_scale), None, None, None, None


def multiply_frozen(x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply with a frozen weight in 8 bits; the input gets a gradient that is made in 8 bits too.

    Args:
        x: ``(..., in)``.
        weight: quantized.
        bias: ``(out,)``, added in bfloat16.

    Returns:
        ``(..., out)`` in bfloat16.
    """
    rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
    product: torch.Tensor = _FrozenProduct.apply(  # type: ignore[no-untyped-call]
        rows, weight.forward, weight.forward_scale, weight.backward, weight.backward_scale
    )
    product = product.view(*x.shape[:-1], product.shape[-1])
    return product if bias is None else product + bias.to(product.dtype)


def _fp8_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Run a frozen linear layer."""
    return multiply_frozen(x, self.fp8_weight, self.bias)


@dataclass
class Fp8Layers:
    """Frozen linear layers that run in 8 bits while training, and as they are otherwise.

    Attributes:
        layers: both sides of each are a multiple of 16.
        num_others: frozen linear layers beside them that stay in 16 bits, for their sizes.
        why_not: what speaks against it, known before a step is made; ``None`` leaves it to a try.
    """

    layers: list[torch.nn.Linear]
    num_others: int = 0
    why_not: str | None = None
    _weights: list[Fp8Weight] = field(default_factory=list)
    _on_host: list[torch.Tensor] = field(default_factory=list)

    @property
    def is_on(self) -> bool:
        """Return whether the layers have weights in 8 bits."""
        return bool(self._weights)

    @property
    def num_bytes(self) -> int:
        """Return what the weights in 8 bits take."""
        return sum(weight.num_bytes for weight in self._weights)

    @torch.no_grad()
    def switch_on(self) -> None:
        """Quantize the weights and let the layers run with them."""
        if not self._weights:
            self._weights = [quantize_weight(layer.weight) for layer in self.layers]
        for layer, weight in zip(self.layers, self._weights, strict=True):
            # On the instance, so that the class and other models keep theirs; and no buffer, which would be stored.
            layer.__dict__["fp8_weight"] = weight
            layer.forward = MethodType(_fp8_forward, layer)  # type: ignore[method-assign]

    def switch_off(self) -> None:
        """Let the layers run as they are, with the weights that they had, and drop those in 8 bits."""
        self._take_away()
        self._bring_back()
        self._weights.clear()
        self._on_host.clear()

    @property
    def wait_on_host(self) -> bool:
        """Return whether the weights in 16 bits lie in the host's memory."""
        return bool(self._on_host)

    def release_weights(self) -> None:
        """Move the weights in 16 bits to the host's memory where they would take much of the device's."""
        size = sum(layer.weight.nbytes for layer in self.layers)
        if size > KEPT_SHARE * _memory_of(self.layers[0].weight.device):
            self._on_host = [layer.weight.detach().cpu() for layer in self.layers]
            self._leave_out()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run the block with the weights in 16 bits: what is measured is comparable with the base model."""
        if not self.is_on:
            yield
            return
        self._take_away()
        try:
            self._bring_back()
            yield
        finally:
            self._leave_out()
            self.switch_on()

    def _take_away(self) -> None:
        for layer in self.layers:
            layer.__dict__.pop("fp8_weight", None)
            if getattr(layer.__dict__.get("forward"), "__func__", None) is _fp8_forward:
                del layer.forward

    def _bring_back(self) -> None:
        """Move the weights back to the device, where they were moved away."""
        for layer, weight in zip(self.layers, self._on_host, strict=bool(self._on_host)):
            layer.weight.data = weight.to(layer.weight.device)

    def _leave_out(self) -> None:
        """Let go of the weights on the device whose copies lie on the host."""
        for layer, _ in zip(self.layers, self._on_host, strict=bool(self._on_host)):
            weight = layer.weight
            # One NaN for all indices: the shape stays, for whoever counts, and whoever reads it notices.
            layer.weight.data = torch.full((), torch.nan, dtype=weight.dtype, device=weight.device).expand(weight.shape)


def _memory_of(device: torch.device) -> int:
    """Return the bytes of a device's memory; those of a CPU are not counted against."""
    if device.type != "cuda":
        return 1 << 60
    return int(torch.cuda.get_device_properties(device).total_memory)


def find_fp8_layers(model: torch.nn.Module, decoder_layers: list[torch.nn.Module]) -> Fp8Layers:
    """Find the frozen linear layers whose products can be made in 8 bits.

    Embedding and head stay outside, whose rounding goes into the logits directly.

    Args:
        model: with adapters.
        decoder_layers: of the model.

    Raises:
        UserError: there is none.
    """
    found = [
        module
        for layer in decoder_layers
        for module in layer.modules()
        # Not a subclass, which may compute another thing; and what is trained keeps its 16 bits.
        if type(module) is torch.nn.Linear and not module.weight.requires_grad
    ]
    fitting = [layer for layer in found if not (layer.in_features % MULTIPLE or layer.out_features % MULTIPLE)]
    if not fitting:
        sides = sorted({side for layer in found for side in (layer.in_features, layer.out_features)})
        what = (
            f"the sides of its layers are {', '.join(map(str, sides))}, and products in 8 bits need multiples of "
            f"{MULTIPLE}"
            if found
            else f"{type(model).__name__} has no frozen linear layer in a list of decoder layers"
        )
        raise UserError(f"train.fp8 = true cannot be had with this model: {what}. Set train.fp8 = false.")
    return Fp8Layers(fitting, num_others=len(found) - len(fitting))


def why_no_device(device: str) -> str | None:
    """Return why a device cannot make products in 8 bits; ``None`` where it can.

    Args:
        device: ``cpu`` or ``cuda``.
    """
    if device != "cuda":
        return f"training runs on the {device.upper()}, and such products need a CUDA card"
    if not hasattr(torch, "_scaled_mm"):
        return f"PyTorch {torch.__version__} has no product of scaled matrices"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        has, needed = (".".join(map(str, version)) for version in (capability, MIN_CAPABILITY))
        return f"{torch.cuda.get_device_name()} has compute capability {has}, and such products need {needed}"
    return None


def refuse_without_device(device: str, compute_dtype: str) -> None:
    """Refuse FP8 where the device or the dtype of the other products does not go with it.

    Args:
        device: ``cpu`` or ``cuda``.
        compute_dtype: of the products that stay as they are.

    Raises:
        UserError: naming the cause.
    """
    why = why_no_device(device)
    if why is None and compute_dtype != "bfloat16":
        why = f"it goes with arithmetic in bfloat16, and this run computes in {compute_dtype} (train.precision)"
    if why is not None:
        raise UserError(f"train.fp8 = true cannot be had: {why}. Set train.fp8 = false.")
