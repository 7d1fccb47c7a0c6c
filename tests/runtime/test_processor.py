"""How many cores a process may use, and what its processor can do, read from files as the kernel writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lm_tuning.runtime.device import BFLOAT16_FEATURES, read_processor

GIB = 1 << 30


def write_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n", encoding="utf-8")
    return root


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Describe eight logical processors on four hyper-threaded Intel cores with 32 GiB."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    topology = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/{name}": value
        for cpu in range(8)
        for name, value in (("core_id", str(cpu % 4)), ("physical_package_id", "0"))
    }
    cpuinfo = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Xeon\nflags\t\t: fpu avx2 avx512_bf16 amx_bf16"
    return write_files(
        tmp_path,
        {
            "proc/cpuinfo": f"{cpuinfo}\n\nprocessor\t: 1",
            "proc/meminfo": f"MemTotal: {32 * GIB // 1024} kB",
            **topology,
        },
    )


def test_hyper_threads_of_one_core_count_once(machine: Path) -> None:
    found = read_processor(machine)
    assert (found.name, found.vendor, found.num_cores, found.quota) == ("Xeon", "intel", 4, None)
    assert found.bfloat16_features == ("amx_bf16", "avx512_bf16")
    assert found.memory_bytes == 32 * GIB


def test_affinity_limits_the_cores(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 4, 1})
    assert read_processor(machine).num_cores == 2


@pytest.mark.parametrize(
    ("files", "cores", "quota"),
    [
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2, 2.0),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, 4, None),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "150000 100000"}, 2, 1.5),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "20000 100000"}, 1, 0.2),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "6400000 100000"}, 4, 64.0),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/on/the/host\n0::/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            3,
            3.0,
        ),
        ({"proc/self/cgroup": "1:cpu:/", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"}, 4, None),
    ],
    ids=["v2", "v2 without limit", "v2 limit above", "less than one", "more than there are", "v1", "v1 without limit"],
)
def test_a_container_s_quota_limits_the_cores(
    machine: Path, files: dict[str, str], cores: int, quota: float | None
) -> None:
    found = read_processor(write_files(machine, files))
    assert (found.num_cores, found.quota) == (cores, quota)


def test_memory_of_a_container_counts(machine: Path) -> None:
    files = {"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/memory.max": str(8 * GIB)}
    assert read_processor(write_files(machine, files)).memory_bytes == 8 * GIB


def test_nothing_to_read_still_gives_an_answer(tmp_path: Path) -> None:
    found = read_processor(tmp_path)
    assert found.num_cores >= 1
    assert found.name
    assert found.bfloat16_features == ()
    assert found.memory_bytes == 0


def test_this_machine_agrees_with_the_system() -> None:
    found = read_processor()
    assert 1 <= found.num_cores <= (os.cpu_count() or 1)
    assert set(found.bfloat16_features) <= set(BFLOAT16_FEATURES)
