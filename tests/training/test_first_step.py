"""The look before step 1 and the monitor after it: faults that no other test plants."""

from __future__ import annotations

import functools
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from lm_tuning.batching.losses import PLAIN
from lm_tuning.batching.tasks.registry import get_task
from lm_tuning.errors import UserError
from lm_tuning.text.records import NO_LABEL, TokenRow
from lm_tuning.text.store.table import TokenTableWriter, open_split
from lm_tuning.training.health import plain_loss
from lm_tuning.training.health.first_step import check_fresh_head
from lm_tuning.training.health.monitor import FAILURES_IN_A_ROW, TrainingMonitor
from lm_tuning.training.health.monitors import StepNumbers
from lm_tuning.training.health.plain_loss import PlainLoss, _group_alike, measure_plain_loss
from lm_tuning.training.health.report import HealthReport
from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
from tests.support.settings import vary
from tests.support.tiny import PAD, VOCABULARY, make_model
from tests.support.tiny_tasks import make_classifier


def codes(report: dict[str, Any] | HealthReport) -> list[str]:
    findings = report.findings if isinstance(report, HealthReport) else report["findings"]
    return [finding["code"] if isinstance(finding, dict) else finding.code for finding in findings]


def test_a_model_class_that_scales_its_loss_is_named_and_changes_nothing(
    paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = run_training(paths, settings)
    forward = LlamaForCausalLM.forward

    @functools.wraps(forward)
    def scaled(self: Any, *arguments: Any, **options: Any) -> Any:
        output = forward(self, *arguments, **options)
        if output.loss is not None:
            output.loss = 12 * output.loss
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    result = run_training(paths, settings)
    [finding] = [finding for finding in result.health["findings"] if finding["code"] == "model-loss-differs"]
    assert finding["severity"] == "note"
    facts = result.health["facts"]
    assert facts["model_loss_of_shortest_row"] == pytest.approx(12 * facts["our_loss_of_shortest_row"], rel=1e-5)
    assert result.steps == sound.steps
    assert "model-loss-differs" not in codes(sound.health)


def test_a_base_model_that_is_surely_wrong_is_worse_than_an_untrained_one(
    paths: TrainingPaths, settings: TrainingSettings, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(settings.base["name_or_path"], tmp_path / "sure"))
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: 20 * tensor if "embed_tokens" in name else tensor for name, tensor in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    health = run_training(
        paths, vary(settings, base={**settings.base, "name_or_path": str(folder)}, max_steps=1)
    ).health
    assert "worse-than-untrained" in codes(health)


def loss_of_logits(logits: torch.Tensor, labels: torch.Tensor) -> PlainLoss:
    row = TokenRow(row_id=1, input_ids=torch.zeros(1, dtype=torch.int32).numpy(), spans=[], label=0)
    return PlainLoss(
        nats=0.0,
        logits={},
        shortest_row=row,
        shortest_nats=0.0,
        class_logits=logits,
        labels=labels,
    )


def test_a_new_head_that_does_not_start_at_chance_is_found() -> None:
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(280, (12,), generator=random)
    logits = 0.1 * torch.randn(12, 280, generator=random)
    sound, off = HealthReport(), HealthReport()
    check_fresh_head(sound, loss_of_logits(logits, labels))
    assert codes(sound) == []
    assert sound.facts["fresh_head_expected_nats_per_row"] == pytest.approx(math.log(280) + 0.005, abs=1e-3)
    logits[torch.arange(12), labels] -= 3.0  # a head that was trained on other labels rules the right ones out
    check_fresh_head(off, loss_of_logits(logits, labels))
    assert codes(off) == ["fresh-head-off"]


@pytest.mark.parametrize("has_scaler", [False, True], ids=["plain", "float16"])
def test_updates_that_keep_failing_end_the_run(has_scaler: bool) -> None:
    report = HealthReport()
    watch = TrainingMonitor(
        report, total_steps=100, max_grad_norm=1.0, learning_rate=1e-3, device="cpu", has_scaler=has_scaler
    )

    def fail(step: int) -> None:
        watch.step(
            StepNumbers(
                step=step,
                loss=2.0,
                gradient_norm=math.nan,
                learning_rate=1e-3,
                seconds=1.0,
                wait_seconds=0.0,
                num_tokens=100,
                memory_bytes=0,
                row_ids=[step],
            )
        )

    allowed = FAILURES_IN_A_ROW[has_scaler]
    for step in range(1, allowed):
        fail(step)
    assert "updates-keep-failing" not in codes(report)
    with pytest.raises(UserError, match=r"updates-keep-failing.* in a row.*; expected a single one now and then\."):
        fail(allowed)


def test_rows_of_one_length_go_side_by_side_more_of_them_on_a_gpu(tmp_path: Path) -> None:
    with TokenTableWriter(tmp_path / "train.arrow") as writer:
        for row, length in enumerate([200] * 25 + [30]):
            writer.append(row, [9] * length, [(1, length)])
    table = open_split(tmp_path, "train")
    rows = [table[index] for index in range(len(table))]
    task = get_task("causal_lm", pad_id=0)
    sizes = {device: [len(alike) for alike in _group_alike(task, rows, device)] for device in ("cpu", "cuda", "mps")}
    assert sizes["cuda"] == [10, 10, 5, 1]
    assert sizes["cpu"] == sizes["mps"] == [2] * 12 + [1, 1]


@pytest.mark.parametrize("task_name", ["causal_lm", "sequence_classification"])
def test_rows_filled_up_have_the_loss_that_each_has_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, task_name: Any
) -> None:
    """As on a GPU; a model that sees what comes after a row gets rows of one length alone."""
    is_classifier = task_name == "sequence_classification"
    random = np.random.default_rng(2)
    with TokenTableWriter(tmp_path / "train.arrow") as writer:
        for row, length in enumerate([*range(4, 30), 12, 12]):
            ids = random.integers(8, len(VOCABULARY), length).tolist()
            # One row teaches nothing.
            spans = [] if is_classifier or row == 3 else [(2, length)]
            writer.append(row, ids, spans, label=row % 3 if is_classifier else NO_LABEL)
    table = open_split(tmp_path, "train")
    rows = [table[index] for index in range(len(table))]
    task = get_task(task_name, pad_id=PAD)
    model = make_classifier(num_labels=3) if is_classifier else make_model()
    kept = {"shape": PLAIN, "device": "cpu"}
    calls: list[int] = []
    run = type(task).logits_of_alike

    def count(self: Any, model: Any, rows: Any, **options: Any) -> Any:
        calls.append(len(rows))
        return run(self, model, rows, **options)

    monkeypatch.setattr(type(task), "logits_of_alike", count)
    alone = measure_plain_loss(task, model, rows, **kept)
    num_alone = len(calls)
    monkeypatch.setattr(plain_loss, "_FILLING_DEVICES", ("cpu",))
    filled = measure_plain_loss(task, model, rows, **kept)
    assert len(calls) - num_alone < num_alone / 3
    assert filled.nats == pytest.approx(alone.nats, rel=1e-5)
    assert filled.count == alone.count
    assert filled.shortest_nats == pytest.approx(alone.shortest_nats, rel=1e-5)
    assert len(filled.shortest_row.input_ids) == len(alone.shortest_row.input_ids)
    assert filled.logits == pytest.approx(alone.logits, rel=1e-4)
    # A model that looks ahead: what fills a row up changes it.
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    embed = inner.get_input_embeddings()
    embed.register_forward_hook(lambda module, given, out: out + out.mean(dim=1, keepdim=True))
    calls.clear()
    ahead = measure_plain_loss(task, model, rows, **kept)
    monkeypatch.setattr(plain_loss, "_FILLING_DEVICES", ())
    assert ahead.nats == measure_plain_loss(task, model, rows, **kept).nats
    assert max(calls) < 5
