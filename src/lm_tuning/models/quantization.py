"""Hold frozen weights in 4 or 8 bits through bitsandbytes."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import FunctionType
from typing import Any, Literal

from lm_tuning.errors import UserError

logger = logging.getLogger(__name__)

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Quantization:
    """How the linear layers of a frozen model are held.

    Attributes:
        bits: 4 or 8.
        quant_type: ``nf4`` or ``fp4``; read with 4 bits.
        double_quant: whether the scales of blocks are quantized too; read with 4 bits.
        compute_dtype: type that 4-bit weights are multiplied in: ``float32``, ``bfloat16`` or ``float16``. 8-bit ones
            choose by device: integers on a GPU, with float16 for what is too large, and the input's type on a CPU.
    """

    bits: Literal[4, 8] = 4
    quant_type: Literal["nf4", "fp4"] = "nf4"
    double_quant: bool = True
    compute_dtype: str = "float32"

    def to_config(self) -> Any:
        """Return what transformers loads by."""
        import torch
        from transformers import BitsAndBytesConfig

        make: Any = BitsAndBytesConfig  # not typed
        # Nothing is named to be left out, so that transformers leaves out what it knows about: the head of language
        # models and classifiers and everything that shares its weights. Embeddings are no linear layers.
        if self.bits == 8:
            return make(load_in_8bit=True)
        return make(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.quant_type,
            bnb_4bit_use_double_quant=self.double_quant,
            bnb_4bit_compute_dtype=getattr(torch, self.compute_dtype),
        )


QUANTIZED: Mapping[str, Quantization] = {"int8": Quantization(bits=8), "nf4": Quantization(bits=4, quant_type="nf4")}
"""What ``evaluate.quantization`` and ``generate.quantization`` name, apart from ``none``."""


def choose_quantization(name: str, *, compute_dtype: str) -> Quantization | None:
    """Return how a model is held that is quantized for its answers; ``None`` for ``none``.

    Args:
        name: ``none``, ``int8`` or ``nf4``.
        compute_dtype: type that 4-bit weights are multiplied in.
    """
    return None if name == "none" else replace(QUANTIZED[name], compute_dtype=compute_dtype)


def import_bitsandbytes() -> None:
    """Import bitsandbytes, if it is installed, without torch's compiler.

    PEFT imports it for every adapter. It has a few functions compiled where it is imported, for which torch loads its
    whole compiler, two seconds long; here each is compiled when it is called first, which a run without quantized
    weights never does.
    """
    if "bitsandbytes" in sys.modules or find_spec("bitsandbytes") is None:
        return
    import torch

    compile_now = torch.compile
    torch.compile = _compile_when_called(compile_now)
    try:
        import bitsandbytes  # noqa: F401
    finally:
        torch.compile = compile_now


def _compile_when_called(compile_now: Any) -> Any:
    """Return what stands in for ``torch.compile``: the same for everything but functions, which it compiles later."""

    def compile_later(function: Any = None, **options: Any) -> Any:
        if not isinstance(function, FunctionType):
            return compile_now(function, **options)

        @functools.cache
        def compiled() -> Callable[..., Any]:
            made: Callable[..., Any] = compile_now(function, **options)
            return made

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            return compiled()(*arguments, **named)

        return call

    return compile_later


def check_quantization(
    device: str, *, setting: str = "train.method = qlora", instead: str = "train.method = lora"
) -> None:
    """Refuse to quantize where that cannot be done, before weights are read.

    Args:
        device: where the weights go, for example ``cpu`` or ``cuda:0``.
        setting: what asks for it, for messages.
        instead: what to set where it cannot be done.

    Raises:
        UserError: bitsandbytes is missing, does not run on the device, or lacks the part that does.
    """
    if find_spec("bitsandbytes") is None:
        raise UserError(
            f"{setting} needs the package bitsandbytes, which is not installed: pip install bitsandbytes, or set "
            f"{instead}."
        )
    kind = device.partition(":")[0]
    if kind not in _DEVICES:
        raise UserError(f"{setting} runs on {' and '.join(_DEVICES)}, and the device here is {kind}: set {instead}.")
    import_bitsandbytes()
    from bitsandbytes import cextension

    # Without its compiled part bitsandbytes can be imported, and fails where that is called first.
    if isinstance(cextension.lib, cextension.ErrorHandlerMockBNBNativeLibrary):
        raise UserError(
            f"{setting} needs the compiled part of bitsandbytes, which cannot be loaded here "
            f"({cextension.lib.error_msg}): run `python -m bitsandbytes` to see why, or set {instead}."
        )


def prepare_quantized(model: Any) -> None:
    """Make a model that was just quantized fit for training, and check what was quantized.

    Args:
        model: as transformers loaded it.
    """
    from bitsandbytes.nn.modules import Linear4bit

    linear = [(name, module) for name, module in model.named_modules() if _is_quantized(module)]
    assert linear, "a quantized model has quantized layers"
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    kept = (head, getattr(model, "score", None), model.get_input_embeddings())
    assert not any(module in kept for _, module in linear), "head and embeddings stay as they are"
    # On CPUs with AVX512-BF16, bitsandbytes 0.50 packs 4-bit weights again when a layer runs in evaluation mode, for a
    # kernel that has no derivative. Every training step after an evaluation would then have wrong gradients without an
    # error, so the kernel is switched off.
    for _, module in linear:
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
    # 8-bit layers log a line about their input's type on every call; one is enough.
    messages = logging.getLogger("bitsandbytes.autograd._functions")
    if not any(isinstance(each, _Once) for each in messages.filters):
        messages.addFilter(_Once())


def quantized_bits(model: Any) -> int | None:
    """Return 4 or 8 for a model with layers held in so many bits, None for any other."""
    kinds = {type(module).__name__ for module in model.modules() if _is_quantized(module)}
    return None if not kinds else 8 if "Linear8bitLt" in kinds else 4


def weight_bytes(model: Any) -> int:
    """Return the memory of a model's weights in bytes, with the scales that quantized ones bring along.

    Args:
        model: wrapped or not.
    """
    num_bytes = 0
    for weight in model.parameters():
        num_bytes += weight.nbytes
        # bitsandbytes keeps the scales of 4 bits in a state, itself quantized or not, and those of 8 bits by row.
        state = getattr(weight, "quant_state", None)
        parts = [getattr(part, "absmax", None) for part in (state, getattr(state, "state2", None))]
        num_bytes += sum(part.nbytes for part in (*parts, getattr(weight, "SCB", None)) if part is not None)
    return num_bytes


def _is_quantized(module: Any) -> bool:
    # By name, so that a model which is not quantized costs no import of bitsandbytes.
    return type(module).__module__.startswith("bitsandbytes.") and hasattr(module, "in_features")


class _Once(logging.Filter):
    """Let each message through once, whatever its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the message is new."""
        is_new = record.msg not in self.seen
        self.seen.add(record.msg)
        return is_new
