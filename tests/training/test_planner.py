"""Plans of micro-batches: made in a fresh process, kept, and never in the way of a training."""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.text.store.table import TokenTableWriter, open_split
from lm_tuning.training.planning import plan as plan_store
from lm_tuning.training.planning import planner
from lm_tuning.training.planning.plan import BatchPlan, choose_point, explain_choice, list_budgets
from lm_tuning.training.planning.records import ProbeAnswer, ProbePoint
from lm_tuning.training.planning.report import NOT_COMPILED, draw_plan, tabulate_plan
from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
from lm_tuning.training.settings import step_plan_of
from tests.support.patience import PATIENCE_SECONDS
from tests.support.settings import vary
from tests.training.conftest import write_rows

# Without a limit: the time that users grant the planning says nothing of the code, and a busy machine needs more.
plan_batches = functools.partial(planner.plan_batches, seconds=PATIENCE_SECONDS)


@pytest.fixture
def settings(settings: TrainingSettings) -> TrainingSettings:
    """A run that is long enough to plan for; a short one is planned by its first size."""
    return vary(settings, max_steps=1_000_000)


@pytest.fixture
def cache_folder(tmp_path: Path) -> Path:
    return tmp_path / "plans"


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Collect the processes that really start."""
    started: list[Any] = []
    popen = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> Any:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(planner.subprocess, "Popen", start)
    yield started
    assert all(process.poll() is not None for process in started), "none is left running"


@pytest.fixture
def start_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let the planner start a line of shell in the place of Python."""

    def start(line: str) -> None:
        program = tmp_path / "program.sh"
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
        monkeypatch.setattr(planner.sys, "executable", str(program))

    return start


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_plan_is_made_in_a_fresh_process_and_kept(
    paths: TrainingPaths,
    settings: TrainingSettings,
    cache_folder: Path,
    tiny_model_folder: Path,
    processes: list[Any],
) -> None:
    before = files_of(tiny_model_folder) | files_of(paths.tokens)
    progress: list[tuple[int, int | None]] = []
    plan = plan_batches(
        paths,
        settings,
        cache_folder=cache_folder,
        on_progress=lambda what, done, total, unit: progress.append((done, total)),
    )
    assert plan.warning is None, plan.warning
    assert len(processes) == 1
    assert processes[0].pid != os.getpid()
    assert processes[0].returncode == 0
    sizes = [point.micro_batch_tokens for point in plan.curve]
    assert sizes == sorted(set(sizes))
    assert len(sizes) > 1
    assert plan.micro_batch_tokens in sizes
    assert not plan.gradient_checkpointing
    assert plan.seconds > 0
    assert not plan.cached
    assert f"{plan.micro_batch_tokens:,} tokens" in plan.reason
    assert progress[0][0] == 0
    assert progress[-1][0] == progress[-1][1]
    assert files_of(tiny_model_folder) | files_of(paths.tokens) == before
    assert not paths.checkpoints.exists(), "no checkpoint, no optimizer"

    again = plan_batches(paths, settings, cache_folder=cache_folder)
    assert len(processes) == 1, "no process starts for a plan that is there"
    assert again.cached
    assert replace(again, cached=False, seconds=plan.seconds) == plan
    assert BatchPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_what_a_plan_depends_on_makes_a_new_one(
    paths: TrainingPaths, settings: TrainingSettings, cache_folder: Path, tmp_path: Path
) -> None:
    def key(settings: TrainingSettings, tokens: Path = paths.tokens) -> str:
        table = open_split(tokens, "train")
        budgets, start = list_budgets(settings, table, step_plan_of(settings, table))
        reading = planner.read_memory("cpu")
        return planner._key(planner._Question(settings, table, budgets, start, [False], reading))

    write_rows(tmp_path / "others", "train", 20, seed=5)
    with TokenTableWriter(tmp_path / "others" / "train.arrow") as writer:
        for row in range(20):
            writer.append(row, [9] * 300, [(1, 300)])
    first = key(settings)
    assert key(vary(settings, learning_rate=1.0, run_id="other", resume=True)) == first
    assert key(settings, tokens=tmp_path / "others") != first
    assert key(vary(settings, memory_fraction=0.5)) != first
    for change in (
        {"base": {**settings.base, "digest": "base-2"}},
        {"method": "lora", "lora": {"r": 4}},
        {"compute_dtype": "bfloat16"},
        {"attention": "eager"},
        {"batching": "padded"},
        {"trainer": {"optim": "sgd"}},
        {"effective_batch_rows": 20},
    ):
        assert key(vary(settings, **change)) != first, change


def test_a_share_that_nothing_fits_takes_the_least_and_says_so(
    paths: TrainingPaths, settings: TrainingSettings, cache_folder: Path
) -> None:
    table = open_split(paths.tokens, "train")
    budgets, start = list_budgets(settings, table, step_plan_of(settings, table))
    plan = plan_batches(paths, vary(settings, memory_fraction=1e-6), cache_folder=cache_folder)
    sizes = [point.micro_batch_tokens for point in plan.curve]
    assert sizes == [budgets[start], *reversed(budgets[:start])], "nothing larger is tried, all that is smaller is"
    assert start > 0
    assert not any(point.fits for point in plan.curve)
    assert plan.micro_batch_tokens in sizes
    assert "nothing that was tried takes less" in plan.reason


@pytest.mark.slow
def test_the_effective_batch_stays(paths: TrainingPaths, settings: TrainingSettings, cache_folder: Path) -> None:
    settings = vary(settings, max_steps=2)
    plan = plan_batches(paths, settings, cache_folder=cache_folder)
    planned = run_training(paths, vary(settings, micro_batch_tokens=plan.micro_batch_tokens))
    by_hand = run_training(paths, vary(settings, micro_batch_tokens=64))
    assert [row["num_tokens"] for row in planned.efficiency] == [row["num_tokens"] for row in by_hand.efficiency]
    assert [row["loss_nats_per_token"] for row in planned.steps] == pytest.approx(
        [row["loss_nats_per_token"] for row in by_hand.steps], rel=1e-5
    )


def test_a_number_of_the_users_is_the_only_size(paths: TrainingPaths, settings: TrainingSettings) -> None:
    settings = vary(settings, micro_batch_tokens=100)
    table = open_split(paths.tokens, "train")
    assert list_budgets(settings, table, step_plan_of(settings, table)) == ([100], 0)


def test_a_model_that_cannot_be_loaded_leaves_an_estimate(
    paths: TrainingPaths,
    settings: TrainingSettings,
    cache_folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = vary(settings, base={**settings.base, "name_or_path": str(tmp_path / "nowhere")})
    plan = plan_batches(paths, settings, cache_folder=cache_folder)
    assert plan.curve == []
    assert plan.micro_batch_tokens > 0
    assert "nowhere" in (plan.warning or "")
    assert plan.warning in caplog.messages
    assert not list(cache_folder.glob("*")), "a guess is not kept"


def test_a_process_that_dies_leaves_an_estimate(
    paths: TrainingPaths,
    settings: TrainingSettings,
    cache_folder: Path,
    start_instead: Callable[[str], None],
) -> None:
    start_instead("kill -9 $$")
    plan = plan_batches(paths, settings, cache_folder=cache_folder)
    assert "signal 9" in (plan.warning or "")
    assert plan.micro_batch_tokens > 0
    assert "by arithmetic it takes" in plan.reason
    assert not list(cache_folder.glob("*"))


def test_a_process_that_cannot_start_leaves_an_estimate(
    paths: TrainingPaths, settings: TrainingSettings, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner.sys, "executable", str(cache_folder / "no-python"))
    plan = plan_batches(paths, settings, cache_folder=cache_folder)
    assert "could not be started" in (plan.warning or "")
    assert plan.micro_batch_tokens > 0


def test_a_plan_that_cannot_be_kept_serves_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    plan_store.keep_plan(tmp_path / "file" / "plan.json", BatchPlan(64, False, [], "", 1.0, False))
    assert "could not be kept" in caplog.text


def test_a_process_that_dies_in_the_middle_leaves_what_it_measured(
    paths: TrainingPaths,
    settings: TrainingSettings,
    cache_folder: Path,
    processes: list[Any],
    start_instead: Callable[[str], None],
) -> None:
    # The probe itself, but that it waits before its second size, until it is killed.
    waiting = paths.checkpoints.with_name("waiting.py")
    waiting.write_text(
        "import sys, time\n"
        "from lm_tuning.training.planning import probe\n"
        "try_budget = probe.try_budget\n"
        "def wait(one, answer, *rest, **options):\n"
        "    if answer.points:\n"
        f"        time.sleep({PATIENCE_SECONDS})\n"
        "    return try_budget(one, answer, *rest, **options)\n"
        "probe.try_budget = wait\n"
        "sys.exit(probe.main(sys.argv[-2:]))\n"
    )
    start_instead(f'exec {shlex.join([sys.executable, str(waiting)])} "$@"')

    def kill_after_one(what: str, done: int, total: int | None, unit: str) -> None:
        if done == 1:
            processes[0].kill()

    plan = plan_batches(paths, settings, cache_folder=cache_folder, on_progress=kill_after_one)
    assert [point.micro_batch_tokens for point in plan.curve] == [plan.micro_batch_tokens], plan.reason
    assert "ended early" in (plan.warning or "")
    assert not list(cache_folder.glob("*")), "half a curve is not kept"


def test_a_process_that_takes_too_long_is_ended(
    paths: TrainingPaths,
    settings: TrainingSettings,
    cache_folder: Path,
    processes: list[Any],
    start_instead: Callable[[str], None],
) -> None:
    start_instead(f"exec sleep {PATIENCE_SECONDS}")
    plan = plan_batches(paths, settings, cache_folder=cache_folder, seconds=1.0)
    assert processes[0].returncode == -9, "killed, and not waited for"
    assert "its time was over" in (plan.warning or "")


def test_an_interrupt_ends_the_process(
    paths: TrainingPaths, settings: TrainingSettings, cache_folder: Path, processes: list[Any]
) -> None:
    def interrupt(what: str, done: int, total: int | None, unit: str) -> None:
        if processes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan_batches(paths, settings, cache_folder=cache_folder, on_progress=interrupt)
    assert processes[0].returncode == -9


def test_a_plan_that_cannot_be_used_any_more_is_not_there(tmp_path: Path) -> None:
    reading = planner.read_memory("cpu")
    plan = BatchPlan(64, False, [], "", 1.0, False, facts={"other_programs_bytes": 2**30})
    file = tmp_path / "plan.json"
    assert plan_store.read_plan(file, reading) is None
    file.write_text(json.dumps(plan.to_json()))
    assert plan_store.read_plan(file, reading) == plan
    crowded = replace(reading, total=2**36, others=2**30 + 2**34)
    assert plan_store.read_plan(file, crowded) is None, "another program has come onto the device"
    for content in ("{", '{"micro_batch_tokens": 3}', "[]", '{"unknown": 1}'):
        file.write_text(content)
        assert plan_store.read_plan(file, reading) is None, content


def point(tokens: int, speed: float | None, share: float, **changes: Any) -> ProbePoint:
    total = round(share * 100_000)
    outcome = "measured" if speed is not None else "predicted"
    values: dict[str, Any] = {
        "micro_batch_tokens": tokens,
        "gradient_checkpointing": False,
        "outcome": outcome,
        "tokens_per_second": speed,
        "peak_memory_bytes": total if speed is not None else None,
        "predicted_total_bytes": total,
        "fits": speed is not None and share <= 0.88,
    }
    return ProbePoint(**(values | changes))


def answer_of(*points: ProbePoint) -> ProbeAnswer:
    return ProbeAnswer(list(points), {"total_bytes": 100_000, "memory_fraction": 0.88}, finished=True)


def test_the_fastest_is_taken_and_not_the_largest() -> None:
    points = [point(4096, 20_000, 0.4), point(8192, 24_310, 0.61), point(12288, 20_100, 0.8), point(16384, None, 0.93)]
    choice = choose_point(points)
    assert choice is points[1]
    assert explain_choice(choice, answer_of(*points)) == (
        "8,192 tokens: 24,310 tokens/s at 61% of memory; 12,288 was slower (20,100 tokens/s); 16,384 would take 93%"
    )


def test_of_equally_fast_ones_the_one_that_takes_least_is_chosen() -> None:
    points = [point(4096, 20_000, 0.4), point(8192, 20_100, 0.61), point(16384, 20_200, 0.8)]
    assert choose_point(points) is points[0]
    assert explain_choice(points[0], answer_of(*points)).endswith("16,384 was hardly faster (20,200 tokens/s)")
    same = [point(4096, 20_000, 0.4), point(4096, 20_000, 0.2, gradient_checkpointing=True)]
    assert choose_point(same) is same[0], "checkpointing only where it is needed"


def test_what_is_faster_but_does_not_fit_is_passed_over() -> None:
    points = [point(4096, 20_000, 0.4), point(8192, 40_000, 0.9)]
    assert choose_point(points) is points[0]
    assert "8,192 takes 90% (40,000 tokens/s)" in explain_choice(points[0], answer_of(*points))
    failed = point(8192, None, 0.0, outcome="out of memory", predicted_total_bytes=None)
    assert "8,192 ran out of memory" in explain_choice(points[0], answer_of(points[0], failed))
    assert choose_point([failed]) is None


def test_budgets_reach_from_the_longest_row_to_a_whole_step(settings: TrainingSettings, tmp_path: Path) -> None:
    def budgets(lengths: list[int], **changes: Any) -> tuple[list[int], int]:
        folder = tmp_path / "-".join(map(str, lengths[:3]))
        folder.mkdir(exist_ok=True)
        with TokenTableWriter(folder / "train.arrow") as writer:
            for row, length in enumerate(lengths):
                writer.append(row, [9] * length, [(1, length)])
        table = open_split(folder, "train")
        changed = vary(settings, batching="packed", **changes)
        return list_budgets(changed, table, step_plan_of(changed, table))

    assert budgets([50] * 20, effective_batch_rows=10) == ([64, 128, 192, 256, 384, 512], 1)
    assert budgets([50] * 20, effective_batch_rows=1) == ([64], 0)
    assert budgets([300] * 20, effective_batch_rows=2) == ([320, 384, 512, 640], 0)
    tokens, start = budgets([200] * 1000, effective_batch_rows=None, effective_batch_tokens=100_000, device="cuda")
    assert tokens[start] == 2048
    assert tokens[:start] == [256, 512, 1024]
    assert tokens[-1] == 65536
    assert tokens[start : start + 4] == [2048, 3072, 4096, 6144]
    tokens, start = budgets([5000] * 8, effective_batch_rows=8, device="cuda")
    assert (tokens[0], tokens[start]) == (5056, 5056), "no size is below the longest row"


def test_the_curve_is_drawn_and_tabulated(tmp_path: Path) -> None:
    points = [
        point(4096, 20_000, 0.4),
        point(8192, 24_000, 0.61),
        point(12288, 23_000, 0.9),
        point(16384, None, 0.99),
        point(4096, None, 0.0, outcome="out of memory", predicted_total_bytes=None, gradient_checkpointing=True),
    ]
    plan = BatchPlan(
        micro_batch_tokens=8192,
        gradient_checkpointing=False,
        curve=points,
        reason="8,192 tokens: it is the fastest",
        seconds=20.0,
        cached=False,
        facts={"device": "a card", "total_bytes": 100_000, "memory_fraction": 0.88},
        not_tried=[24576],
    )
    figure = draw_plan(plan)
    figure.savefig(tmp_path / "plan.png")
    speed, memory = figure.axes
    assert list(speed.lines[0].get_xdata()) == [4096, 8192, 12288]
    assert list(speed.lines[0].get_ydata()) == [20_000, 24_000, 23_000]
    assert [text.get_text() for text in memory.get_xticklabels()] == ["4,096", "8,192", "12,288", "16,384"]
    table = tabulate_plan(plan)
    assert "| 8,192 | no | no | 24,000 | 0.00 | 0.00 | 61% | chosen |" in table
    assert "| 12,288 | no | no | 23,000 | 0.00 | 0.00 | 90% | over the share |" in table
    assert "| 16,384 | no | no | - | - | 0.00 | 99% | predicted |" in table
    assert "| 4,096 | yes | no | - | - | - | - | out of memory |" in table
    assert NOT_COMPILED in table
    assert "24,576" in table
    compiled = [replace(point(size, 30_000.0, 0.5), compiled=True) for size in (8192, 12288)]
    looked_again = replace(plan, micro_batch_tokens=12288, curve=[*plan.curve, *compiled])
    table = tabulate_plan(looked_again)
    assert "| 12,288 | no | yes | 30,000 | 0.00 | 0.00 | 50% | chosen |" in table
    assert table.count("chosen") == 1, "not the point of the same size whose layers were not compiled"
    labels = [text.get_text() for text in draw_plan(looked_again).axes[0].get_legend().get_texts()]
    assert labels == ["no checkpointing", "gradient checkpointing", "compiled", "chosen"]
    empty = replace(plan, curve=[], warning="It could not be measured.")
    said = draw_plan(empty)
    said.savefig(tmp_path / "empty.png")
    assert not said.axes, "no empty diagram"
    assert [text.get_text() for text in said.texts] == ["Not measured: 8,192 tokens: it is the fastest."]
    assert "It could not be measured." in tabulate_plan(empty)
