"""Whole trainings of a tiny model: the same steps however they are cut, resumed or interrupted."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lm_tuning.batching.losses import PLAIN
from lm_tuning.batching.tasks.registry import task_of
from lm_tuning.errors import Interrupted, UserError
from lm_tuning.runtime import nvml
from lm_tuning.runtime.nvml import CardReading
from lm_tuning.runtime.peak import Ceiling
from lm_tuning.runtime.stopping import forget_request, note_request
from lm_tuning.text.store.table import open_split
from lm_tuning.training import step_log
from lm_tuning.training.checkpoints import format as checkpoints
from lm_tuning.training.checkpoints.saving import BestCheckpoint
from lm_tuning.training.health.plain_loss import measure_plain_loss
from lm_tuning.training.records import describe_result
from lm_tuning.training.results import efficiency_figures
from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
from lm_tuning.training.trainer import StepPlanTrainer
from tests.support.rounding import SAME_LOSS
from tests.support.settings import vary
from tests.training.conftest import write_rows

LORA = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"}


def losses(result: Any) -> list[float]:
    return [row["loss_nats_per_token"] for row in result.steps]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next(folder.glob("*model.safetensors")))


def assert_equal_weights(first: Path, second: Path) -> None:
    one, two = weights(first), weights(second)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_a_step_computes_the_same_however_it_is_cut(
    paths: TrainingPaths, settings: TrainingSettings, method: str
) -> None:
    settings = vary(settings, method=method, lora=LORA if method == "lora" else {})
    whole = run_training(paths, vary(settings, batching="packed", micro_batch_tokens=1000))
    for batching, budget, most in (("packed", 60, 6), ("padded", 60, 6), ("padded", 1000, 1), ("packed", 1, 6)):
        cut = run_training(paths, vary(settings, batching=batching, micro_batch_tokens=budget))
        assert 1 <= cut.efficiency[0]["num_micro_batches"] <= most
        assert losses(cut) == pytest.approx(losses(whole), rel=SAME_LOSS)
        norms = [row["gradient_norm"] for row in cut.steps]
        assert norms == pytest.approx([row["gradient_norm"] for row in whole.steps], rel=1e-4)


def test_the_logged_loss_is_the_loss_of_the_rows(paths: TrainingPaths, settings: TrainingSettings) -> None:
    from lm_tuning.batching.step_plan import StepPlan
    from lm_tuning.models.loading import load_model

    result = run_training(paths, vary(settings, micro_batch_tokens=40))
    table = open_split(paths.tokens, "train")
    plan = StepPlan(table.lengths, seed=settings.seed, effective_batch_rows=6, max_steps=6)
    model = load_model(settings.base["name_or_path"])
    rows = [table[int(row)] for row in plan.rows_of_step(0)]
    task = task_of(model, "causal_lm", pad_id=0)
    expected = measure_plain_loss(task, model, rows, shape=PLAIN, device="cpu").nats
    assert losses(result)[0] == pytest.approx(expected, rel=SAME_LOSS)
    assert result.health["facts"]["first_step_measured_nats_per_token"] == pytest.approx(expected, rel=SAME_LOSS)
    assert not [finding for finding in result.health["findings"] if finding["code"] == "first-loss-off"]


def test_a_tuned_folder_says_what_it_is(paths: TrainingPaths, settings: TrainingSettings) -> None:
    streamed: list[tuple[int, dict[str, float]]] = []
    result = run_training(
        paths,
        vary(settings, method="lora", lora=LORA, run_id="run-1"),
        on_metrics=lambda step, metrics: streamed.append((step, metrics)),
    )
    facts = json.loads((result.model_folder / "tuning.json").read_text())
    assert (facts["method"], facts["tokens_key"], facts["finished_step"]) == ("lora", "tokens-1", 6)
    assert facts["compute_dtype"] == settings.compute_dtype
    assert (result.model_folder / "adapter_model.safetensors").is_file()
    assert (result.model_folder / "tokenizer.json").is_file()
    assert not (result.model_folder / "model.safetensors").exists()
    assert [step for step, _ in streamed] == [1, 2, 3, 4, 5, 6]
    assert [metrics["loss_nats_per_token"] for _, metrics in streamed] == losses(result)
    assert result.efficiency[0]["num_rows"] == 6


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_resumed_run_equals_an_unbroken_one_bit_by_bit(
    paths: TrainingPaths, settings: TrainingSettings, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = {**LORA, "dropout": 0.3} if method == "lora" else {}
    settings = vary(
        settings,
        method=method,
        lora=lora,
        save_every_steps=2,
        trainer={"lr_scheduler_type": "linear", "warmup_steps": 2},
        eval_every_steps=3,
        health={"on_mismatch": "warn"},
        micro_batch_tokens=60,
    )
    unbroken = run_training(paths, settings)
    broken = TrainingPaths(paths.tokens, tmp_path / "broken")

    step = StepPlanTrainer.training_step

    def fail_at_fifth(self: StepPlanTrainer, model: Any, inputs: Any, count: Any = None) -> torch.Tensor:
        if inputs.step == 4:
            raise RuntimeError("the power went out")
        return step(self, model, inputs, count)

    with monkeypatch.context() as patch:
        patch.setattr(StepPlanTrainer, "training_step", fail_at_fifth)
        with pytest.raises(RuntimeError, match="power"):
            run_training(broken, settings)
    torch.manual_seed(999)  # whatever happened in between
    resumed = run_training(broken, vary(settings, resume=True))
    assert losses(resumed) == losses(unbroken)
    assert [row["learning_rate"] for row in resumed.steps] == [row["learning_rate"] for row in unbroken.steps]
    assert resumed.steps == unbroken.steps
    assert_equal_weights(resumed.model_folder, unbroken.model_folder)


def test_a_signal_finishes_the_step_and_keeps_it(
    paths: TrainingPaths, settings: TrainingSettings, tmp_path: Path
) -> None:
    unbroken = run_training(paths, settings)
    stopped = TrainingPaths(paths.tokens, tmp_path / "stopped")

    def interrupt(what: str, done: int, total: int | None, unit: str) -> None:
        if what == "Training" and done == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="Step 3 of 6") as caught:
        run_training(stopped, settings, on_progress=interrupt)
    assert caught.value.signal_name == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before
    latest = checkpoints.find_latest(stopped.checkpoints)
    assert latest is not None
    assert latest.step == 3
    resumed = run_training(stopped, vary(settings, resume=True))
    assert losses(resumed) == losses(unbroken)
    assert_equal_weights(resumed.model_folder, unbroken.model_folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_processes_leaves_the_loader_at_work(
    paths: TrainingPaths, settings: TrainingSettings, number: signal.Signals
) -> None:
    """Batch schedulers and Ctrl-C signal every process of a job, the loader's workers too."""
    settings = vary(settings, num_loader_workers=2, max_steps=30, num_epochs=None)
    asked = []

    def interrupt(what: str, done: int, total: int | None, unit: str) -> None:
        if what == "Training" and done == 3:
            workers = [process.pid for process in multiprocessing.active_children()]
            asked.extend(workers)
            # From a process that is not their parent: of their parent they take it as the end of their work.
            subprocess.run(["kill", f"-{number.value}", *map(str, [*workers, os.getpid()])], check=True)
            time.sleep(1)

    with pytest.raises(Interrupted, match="Step 3 of 30"):
        run_training(paths, settings, on_progress=interrupt)
    assert len(asked) == 2
    assert not multiprocessing.active_children(), "they end with the training"
    latest = checkpoints.find_latest(paths.checkpoints)
    assert latest is not None
    assert latest.step == 3


def test_a_request_from_before_the_first_step_stops_there(paths: TrainingPaths, settings: TrainingSettings) -> None:
    before = signal.getsignal(signal.SIGTERM)
    note_request("SIGTERM")
    try:
        with pytest.raises(Interrupted, match="SIGTERM"):
            run_training(paths, settings)
    finally:
        forget_request()
    assert signal.getsignal(signal.SIGTERM) is before
    assert checkpoints.find_latest(paths.checkpoints) is None


def test_a_signal_in_the_middle_of_a_step_is_acknowledged_once(
    paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from lm_tuning.training.trainer import StepPlanTrainer

    plain, calls = StepPlanTrainer.micro_batch_loss, []

    def signalled(self: StepPlanTrainer, model: Any, micro_batch: Any, total: int) -> torch.Tensor:
        calls.append(len(caplog.messages))
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, model, micro_batch, total)

    monkeypatch.setattr(StepPlanTrainer, "micro_batch_loss", signalled)
    caplog.set_level("WARNING", logger="lm_tuning")
    with pytest.raises(Interrupted, match="Step 1 of 6"):
        run_training(paths, vary(settings, micro_batch_tokens=40))
    assert len(calls) > 2, "the step has several micro-batches, and all of them are done"
    said = [index for index, message in enumerate(caplog.messages) if message.startswith("SIGTERM: the step in hand")]
    assert len(said) == 1
    assert said[0] < calls[-1], "before the step's last micro-batch"


def test_every_step_of_a_short_run_has_its_line_before_the_end(
    paths: TrainingPaths, settings: TrainingSettings, caplog: pytest.LogCaptureFixture
) -> None:
    def stop_after_second(what: str, done: int, total: int | None, unit: str) -> None:
        if what == "Training" and done == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    caplog.set_level("INFO", logger="lm_tuning")
    with pytest.raises(Interrupted, match="Step 2 of 6"):
        run_training(paths, settings, on_progress=stop_after_second)
    run_training(paths, vary(settings, resume=True))
    said = [message.split()[1] for message in caplog.messages if message.startswith("step ")]
    assert said == [f"{step}/6" for step in range(1, 7)]


def test_a_resume_keeps_the_times_from_before(paths: TrainingPaths, settings: TrainingSettings) -> None:
    first = run_training(paths, vary(settings, save_every_steps=3)).summary
    kept = checkpoints.find_latest(paths.checkpoints)
    assert kept is not None and kept.step == 6
    log = json.loads((kept.path / checkpoints.STEP_LOG).read_text())
    again = run_training(paths, vary(settings, save_every_steps=3, resume=True)).summary
    assert first["training_seconds"] >= again["training_seconds"] == kept.facts["training_seconds"] > 0
    assert again["health_seconds"] >= kept.facts["health_seconds"] > 0
    logging_fraction = log["own_seconds"] / again["training_seconds"]
    assert again["logging_fraction"] >= logging_fraction > 0
    longer = run_training(paths, vary(settings, save_every_steps=3, resume=True, max_steps=8)).summary
    assert longer["training_seconds"] > again["training_seconds"]
    for summary in (first, again, longer):
        assert summary["total_seconds"] >= summary["training_seconds"]


@pytest.mark.parametrize("stored", [{"training_seconds": 1e3}, {"training_seconds": 1e3, "total_seconds": 1.1e3}])
def test_the_whole_time_has_that_from_before_a_resume(
    paths: TrainingPaths, settings: TrainingSettings, stored: dict[str, float]
) -> None:
    run_training(paths, vary(settings, save_every_steps=3))
    latest = checkpoints.find_latest(paths.checkpoints)
    assert latest is not None
    marker = latest.path / checkpoints.MARKER
    facts = json.loads(marker.read_text())
    assert 0 < facts["training_seconds"] <= facts.pop("total_seconds")  # which earlier versions did not write
    marker.write_text(json.dumps(facts | stored))
    summary = run_training(paths, vary(settings, resume=True)).summary
    assert 1000 <= summary["training_seconds"] <= summary["total_seconds"]
    assert summary["total_seconds"] >= max(stored.values())


def test_a_half_written_checkpoint_is_never_used(paths: TrainingPaths, settings: TrainingSettings) -> None:
    run_training(paths, vary(settings, save_every_steps=2, keep_checkpoints=5))
    latest = checkpoints.find_latest(paths.checkpoints)
    assert latest is not None
    assert latest.step == 6
    (latest.path / checkpoints.MARKER).unlink()
    before = checkpoints.find_latest(paths.checkpoints)
    assert before is not None
    assert before.step == 4


def test_resuming_something_else_is_refused_with_both_values(paths: TrainingPaths, settings: TrainingSettings) -> None:
    run_training(paths, vary(settings, save_every_steps=2, max_steps=2))
    with pytest.raises(UserError) as caught:
        run_training(paths, vary(settings, resume=True, effective_batch_rows=12, tokens_key="tokens-2"))
    assert "train.effective_batch_rows: 6 -> 12" in str(caught.value)
    assert "tokens-2" in str(caught.value)


def test_resuming_without_a_checkpoint_says_so(paths: TrainingPaths, settings: TrainingSettings) -> None:
    with pytest.raises(UserError, match="no complete checkpoint"):
        run_training(paths, vary(settings, resume=True))
    assert not list(paths.checkpoints.glob("run-*"))


def test_a_finished_run_can_be_made_longer_at_the_present_rate(
    paths: TrainingPaths, settings: TrainingSettings
) -> None:
    linear = vary(settings, trainer={"lr_scheduler_type": "linear"}, save_every_steps=3, max_steps=3)
    run_training(paths, linear)
    longer = run_training(paths, vary(linear, resume=True, max_steps=6, learning_rate=2e-2))
    rates = [row["learning_rate"] for row in longer.steps[3:]]
    assert rates == pytest.approx([2e-2 * (6 - done) / 6 for done in (3, 4, 5)])


def test_checkpoints_of_another_run_stay(paths: TrainingPaths, settings: TrainingSettings) -> None:
    saving = vary(settings, save_every_steps=2, keep_checkpoints=1)
    run_training(paths, saving)
    run_training(paths, saving)
    kept = sorted(path.parent.name for path in paths.checkpoints.glob("run-*/checkpoint-6"))
    assert len(kept) == 2
    assert not list(paths.checkpoints.glob("run-*/checkpoint-4"))


def test_the_best_checkpoint_can_be_taken(paths: TrainingPaths, settings: TrainingSettings) -> None:
    # A huge rate after a good start: the last step is worse than an earlier one.
    result = run_training(
        paths,
        vary(
            settings,
            learning_rate=0.05,
            max_steps=12,
            eval_every_steps=2,
            save_every_steps=2,
            keep_checkpoints=1,
            load_best=True,
            trainer={"lr_scheduler_type": "constant", "max_grad_norm": 100.0},
        ),
    )
    measured = {row["step"]: row["validation_nats_per_token"] for row in result.steps}
    held_out = {step: value for step, value in measured.items() if value is not None}
    best = min(held_out, key=held_out.__getitem__)
    assert result.summary["best_step"] == best
    for row in result.steps[1::2]:
        assert 0 <= row["validation_token_accuracy"] <= row["validation_top_5_accuracy"] <= 1
    if best != 12:
        assert_equal_weights(result.model_folder, next(paths.checkpoints.glob(f"run-*/checkpoint-{best}")))


def test_training_ends_early_when_nothing_gets_better(
    paths: TrainingPaths, settings: TrainingSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="lm_tuning")
    hopeless = vary(
        settings,
        learning_rate=1e-12,
        max_steps=12,
        eval_every_steps=2,
        save_every_steps=2,
        early_stopping_evals=3,
        trainer={"lr_scheduler_type": "constant"},
    )
    result = run_training(paths, hopeless)
    said = [message.split()[1] for message in caplog.messages if message.startswith("step ") and "/12" in message]
    assert said == [f"{step}/12" for step in range(1, result.summary["total_steps"] + 1)], "the last one too"
    values = [row["validation_nats_per_token"] for row in result.evaluations]
    best = min(range(len(values)), key=values.__getitem__)
    assert [row["step"] for row in result.evaluations] == list(range(0, 2 * (best + 3) + 1, 2))
    assert (result.summary["total_steps"], result.summary["stopped_early"]) == (2 * (best + 3), True)
    assert json.loads((result.model_folder / "tuning.json").read_text())["finished_step"] == 2 * (best + 3)
    resumed = run_training(paths, vary(hopeless, resume=True))
    assert resumed.summary["total_steps"] == result.summary["total_steps"], "a run that has ended stays ended"
    assert_equal_weights(resumed.model_folder, result.model_folder)


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [("nats_per_token", [3.0, 2.0, 2.5, math.nan], 2.0), ("accuracy", [0.1, 0.5, math.nan, 0.4], 0.5)],
)
def test_each_figure_knows_which_way_is_better(metric: str, values: list[float], best: float) -> None:
    seen = BestCheckpoint(metric)
    for step, value in enumerate(values):
        if seen.is_beaten_by(value):
            seen = BestCheckpoint(metric, value, step)
    assert (seen.value, seen.step) == (best, 1)


@pytest.mark.parametrize("warmup", [10, 0.9])
def test_a_warmup_without_end_is_refused(paths: TrainingPaths, settings: TrainingSettings, warmup: float) -> None:
    trainer = {"lr_scheduler_type": "linear", "warmup_steps": warmup}
    short = vary(settings, max_steps=None, num_epochs=1, effective_batch_rows=7, trainer=trainer)
    with pytest.raises(UserError, match="3 steps in total"):
        run_training(paths, short)


def test_adapter_targets_are_checked_against_the_model(paths: TrainingPaths, settings: TrainingSettings) -> None:
    lora = {**LORA, "target_modules": ["q_proj", "v_porj"]}
    with pytest.raises(UserError, match=r"'v_porj'.*'v_proj'.*k_proj") as caught:
        run_training(paths, vary(settings, method="lora", lora=lora))
    assert "q_proj'" not in str(caught.value).split("v_porj")[0]


def test_gradient_checkpointing_gives_the_same_steps(
    paths: TrainingPaths, settings: TrainingSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    settings = vary(settings, method="lora", lora=LORA)
    said = "Gradient checkpointing is on, which takes less memory and more time."
    plain = run_training(paths, settings)
    assert said not in caplog.text
    checkpointed = run_training(paths, vary(settings, gradient_checkpointing=True))
    assert said in caplog.text
    assert losses(checkpointed) == pytest.approx(losses(plain), rel=SAME_LOSS)


def test_loader_workers_give_the_same_steps(paths: TrainingPaths, settings: TrainingSettings) -> None:
    assert losses(run_training(paths, vary(settings, num_loader_workers=2))) == losses(run_training(paths, settings))


def test_sources_are_mixed_by_their_weights_and_counted(
    settings: TrainingSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="lm_tuning")
    write_rows(tmp_path / "tokens", "train", 24, num_sources=3)
    write_rows(tmp_path / "tokens", "validation", 0)
    paths = TrainingPaths(tokens=tmp_path / "tokens", checkpoints=tmp_path / "checkpoints")
    sources = [{"path": name, "weight": weight} for name, weight in (("a", 1.5), ("b", 1.0), ("c", 0.05))]
    mixed = vary(settings, sources=sources, max_steps=5, save_every_steps=5, effective_batch_rows=5)
    result = run_training(paths, mixed)
    # 8 rows each: 12 + 8 + 0 are an epoch of four steps; the fifth step has rows of the next one.
    assert result.summary["epochs"] == 5 / 4
    described = result.summary["sources"]
    assert described == result.health["facts"]["sources"]
    assert [source["rows_per_epoch"] for source in described] == [12, 8, 0]
    assert sum(source["num_rows_trained"] for source in described) == 25
    assert "Source a: 8 rows x 1.5 = 12 rows per epoch, 60.0 % of it" in caplog.text
    assert [finding["code"] for finding in result.health["findings"]] == ["source-left-out"]
    with pytest.raises(UserError, match=r"other weights of data.path: .*'1.5, 1, 0.05', this run '1'"):
        run_training(paths, vary(mixed, resume=True, sources=[{**source, "weight": 1.0} for source in sources]))


def test_weights_of_one_are_the_run_without_them(paths: TrainingPaths, settings: TrainingSettings) -> None:
    plain = run_training(paths, vary(settings, save_every_steps=6))
    named = vary(settings, sources=[{"path": "a", "weight": 1.0}])
    assert losses(run_training(paths, vary(named, resume=True))) == losses(plain)  # it goes on from its end
    assert losses(run_training(paths, named)) == losses(plain)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_label_map_goes_with_the_model(paths: TrainingPaths, settings: TrainingSettings, method: str) -> None:
    labels = {"card_arrival": 0, "Überweisung": 1}
    result = run_training(
        paths, vary(settings, max_steps=1, method=method, lora=LORA if method == "lora" else {}, label_map=labels)
    )
    assert json.loads((result.model_folder / "label_map.json").read_text(encoding="utf-8")) == labels
    if method == "full":
        config = json.loads((result.model_folder / "config.json").read_text(encoding="utf-8"))
        assert config["id2label"] == {"0": "card_arrival", "1": "Überweisung"}
        assert config["label2id"] == labels


def test_mistyped_targets_are_refused_before_the_weights_are_read(
    paths: TrainingPaths, settings: TrainingSettings, tmp_path: Path
) -> None:
    broken = shutil.copytree(settings.base["name_or_path"], tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"no weights")
    lora = vary(settings, method="lora", base={**settings.base, "name_or_path": str(broken)})
    with pytest.raises(UserError, match=r"no linear layer named 'v_porj'"):
        run_training(paths, vary(lora, lora={**LORA, "target_modules": ["v_porj"]}))
    with pytest.raises(UserError, match="damaged"):
        run_training(paths, vary(lora, lora={**LORA, "target_modules": ["v_proj"]}))


def test_a_resume_that_is_refused_loads_no_model(paths: TrainingPaths, settings: TrainingSettings) -> None:
    run_training(paths, vary(settings, save_every_steps=2, max_steps=2))
    nowhere = {**settings.base, "name_or_path": "/nowhere"}
    with pytest.raises(UserError, match=r"train\.effective_batch_rows: 6 -> 12"):
        run_training(paths, vary(settings, resume=True, effective_batch_rows=12, base=nowhere))


def test_progress_counts_from_where_the_run_goes_on(paths: TrainingPaths, settings: TrainingSettings) -> None:
    def steps(settings: TrainingSettings) -> list[tuple[int, int | None]]:
        seen: list[tuple[str, int, int | None, str]] = []
        run_training(paths, settings, on_progress=lambda *event: seen.append(event))
        return [(done, total) for what, done, total, _ in seen if what == "Training"]

    assert steps(vary(settings, save_every_steps=2, max_steps=2)) == [(0, 2), (1, 2), (2, 2)]
    assert steps(vary(settings, resume=True, max_steps=4)) == [(2, 4), (3, 4), (4, 4)]


def test_every_step_says_where_its_time_went(paths, settings, monkeypatch):
    ceiling = Ceiling("CPU", "float32", None, 1e15)
    monkeypatch.setattr("lm_tuning.training.run.find_ceiling", lambda *_: ceiling)
    result = run_training(paths, settings)
    for row in result.efficiency:
        parts = [row[f"{phase}_seconds"] for phase in ("forward", "backward", "optimizer")]
        assert min(parts) > 0
        assert sum(parts) + row["loader_wait_seconds"] <= row["seconds"] + 1e-3
    assert 6 * 18_432 < result.summary["model_flops_per_token"] < 12 * 18_432
    attained = result.summary["tokens_per_second"] * result.summary["model_flops_per_token"]
    assert result.summary["mfu"] is None
    assert 0 < result.summary["mfu_of_measured"] == pytest.approx(attained / 1e15)


def test_a_run_reports_its_speed_and_the_shares_of_checks_and_logging(
    paths: TrainingPaths, settings: TrainingSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="lm_tuning")
    streamed: list[tuple[int, dict[str, float]]] = []
    result = run_training(paths, settings, on_metrics=lambda *step: streamed.append(step))
    for row, (_, metrics) in zip(result.efficiency, streamed, strict=True):
        assert metrics["samples_per_second"] == pytest.approx(row["num_rows"] / row["seconds"], rel=1e-2)
        assert metrics["samples_per_second"] == pytest.approx(row["num_rows"] * metrics["steps_per_second"])
        assert row["samples_per_second"] == pytest.approx(metrics["samples_per_second"], rel=1e-2)
    summary = result.summary
    timed = result.efficiency[2:]
    seconds = sum(row["seconds"] for row in timed)
    assert summary["samples_per_second"] == pytest.approx(sum(row["num_rows"] for row in timed) / seconds, rel=1e-3)
    assert summary["steps_per_second"] == pytest.approx(len(timed) / seconds, rel=1e-3)
    watching = summary["health_seconds"] - summary["first_look_seconds"]
    assert 0 < watching < summary["health_seconds"], "the checks up to step 1 are told apart"
    assert summary["health_fraction"] == pytest.approx(watching / summary["training_seconds"])
    assert 0 < summary["logging_fraction"] < 1
    assert any("samples/s" in message for message in caplog.messages if message.startswith("step "))


def test_the_time_of_the_checks_that_watch_a_training_is_not_that_of_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(step_log, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def check(row: dict[str, Any]) -> None:
        now[0] += 100

    def note(step: int, metrics: dict[str, float]) -> None:
        now[0] += 1

    log = step_log.StepLog(on_metrics=note, on_step=check)
    batch: Any = SimpleNamespace(
        step=0, num_tokens=8, num_supervised=4, num_positions=8, row_ids=[1, 2], micro_batches=[None]
    )
    log.start()
    for _ in range(3):
        log.record(batch, epoch=0.1, loss=torch.tensor(1.0), gradient_norm=1.0, learning_rate=0.1)
    log.flush()
    assert log.own_seconds == 3


def test_a_run_on_a_card_reports_what_its_driver_tells(
    paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = CardReading(60 * 2**30, 80 * 2**30, 0.9, 350.0)
    monkeypatch.setattr(nvml, "read_card", lambda uuid: reading)
    monkeypatch.setattr("lm_tuning.training.run.find_card", lambda device: "22")
    streamed: list[dict[str, float]] = []
    result = run_training(paths, settings, on_metrics=lambda step, metrics: streamed.append(metrics))
    told = {"gpu_utilization_fraction": 0.9, "gpu_power_watts": 350.0, "gpu_memory_used_bytes": 60 * 2**30}
    for metrics, row in zip(streamed, result.efficiency, strict=True):
        assert told.items() <= metrics.items()
        assert told.items() <= row.items()
    figures = efficiency_figures(result.summary)["efficiency"]
    assert (told | {"gpu_memory_total_bytes": 80 * 2**30}).items() <= figures.items()
    said = describe_result(result.summary)
    assert said.endswith("; the GPU by its driver: 90% busy, 350 W, at most 60.0 of 80.0 GiB in use.")


def test_a_run_without_a_card_has_no_empty_figures_of_one(paths: TrainingPaths, settings: TrainingSettings) -> None:
    result = run_training(paths, settings)
    assert not [name for row in [*result.efficiency, result.summary] for name in row if name.startswith("gpu")]
