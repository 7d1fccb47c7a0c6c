"""What a run says of its own speed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lm_tuning.runtime.peak import Ceiling
from lm_tuning.training import step_log
from lm_tuning.training.records import describe_result
from lm_tuning.training.results import efficiency_figures, summarize_efficiency
from lm_tuning.training.step_log import StepLog

H100 = Ceiling("NVIDIA H100 80GB HBM3", "bfloat16", 989.5e12, 776e12)


def make_log(seconds: list[float], **changes: Any) -> StepLog:
    """Note steps of 1000 real tokens: 30 % forward, 50 % backward, 10 % optimizer, 5 % loader."""
    log = StepLog()
    log.efficiency = [
        {
            "step": index + 1,
            "seconds": each,
            "num_tokens": 1000,
            "num_rows": 4,
            "padding_fraction": 0.02,
            "loader_wait_seconds": 0.05 * each,
            "forward_seconds": 0.3 * each,
            "backward_seconds": 0.5 * each,
            "optimizer_seconds": 0.1 * each,
            "peak_memory_bytes": 3 * 2**30,
        }
        | changes
        for index, each in enumerate(seconds)
    ]
    return log


def test_speed_and_quantiles_leave_the_first_steps_out():
    figures = summarize_efficiency(make_log([60.0, 30.0, *(0.1 * index for index in range(1, 12))]))
    assert figures["tokens_per_second"] == pytest.approx(11_000 / 6.6)
    assert figures["samples_per_second"] == pytest.approx(44 / 6.6)
    assert figures["steps_per_second"] == pytest.approx(11 / 6.6)
    names = [f"step_seconds_{name}" for name in ("p10", "median", "p90", "p99")]
    assert [figures[name] for name in names] == pytest.approx([0.2, 0.6, 1.0, 1.09])


def test_padding_is_that_of_all_positions_not_the_mean_of_steps():
    log = make_log([1.0] * 3)
    log.efficiency[0] |= {"num_tokens": 100, "padding_fraction": 0.9}  # 1000 positions; the others 1020.4
    slots = 1000 + 2 * 1000 / 0.98
    assert summarize_efficiency(log)["padding_fraction"] == pytest.approx(1 - 2100 / slots)


def test_the_time_of_a_step_is_split():
    figures = summarize_efficiency(make_log([1.0, 2.0, 4.0]))
    names = [f"{name}_fraction" for name in ("loader_wait", "forward", "backward", "optimizer")]
    assert [figures[name] for name in names] == pytest.approx([0.05, 0.3, 0.5, 0.1])


def test_steps_from_before_a_resume_without_phases_are_left_out_of_the_split_alone():
    log = make_log([1.0] * 6)
    for row in log.efficiency[:4]:
        for phase in ("forward", "backward", "optimizer"):
            del row[f"{phase}_seconds"]
    figures = summarize_efficiency(log)
    assert figures["backward_fraction"] == pytest.approx(0.5)
    assert figures["tokens_per_second"] == pytest.approx(1000)


def test_mfu_is_the_share_of_the_cards_peak_and_of_the_measured_product():
    figures = summarize_efficiency(make_log([0.05] * 3), model_flops_per_token=16e9, ceiling=H100)
    assert figures["model_flops_per_second"] == pytest.approx(20_000 * 16e9)
    assert figures["mfu"] == pytest.approx(320 / 989.5)
    assert figures["mfu_of_measured"] == pytest.approx(320 / 776)


@pytest.mark.parametrize(
    ("flops", "ceiling", "known", "measured"),
    [
        (None, H100, None, None),
        (16e9, None, None, None),
        (16e9, Ceiling("CPU", "float32", None, 640e12), None, 0.5),
        (16e9, Ceiling("CPU", "float32", None, 1e12), None, None),  # slower than the training: disturbed
        (16e9, Ceiling("NVIDIA H100 80GB HBM3", "bfloat16", 989.5e12, None), 320 / 989.5, None),
    ],
)
def test_what_is_not_known_is_left_open(flops, ceiling, known, measured):
    figures = summarize_efficiency(make_log([0.05] * 3), model_flops_per_token=flops, ceiling=ceiling)
    expected = [None if value is None else pytest.approx(value) for value in (known, measured)]
    assert [figures["mfu"], figures["mfu_of_measured"]] == expected


def test_a_measurement_that_cannot_be_right_is_left_out_with_a_word(caplog):
    caplog.set_level("INFO", logger="lm_tuning")
    disturbed = Ceiling("CPU", "float32", None, 1e12)
    summarize_efficiency(make_log([0.05] * 3), model_flops_per_token=16e9, ceiling=disturbed)
    assert "did 3.2e+14 operations per second, the matrix product measured before it only 1e+12" in caplog.text


def test_a_run_without_steps_has_no_figures():
    figures = summarize_efficiency(StepLog(), model_flops_per_token=1.0, ceiling=H100)
    assert figures["samples_per_second"] is figures["step_seconds_p90"] is figures["mfu"] is None


def summary(**options: Any) -> dict[str, Any]:
    return {
        "num_steps": 3,
        "total_steps": 3,
        "epochs": 0.5,
        "stopped_early": False,
        "unit": "token",
        "first_loss": 4.0,
        "last_loss": 2.0,
        "health_seconds": 1.0,
        "first_look_seconds": 0.9,
        "health_fraction": 0.01,
        "logging_fraction": 0.002,
        "training_seconds": 10.0,
        "total_seconds": 12.0,
        **summarize_efficiency(make_log([0.05] * 3), **options),
    }


def test_the_terminal_says_speed_share_of_the_card_quantiles_split_and_memory():
    text = describe_result(summary(model_flops_per_token=16e9, ceiling=H100))
    for part in (
        "20,000 tokens/s (32.3% of the 990 TFLOP/s that NVIDIA H100 80GB HBM3 has at most, "
        "41.2% of the 776 TFLOP/s of a bfloat16 product)",
        "median step 0.05 s (90 % within 0.05 s, 99 % within 0.05 s)",
        "80.0 samples/s, 20.0 steps/s, median step",
        "padding 2.0%; of the step time loader wait 5.00%, forward 30%, backward 50%, optimizer 10%; of the training "
        "time health checks 1.00%, logging 0.200%; checks up to step 1 0.9 s; peak memory 3.0 GiB",
    ):
        assert part in text


def test_the_terminal_says_the_passes_of_replayed_steps_as_one():
    replayed = summary()
    replayed |= {"forward_fraction": 0.9, "backward_fraction": 0.02, "step_seconds_median": 0.01745}
    text = describe_result(replayed)
    assert "loader wait 5.00%, forward and backward 92%, optimizer 10%" in text
    assert "median step 0.0175 s" in text


def test_waiting_for_the_device_is_none_of_the_time_that_writing_numbers_down_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(step_log.time, "perf_counter", lambda: now[0])

    class Ready:
        def synchronize(self) -> None:
            now[0] += 5.0  # a host that is a step ahead

    def hand_out(step: int, values: dict[str, float]) -> None:
        now[0] += 0.25

    log = StepLog(on_metrics=hand_out)
    batch: Any = SimpleNamespace(
        step=0, row_ids=[1], micro_batches=[], num_supervised=9, num_tokens=10, num_positions=10
    )
    log.record(batch, epoch=0.1, loss=torch.tensor(1.0), gradient_norm=1.0, learning_rate=1e-3)
    assert log._pending is not None
    log._pending.ready = Ready()  # type: ignore[assignment]
    log.flush()
    assert log.own_seconds == 0.25


def test_the_terminal_compares_a_cpu_with_its_own_products():
    text = describe_result(summary(model_flops_per_token=1e6, ceiling=Ceiling("CPU", "float32", None, 40e9)))
    assert "20,000 tokens/s (50.0% of the 40 GFLOP/s of a float32 product), 80.0 samples/s" in text


def test_the_terminal_leaves_out_what_is_not_known():
    text = describe_result(summary())
    assert "FLOP/s" not in text
    assert "20,000 tokens/s, 80.0 samples/s" in text


def test_the_figures_for_files_and_tracking_are_all_there_and_grouped():
    given = summary(model_flops_per_token=16e9, ceiling=H100)
    figures = efficiency_figures(given)["efficiency"]
    speed = summarize_efficiency(make_log([0.05] * 3), model_flops_per_token=16e9, ceiling=H100)
    shares = {"health_fraction", "logging_fraction"}
    seconds = {"training_seconds", "health_seconds", "first_look_seconds", "total_seconds"}
    assert set(figures) == {*speed, *shares, *seconds}
    assert figures["mfu"] == given["mfu"]
    json.dumps(figures)
