"""What else keeps the processors busy is read from two readings of made-up files, and a quiet machine says nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from lm_tuning.runtime import busy
from lm_tuning.runtime.busy import LoadMonitor, describe_load, read_load

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Machine:
    """Files of a machine whose processors 0 and 1 are this run's; 2 and 3 belong to others."""

    root: Path
    seconds: float = 0.0

    def __post_init__(self) -> None:
        (self.root / "proc/self/task/1").mkdir(parents=True)
        (self.root / "proc/self/task/1/children").write_text("77 ")
        (self.root / "proc/77/task/77").mkdir(parents=True)
        (self.root / "proc/77/task/77/children").write_text("")
        (self.root / "proc/loadavg").write_text("11.24 9.00 5.00 3/512 4711\n")
        self.used = {"own": 0.0, "worker": 0.0, "others": 0.0, "stolen": 0.0}
        self.go_on(0.0)

    def go_on(self, seconds: float, **used: float) -> None:
        """Let time pass, in which processors 0 and 1 were used for so many processor seconds."""
        self.seconds += seconds
        for name, value in used.items():
            self.used[name] += value
        busy_ticks = [int(TICKS * sum(self.used[name] for name in ("own", "worker", "others")) / 2)] * 2
        stolen = int(TICKS * self.used["stolen"] / 2)
        idle = int(TICKS * self.seconds) - busy_ticks[0] - stolen
        rows = [f"cpu{number} {busy_ticks[0]} 0 0 {idle} 0 0 0 {stolen} 5 0" for number in (0, 1)]
        rows += [f"cpu{number} {int(TICKS * self.seconds)} 0 0 0 0 0 0 0 0 0" for number in (2, 3)]
        (self.root / "proc/stat").write_text("\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *rows, "intr 1 2", ""]))
        for folder, name in (("self", "own"), ("77", "worker")):
            fields = ["0"] * 11 + [str(int(TICKS * self.used[name])), "0", "0", "0"]
            (self.root / f"proc/{folder}/stat").write_text(f"5 (a (program) R {' '.join(fields[1:])} 0 0\n")

    def limit(self, quota: str, throttled_seconds: float) -> None:
        folder = self.root / "sys/fs/cgroup/job"
        folder.mkdir(parents=True, exist_ok=True)
        (self.root / "proc/self/cgroup").write_text("0::/job\n")
        (folder / "cpu.max").write_text(quota)
        (folder / "cpu.stat").write_text(f"usage_usec 1\nthrottled_usec {int(throttled_seconds * 1e6)}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(busy, "allowed_cpus", lambda: [0, 1])
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    return Machine(tmp_path)


def test_a_machine_that_trains_and_nothing_else_says_nothing(machine: Machine) -> None:
    watch = LoadMonitor(machine.root)
    machine.go_on(30.0, own=56.0, worker=2.0, others=1.0)
    assert watch.describe() is None
    watch.restart()
    machine.go_on(30.0, own=10.0, others=20.0)
    assert watch.describe() is None, "half of the time is left"


def test_other_programs_on_full_processors_are_named_with_what_to_set(machine: Machine) -> None:
    watch = LoadMonitor(machine.root)
    machine.go_on(30.0, own=10.0, worker=1.0, others=48.0)
    assert watch.describe() == (
        "other programs used 1.6 of the 2 processors of this run (load average 11.24); end them, or set "
        "environment.num_threads=1 (now 2), since the threads of one operation wait for the slowest of them"
    )


def test_no_fewer_threads_than_there_are_is_advised(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    watch = LoadMonitor(machine.root)
    machine.go_on(30.0, own=12.0, others=48.0)
    assert watch.describe() == (
        "other programs used 1.6 of the 2 processors of this run (load average 11.24); end them"
    )


def test_time_that_the_host_gives_to_others_is_named(machine: Machine) -> None:
    watch = LoadMonitor(machine.root)
    machine.go_on(30.0, own=36.0, stolen=24.0)
    said = watch.describe()
    assert said is not None
    assert said.startswith("the host gave 40% of the processor time to other virtual machines (steal); take a machine")
    assert "environment.num_threads=1 (now 2)" in said


def test_a_quota_that_is_used_up_is_named(machine: Machine) -> None:
    machine.limit("100000 100000", 0.0)
    watch = LoadMonitor(machine.root)
    machine.go_on(30.0, own=30.0)
    machine.limit("100000 100000", 15.0)
    assert watch.describe() == (
        "the container's quota of 1 processor was used up for 50% of the time; raise the quota, or set "
        "environment.num_threads=1 (now 2), since the threads of one operation wait for the slowest of them"
    )


def test_a_short_time_says_nothing(machine: Machine) -> None:
    watch = LoadMonitor(machine.root)
    machine.go_on(2.0, others=4.0)
    assert watch.describe() is None


def test_a_system_that_does_not_tell_says_nothing(tmp_path: Path, machine: Machine) -> None:
    assert read_load(tmp_path / "nowhere") is None
    assert describe_load(None, None) is None
    (machine.root / "proc/self/task/1/children").unlink()
    watch = LoadMonitor(machine.root)
    machine.go_on(30.0, own=20.0, worker=40.0)
    assert watch.describe() is None, "the children's time is not known, so it is not called another program's"


def test_this_machine_is_read() -> None:
    reading = read_load()
    if reading is None:
        pytest.skip("this system has no /proc/stat")
    assert reading.num_processors >= 1
    assert reading.total >= reading.idle
