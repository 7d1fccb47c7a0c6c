"""A fused forward pass for LoRA layers: the adapter's weights are cast to the type of the activations, not the reverse.

Adapters are kept in float32, since their updates are small. The library casts every layer's input up to float32 for
them, and autocast casts it down again for the product; the input is a thousand times larger than the adapter. Here the
two small matrices are cast instead. What is computed is the same: under autocast the products were made in 16 bits
before, too.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch.nn.functional import linear


def install(model: torch.nn.Module) -> int:
    """Give every plain LoRA layer the fused forward pass.

    Layers with dropout, a variant such as DoRA, a bias of the adapter or more than one adapter keep the library's.

    Args:
        model: with adapters; changed in place. What is stored of it stays the same.

    Returns:
        How many layers have it.
    """
    count = 0
    for module in model.modules():
        if _is_plain(module):
            # On the instance, so that other models of the process, and the class, keep the library's.
            module.forward = MethodType(_forward, module)
            count += 1
    return count


def remove(model: torch.nn.Module) -> None:
    """Give every layer the library's forward pass back."""
    for module in model.modules():
        # Other libraries put functions of their own there too, such as accelerate's wrapper; those stay.
        if getattr(module.__dict__.get("forward"), "__func__", None) is _forward:
            del module.forward


def _forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Add the adapter's part to the frozen layer's result."""
    # An evaluation of the base model switches adapters off; merged ones are in the frozen weights already.
    if self.disable_adapters or self.merged or args or kwargs:
        return type(self).forward(self, x, *args, **kwargs)  # type: ignore[no-any-return]
    [name] = self.active_adapters
    result = self.base_layer(x)
    # (r, in) and (out, r): a thousandth of the activations (tokens, in), so that casting them costs next to nothing.
    down, up = self.lora_A[name].weight.to(result.dtype), self.lora_B[name].weight.to(result.dtype)
    # (..., r)
    hidden = linear(x.to(result.dtype), down)
    # Scaled on the small matrix, not on the activations, (..., out).
    return result + linear(hidden, up * self.scaling[name])  # type: ignore[no-any-return]


def _is_plain(module: Any) -> bool:
    """Return whether a module is a LoRA layer over a linear one with nothing special about it."""
    from peft.tuners.lora.layer import LoraLayer

    if not isinstance(module, LoraLayer) or module.merged or module.lora_variant:
        return False
    # Several adapters would be added up, or chosen among, by the library's own rules.
    names = list(module.lora_A)
    if len(names) != 1 or list(module.active_adapters) != names or module.lora_embedding_A:
        return False
    [name] = names
    dropout = module.lora_dropout[name]
    matrices: tuple[Any, Any] = (module.lora_A[name], module.lora_B[name])
    return (
        all(type(matrix) is torch.nn.Linear and matrix.bias is None for matrix in matrices)
        and not getattr(dropout, "p", 0.0)
        and hasattr(module.get_base_layer(), "in_features")
    )
