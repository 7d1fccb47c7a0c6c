"""Read what the processor is and how much of it this process may use, from files and without importing torch."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

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
