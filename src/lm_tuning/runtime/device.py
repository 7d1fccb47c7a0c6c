"""Find the device that training runs on: first cheaply, to choose thread settings, then exactly, by asking torch."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lm_tuning.runtime.nvml import list_cards
from lm_tuning.runtime.processor import Processor, read_processor

DeviceKind = Literal["cuda", "cpu", "mps"]
# Ampere: the first generation whose tensor cores multiply bfloat16 and TF32.
_FIRST_BFLOAT16_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Device:
    """The device that training runs on.

    Attributes:
        kind: ``cuda``, ``cpu`` or ``mps``.
        name: model of the graphics card or the processor.
        count: devices that this process sees; 1 for a CPU.
        memory_bytes: memory of one device, the smallest if they differ; 0 when unknown.
        supports_bf16: whether bfloat16 matrix products are fast on it.
        cores: physical CPU cores that this process may use.
        detail: what ``supports_bf16`` rests on, for messages.
    """

    kind: DeviceKind
    name: str
    count: int
    memory_bytes: int
    supports_bf16: bool
    cores: int
    detail: str = ""


def describe_device() -> Device:
    """Ask torch which device it will use, importing torch.

    On a machine with several cards this looks at each of them, which starts CUDA in this process.
    """
    import torch

    processor = read_processor()
    if torch.cuda.is_available():
        cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        capability = min((card.major, card.minor) for card in cards)
        # Processes on several cards get equal shares of the work, so the least of the cards decides.
        return _cuda_device(cards[0].name, len(cards), min(card.total_memory for card in cards), capability, processor)
    if torch.backends.mps.is_available():
        return _mps_device(processor)
    return _cpu_device(processor)


def probe_device(environ: Mapping[str, str] | None = None, root: Path = Path("/")) -> Device:
    """Find the device without importing torch, in a few milliseconds.

    It reads ``CUDA_VISIBLE_DEVICES``, looks whether the installed torch was built with CUDA, and asks the driver's NVML
    library, which does not start CUDA: variables that CUDA reads can still be set afterwards.

    Args:
        environ: variables to look at; the process's own by default.
        root: folder that holds ``proc`` and ``sys``.
    """
    environ = os.environ if environ is None else environ
    processor = read_processor(root)
    if torch_cuda_version() is not None and (num_visible := _num_visible(environ)) != 0:
        cards = list_cards()
        if cards:
            # The variable may list more than the machine has.
            count = len(cards) if num_visible is None else min(num_visible, len(cards))
            name, memory_bytes, capability = cards[0]
            return _cuda_device(name, count, memory_bytes, capability, processor)
        # Some containers show the driver's files and lack its library: then memory and capability stay unknown, and
        # bfloat16 is not taken for granted.
        folders = list(root.glob("proc/driver/nvidia/gpus/*/information"))
        if folders:
            text = folders[0].read_text(encoding="utf-8", errors="replace")
            found = re.search(r"Model:\s*(.+)", text)
            name = found.group(1).strip() if found else "NVIDIA GPU"
            count = len(folders) if num_visible is None else min(num_visible, len(folders))
            return _cuda_device(name, count, 0, None, processor)
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return _mps_device(processor)
    return _cpu_device(processor)


def current_device() -> Device:
    """Describe the device exactly where that neither imports torch nor starts CUDA, else cheaply."""
    if "torch" in sys.modules:
        import torch

        cuda: Any = torch.cuda  # its type information is incomplete
        # Properties of a card are only known to a started CUDA, which takes memory on the card and cannot be forked.
        # Asking whether there is a card does not start it.
        if cuda.is_initialized() or not cuda.is_available():
            return describe_device()
    return probe_device()


def torch_cuda_version() -> str | None:
    """Return the CUDA version the installed torch was built with, None for a CPU build, without importing it."""
    # find_spec() runs no code of a top-level package; importing torch would take seconds, and would read the variables
    # that are only decided on once the device is known.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"""^cuda\b[^=]*=\s*['"]([^'"]+)['"]""", text, re.MULTILINE)
    return found.group(1) if found else None


def _cuda_device(
    name: str, count: int, memory_bytes: int, capability: tuple[int, int] | None, processor: Processor
) -> Device:
    supports = capability is not None and capability >= _FIRST_BFLOAT16_CAPABILITY
    detail = (
        "compute capability unknown" if capability is None else f"compute capability {capability[0]}.{capability[1]}"
    )
    return Device("cuda", name, count, memory_bytes, supports, processor.num_cores, detail)


def _mps_device(processor: Processor) -> Device:
    return Device("mps", processor.name, 1, processor.memory_bytes, False, processor.num_cores, "not tried on MPS")


def _cpu_device(processor: Processor) -> Device:
    features = processor.bfloat16_features
    detail = ", ".join(features) if features else "neither amx_bf16 nor avx512_bf16"
    return Device("cpu", processor.name, 1, processor.memory_bytes, bool(features), processor.num_cores, detail)


def _num_visible(environ: Mapping[str, str]) -> int | None:
    """Return how many cards ``CUDA_VISIBLE_DEVICES`` lets through, None if it is not set."""
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    count = 0
    for entry in value.split(","):
        if not re.fullmatch(r"\d+|(GPU|MIG)-\S+", entry.strip()):
            break  # CUDA, too, ignores everything from the first invalid entry on
        count += 1
    return count
