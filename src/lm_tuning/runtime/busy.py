"""See what else keeps the processors busy: other programs, other virtual machines, the container's quota.

Shares of processor time between two readings are compared, so that nothing here depends on how fast the machine is, and
the load average, which follows minutes later, is only mentioned.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lm_tuning.runtime.device import allowed_cpus, cgroup_files, cpu_quota
from lm_tuning.runtime.threads import read_num_threads

#: Share of the processor time that is used where more work waits for it.
FULL_FRACTION = 0.90

OTHERS_FRACTION = 0.15
#: Other programs that use less than this share, or this many processors, slow nothing down by much.
OTHERS_PROCESSORS = 0.5

STOLEN_FRACTION = 0.05
THROTTLED_FRACTION = 0.10
#: A shorter time between two readings says nothing.
MIN_SECONDS = 5.0

_STAT_FIELDS = 8  # user nice system idle iowait irq softirq steal; guest time is part of user time


@dataclass(frozen=True)
class Reading:
    """Processor time so far, in processor seconds, of the processors that this process may use.

    Attributes:
        num_processors: logical ones.
        total: used or not.
        idle: not used.
        stolen: given to other virtual machines.
        own: used by this process and its children; ``None`` where the system does not name the children.
        throttled: seconds in which the cgroup's quota was used up.
    """

    num_processors: int
    total: float
    idle: float
    stolen: float
    own: float | None
    throttled: float


class LoadMonitor:
    """Compare the processors' time with that of an earlier moment."""

    def __init__(self, root: Path = Path("/")) -> None:
        """Note the present counts, as the moment to compare with.

        Args:
            root: folder that holds ``proc`` and ``sys``.
        """
        self._root = root
        self._before = read_load(root)

    def restart(self) -> None:
        """Compare with this moment from now on."""
        self._before = read_load(self._root)

    def describe(self) -> str | None:
        """Describe what kept the processors from this process since the beginning, and what to set.

        Returns:
            A sentence without its full stop, such as ``other programs used 1.6 of the 2 processors (…)``; ``None``
            when nothing did, or the system does not tell.
        """
        return describe_load(self._before, read_load(self._root), root=self._root)


def read_load(root: Path = Path("/")) -> Reading | None:
    """Read the processor time so far; ``None`` where the system does not tell.

    Args:
        root: folder that holds ``proc``.
    """
    with suppress(OSError, ValueError, IndexError):
        ticks = os.sysconf("SC_CLK_TCK")
        allowed = {f"cpu{number}" for number in allowed_cpus()}
        lines = [line.split() for line in (root / "proc/stat").read_text(encoding="ascii").splitlines()]
        # Of the processors that this process may use: a container shows all of the machine, and others may be idle.
        rows = [[int(field) for field in line[1 : _STAT_FIELDS + 1]] for line in lines if line and line[0] in allowed]
        if not rows:
            return None
        return Reading(
            num_processors=len(rows),
            total=sum(map(sum, rows)) / ticks,
            idle=sum(row[3] + row[4] for row in rows) / ticks,
            stolen=sum(row[7] for row in rows) / ticks,
            own=_own_seconds(root, ticks),
            throttled=_throttled_seconds(root),
        )
    return None


def describe_load(
    before: Reading | None, now: Reading | None, *, root: Path = Path("/"), environ: Mapping[str, str] | None = None
) -> str | None:
    """Describe what kept the processors from this process between two readings; see `LoadMonitor.describe`.

    Args:
        before: the earlier reading.
        now: the later one.
        root: folder that holds ``proc`` and ``sys``.
        environ: names the threads of this process in ``OMP_NUM_THREADS``; by default the process's own variables.
    """
    if before is None or now is None or now.num_processors != before.num_processors:
        return None
    total = now.total - before.total
    count = now.num_processors
    if total / count < MIN_SECONDS:
        return None
    # What is left for this run is the least that any of the causes leaves.
    seen, fixes, left = [], [], float(count)
    others = _others(before, now)
    if others is not None and others >= max(OTHERS_FRACTION * count, OTHERS_PROCESSORS):
        seen.append(f"other programs used {others:.1f} of the {_processors(count)} of this run{_load_average(root)}")
        fixes.append("end them")
        left = min(left, count - others)
    stolen = (now.stolen - before.stolen) / total
    if stolen >= STOLEN_FRACTION:
        seen.append(f"the host gave {stolen:.0%} of the processor time to other virtual machines (steal)")
        fixes.append("take a machine whose processors are not shared")
        left = min(left, count * (1 - stolen))
    throttled = (now.throttled - before.throttled) * count / total
    quota = cpu_quota(root)
    if throttled >= THROTTLED_FRACTION and quota is not None:
        share = f"{min(throttled, 1.0):.0%}"
        seen.append(f"the container's quota of {_processors(quota)} was used up for {share} of the time")
        fixes.append("raise the quota")
        left = min(left, quota)
    if not seen:
        return None
    fixes += _fewer_threads(left, os.environ if environ is None else environ)
    return f"{', and '.join(seen)}; {', or '.join(fixes)}"


def _others(before: Reading, now: Reading) -> float | None:
    """Return the processors that other programs used on average where no time was left; ``None`` when unknown."""
    total = now.total - before.total
    # Whose time it is says nothing while some is left over: a run that waits for a disk is not crowded out.
    idle, stolen = now.idle - before.idle, now.stolen - before.stolen
    if before.own is None or now.own is None or idle > (1 - FULL_FRACTION) * total:
        return None
    return max(total - idle - stolen - (now.own - before.own), 0.0) / total * now.num_processors


def _fewer_threads(left: float, environ: Mapping[str, str]) -> list[str]:
    """Return the setting that fits the processors that are left for this run, where it has more threads than that."""
    # A quarter is forgiven: threads that fit 1.9 processors are two.
    fitting = max(int(left + 0.25), 1)
    threads = read_num_threads(environ)
    if threads is not None and threads <= fitting:
        return []
    now = "" if threads is None else f" (now {threads})"
    return [
        f"set environment.num_threads={fitting}{now}, since the threads of one operation wait for the slowest of them"
    ]


def _processors(count: float) -> str:
    return f"{count:g} {'processor' if count == 1 else 'processors'}"


def _load_average(root: Path) -> str:
    try:
        return f" (load average {(root / 'proc/loadavg').read_text(encoding='ascii').split()[0]})"
    except (OSError, IndexError):
        return ""


def _own_seconds(root: Path, ticks: int) -> float | None:
    """Return the time of this process, its living children and those that it has waited for."""
    # Kernels built without CONFIG_PROC_CHILDREN have no such file. Counting this process alone would take the work of
    # its loaders for that of other programs.
    if not any((root / "proc/self/task").glob("*/children")):
        return None
    names = ("self", *_descendants(root, "self"))
    return sum(read_ticks(root / "proc" / name, with_children=True) for name in names) / ticks


def _descendants(root: Path, name: str) -> Iterator[str]:
    for file in (root / "proc" / name / "task").glob("*/children"):
        with suppress(OSError):
            for child in file.read_text(encoding="ascii").split():
                yield child
                yield from _descendants(root, child)


def read_ticks(folder: Path, *, with_children: bool) -> int:
    """Return user and system time of a process or thread, in ticks of the system; 0 where there is no such thing.

    Args:
        folder: of the process or thread in ``proc``.
        with_children: also that of the children that a process has waited for.
    """
    with suppress(OSError, ValueError):
        fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        # utime, stime, and the same of the children; the name before the parenthesis may hold spaces.
        return sum(map(int, fields[11 : 15 if with_children else 13]))
    return 0


def _throttled_seconds(root: Path) -> float:
    """Return the longest time for which a cgroup of this process was held back by its quota."""
    # Each level of nested cgroups has a quota of its own, and the tightest one holds the process back.
    seconds = [0.0]
    for file in cgroup_files(root, "cpu", "cpu.stat", "cpu.stat"):
        with suppress(OSError, ValueError):
            values = dict(line.split() for line in file.read_text(encoding="ascii").splitlines())
            seconds.append(int(values.get("throttled_usec", 0)) / 1e6)
            seconds.append(int(values.get("throttled_time", 0)) / 1e9)  # version 1 counts nanoseconds
    return max(seconds)
