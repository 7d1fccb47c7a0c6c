"""Make the code take this machine for another one, so that both kinds are tested on either. Standard library only.

The code reads what it knows of the processor from ``/proc``, ``/sys`` and the process's affinity; these answers are
changed, here and in the processes that tests start (``child/sitecustomize.py``).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

BFLOAT16 = "LM_TUNING_TEST_BFLOAT16"
"""``fast``: the processor multiplies bfloat16 in hardware; ``slow``: it does not. Unset: as it is."""

CORES = "LM_TUNING_TEST_CORES"
"""Number of cores of the processor, all of them this process's. Unset: as it is."""

_FAST = "avx512_bf16"


def pretend() -> None:
    """Do as the two variables say.

    Raises:
        ValueError: for a value that neither knows.
    """
    bfloat16, cores = os.environ.get(BFLOAT16), os.environ.get(CORES)
    if bfloat16 not in {None, "fast", "slow"}:
        raise ValueError(f"{BFLOAT16}={bfloat16}: use fast or slow")
    if cores is not None and not re.fullmatch("[1-9][0-9]*", cores):
        raise ValueError(f"{CORES}={cores}: use a number from 1")
    if bfloat16 or cores:
        _change_files(bfloat16, cores)
    if cores:
        num_cores = int(cores)
        os.cpu_count = lambda: num_cores
        os.sched_getaffinity = lambda _: set(range(num_cores))  # type: ignore[assignment]


def _change_files(bfloat16: str | None, cores: str | None) -> None:
    read_text = Path.read_text

    def changed(self: Path, *arguments: object, **options: object) -> str:
        name = str(self)
        if cores and (core := re.fullmatch(r"/sys/devices/system/cpu/cpu(\d+)/topology/core_id", name)):
            return core[1]
        if cores and re.fullmatch(r"/sys/fs/cgroup/.*(cpu\.max|cpu\.cfs_quota_us)", name):
            return "max"
        text = read_text(self, *arguments, **options)  # type: ignore[arg-type]
        if bfloat16 and name == "/proc/cpuinfo":
            text = re.sub(r" (amx_bf16|avx512_bf16)\b", "", text)
            if bfloat16 == "fast":
                text = re.sub(r"^((?:flags|Features)\s*:.*)$", rf"\1 {_FAST}", text, flags=re.MULTILINE)
        return text

    Path.read_text = changed  # type: ignore[method-assign, assignment]
