from __future__ import annotations

import gzip
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.errors import UserError
from lm_tuning.reporting.markdown import write_markdown
from lm_tuning.reporting.terminal import build_blocks
from lm_tuning.training.kernels import fast_path
from lm_tuning.training.profile import trace as trace_table
from lm_tuning.training.profile.profiling import (
    TrainingProfile,
    compose_report,
    profile_figures,
    profile_training,
    tabulate_groups,
)
from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
from tests.support.settings import vary
from tests.support.task_rows import WRITERS, label_map


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def long_settings(settings: TrainingSettings) -> TrainingSettings:
    """A training that would evaluate and save, and is much longer than its profile."""
    return vary(settings, max_steps=400, save_every_steps=2, eval_every_steps=2, load_best=True, early_stopping_evals=3)


def test_a_few_steps_of_the_real_training_are_profiled(paths: TrainingPaths, long_settings, tmp_path, caplog):
    caplog.set_level("INFO")
    calls: list[tuple[str, int, int | None, str]] = []
    profile = profile_training(
        paths, long_settings, folder=tmp_path / "profile", num_steps=2, on_progress=lambda *call: calls.append(call)
    )
    table = profile.table
    assert (table.num_steps, table.on_gpu) == (2, False)
    assert 0 < table.busy_seconds < table.seconds
    groups = table.seconds_by_group()
    for group in (trace_table.PRODUCTS, trace_table.ATTENTION, trace_table.ELEMENTWISE, trace_table.OPTIMIZER):
        assert groups[group] > 0, group
    assert sum(groups.values()) + table.idle_fraction * table.seconds == pytest.approx(table.seconds, rel=0.02)
    assert profile.tokens_per_second is not None
    assert calls[-1] == ("Warm-up and profiling", 7, 7, "steps")
    line = "The profile runs the first 7 of 400 training steps: 5 to warm up, then 2 under the profiler."
    assert line in caplog.messages
    markdown = write_markdown(compose_report(profile, {}))
    assert "- profiled: 2 steps of " in markdown and "; the 5 warm-up steps before ran at " in markdown
    # Two steps of one micro-batch through two layers: nothing else of the run is in it.
    assert [row.count for row in table.operations if row.name == "aten::silu"] == [2 * 2]
    content = json.loads(gzip.decompress(profile.trace.read_bytes()))
    names = [each["name"] for each in content["traceEvents"] if each.get("cat") == "user_annotation"]
    assert [name for name in names if name.startswith("training step")] == ["training step 6", "training step 7"]


def num_products(profile: TrainingProfile, group: str) -> int:
    """Count the matrix products of a group in all profiled steps."""
    names = {"aten::mm", "aten::addmm", "aten::addmm_"}
    return sum(row.count for row in profile.table.operations if row.name in names and row.group == group)


# Logits, gradient of the hidden states, gradient of the weight; the last one makes the logits twice.
PRODUCTS_OF_HEAD = {"a chunk at a time": 3, "all logits at once": 3, "logits again in the backward pass": 4}


@pytest.mark.parametrize("how", PRODUCTS_OF_HEAD)
def test_the_head_s_products_are_the_loss_s(how, paths, settings, tmp_path, monkeypatch):
    choose = fast_path.choose_head_loss

    def choose_as_said(*arguments: Any, **options: Any) -> Any:
        chosen, reason = choose(*arguments, **options)
        assert chosen is not None
        if how == "all logits at once":
            return None, reason
        return (replace(chosen, implementation=None) if how.startswith("logits again") else chosen), reason

    monkeypatch.setattr(fast_path, "choose_head_loss", choose_as_said)
    profile = profile_training(paths, settings, folder=tmp_path, num_steps=2, num_warm_up_steps=2)
    assert num_products(profile, trace_table.LOSS) == 2 * PRODUCTS_OF_HEAD[how]
    # Seven linear layers in each of two decoder layers, forward, and backward to input and weight.
    assert num_products(profile, trace_table.PRODUCTS) == 2 * 2 * 7 * 3
    assert num_products(profile, trace_table.ATTENTION) == num_products(profile, trace_table.OPTIMIZER) == 0


def test_a_classifier_s_head_is_the_loss_s_too(settings, tmp_path):
    for seed, split in enumerate(("train", "validation", "test")):
        WRITERS["sequence_classification"](tmp_path / "tokens", split, 12, seed=seed)
    settings = vary(settings, task="sequence_classification", label_map=label_map(), health={"on_mismatch": "warn"})
    paths = TrainingPaths(tokens=tmp_path / "tokens", checkpoints=tmp_path / "checkpoints")
    profile = profile_training(paths, settings, folder=tmp_path, num_steps=2, num_warm_up_steps=2)
    assert num_products(profile, trace_table.LOSS) == 2 * 3
    assert num_products(profile, trace_table.PRODUCTS) == 2 * 2 * 7 * 3


def test_work_has_the_names_that_the_code_gives_it(paths, settings, tmp_path):
    profile = profile_training(paths, settings, folder=tmp_path, num_steps=1, num_warm_up_steps=2)
    content = json.loads(gzip.decompress(profile.trace.read_bytes()))
    ranges = {each["name"] for each in content["traceEvents"] if each.get("cat") == "user_annotation"}
    assert {"forward", "backward", "optimizer", "lm_tuning: loss", "lm_tuning: attention"} <= ranges
    by_name = {row.name: row.group for row in profile.table.operations}
    assert by_name["aten::_fused_adamw_"] == trace_table.OPTIMIZER, "whatever the optimizer calls"


def test_it_leaves_nothing_but_the_trace_and_touches_no_checkpoint(paths, settings, long_settings, tmp_path):
    run_training(paths, vary(settings, max_steps=2, save_every_steps=1))
    before = files_below(paths.checkpoints)
    assert any("checkpoint-2" in name for name in before)
    profile_training(paths, vary(long_settings, resume=True), folder=tmp_path / "profile", num_steps=1)
    assert files_below(paths.checkpoints) == before
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["trace.json.gz"]


def test_a_training_of_fewer_steps_is_made_longer(paths, settings, tmp_path, caplog):
    caplog.set_level("INFO")
    short = vary(settings, max_steps=2, trainer={**settings.train.trainer, "warmup_steps": 1})
    assert profile_training(paths, short, folder=tmp_path, num_steps=2, num_warm_up_steps=2).table.num_steps == 2
    # A run too short for the profile is laid out longer, and the lines of the training count up to that.
    line = "The profile runs the first 4 of 5 training steps: 2 to warm up, then 2 under the profiler."
    assert line in caplog.messages


def test_an_error_of_the_training_comes_through_and_nothing_stays(paths, settings, tmp_path):
    wrong = vary(settings, method="lora", lora={"r": 2, "alpha": 4, "dropout": 0.0, "target_modules": ["q_prj"]})
    with pytest.raises(UserError, match="q_prj"):
        profile_training(paths, wrong, folder=tmp_path / "profile")
    assert list((tmp_path / "profile").iterdir()) == []
    profile = profile_training(paths, settings, folder=tmp_path / "profile", num_steps=1, num_warm_up_steps=2)
    assert profile.table.num_steps == 1


def test_of_the_profiler_s_warnings_only_the_usual_one_is_hidden(paths, settings, tmp_path, monkeypatch):
    from torch.profiler import profile

    sound = profile.start

    def start(self: profile) -> None:
        sound(self)
        warnings.warn("Warning: Profiler clears events at the end of each cycle.Only events from", stacklevel=1)
        warnings.warn("CUDA is not available, disabling CUDA profiling", stacklevel=1)

    monkeypatch.setattr(profile, "start", start)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        profile_training(paths, settings, folder=tmp_path / "profile", num_steps=1, num_warm_up_steps=2)
    said = [str(one.message) for one in caught]
    assert "CUDA is not available, disabling CUDA profiling" in said
    assert not [one for one in said if "clears events" in one]


class TestReport:
    @pytest.fixture
    def profile(self, tmp_path: Path) -> TrainingProfile:
        table = trace_table.TraceTable(
            on_gpu=True,
            num_steps=2,
            seconds=0.1,
            busy_seconds=0.08,
            operations=[
                trace_table.Operation("nvjet<a|b>", trace_table.PRODUCTS, 0.06, 40),
                trace_table.Operation("flash_fwd", trace_table.ATTENTION, 0.02, 4),
            ],
        )
        return TrainingProfile(
            table=table, trace=tmp_path / "trace.json.gz", tokens_per_second=20000.0, num_warm_up_steps=5
        )

    def test_groups_are_shares_of_the_time_and_idle_time_comes_last(self, profile):
        assert tabulate_groups(profile.table).rows == [
            ("matrix products", "60.0%", "30.00", "20"),
            ("attention", "20.0%", "10.00", "2"),
            ("no kernel ran", "20.0%", "10.00", ""),
        ]

    def test_figures_are_numbers_for_tracking_and_rows_for_reading(self, profile):
        figures = profile_figures(profile)
        assert figures["metrics"]["profile"] == pytest.approx(
            {
                "num_steps": 2,
                "step_seconds": 0.05,
                "tokens_per_second_before": 20000.0,
                "idle_fraction": 0.2,
                "matrix_products_fraction": 0.6,
                "attention_fraction": 0.2,
            }
        )
        assert figures["operations"][0]["count"] == 40
        json.dumps(figures)

    def test_markdown_has_both_tables_and_says_how_to_open_the_trace(self, profile):
        text = write_markdown(compose_report(profile, {"model": "a_b", "device": "H100"}))
        assert text.startswith("# Profile of a training\n")
        assert "- model: a_b" in text
        assert "| matrix products | 60.0% | 30.00 | 20 |" in text
        assert "| no kernel ran | 20.0% | 10.00 |  |" in text
        assert r"| `nvjet<a\|b>` | matrix products | 60.0% | 30.00 | 20.0 |" in text
        assert "2 steps of 50.0 ms" in text and "20,000 real tokens per second" in text
        assert "https://ui.perfetto.dev" in text and "`trace.json.gz`" in text

    def test_the_terminal_shows_the_groups(self, profile):
        from rich.console import Console

        console = Console(record=True, width=100)
        console.print(build_blocks([tabulate_groups(profile.table)]))
        shown = console.export_text()
        assert "matrix products" in shown and "60.0%" in shown and "no kernel ran" in shown
