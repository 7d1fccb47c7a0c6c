"""What the driver says of a graphics card while it works: memory, utilization and power, by NVIDIA's NVML.

torch knows only what its own process holds. The driver knows the card: other programs' memory, how much of the time a
kernel ran, and the power that it takes. Nothing in here waits for the card, and nothing in here fails a training.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple, TypedDict, TypeVar

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

#: For a reading under way when a training ends; a driver that hangs must not hold the training up.
_MOST_WAITED_SECONDS = 5.0

#: Time between two readings. The driver itself averages utilization over up to a second.
SAMPLE_SECONDS = 2.0


class Card(NamedTuple):
    """A card as the driver names it; where it does not tell, the memory is 0 and the compute capability None."""

    name: str
    memory_bytes: int
    capability: tuple[int, int] | None


def list_cards() -> list[Card]:
    """Ask the driver for its cards; nothing without a card, a driver or NVIDIA's package.

    CUDA is not started by it, so that variables which CUDA reads when it starts can still be set.
    """
    cards = []
    with _open_library() as nvml:
        num_cards = _ask(nvml, lambda: int(nvml.nvmlDeviceGetCount())) if nvml else None
        for index in range(num_cards or 0):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
            except nvml.NVMLError as error:  # a card that this process may not see, or that has failed
                logger.debug("The driver tells nothing of card %d: %s", index, error)
                continue
            cards.append(_describe_card(nvml, handle))
    return cards


def _describe_card(nvml: Any, handle: object) -> Card:
    # Each by itself: a card that shares the processor's memory, for one, has no figure for it, and is a card.
    name = _ask(nvml, lambda: str(nvml.nvmlDeviceGetName(handle)))
    memory_bytes = _ask(nvml, lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total))
    major_minor = _ask(nvml, lambda: tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)))
    return Card(name or "NVIDIA GPU", memory_bytes or 0, major_minor)


class CardFigures(TypedDict, total=False):
    """What a driver tells of a card, by the names that reports use; what it does not tell is missing."""

    gpu_utilization_fraction: float
    gpu_memory_used_bytes: int
    gpu_power_watts: float
    gpu_memory_total_bytes: int


@dataclass(frozen=True)
class CardReading:
    """A card at one moment.

    Attributes:
        memory_used_bytes: by all programs together.
        memory_total_bytes: of the card.
        utilization_fraction: share of the driver's last sampling period in which a kernel ran, 0 to 1; ``None`` where
            the driver does not tell, as for a part of a card (MIG).
        power_watts: drawn by the whole card; ``None`` where the driver does not tell.
    """

    memory_used_bytes: int
    memory_total_bytes: int
    utilization_fraction: float | None = None
    power_watts: float | None = None

    def figures(self) -> CardFigures:
        """Return all but the memory that there is, which does not change."""
        figures = CardFigures()
        if self.utilization_fraction is not None:
            figures["gpu_utilization_fraction"] = self.utilization_fraction
        figures["gpu_memory_used_bytes"] = self.memory_used_bytes
        if self.power_watts is not None:
            figures["gpu_power_watts"] = self.power_watts
        return figures


def read_card(uuid: str | None = None) -> CardReading | None:
    """Ask the driver how a card is doing; it takes about a millisecond once the driver's library is loaded.

    Args:
        uuid: of the card, see :func:`find_card`; ``None`` takes the driver's first card.

    Returns:
        The reading; ``None`` without a card, a driver or NVIDIA's package.
    """
    with _open_library() as nvml:
        if nvml is None:
            return None
        try:
            card = nvml.nvmlDeviceGetHandleByUUID(uuid) if uuid else nvml.nvmlDeviceGetHandleByIndex(0)
            memory = nvml.nvmlDeviceGetMemoryInfo(card)
        except nvml.NVMLError as error:
            logger.debug("The driver tells nothing of the card: %s", error)
            return None
        utilization = _ask(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(card).gpu / 100)
        power = _ask(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(card) / 1000)  # milliwatts
        return CardReading(int(memory.used), int(memory.total), utilization, power)


def find_card(device: str) -> str | None:
    """Return the driver's UUID of the card that this process computes on; ``None`` for another device than ``cuda``.

    Args:
        device: ``cpu``, ``cuda`` or ``mps``.
    """
    if device != "cuda":
        return None
    import torch

    # CUDA counts the cards that CUDA_VISIBLE_DEVICES lets through, the driver counts all: only the UUID is the same.
    uuid = str(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", ""))
    return f"GPU-{uuid.removeprefix('GPU-')}" if uuid else None


@dataclass
class CardSampler:
    """Reads a card again and again from a thread of its own, between entering and leaving a ``with`` block.

    Attributes:
        uuid: of the card; ``None`` reads nothing at all.
        seconds: between two readings.
        latest: the last reading; ``None`` without a card.
    """

    uuid: str | None
    seconds: float = SAMPLE_SECONDS
    latest: CardReading | None = None
    _readings: list[CardReading] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> CardSampler:
        """Read once; where that succeeds, go on reading."""
        # A first reading that fails ends it here: without a driver there is no thread that tries again for ever.
        if self.uuid is not None and self._read():
            self._thread = threading.Thread(target=self._read_forever, name="card-sampler", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_MOST_WAITED_SECONDS)

    def summary(self) -> CardFigures:
        """Return mean utilization and power and the most memory over all readings; nothing without a card."""
        if not self._readings:
            return {}
        # A reading may lack what others have, so each figure is averaged over the readings that have it.
        busy = [each.utilization_fraction for each in self._readings if each.utilization_fraction is not None]
        watts = [each.power_watts for each in self._readings if each.power_watts is not None]
        mean = CardReading(
            max(each.memory_used_bytes for each in self._readings),
            self._readings[0].memory_total_bytes,
            fmean(busy) if busy else None,
            fmean(watts) if watts else None,
        )
        return {**mean.figures(), "gpu_memory_total_bytes": mean.memory_total_bytes}

    def _read_forever(self) -> None:
        with _open_library():  # so that the readings find it open
            while not self._ended.wait(self.seconds) and self._read():
                pass

    def _read(self) -> bool:
        """Read the card once; return whether it answered."""
        reading = read_card(self.uuid)
        if reading is not None:
            self.latest = reading
            self._readings.append(reading)
        return reading is not None


@contextmanager
def _open_library() -> Iterator[Any]:
    """Give NVIDIA's module with its library loaded, or ``None``."""
    # The library counts how often it was opened, so blocks may be nested, and only the outermost one loads it.
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        logger.debug("No NVML: %s", error)
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _ask(nvml: Any, question: Callable[[], _Answer]) -> _Answer | None:
    """Return an answer of the driver; ``None`` where it has none for this card."""
    try:
        return question()
    except nvml.NVMLError:
        return None
