"""The cost of a call in a unit that no machine and no load changes: the calls that it makes itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_calls(function: Callable[[], object]) -> int:
    """Count the functions, in Python and in C, that a function calls in this thread; its own call is not counted.

    Args:
        function: runs once. What it does with other threads is not counted.
    """
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count - 2  # the function's own call, and that of ``sys.setprofile``
