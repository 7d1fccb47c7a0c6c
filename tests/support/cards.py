"""What tests ask of a graphics card."""

from __future__ import annotations

import pytest
import torch

from lm_tuning.training.kernels.fp8 import MIN_CAPABILITY

_HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= MIN_CAPABILITY
needs_fp8 = pytest.mark.skipif(not _HAS_FP8, reason="needs a card with products in 8 bits")
