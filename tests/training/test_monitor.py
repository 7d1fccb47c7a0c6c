"""The watch: each planted fault is seen once and named; runs that are well raise nothing, however short they are."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_tuning.errors import UserError
from lm_tuning.runtime.busy import LoadMonitor
from lm_tuning.training.health.monitor import TrainingMonitor
from lm_tuning.training.health.monitors import StepNumbers, check_planned_rates
from lm_tuning.training.health.report import Finding, HealthReport
from tests.support.cost import count_calls

PEAK = 1e-3


def make_watch(report: HealthReport, total_steps: int, **options: Any) -> TrainingMonitor:
    chosen = {"max_grad_norm": 1.0, "learning_rate": PEAK, "device": "cpu", **options}
    return TrainingMonitor(report, total_steps=total_steps, **chosen)


def step_row(step: int, **numbers: Any) -> StepNumbers:
    """A step of two seconds in which all is well."""
    usual = {
        "loss": 2.0,
        "gradient_norm": 0.5,
        "learning_rate": PEAK,
        "seconds": 2.0,
        "wait_seconds": 0.01,
        "num_tokens": 4000,
        "memory_bytes": 10,
        "row_ids": [step],
    }
    return StepNumbers(step, **usual | numbers)


def watch_run(
    rows: Sequence[StepNumbers], *, total_steps: int | None = None, severities: Any = None, **options: Any
) -> HealthReport:
    report = HealthReport(severities=severities or {})
    watch = make_watch(report, total_steps or len(rows), **options)
    for row in rows:
        watch.step(row)
    watch.finish()
    return report


def codes(report: HealthReport) -> list[str]:
    return [finding.code for finding in report.findings]


def only(report: HealthReport) -> Finding:
    [finding] = report.findings
    return finding


def linear(total: int, warmup: int) -> list[float]:
    """The rates that transformers' linear schedule gives to the updates of a run."""
    return [
        PEAK * (step / warmup if step < warmup else max(0.0, (total - step) / max(1, total - warmup)))
        for step in range(total)
    ]


def cosine(total: int, warmup: int) -> list[float]:
    return [
        PEAK * (step / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))))
        for step in range(total)
    ]


def healthy(rates: Iterable[float], *, seed: int = 0) -> list[StepNumbers]:
    """Noisy steps: the first slow ones wait for workers, every 50th is slow after an evaluation, norms have a tail."""
    noise = random.Random(seed)
    rows = []
    for step, rate in enumerate(rates, 1):
        seconds = 2.0 * noise.uniform(0.9, 1.1) * (8 if step <= 2 else 1) * (3 if step % 50 == 1 else 1)
        rows.append(
            step_row(
                step,
                loss=2.0 * math.exp(-step / 400) + noise.uniform(-0.1, 0.1),
                gradient_norm=0.4 * math.exp(noise.gauss(0, 0.6)),
                learning_rate=rate,
                seconds=seconds,
                wait_seconds=seconds * 0.9 if step <= 2 else 0.02,
                num_tokens=noise.randrange(3000, 5000),
            )
        )
    return rows


@pytest.mark.parametrize(
    "rates",
    [
        [PEAK],
        [0.0, PEAK],
        [PEAK, PEAK / 2],
        linear(3, 2),
        linear(40, 0),
        linear(600, 60),
        cosine(1000, 30),
        [PEAK] * 300,
    ],
    ids=["one step", "two, one warm-up", "two", "three, two warm-up", "linear", "warm-up", "cosine", "constant"],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_run_raises_nothing(rates: list[float], seed: int) -> None:
    report = watch_run(healthy(rates, seed=seed), device="cuda", memory_total_bytes=11)
    assert report.findings == []
    assert report.facts["learning_rate_max"] == max(rates)


def test_a_run_of_no_steps_raises_nothing() -> None:
    assert watch_run([], total_steps=4).findings == []


# The loss


def watch_losses(losses: Iterable[float]) -> list[str]:
    return codes(watch_run([step_row(step, loss=loss) for step, loss in enumerate(losses, 1)]))


def test_a_loss_that_rises_is_named() -> None:
    noise = random.Random(1)
    assert watch_losses(2.0 + min(step, 60) / 40 + noise.uniform(-0.1, 0.1) for step in range(100)) == ["loss-rises"]


def test_a_loss_that_rises_in_a_resumed_run_is_named_with_the_steps_from_before() -> None:
    report = HealthReport()
    watch = make_watch(report, 60)
    rates = {"gradient_norm": 0.5, "learning_rate": PEAK}
    watch.replay([{"step": step, "loss_nats_per_row": 2.0, **rates} for step in range(1, 31)])
    for step in range(31, 61):
        watch.step(step_row(step, loss=4.0))
    watch.finish()
    assert only(report).code == "loss-rises"
    assert only(report).measured.startswith("each of the last 15 steps has a loss of at least 4.0000 nats, and none of")


@pytest.mark.parametrize("num_steps", [2, 39, 40, 300])
def test_a_loss_that_stays_where_it_is_is_no_rise_however_noisy(num_steps: int) -> None:
    """A finished model, a low rate: heavy tails, rows of two kinds, losses near 0."""
    for seed in range(100):
        noise = random.Random(seed)
        assert watch_losses(noise.lognormvariate(0, 1.5) for _ in range(num_steps)) == []
        assert watch_losses(noise.choice([0.1, *[3.0] * 20]) for _ in range(num_steps)) == []
        assert watch_losses(0.01 + 0.001 * step + noise.uniform(0, 0.01) for step in range(min(num_steps, 90))) == []


def test_a_rise_that_is_over_at_the_end_or_comes_in_a_short_run_is_none() -> None:
    assert watch_losses(4.0 if 20 < step < 70 else 2.0 for step in range(100)) == []
    assert watch_losses(2.0 + step for step in range(39)) == []


# Gradients


def test_norms_far_above_the_limit_are_said_with_both() -> None:
    report = watch_run([step_row(step, gradient_norm=12.5) for step in range(1, 41)])
    finding = only(report)
    assert (finding.code, finding.severity) == ("gradients-far-above-limit", "warn")
    assert finding.measured == (
        "100% of 40 updates were clipped, and the usual gradient norm is 12.5, 12.5 times the limit of 1"
    )
    assert report.facts["clipped_fraction"] == 1.0


def test_updates_that_are_mostly_clipped_are_a_note() -> None:
    rows = [step_row(step, gradient_norm=30.0 if step % 4 else 0.5) for step in range(1, 101)]
    finding = only(watch_run(rows))
    assert (finding.code, finding.severity) == ("gradients-often-clipped", "note")
    assert finding.measured == "75% of 100 updates were clipped at 1; the usual gradient norm is 30"
    assert watch_run(rows, max_grad_norm=0.0).findings == []
    assert watch_run(rows[:19]).findings == []


def test_norms_a_few_times_the_limit_are_ordinary() -> None:
    report = watch_run([step_row(step, gradient_norm=3.0) for step in range(1, 101)])
    assert report.findings == []
    assert report.facts["clipped_fraction"] == 1.0


def test_an_explosion_is_measured_against_the_usual_norm() -> None:
    rows = [step_row(step) for step in range(1, 201)]
    rows[149].gradient_norm = 20.0
    rows[150].gradient_norm = 40.0
    report = watch_run(rows)
    finding = only(report)
    assert finding.code == "gradient-exploded"
    assert finding.measured == ("the gradient norm was 40 at step 151, 80 times the usual 0.5 (and at 1 further step)")
    assert report.facts["gradient_norm_max_step"] == 151


def test_a_spike_under_the_limit_or_before_a_usual_norm_is_known_is_no_explosion() -> None:
    quiet = [step_row(step, gradient_norm=0.01) for step in range(1, 101)]
    quiet[60].gradient_norm = 0.9
    assert watch_run(quiet).findings == []
    early = [step_row(step) for step in range(1, 101)]
    early[3].gradient_norm = 50.0
    assert watch_run(early).findings == []


def test_the_usual_norm_follows_the_run() -> None:
    falling = [step_row(step, gradient_norm=100.0 if step <= 200 else 0.5) for step in range(1, 601)]
    falling[500].gradient_norm = 45.0
    assert "gradient-exploded" in codes(watch_run(falling, max_grad_norm=0.0))


def test_a_zero_gradient_with_a_loss_is_found_and_without_one_is_right() -> None:
    rows = [step_row(step, gradient_norm=0.0) for step in range(1, 4)]
    finding = only(watch_run(rows))
    assert finding.code == "gradient-zero"
    assert finding.measured.startswith("the gradient of step 1 is exactly 0 although its loss is not (and at 2 further")
    assert watch_run([step_row(1, gradient_norm=0.0, loss=0.0)]).findings == []


# NaN and infinity


def test_a_step_that_is_not_finite_is_named_with_its_rows_and_saved(tmp_path: Path) -> None:
    saved: list[int] = []

    def reproduce(step: int) -> Path:
        saved.append(step)
        return tmp_path / f"step-{step}.json"

    rows = [step_row(step) for step in range(1, 31)]
    rows[4] = replace(rows[4], gradient_norm=math.inf, row_ids=list(range(100, 112)))
    for index in (9, 12, 20):
        rows[index].loss = rows[index].gradient_norm = math.nan
    report = watch_run(rows, reproduce=reproduce)
    gradient, loss = report.findings
    assert gradient.measured == (
        "step 5 has a loss of 2 and a gradient norm of inf: its update was skipped; rows 100, 101, 102, 103, 104, 105, "
        f"106, 107 and 4 more; saved in {tmp_path / 'step-5.json'}"
    )
    assert gradient.code == "gradient-not-finite"
    assert (loss.code, loss.severity) == ("loss-not-finite", "warn")
    assert loss.measured == (
        "step 10 has a loss of nan and a gradient norm of nan: its update was skipped; rows 10; saved in "
        f"{tmp_path / 'step-10.json'} (and 2 further of 30 steps)"
    )
    assert saved == [5, 10, 13]
    assert [entry["step"] for entry in report.facts["steps_not_finite"]] == saved
    assert report.facts["steps_not_finite"][1]["loss"] == "nan"
    assert report.facts["num_steps_not_finite"] == 4
    assert report.facts["num_updates"] == 26


def test_a_run_whose_updates_all_fail_is_stopped() -> None:
    report = HealthReport()
    watch = make_watch(report, 100)
    for step in range(1, 10):
        watch.step(step_row(step, loss=math.nan, gradient_norm=math.nan))
    with pytest.raises(UserError, match="10 updates in a row were NaN or infinite"):
        watch.step(step_row(10, loss=math.nan, gradient_norm=math.nan))


def test_float16_may_overflow_while_it_looks_for_its_scale() -> None:
    searching = [step_row(step, gradient_norm=math.inf if step <= 14 else 0.5) for step in range(1, 101)]
    assert watch_run(searching, has_scaler=True).findings == []
    for row in searching[20::4]:
        row.gradient_norm = math.inf
    finding = only(watch_run(searching, has_scaler=True))
    assert finding.code == "fp16-overflows"
    assert finding.measured == "34 of 100 updates were skipped for overflows in float16"


# Learning rate


@pytest.mark.parametrize(
    ("rates", "code", "words"),
    [
        ([0.0], "no-update-made", "none of 1 step changed the weights"),
        (linear(100_000, 100_000)[:3], "learning-rate-tiny", "0.00002 of the peak"),
        (linear(100, 10)[:3], "warm-up-not-finished", "0.2 of the peak of 0.001"),
        ([PEAK / 2] * 30, "peak-rate-not-reached", "0.0005, 0.5 of the peak of 0.001"),
    ],
)
def test_a_rate_that_does_not_do_what_was_asked_for(rates: list[float], code: str, words: str) -> None:
    words = words.replace("0.00002", "2e-05")
    rows = [step_row(step, learning_rate=rate) for step, rate in enumerate(rates, 1)]
    report = HealthReport()
    watch = make_watch(report, len(rows))
    for row in rows:
        watch.step(row)
    assert report.findings == []
    if code == "no-update-made":
        with pytest.raises(UserError, match="no-update-made"):
            watch.finish()
    else:
        watch.finish()
    finding = only(report)
    assert finding.code == code
    assert words in finding.measured


def test_a_run_whose_updates_were_all_skipped_says_so() -> None:
    with pytest.raises(UserError, match=r"no-update-made.*Every update was skipped"):
        watch_run([step_row(step, gradient_norm=math.nan) for step in (1, 2)])


@pytest.mark.parametrize(
    ("warmup", "total", "code"),
    [(0, 3, None), (2, 3, None), (10, 3, "warm-up-not-finished"), (400, 3, "learning-rate-tiny")],
)
def test_the_plan_of_rates_is_judged_before_the_first_step(warmup: int, total: int, code: str | None) -> None:
    from transformers import get_linear_schedule_with_warmup

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = get_linear_schedule_with_warmup(optimizer, warmup, max(total, warmup + 1))
    report = HealthReport()
    check_planned_rates(report, scheduler, total_steps=total, peak=PEAK)
    assert codes(report) == ([] if code is None else [code])


def test_a_plan_without_any_update_stops_before_the_first_step() -> None:
    from transformers import get_linear_schedule_with_warmup

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    with pytest.raises(UserError, match="no-update-made"):
        check_planned_rates(HealthReport(), get_linear_schedule_with_warmup(optimizer, 1, 2), total_steps=1, peak=PEAK)


def test_a_schedule_that_depends_on_the_training_is_not_judged_beforehand() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK / 1000)
    report = HealthReport()
    check_planned_rates(report, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), total_steps=5, peak=PEAK)
    assert report.findings == []


# Speed and memory


def test_a_loader_that_starves_the_device() -> None:
    rows = [step_row(step, seconds=1.0, wait_seconds=0.25) for step in range(1, 46)]
    finding = only(watch_run(rows))
    assert finding.code == "loader-starves-device"
    assert finding.measured == "25% of the training time went into waiting for batches (10 of 40 s)"


def test_a_wait_of_milliseconds_or_at_the_start_is_none() -> None:
    tiny = [step_row(step, seconds=0.01, wait_seconds=0.005) for step in range(1, 400)]
    assert watch_run(tiny).findings == []
    start = [step_row(step, seconds=60.0, wait_seconds=59.0) for step in range(1, 6)]
    assert watch_run(start + [step_row(step) for step in range(6, 60)]).findings == []


def test_a_wait_that_made_up_for_itself_is_taken_back() -> None:
    rows = [step_row(step, seconds=1.0, wait_seconds=0.2 if step < 110 else 0.0) for step in range(1, 1001)]
    report = HealthReport()
    watch = make_watch(report, len(rows))
    for row in rows[:200]:
        watch.step(row)
    assert codes(report) == ["loader-starves-device"]
    for row in rows[200:]:
        watch.step(row)
    watch.finish()
    assert report.findings == []


def test_memory_near_the_limit_is_said_with_what_it_costs() -> None:
    gib = 2**30
    rows = [step_row(step, memory_bytes=(70 if step < 3 else 76) * gib) for step in range(1, 6)]
    finding = only(watch_run(rows, device="cuda", memory_total_bytes=80 * gib))
    assert finding.code == "memory-near-limit"
    assert finding.measured == "95.0% of the GPU's memory is used (76.0 of 80.0 GiB)"
    assert "2.4 times as long" in finding.cause
    assert watch_run(rows, device="cuda", memory_total_bytes=100 * gib).findings == []
    assert watch_run(rows, device="cpu", memory_total_bytes=80 * gib).findings == []


def test_training_that_gets_slower() -> None:
    rows = [step_row(step, seconds=2.0 if step <= 60 else 4.0) for step in range(1, 121)]
    report = watch_run(rows)
    finding = only(report)
    assert finding.code == "throughput-falls"
    assert finding.measured.startswith(
        "the last quarter of the steps ran at 1,000 tokens per second, an early one at 2,000 (50% slower)"
    )
    assert report.facts["late_tokens_per_second"] == 1000.0


def test_training_that_gets_slower_beside_other_programs_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "other programs used 1.8 of the 2 processors of this run; set environment.num_threads=1 (now 2)"
    monkeypatch.setattr(LoadMonitor, "describe", lambda self: said)
    rows = [step_row(step, seconds=2.0 if step <= 60 else 4.0) for step in range(1, 121)]
    assert only(watch_run(rows)).cause == f"Lately, {said}."
    monkeypatch.setattr(LoadMonitor, "describe", lambda self: None)
    assert only(watch_run(rows)).cause.startswith("The device is throttled")


def test_what_keeps_the_processors_busy_is_read_beside_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking through the files of all threads and worker processes takes milliseconds."""
    readers: list[int] = []
    report = HealthReport()
    watch = make_watch(report, 120)
    monkeypatch.setattr(LoadMonitor, "describe", lambda self: readers.append(threading.get_ident()))
    for step in range(1, 121):
        watch.step(step_row(step, seconds=2.0 if step <= 60 else 4.0))
    assert codes(report) == ["throughput-falls"], "of step 90, which waits for the reading"
    assert len(readers) == 3
    assert threading.get_ident() not in readers


def test_slow_single_steps_and_short_runs_are_no_loss_of_speed() -> None:
    single = [step_row(step, seconds=40.0 if step % 5 == 0 else 2.0) for step in range(1, 121)]
    assert watch_run(single).findings == []
    short = [step_row(step, seconds=0.1 if step <= 60 else 0.2) for step in range(1, 121)]
    assert watch_run(short).findings == []
    few = [step_row(step, seconds=2.0 if step <= 15 else 9.0) for step in range(1, 31)]
    assert watch_run(few).findings == []


# The watch itself


def test_a_finding_is_logged_once_while_training_and_counted_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    rows = [step_row(step, gradient_norm=math.inf if step in (3, 5, 9) else 0.5) for step in range(1, 12)]
    with caplog.at_level("WARNING"):
        report = watch_run(rows)
    assert [record.message.count("gradient-not-finite") for record in caplog.records] == [1]
    assert only(report).measured.endswith("(and 2 further of 11 steps)")


def test_severities_of_the_user_hold() -> None:
    rows = [step_row(step, gradient_norm=0.0) for step in (1, 2)]
    assert watch_run(rows, severities={"gradient-zero": "off"}).findings == []
    assert only(watch_run(rows, severities={"gradient-zero": "note"})).severity == "note"
    report = HealthReport(severities={"gradient-zero": "stop"})
    with pytest.raises(UserError, match="gradient-zero"):
        make_watch(report, 2).step(rows[0])


def test_a_resumed_run_counts_what_was_before_and_repeats_nothing() -> None:
    rows = [step_row(step, gradient_norm=30.0, learning_rate=rate) for step, rate in enumerate(linear(60, 6), 1)]
    logged = [
        {
            "step": row.step,
            "loss_nats_per_token": row.loss,
            "gradient_norm": row.gradient_norm,
            "learning_rate": row.learning_rate,
        }
        for row in rows
    ]
    report = HealthReport()
    watch = make_watch(report, 60)
    watch.replay(logged[:50])
    assert report.findings == []
    for row in rows[50:]:
        watch.step(row)
    watch.finish()
    assert only(report).measured == (
        "100% of 60 updates were clipped, and the usual gradient norm is 30, 30 times the limit of 1"
    )
    assert report.facts["num_updates"] == 59
    assert report.facts["learning_rate_max"] == PEAK


def test_failures_after_a_resume_are_a_share_of_the_whole_run() -> None:
    earlier = {"loss_nats_per_token": 2.0, "gradient_norm": 0.5, "learning_rate": PEAK}
    report = HealthReport()
    watch = make_watch(report, 100)
    watch.replay([{"step": step, **earlier} for step in range(1, 98)])
    for step in (98, 99, 100):
        watch.step(step_row(step, gradient_norm=0.5 if step == 100 else math.nan))
    watch.finish()  # which most-updates-skipped would stop
    finding = only(report)
    assert finding.code == "gradient-not-finite"
    assert finding.measured.endswith("(and 1 further of 100 steps)")
    assert report.facts["num_steps_not_finite"] == 2


def test_a_run_seen_from_its_middle_is_not_judged_by_its_peak() -> None:
    rows = [step_row(step, learning_rate=rate) for step, rate in enumerate(linear(60, 6), 1)]
    assert watch_run(rows[50:], total_steps=60).findings == []


def test_a_step_costs_the_monitor_next_to_nothing() -> None:
    """A step of a tiny model takes some 5 ms. Half a percent of it are 25 µs, in which Python calls 200 functions."""
    report = HealthReport()
    watch = make_watch(report, 2000)
    calls = [count_calls(lambda: watch.step(row)) for row in healthy(linear(2000, 50))]  # noqa: B023
    assert sum(calls) / len(calls) < 100
    assert max(calls[-100:]) < 2 * max(calls[200:300]), "a long run costs no more for each step"
    assert report.seconds > 0


def test_the_monitor_needs_no_torch() -> None:
    modules = "lm_tuning.training.health.monitor, lm_tuning.parameters.health_codes"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
