"""A step that fits at once is not measured, and a short run is not planned for longer than it pays."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.text.store.table import TokenTable, TokenTableWriter, open_split
from lm_tuning.training.planning import planner
from lm_tuning.training.planning.out_of_memory import MemoryReading
from lm_tuning.training.planning.plan import BatchPlan, keep_plan, read_plan
from lm_tuning.training.planning.report import draw_plan, tabulate_plan
from lm_tuning.training.planning.whole_step import plan_whole_step
from lm_tuning.training.run import TrainingPaths, TrainingSettings
from lm_tuning.training.settings import step_plan_of
from tests.support.settings import vary
from tests.training.test_probe import request_for, run

CARD = MemoryReading("a card", total=80 * 2**30, used=0, peak=0)


def rows_of(folder: Path, lengths: list[int]) -> TokenTable:
    folder.mkdir(parents=True, exist_ok=True)
    with TokenTableWriter(folder / "train.arrow") as writer:
        for row, length in enumerate(lengths):
            writer.append(row, [9] * length, [(1, length)])
    return open_split(folder, "train")


def plan(settings: TrainingSettings, table: TokenTable, reading: MemoryReading = CARD) -> BatchPlan | None:
    return plan_whole_step(settings, table, step_plan_of(settings, table), reading)


@pytest.fixture
def on_card(settings: TrainingSettings) -> TrainingSettings:
    return vary(settings, device="cuda", effective_batch_rows=10)


def test_a_small_step_is_one_micro_batch_of_all_its_positions(on_card: TrainingSettings, tmp_path: Path) -> None:
    chosen = plan(on_card, rows_of(tmp_path, [50] * 20))
    assert chosen is not None
    assert (chosen.micro_batch_tokens, chosen.gradient_checkpointing, chosen.curve) == (512, False, [])
    assert chosen.reason.startswith("512 tokens, a whole step at once; by arithmetic it takes 0.")
    assert chosen.reason.endswith("of 80 GiB")
    assert "512 tokens, a whole step at once" in tabulate_plan(chosen)
    draw_plan(chosen)


def test_the_largest_of_all_steps_counts(on_card: TrainingSettings, tmp_path: Path) -> None:
    table = rows_of(tmp_path, [50] * 500 + [200] * 10)
    chosen = plan(on_card, table)
    steps = step_plan_of(on_card, table)
    largest = max(int(table.lengths[steps.rows_of_step(step)].sum()) for step in range(steps.total_steps))
    assert chosen is not None
    assert largest <= chosen.micro_batch_tokens < largest + 64


@pytest.mark.parametrize("lengths", [[1000] * 40, [8000, *[50] * 39]])
def test_a_large_step_of_packed_rows_is_one_too(on_card: TrainingSettings, tmp_path: Path, lengths: list[int]) -> None:
    chosen = plan(on_card, rows_of(tmp_path, lengths))
    assert chosen is not None
    assert chosen.micro_batch_tokens >= 8000


def test_a_step_that_takes_much_of_the_memory_is_measured(on_card: TrainingSettings, tmp_path: Path) -> None:
    table = rows_of(tmp_path, [1000] * 40)
    roomy = plan(on_card, table)
    assert roomy is not None
    tight = MemoryReading("a card", total=2**20, used=0, peak=0)
    assert plan(on_card, table, tight) is None
    busy = MemoryReading("a card", total=80 * 2**30, used=0, peak=0, others=79 * 2**30)
    assert plan(on_card, table, busy) is None
    unknown = MemoryReading("a card", total=0, used=0, peak=0)
    assert plan(on_card, table, unknown) is None


def test_padded_rows_of_unlike_length_are_measured(on_card: TrainingSettings, tmp_path: Path) -> None:
    padded = vary(on_card, batching="padded")
    assert plan(padded, rows_of(tmp_path / "long", [1000] * 40)) is None
    # Few tokens, and most positions of the step would be padding.
    assert plan(padded, rows_of(tmp_path / "unlike", [1500, *[10] * 9] * 2)) is None
    few = plan(padded, rows_of(tmp_path / "few", [100, *[50] * 9] * 2))
    assert few is not None
    assert few.micro_batch_tokens >= 10 * 100


def test_what_the_user_has_set_is_kept(on_card: TrainingSettings, tmp_path: Path) -> None:
    table = rows_of(tmp_path, [50] * 20)
    number = plan(vary(on_card, micro_batch_tokens=128), table)
    assert number is not None
    assert number.micro_batch_tokens == 128
    assert "as train.micro_batch_tokens says" in number.reason
    asked = plan(vary(on_card, gradient_checkpointing=True), table)
    assert asked is not None
    assert asked.gradient_checkpointing


def test_a_model_without_an_estimate_is_measured(on_card: TrainingSettings, tmp_path: Path) -> None:
    nowhere = vary(on_card, base={**on_card.base, "name_or_path": str(tmp_path / "none")})
    assert plan(nowhere, rows_of(tmp_path, [50] * 20)) is None


def test_a_training_on_a_gpu_starts_no_process_for_it(
    paths: TrainingPaths, on_card: TrainingSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measured: list[Any] = []
    monkeypatch.setattr(planner, "read_memory", lambda device: CARD)
    monkeypatch.setattr(planner, "plan_batches", lambda *given, **options: measured.append(given))
    with caplog.at_level(logging.INFO):
        chosen = planner.choose_batches(paths, on_card)
    assert not measured
    assert chosen.facts["device"] == "a card"
    assert f"Micro-batches: {chosen.reason}, so no sizes were measured." in caplog.text
    monkeypatch.setattr(planner, "read_memory", lambda device: MemoryReading("a card", 2**20, 0, 0))
    planner.choose_batches(paths, on_card)
    assert len(measured) == 1


def test_a_short_run_is_planned_no_longer_than_it_pays(paths: TrainingPaths, settings: TrainingSettings) -> None:
    short = run(request_for(paths, settings, began_at=time.time(), run_tokens=1.0))
    assert [point.micro_batch_tokens for point in short.points] == [64], "one is always measured"
    assert short.not_tried == [128, 192]
    assert short.facts["cut_short_at_tokens"] == 1.0
    long = run(request_for(paths, settings, began_at=time.time(), run_tokens=1e12))
    assert len(long.points) == 3
    assert "cut_short_at_tokens" not in long.facts


def test_a_plan_of_a_short_run_serves_no_run_that_is_much_longer(tmp_path: Path) -> None:
    values = {"micro_batch_tokens": 64, "gradient_checkpointing": False, "curve": [], "reason": "", "seconds": 1.0}
    kept = tmp_path / "plan.json"
    keep_plan(kept, BatchPlan(**values, cached=False, facts={"cut_short_at_tokens": 1000.0}))  # type: ignore[arg-type]
    stored = read_plan(kept, CARD)
    assert stored is not None
    assert not planner._was_cut_short(stored, 2000.0)
    assert planner._was_cut_short(stored, 2001.0)
    keep_plan(kept, BatchPlan(**values, cached=False))  # type: ignore[arg-type]
    stored = read_plan(kept, CARD)
    assert stored is not None
    assert not planner._was_cut_short(stored, 1e12)
