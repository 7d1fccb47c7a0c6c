"""Tell a lack of memory from other errors."""

from __future__ import annotations

import re

import torch

# Only torch's CUDA allocator raises a class of its own. Its CPU allocator and cuBLAS raise a RuntimeError, whose words
# tell.
_SAID_BY_LIBRARIES = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE
)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell a lack of memory from other errors, whichever library met it.

    Args:
        error: ``torch.OutOfMemoryError``, ``MemoryError``, or a ``RuntimeError`` whose message says so.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_SAID_BY_LIBRARIES.search(str(error)))
