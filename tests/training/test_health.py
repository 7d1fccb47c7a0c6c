"""Health: a planted fault is found and its cause named; a sound run raises nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lm_tuning.errors import UserError
from lm_tuning.text.token_table import TokenRow
from lm_tuning.training import first_look
from lm_tuning.training.batches import StepDataset
from lm_tuning.training.health import check_first_step, check_layout, mark_supervised
from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
from lm_tuning.training.trainer import StepPlanTrainer
from tests.support.tiny import ASSISTANT, END, USER, ids, make_tokenizer


def test_rounding_near_zero_is_no_finding() -> None:
    assert check_first_step(0.02, 0.028, tolerance=0.05, num_micro_batches=4) is None
    assert check_first_step(0.02, 0.08, tolerance=0.05, num_micro_batches=4) is not None


def test_equal_losses_are_no_finding() -> None:
    assert check_first_step(5.63, 5.64, tolerance=0.05, num_micro_batches=12) is None


@pytest.mark.parametrize(
    ("logged", "words"),
    [
        (5.63 * 12, "equal to the 12 micro-batches of a step:"),
        (5.63 * 2, "equal to the 2 ranks"),
        (5.63 * 24, "12 micro-batches of a step times 2 ranks"),
        (5.63 / 12, "divided twice"),
        (float("nan"), "not a number"),
        (5.63 * 3.3, "not one of the known"),
    ],
)
def test_the_cause_of_a_wrong_first_loss_is_named(logged: float, words: str) -> None:
    finding = check_first_step(5.63, logged, tolerance=0.05, num_micro_batches=12, num_ranks=2)
    assert finding is not None
    assert finding.code == "first-loss-off"
    assert words in finding.sentence()


def test_a_training_step_that_adds_up_means_stops_with_its_cause(
    paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = StepPlanTrainer.micro_batch_loss

    def add_up_means(self: StepPlanTrainer, model: Any, micro_batch: Any, total: int) -> torch.Tensor:
        return sound(self, model, micro_batch, micro_batch.num_supervised)

    monkeypatch.setattr(StepPlanTrainer, "micro_batch_loss", add_up_means)
    cut = replace(settings, batching="packed", micro_batch_tokens=1)
    with pytest.raises(UserError, match=r"first-loss-off.*the 6 micro-batches of a step"):
        run_training(paths, replace(cut, first_loss_tolerance=0.03))
    result = run_training(paths, replace(cut, first_loss_severity="warn"))
    assert [finding["code"] for finding in result.health["findings"]] == ["first-loss-off"]


@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["by the first step", "before it, since dropout blurs the step"])
def test_rows_that_see_each_other_stop_the_run_before_the_weights_change(
    paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch, dropout: float
) -> None:
    sound = StepDataset.__getitem__
    steps_of_the_optimizer = []

    def forget_borders(self: StepDataset, step: int) -> Any:
        batch = sound(self, step)
        for micro_batch in batch.micro_batches:
            micro_batch.position_ids = None
        return batch

    monkeypatch.setattr(StepDataset, "__getitem__", forget_borders)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_, **__: steps_of_the_optimizer.append(1))
    # A random model hardly looks at its neighbours; any difference beyond rounding is one too many here.
    monkeypatch.setattr("lm_tuning.training.health.ROUNDING_NATS", 1e-6)
    monkeypatch.setattr(
        first_look,
        "check_layout",
        lambda plain, path, *, tolerance, batching: check_layout(plain, path, tolerance=1e-6, batching=batching),
    )
    packed = replace(settings, batching="packed", micro_batch_tokens=1000, first_loss_tolerance=1e-6)
    with pytest.raises(UserError, match=r"layout-changes-loss.*Packed rows see each other.*train.batching=padded"):
        run_training(paths, replace(packed, lora={**settings.lora, "dropout": dropout}))
    assert not steps_of_the_optimizer


def test_a_sound_run_has_facts_and_no_stop(paths: TrainingPaths, settings: TrainingSettings) -> None:
    health = run_training(paths, settings).health
    assert [finding for finding in health["findings"] if finding["severity"] != "note"] == []
    facts = health["facts"]
    assert facts["untrained_head_nats_per_token"] == pytest.approx(4.6444, abs=1e-4)  # log(104)
    assert facts["first_step_logged_nats_per_token"] == pytest.approx(
        facts["first_step_measured_nats_per_token"], rel=1e-5
    )
    assert facts["pad_is_eos"] is False
    assert facts["rows_that_teach_the_end"] == facts["first_step_rows"] == 6
    assert "⟦" in facts["first_example"]


def test_the_supervised_part_is_marked() -> None:
    import numpy as np

    tokens = [USER, *ids("hi"), END, ASSISTANT, *ids("yo"), END]
    row = TokenRow(row_id=1, input_ids=np.array(tokens, dtype=np.int32), spans=[(5, 8)])
    assert mark_supervised(make_tokenizer(), row) == "<|user|>hi<|end|><|assistant|>⟦yo<|end|>⟧"
