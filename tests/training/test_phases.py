from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from lm_tuning.batching.batch import MicroBatch, StepBatch
from lm_tuning.training import step_log
from lm_tuning.training.results import summarize_efficiency
from lm_tuning.training.step_log import PhaseClock, StepLog
from tests.support.cost import count_calls


def step_batch(step: int, num_tokens: int = 8) -> StepBatch:
    ids = torch.zeros((1, num_tokens), dtype=torch.int64)
    micro = MicroBatch(ids, None, torch.zeros(1, dtype=torch.int64), ids[:, :1], 1, num_tokens, 1)
    return StepBatch(step, [1], [micro])


Wait = Callable[[float], None]


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Wait:
    """Let time pass for the code under test, by the seconds given and not by what the machine is busy with."""
    now = 100.0

    def pass_by(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock = SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr(step_log, "time", clock)
    monkeypatch.setattr(step_log, "time", clock)
    return pass_by


def mark_step(
    clock: PhaseClock, wait: Wait, *, forward: float, backward: float, optimizer: float, micro_batches: int = 1
) -> None:
    for _ in range(micro_batches):
        clock.enter("forward")
        wait(forward)
        clock.enter("backward")
        wait(backward)
    clock.enter("optimizer")
    wait(optimizer)


def test_a_phase_lasts_from_its_mark_to_the_next_and_micro_batches_add_up(wait: Wait):
    clock = PhaseClock()
    mark_step(clock, wait, forward=2.0, backward=4.0, optimizer=1.0, micro_batches=2)
    seconds = clock.end_step().seconds()
    assert list(seconds) == ["forward", "backward", "optimizer"]
    assert seconds == {"forward": 4.0, "backward": 8.0, "optimizer": 1.0}


def test_time_between_steps_belongs_to_no_phase(wait: Wait):
    clock = PhaseClock()
    for _ in range(2):
        wait(10.0)
        mark_step(clock, wait, forward=1.0, backward=1.0, optimizer=1.0)
        assert sum(clock.end_step().seconds().values()) == 3.0


def test_a_step_without_marks_has_no_times():
    assert PhaseClock().end_step().seconds() == {}


def test_marking_costs_next_to_nothing():
    clock = PhaseClock()

    def mark() -> None:
        clock.enter("forward")
        clock.enter("backward")
        clock.enter("optimizer")
        clock.end_step()

    mark()
    assert count_calls(mark) < 50
    assert clock.own_seconds > 0


def test_a_profiler_sees_the_phases_as_ranges(tmp_path):
    clock = PhaseClock()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        mark_step(clock, time.sleep, forward=0.002, backward=0.004, optimizer=0.001, micro_batches=2)
        clock.end_step()
    ranges = {event.key: event for event in profiler.key_averages()}
    assert [ranges[name].count for name in ("forward", "backward", "optimizer")] == [2, 2, 1]
    assert ranges["backward"].cpu_time_total >= 8000


class TestStepLog:
    def record(self, log: StepLog, step: int) -> None:
        log.record(step_batch(step), epoch=0.1, loss=torch.tensor(1.0), gradient_norm=1.0, learning_rate=0.1)

    def test_each_step_keeps_its_own_phases(self, wait: Wait):
        log = StepLog()
        log.start()
        for step in range(3):
            mark_step(log.phases, wait, forward=1.0, backward=2.0 * (step + 1), optimizer=1.0)
            self.record(log, step)
        log.flush()
        rows = log.efficiency
        assert [row["step"] for row in rows] == [1, 2, 3]
        for row in rows:
            parts = [row[f"{phase}_seconds"] for phase in ("forward", "backward", "optimizer")]
            assert parts == [1.0, 2.0 * row["step"], 1.0]
            assert row["seconds"] == sum(parts)

    def test_a_loop_that_marks_nothing_leaves_the_columns_empty(self):
        log = StepLog()
        log.start()
        self.record(log, 0)
        log.flush()
        assert [log.efficiency[0][f"{phase}_seconds"] for phase in ("forward", "backward", "optimizer")] == [None] * 3
        assert summarize_efficiency(log)["forward_fraction"] is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_device_is_timed_and_the_host_does_not_wait():
    clock = PhaseClock("cuda")
    left = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    pending = []
    for num_products in (1, 40):
        clock.enter("forward")
        torch.mm(left, left)
        clock.enter("backward")
        for _ in range(num_products):
            torch.mm(left, left)
        clock.enter("optimizer")
        pending.append(clock.end_step())
    still_running = not pending[-1].marks[-1].query()
    short, long = (phases.seconds() for phases in pending)
    assert still_running
    assert long["backward"] > 10 * short["backward"]
    assert clock._spare, "events are used again"
