"""Names of the arrays that functions of the package hand to each other; the shape stands where one is used."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
"""Ids, indices, counts, and numbers that stand for equal things."""

Mask: TypeAlias = npt.NDArray[np.bool_]
"""Which of some things."""

Splits: TypeAlias = npt.NDArray[np.int8]
"""Index in ``SPLITS``, below 0 for a row that is left out."""

Digests: TypeAlias = npt.NDArray[np.uint64]
"""``(things, 2)``: two halves of 16 bytes that are equal for equal things."""
