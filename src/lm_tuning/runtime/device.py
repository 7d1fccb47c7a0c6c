"""What this process computes on: the processor, read from files, and the device that training runs on.

The device is found first cheaply, to choose thread settings, then exactly, by asking torch.
"""

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

# Without one of these, a bfloat16 matrix product on a CPU is emulated and many times slower than float32.
BFLOAT16_FEATURES = ("amx_bf16", "avx512_bf16")
_NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes a number near 2^63 where there is no limit


@dataclass(frozen=True)
class Processor:
    """The processor as this process sees it.

    Attributes:
        name: model as the system names it.
        vendor: ``intel``, ``amd``, ``arm``, ``apple`` or ``unknown``.
        machine: instruction set, for example ``x86_64``.
        num_logical: logical processors of the machine.
        num_cores: physical cores this process may use: those of its CPU affinity, at most its cgroup's quota.
        quota: processors granted by cgroups; None without a limit.
        bfloat16_features: those of `BFLOAT16_FEATURES` that the processor has.
        memory_bytes: memory this process may use; 0 when unknown.
    """

    name: str
    vendor: str
    machine: str
    num_logical: int
    num_cores: int
    quota: float | None
    bfloat16_features: tuple[str, ...]
    memory_bytes: int


def read_processor(root: Path = Path("/")) -> Processor:
    """Describe the processor of this machine.

    Args:
        root: folder that holds ``proc`` and ``sys``.
    """
    info = _read_cpuinfo(root)
    flags = info.get("flags", info.get("Features", "")).split()
    allowed = allowed_cpus()
    quota = cpu_quota(root)
    num_cores = _count_physical(root, allowed)
    if quota is not None:
        # Rounded: at 1.5 a second thread still helps, at 2.2 a third one mostly waits for its time slice.
        num_cores = min(num_cores, int(quota + 0.5))
    return Processor(
        name=info.get("model name") or platform.processor() or platform.machine() or "unknown",
        vendor=_vendor(info),
        machine=platform.machine().lower(),
        num_logical=os.cpu_count() or 1,
        num_cores=max(1, num_cores),
        quota=quota,
        bfloat16_features=tuple(feature for feature in BFLOAT16_FEATURES if feature in flags),
        memory_bytes=_memory_bytes(root),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _read_cpuinfo(root: Path) -> dict[str, str]:
    """Return the entries of the first processor, each key once."""
    entries: dict[str, str] = {}
    for line in _read(root / "proc/cpuinfo").split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        # Hybrid processors have cores of two kinds; the first one speaks for all.
        entries.setdefault(key.strip(), value.strip())
    return entries


def _vendor(info: dict[str, str]) -> str:
    known = {"GenuineIntel": "intel", "AuthenticAMD": "amd", "HygonGenuine": "amd"}
    if info.get("vendor_id") in known:
        return known[info["vendor_id"]]
    # Arm names its implementer by a number, if at all, so the machine decides.
    machine = platform.machine().lower()
    if machine in ("arm64", "aarch64"):
        return "apple" if platform.system() == "Darwin" else "arm"
    return "unknown"


def allowed_cpus() -> list[int]:
    """Return the numbers of the logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _count_physical(root: Path, cpus: list[int]) -> int:
    """Count the cores behind logical CPUs; two hyper-threads of one core count once."""
    cores = set()
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        core, package = _read(topology / "core_id"), _read(topology / "physical_package_id")
        # Core ids are unique within a package only. Virtual machines may hide the topology: then each counts.
        cores.add((package, core) if core else ("cpu", str(cpu)))
    return len(cores)


def cgroup_files(root: Path, controller: str, v1_name: str, v2_name: str) -> list[Path]:
    """List the files of this process's cgroups from its own up to the root, for both cgroup versions.

    Args:
        root: folder that holds ``proc`` and ``sys``.
        controller: of version 1, such as ``cpu``.
        v1_name: name of the file there.
        v2_name: name of the file in version 2.
    """
    files = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        # Lines are 4:cpu,cpuacct:/path in version 1, and 0::/path in version 2.
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = root / "sys/fs/cgroup", v2_name
        elif controller in controllers.split(","):
            base, name = root / "sys/fs/cgroup" / controller, v1_name
        else:
            continue
        # Inside a container the path may name a folder that only the host sees; the levels above it are still there.
        folder = base / path.lstrip("/")
        files += [level / name for level in (folder, *folder.parents) if level == base or base in level.parents]
    return files


def cpu_quota(root: Path) -> float | None:
    """Return how many processors the cgroups of this process grant; ``None`` without a limit.

    Args:
        root: folder that holds ``proc`` and ``sys``.
    """
    quotas = []
    for file in cgroup_files(root, "cpu", "cpu.cfs_quota_us", "cpu.max"):
        words = _read(file).split()
        if not words or words[0] in ("max", "-1"):
            continue
        period = words[1] if len(words) > 1 else _read(file.with_name("cpu.cfs_period_us"))
        if words[0].isdigit() and period.isdigit() and int(period) > 0:
            quotas.append(int(words[0]) / int(period))
    return min(quotas, default=None)


def _memory_bytes(root: Path) -> int:
    sizes = []
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            sizes.append(int(line.split()[1]) * 1024)
    for file in cgroup_files(root, "memory", "memory.limit_in_bytes", "memory.max"):
        text = _read(file)
        if text.isdigit() and int(text) < _NO_LIMIT_BYTES:
            sizes.append(int(text))
    return min(sizes, default=0)


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
