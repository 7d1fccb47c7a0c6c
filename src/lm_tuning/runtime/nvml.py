"""What the driver says about the card, through NVML; nothing where there is no card or no library."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class CardReading:
    """A card at one moment.

    Attributes:
        memory_used_bytes: by all programs together.
        memory_total_bytes: of the card itself.
        utilization_fraction: share of the last moment in which a kernel ran; ``None`` where it is not told.
        power_watts: drawn now; ``None`` where it is not told.
    """

    memory_used_bytes: int
    memory_total_bytes: int
    utilization_fraction: float | None = None
    power_watts: float | None = None


def read_card(index: int = 0) -> CardReading | None:
    """Ask the driver.

    Args:
        index: of the card, as the driver counts them.

    Returns:
        ``None`` without the library (package ``nvidia-ml-py``), a driver or such a card.
    """
    try:
        nvml: Any = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        card = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(card)
    except nvml.NVMLError:
        return None
    return CardReading(memory_used_bytes=int(memory.used), memory_total_bytes=int(memory.total))
