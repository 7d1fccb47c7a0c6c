"""Choose the dtype of weights and of matrix products, say why, and open the autocast context that follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lm_tuning.errors import UserError
from lm_tuning.parameters.base import Dtype
from lm_tuning.runtime.device import Device

if TYPE_CHECKING:
    import torch

DType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Precision:
    """The dtypes of one training.

    Attributes:
        weights: format that the model's weights are loaded in, those that are not quantized. Adapters are float32
            whatever it says.
        compute: format of the matrix products.
        reason: one sentence, for the log.
        warning: what the user should know about formats that they asked for; None if nothing.
    """

    weights: DType
    compute: DType
    reason: str
    warning: str | None = None


def choose_precision(
    device: Device, *, requested: Dtype = "auto", method: str = "lora", weights_dtype: Dtype = "auto"
) -> Precision:
    """Choose formats that the device is fast at, or check the ones that were asked for.

    Args:
        device: where training runs.
        requested: ``auto``, ``float32``, ``bfloat16`` or ``float16``, from ``train.precision``.
        method: ``full``, ``lora`` or ``qlora``, from ``train.method``.
        weights_dtype: ``auto`` or a format, from ``model.dtype``.

    Raises:
        UserError: if the device cannot do what was asked for, or if the two formats contradict each other.
    """
    problems = _find_problems(device, requested, method, weights_dtype)
    if problems:
        raise UserError(problems)
    compute, reason = _choose_compute(device, requested, method, weights_dtype)
    weights: DType
    if weights_dtype != "auto":
        weights = weights_dtype
        reason += f"; weights in {weights} because model.dtype asks for it"
    elif method == "full":
        # An update at a learning rate of 1e-5 is smaller than the last digit of a bfloat16 weight and would be lost.
        weights = "float32"
        reason += "; float32 master weights" + ("" if compute == "float32" else " under autocast")
    elif method == "qlora":
        # float16 ends at 65504, and small gradients vanish in it. Three things keep it right: the loss is scaled
        # (GradScaler, which skips a step that overflowed); what is trained is float32, so that its gradients can be
        # unscaled; and what is not quantized stays float32, and with it the sums between layers, where models trained
        # in bfloat16 have their largest values.
        weights = "float32" if compute == "float16" else compute
        reason += f"; frozen base quantized, what is not in {weights}, adapters in float32"
    else:
        # Frozen weights need no more digits than the products that read them.
        weights = compute
        reason += f"; frozen base in {weights}, adapters in float32"
    return Precision(weights, compute, reason, _find_warning(device, method, weights, compute))


def _choose_compute(device: Device, requested: Dtype, method: str, weights_dtype: Dtype) -> tuple[DType, str]:
    where = f"{device.name} ({device.detail})" if device.detail else device.name
    if requested != "auto":
        return requested, f"{requested} products because train.precision asks for it"
    if weights_dtype in ("bfloat16", "float16"):
        return weights_dtype, f"{weights_dtype} products to match model.dtype"
    if device.supports_bf16:
        return "bfloat16", f"bfloat16 products: fast on {where}"
    # The 4-bit weights are turned into this dtype for every product. GPUs without bfloat16 multiply float16 many times
    # faster than float32.
    if device.kind == "cuda" and method == "qlora":
        return "float16", f"float16 products with a scaled loss: {where} has no fast bfloat16"
    if device.kind == "cuda":
        return "float32", (
            f"float32 products: {where} has no fast bfloat16; train.precision=float16 would be faster, at the risk of "
            "overflow in models trained in bfloat16"
        )
    return "float32", f"float32 products: {where} is not fast at bfloat16"


def _find_problems(device: Device, requested: Dtype, method: str, weights_dtype: Dtype) -> list[str]:
    problems = []
    for key, dtype in (("train.precision", requested), ("model.dtype", weights_dtype)):
        if dtype == "float16" and device.kind != "cuda":
            problems.append(
                f"{key}=float16 needs a CUDA graphics card, and training runs on the {device.kind.upper()} "
                f"({device.name}). Allowed here: auto, float32, bfloat16."
            )
        if dtype == "bfloat16" and device.kind == "cuda" and not device.supports_bf16:
            problems.append(
                f"{key}=bfloat16 needs compute capability 8.0 or higher, and {device.name} has {device.detail}. "
                "Allowed here: auto, float32, float16."
            )
    if method == "full" and weights_dtype == "float16":
        problems.append(
            "model.dtype=float16 cannot be trained in full: gradients in float16 underflow and cannot be scaled. Use "
            "model.dtype=auto or float32, with train.precision=float16 if you want float16 products."
        )
    if requested != "auto" and weights_dtype in ("bfloat16", "float16") and requested != weights_dtype:
        problems.append(
            f"train.precision={requested} contradicts model.dtype={weights_dtype}: products cannot be more exact than "
            f"the weights they read. Use model.dtype=auto or float32, or train.precision=auto or {weights_dtype}."
        )
    return problems


def _find_warning(device: Device, method: str, weights: DType, compute: DType) -> str | None:
    warnings = []
    if device.kind == "cpu" and not device.supports_bf16 and "bfloat16" in (weights, compute):
        warnings.append(
            f"{device.name} has {device.detail}: bfloat16 is emulated on it and many times slower than float32. "
            "train.precision=auto with model.dtype=auto would take float32."
        )
    if method == "full" and weights == "bfloat16":
        warnings.append(
            "Full fine-tuning of bfloat16 weights loses updates smaller than 1/256 of a weight. It halves the memory "
            "of the weights; model.dtype=auto keeps float32 master weights."
        )
    return " ".join(warnings) or None


def autocast(device: str, compute_dtype: str) -> torch.autocast:
    """Return the context in which a forward pass computes as training does.

    Args:
        device: ``cpu`` or ``cuda``.
        compute_dtype: type of matrix products.
    """
    import torch

    # A context that is switched off costs nothing, and callers need no branch.
    enabled = compute_dtype != "float32"
    dtype = getattr(torch, compute_dtype) if enabled else None
    return torch.autocast(device_type=device, dtype=dtype, enabled=enabled)
