"""Name what a piece of code is for in a profiler's trace, so that no list of names has to guess it.

Operations inside a range count as what the range says, and so do those of their backward pass, whatever they are called
(:mod:`lm_tuning.training.profile.trace`). Without a profiler a range is nothing, and compiled code holds none: asking
whether a profiler records would compile it again when one begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

#: How the ranges of profiled steps are named in a trace, before their number.
STEP_RANGE = "training step"
#: How the code names what it does in a trace, before one of :data:`GROUPS`.
WORK_RANGE = "lm_tuning: "
ATTENTION = "attention"
PRODUCTS = "matrix products"
LOSS = "loss"
ELEMENTWISE = "norms and element-wise"
OPTIMIZER = "optimizer and clipping"
QUANTIZED = "quantized weights"
COPIES = "copies and casts"
COMMUNICATION = "communication"
OTHER = "other"
GROUPS = (PRODUCTS, ATTENTION, LOSS, ELEMENTWISE, OPTIMIZER, QUANTIZED, COPIES, COMMUNICATION, OTHER)


def is_recording() -> bool:
    """Return whether a profiler records this code as it runs."""
    # The private flag is the only one there is. While compiling it is not read: code that had read it would be compiled
    # again when it changes.
    return not torch.compiler.is_compiling() and bool(torch.autograd.profiler._is_profiler_enabled)


def work_range(group: str) -> AbstractContextManager[object]:
    """Return a context that names what runs in it.

    Args:
        group: one of :data:`lm_tuning.runtime.ranges.GROUPS`.
    """
    if not is_recording():
        return nullcontext()
    return torch.profiler.record_function(WORK_RANGE + group)


@contextmanager
def module_range(module: torch.nn.Module | None, group: str) -> Iterator[None]:
    """Name what a module does, wherever in the block it is called.

    Args:
        module: part of a model; ``None`` names nothing.
        group: one of :data:`lm_tuning.runtime.ranges.GROUPS`.
    """
    if module is None or not is_recording():
        yield
        return
    opened: list[Any] = []

    def begin(*_: object) -> None:
        opened.append(work_range(group))
        opened[-1].__enter__()

    def end(*_: object) -> None:
        opened.pop().__exit__(None, None, None)

    # A range that is entered in one hook and left in another: always_call closes it where the forward pass fails.
    hooks = [module.register_forward_pre_hook(begin), module.register_forward_hook(end, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
