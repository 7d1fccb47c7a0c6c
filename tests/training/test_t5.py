"""A T5 trains with the loss of its own class, scaled head or not, and is stored as it was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lm_tuning.batching.step_plan import StepPlan
from lm_tuning.models.tuned import load_tuned
from lm_tuning.text.records import TokenRow
from lm_tuning.text.store.table import open_split
from lm_tuning.training.run import TrainingPaths, TrainingResult, TrainingSettings, run_training
from tests.support.settings import make_settings, vary
from tests.support.task_rows import save_tiny_t5, write_task_rows

RATE = 0.005


@pytest.fixture(scope="module", params=[True, False], ids=["first version", "version 1.1"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny T5 of either version."""
    return save_tiny_t5(tmp_path_factory.mktemp("t5") / "model", is_first_version=request.param)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task_rows("seq2seq_lm", tmp_path_factory.mktemp("tokens"))


@pytest.fixture
def settings(base: Path) -> TrainingSettings:
    """Two steps of plain gradient descent, of eight and three rows, each in several micro-batches."""
    return make_settings(
        base,
        task="seq2seq_lm",
        learning_rate=RATE,
        effective_batch_rows=8,
        num_epochs=1,
        micro_batch_tokens=60,
        trainer={"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0},
    )


def train(tokens: Path, tmp_path: Path, settings: TrainingSettings) -> TrainingResult:
    return run_training(TrainingPaths(tokens=tokens, checkpoints=tmp_path / "runs"), settings)


def own_nats(model: Any, rows: list[TokenRow]) -> torch.Tensor:
    """Sum the loss of rows, one at a time, as the class itself has it."""
    nats = torch.zeros(())
    for row in rows:
        [(start, end)] = row.spans
        ids = torch.tensor(row.input_ids.tolist())[None]
        nats = nats + model(input_ids=ids[:, :start], labels=ids[:, start:end]).loss * (end - start)
    return nats


def test_losses_and_steps_are_those_of_the_class_itself(
    base: Path, tokens: Path, settings: TrainingSettings, tmp_path: Path
) -> None:
    from transformers import T5ForConditionalGeneration

    result = train(tokens, tmp_path, settings)
    assert [row["num_micro_batches"] > 1 for row in result.efficiency] == [True, True]
    assert {finding["code"] for finding in result.health["findings"]} <= {"worse-than-untrained"}  # random weights are
    table = open_split(tokens, "train")
    plan = StepPlan(table.lengths, seed=7, effective_batch_rows=8, num_epochs=1)
    model = T5ForConditionalGeneration.from_pretrained(base)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step, logged in enumerate(result.steps):
        rows = [table[int(row)] for row in plan.rows_of_step(step)]
        loss = own_nats(model, rows) / sum(row.num_supervised for row in rows)
        assert logged["loss_nats_per_token"] == pytest.approx(float(loss.detach()), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tuned = load_tuned(result.model_folder)
    assert tuned.config.scale_decoder_outputs == model.config.scale_decoder_outputs
    for (name, ours), theirs in zip(tuned.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_tuned_model_has_learned_and_is_stored_as_it_was_trained(
    tokens: Path, settings: TrainingSettings, tmp_path: Path, method: str
) -> None:
    lora = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"} if method == "lora" else {}
    changes: dict[str, Any] = {"optim": "adamw_torch", "lr_scheduler_type": "constant"}
    settings = vary(
        settings,
        method=method,  # type: ignore[arg-type]
        lora=lora,
        learning_rate=0.02,
        num_epochs=None,
        max_steps=20,
        effective_batch_rows=11,
        eval_every_steps=20,
        trainer=changes,
    )
    result = train(tokens, tmp_path, settings)
    losses = [row["loss_nats_per_token"] for row in result.steps]
    assert losses[-1] < 0.6 * losses[0]
    rows = list(open_split(tokens, "validation"))
    with torch.no_grad():
        stored = own_nats(load_tuned(result.model_folder), rows) / sum(row.num_supervised for row in rows)
    assert result.evaluations[-1]["step"] == 20
    assert result.evaluations[-1]["validation_nats_per_token"] == pytest.approx(float(stored), rel=1e-4)
