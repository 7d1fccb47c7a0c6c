"""The autocast context of a run, the same in training, evaluation and the look before them."""

from __future__ import annotations

import torch


def autocast(device: str, compute_dtype: str) -> torch.autocast:
    """Return the context in which a forward pass computes as training does.

    Args:
        device: ``cpu`` or ``cuda``.
        compute_dtype: type of matrix products.
    """
    enabled = compute_dtype != "float32"
    dtype = getattr(torch, compute_dtype) if enabled else None
    return torch.autocast(device_type=device, dtype=dtype, enabled=enabled)
