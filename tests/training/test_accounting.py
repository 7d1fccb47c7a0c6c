"""A step's loss is a sum divided once: the same loss and the same gradient however the step is split."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_tuning.batching.losses import LossShape, balance_classes
from lm_tuning.batching.step_plan import StepPlan
from lm_tuning.batching.tasks.registry import task_of
from lm_tuning.errors import UserError
from lm_tuning.models.loading import load_model
from lm_tuning.text.store.table import IGNORE_INDEX, open_split
from lm_tuning.training.run import TrainingPaths, TrainingResult, TrainingSettings, run_training
from lm_tuning.training.setup.model import set_up_model
from lm_tuning.training.trainer import StepPlanTrainer
from tests.support.rounding import SAME_LOSS
from tests.support.settings import make_settings, vary
from tests.support.task_rows import label_map, save_tiny_bart, save_tiny_qwen3, write_labelled, write_task_rows

TASKS = ["causal_lm", "sequence_classification", "seq2seq_lm"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models and rows of every task; eleven rows, so the second step of eight is short."""
    root = tmp_path_factory.mktemp("accounting")
    decoder = save_tiny_qwen3(root / "qwen3")
    models = {task: decoder for task in TASKS} | {"seq2seq_lm": save_tiny_bart(root / "bart")}
    return {task: models[task] for task in TASKS} | {
        f"{task} rows": write_task_rows(task, root / f"tokens-{task}") for task in TASKS
    }


def train(folders: dict[str, Path], tmp_path: Path, task: str, **changes: Any) -> TrainingResult:
    """Take two steps of plain gradient descent, whose weights tell the gradients."""
    settings = make_settings(
        folders[task],
        task=task,
        label_map=label_map() if task == "sequence_classification" else None,
        learning_rate=0.005,
        effective_batch_rows=8,
        num_epochs=1,
        batching="padded",
        trainer={"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0},
    )
    settings = vary(settings, **changes)
    return run_training(TrainingPaths(tokens=folders[f"{task} rows"], checkpoints=tmp_path / "runs"), settings)


def weights_of(result: TrainingResult) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    [file] = [path for path in result.model_folder.glob("*.safetensors")]
    return load_file(file)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1], ids=["plain", "smoothed"])
def test_losses_and_gradients_do_not_depend_on_how_a_step_is_split(
    folders: dict[str, Path], tmp_path: Path, task: str, method: str, label_smoothing: float
) -> None:
    lora = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"} if method == "lora" else {}
    options: dict[str, Any] = {"method": method, "lora": lora, "label_smoothing": label_smoothing}
    results = [
        train(folders, tmp_path, task, micro_batch_tokens=tokens, **options)
        for tokens in (1, 60, 10_000)  # every row alone, a few at once, the whole step at once
    ]
    counts = [[row["num_micro_batches"] for row in result.efficiency] for result in results]
    assert counts[0] == [8, 3]
    assert counts[2] == [1, 1]
    assert counts[0][0] > counts[1][0] > 1
    whole = results[-1]
    name = next(name for name in whole.steps[0] if name.startswith("loss_nats_per_"))
    for result in results[:-1]:
        assert [row[name] for row in result.steps] == pytest.approx([row[name] for row in whole.steps], rel=1e-5)
        for ours, theirs in zip(weights_of(result).values(), weights_of(whole).values(), strict=True):
            assert float((ours - theirs).norm()) <= 1e-5 * float(theirs.norm()) + 1e-8
    if task != "seq2seq_lm":
        packed = train(folders, tmp_path, task, micro_batch_tokens=10_000, **{**options, "batching": "packed"})
        assert [row[name] for row in packed.steps] == pytest.approx([row[name] for row in whole.steps], rel=1e-5)


# A fresh head is scaled, so a classifier's loss is compared in test_a_fresh_head_starts_at_the_loss_of_chance.
@pytest.mark.parametrize("task", ["causal_lm", "seq2seq_lm"])
def test_the_logged_loss_is_that_of_the_rows_by_the_models_own_class(
    folders: dict[str, Path], tmp_path: Path, task: str
) -> None:
    result = train(folders, tmp_path, task, micro_batch_tokens=50, max_steps=1)
    facts = result.health["facts"]
    unit = result.summary["unit"]
    table = open_split(folders[f"{task} rows"], "train")
    model = load_model(str(folders[task]), task=task)
    own = task_of(model, task, pad_id=int(model.config.pad_token_id))
    plan = StepPlan(table.lengths, seed=7, effective_batch_rows=8, num_epochs=1)
    rows = [table[int(row)] for row in plan.rows_of_step(0)]
    losses = [own.model_loss(model, row, device="cpu") for row in rows]
    assert None not in losses
    nats = sum(loss * row.num_supervised for loss, row in zip(losses, rows, strict=True) if loss is not None)
    mean = nats / sum(row.num_supervised for row in rows)
    assert facts[f"first_step_logged_nats_per_{unit}"] == pytest.approx(mean, rel=1e-5)
    assert result.steps[0][f"loss_nats_per_{unit}"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("micro_batch_tokens", [1, 60, 10_000])
def test_a_fresh_head_starts_at_the_loss_of_chance(
    folders: dict[str, Path], tmp_path: Path, micro_batch_tokens: int
) -> None:
    result = train(folders, tmp_path, "sequence_classification", micro_batch_tokens=micro_batch_tokens, max_steps=1)
    facts = result.health["facts"]
    first = result.steps[0]["loss_nats_per_row"]
    assert first == pytest.approx(1.0986, rel=0.03)  # log(3)
    assert first == pytest.approx(facts["first_step_measured_nats_per_row"], rel=1e-5)
    assert facts["model_loss_of_shortest_row"] == pytest.approx(facts["our_loss_of_shortest_row"], rel=1e-5)
    assert result.health["findings"] == []


def test_280_classes_in_twelve_micro_batches_start_at_5_63(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split in ("train", "validation"):
        write_labelled(tmp_path / "tokens", split, 12, num_classes=280)
    here = folders | {"sequence_classification rows": tmp_path / "tokens"}
    options: dict[str, Any] = {
        "label_map": label_map(280),
        "effective_batch_rows": 12,
        "micro_batch_tokens": 1,
        "max_steps": 1,
    }
    right = train(here, tmp_path, "sequence_classification", **options)
    assert right.efficiency[0]["num_micro_batches"] == 12
    assert right.steps[0]["loss_nats_per_row"] == pytest.approx(5.6348, rel=0.03)  # log(280), not 67.6

    sound = StepPlanTrainer.micro_batch_loss

    def mean_of_the_micro_batch(self: StepPlanTrainer, model: Any, micro_batch: Any, total: int) -> torch.Tensor:
        return sound(self, model, micro_batch, micro_batch.num_supervised)

    monkeypatch.setattr(StepPlanTrainer, "micro_batch_loss", mean_of_the_micro_batch)
    with pytest.raises(UserError, match=r"first-loss-off.*67\..*12 micro-batches of a step"):
        train(here, tmp_path, "sequence_classification", **options)


def test_means_of_unequal_micro_batches_are_not_averaged() -> None:
    """Rows of 8 and 2 supervised tokens with mean losses 1.0 and 3.0 make 1.4, not 2.0."""
    wanted = torch.tensor([1.0] * 8 + [3.0] * 2)
    # Two classes: a log-probability of -loss for class 0.
    logits = torch.stack([-wanted, torch.log1p(-torch.exp(-wanted))], dim=-1)
    targets = torch.zeros(10, dtype=torch.long)
    parts = [LossShape().sum_nats(logits[:8], targets[:8]), LossShape().sum_nats(logits[8:], targets[8:])]
    assert float(sum(parts)) / 10 == pytest.approx(1.4)


def test_ignored_targets_carry_no_loss_and_no_smoothing() -> None:
    logits = torch.tensor([[0.3, -0.2, 1.0], [5.0, 1.0, 0.0]])
    one = LossShape(label_smoothing=0.1).sum_nats(logits[:1], torch.tensor([2]))
    both = LossShape(label_smoothing=0.1).sum_nats(logits, torch.tensor([2, IGNORE_INDEX]))
    assert float(both) == pytest.approx(float(one))
    log_p = torch.log_softmax(logits[0], dim=-1)
    assert float(one) == pytest.approx(float(-0.9 * log_p[2] - 0.1 * log_p.mean()), rel=SAME_LOSS)


def test_balanced_weights_leave_the_loss_of_an_uninformed_model_where_it_is() -> None:
    counts = [6, 2, 0, 4]
    weights = balance_classes(counts)
    assert weights == pytest.approx((12 / 18, 2.0, 0.0, 1.0))
    assert sum(weight * count for weight, count in zip(weights, counts, strict=True)) == pytest.approx(12)


def test_class_weights_are_checked_against_the_classes(folders: dict[str, Path], tmp_path: Path) -> None:
    words = r"train.class_weights.wolf = 2: no training row has the class 'wolf'(.*\n)*.*'cat', 'dog', 'bird'"
    with pytest.raises(UserError, match=words):
        train(folders, tmp_path, "sequence_classification", class_weights={"wolf": 2.0})


def test_class_weights_change_what_is_supervised_and_not_the_first_loss_by_much(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    # All rows in each step, over which the weights have mean 1.
    options: dict[str, Any] = {"effective_batch_rows": 11, "num_epochs": 2}
    plain = train(folders, tmp_path, "sequence_classification", **options)
    weighted = train(folders, tmp_path, "sequence_classification", class_weights="balanced", **options)
    assert weighted.steps[0]["loss_nats_per_row"] == pytest.approx(plain.steps[0]["loss_nats_per_row"], rel=0.05)
    assert weighted.steps[1]["loss_nats_per_row"] != plain.steps[1]["loss_nats_per_row"]


def test_rows_of_heavier_classes_have_a_larger_expected_loss(folders: dict[str, Path], tmp_path: Path) -> None:
    weighted = train(folders, tmp_path, "sequence_classification", class_weights="balanced", effective_batch_rows=2)
    facts = weighted.health["facts"]
    expected = facts["untrained_head_nats_per_row"]
    assert expected != pytest.approx(math.log(3), rel=0.01)
    assert facts["first_step_measured_nats_per_row"] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("factor", [1.0, 1e-4], ids=["scaled", "small enough"])
def test_the_first_report_has_the_spread_of_a_new_heads_weights(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    """The report is made before the first step, so the stored head is taken from a run that learns nothing."""
    ready: list[Any] = []

    def draw(settings: TrainingSettings) -> Any:
        made = set_up_model(settings)
        made.model.score.weight.data.mul_(factor)
        ready.append(float(made.model.score.weight.std()))
        return made

    monkeypatch.setattr("lm_tuning.training.run.set_up_model", draw)
    result = train(folders, tmp_path, "sequence_classification", learning_rate=1e-30)
    facts = result.health["facts"]
    assert facts["fresh_head_drawn_weights_spread"] == pytest.approx(ready[0])
    assert facts["fresh_head_weights_spread"] == pytest.approx(float(weights_of(result)["score.weight"].std()))
    assert (facts["fresh_head_scaled_from_spread"] is None) == (factor < 1)
