"""How often Python looks for reference cycles: hardly ever while packages load, as usual while training.

Loading torch, transformers, peft and MLflow makes a million objects, none of them garbage, and Python looks through all
of them again and again; what that took of a start stands in ``docs/lab-log.md``.
"""

from __future__ import annotations

import gc

_AS_STARTED = gc.get_threshold()
_RARELY = (100_000, 50, 1000)


def collect_rarely() -> None:
    """Look for cycles after 100,000 new objects, not 700 or 2,000; they stay bounded, unlike with it switched off."""
    gc.set_threshold(*_RARELY)


def restore_collection() -> None:
    """Go back to Python's own pace, so that a cycle that holds tensors is freed soon."""
    gc.set_threshold(*_AS_STARTED)
