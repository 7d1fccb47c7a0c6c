"""Norms of a model in one operation each, where nothing is compiled that would fuse them.

A root-mean-square norm of transformers is written as seven operations, each of which a GPU starts by itself, whether
the host launches them or a CUDA graph does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch.nn.functional import rms_norm

# Rounding of a 16-bit type, and of float32 sums in another order.
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
_ROWS_TRIED = 8


@contextmanager
def fused_norms(model: torch.nn.Module) -> Iterator[int]:
    """Run a model's root-mean-square norms as one operation each within the block.

    Which modules those are is told by their class's name and by trying: a norm that scales by ``1 + weight``, or does
    anything else, stays as it is.

    Args:
        model: on its device; changed in place, and back at the end.

    Yields:
        How many norms are fused.
    """
    fused = []
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and "forward" not in module.__dict__ and _gives_the_same(module):
            module.forward = MethodType(_fused_forward, module)
            fused.append(module)
    try:
        yield len(fused)
    finally:
        for module in fused:
            del module.forward


def _epsilon(module: Any) -> float | None:
    # By the two names that transformers' families use.
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return found if isinstance(found, float) else None


def _fused_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return ``(..., width)``, normed over the last dimension, in the type that the norm itself gives."""
    # A float32 weight would raise 16-bit states to float32 in the module's own product, too.
    dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)
    weight = self.weight.to(dtype)
    return rms_norm(hidden_states.to(dtype), weight.shape, weight, _epsilon(self))


def _gives_the_same(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or _epsilon(module) is None:
        return False
    tolerance = _TOLERANCES.get(weight.dtype)
    if tolerance is None:
        return False
    # Numbers of its own, so that the run's random state is left alone; (rows, width).
    generator = torch.Generator(weight.device).manual_seed(0)
    shape = (_ROWS_TRIED, len(weight))
    states = torch.randn(shape, generator=generator, device=weight.device).to(weight.dtype)
    with torch.no_grad():
        own, fused = module(states), _fused_forward(module, states)
    return own.dtype == fused.dtype and torch.allclose(own.float(), fused.float(), rtol=tolerance, atol=tolerance)
