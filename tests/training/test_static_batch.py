"""Micro-batches filled up to a fixed shape have the loss and the gradients of the rows alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_tuning.batching import packed_attention
from lm_tuning.batching.batch import MicroBatch
from lm_tuning.batching.head_loss import choose_head_loss
from lm_tuning.batching.losses import LossShape
from lm_tuning.batching.micro_batches import Batching
from lm_tuning.batching.tasks.base import Packing, TrainingTask
from lm_tuning.batching.tasks.causal_lm import CausalLanguageModeling
from lm_tuning.batching.tasks.classification import SequenceClassification
from lm_tuning.text.store.table import IGNORE_INDEX, TokenTable, open_split
from lm_tuning.training.kernels.static_batch import StaticBatch, StaticShape, find_covering, static_shape, why_not
from tests.support.task_rows import write_task_rows
from tests.support.tiny import PAD, make_model
from tests.support.tiny_tasks import make_classifier

TASKS = ["causal_lm", "sequence_classification"]
BATCHINGS: list[Batching] = ["packed", "padded"]


def make_task(name: str) -> tuple[TrainingTask, Any]:
    packed_attention.register()
    if name == "causal_lm":
        model = make_model()
        task: TrainingTask = CausalLanguageModeling(pad_id=PAD)
        task.head_loss, _ = choose_head_loss(model, [5, 6], device="cpu", compute_dtype="float32")
    else:
        model, task = make_classifier(num_labels=3), SequenceClassification(pad_id=PAD)
    model.set_attn_implementation(packed_attention.NAME)
    task.packing = Packing(by_bounds=True)
    return task, model.train()


@pytest.fixture(params=TASKS)
def table(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, TokenTable]:
    return request.param, open_split(write_task_rows(request.param, tmp_path, num_train=30), "train")


def loss_and_gradients(
    task: TrainingTask, model: Any, batch: MicroBatch, total: Any, shape: LossShape
) -> list[torch.Tensor]:
    model.zero_grad()
    loss = task.sum_nats(model, batch, shape) / total
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_filled_up_rows_have_the_loss_and_gradients_of_the_rows(
    table: tuple[str, TokenTable], batching: Batching, smoothing: float
) -> None:
    name, rows = table
    task, model = make_task(name)
    weights = (0.5, 1.0, 2.0) if name == "sequence_classification" and smoothing else None
    shape = LossShape(label_smoothing=smoothing, class_weights=weights)
    first = task.lay_out(rows, range(9), batching=batching)
    static = StaticBatch(static_shape(first), first, device="cpu", pad_id=PAD)
    assert static.shape.num_positions > first.num_positions
    # One after another through the same tensors: nothing of the rows before may be left.
    for chosen in (range(9), range(9, 13), range(13, 22), [3]):
        batch = task.lay_out(rows, chosen, batching=batching)
        if not static.shape.covers(static_shape(batch)):
            continue
        static.fill(batch, 7)
        wanted = loss_and_gradients(task, model, batch, 7, shape)
        found = loss_and_gradients(task, model, static.batch, static.total, shape)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("batching", BATCHINGS)
def test_what_fills_up_is_rows_of_padding_without_targets(table: tuple[str, TokenTable], batching: Batching) -> None:
    name, rows = table
    task, _ = make_task(name)
    batch = task.lay_out(rows, range(5), batching=batching)
    shape = static_shape(batch)
    static = StaticBatch(shape, batch, device="cpu", pad_id=PAD)
    static.fill(batch, 5)
    filled = static.batch
    assert int(static.total) == 5
    assert filled.input_ids.shape == (shape.rows, shape.width)
    assert int((filled.targets != IGNORE_INDEX).sum()) == batch.num_supervised
    height, width = batch.input_ids.shape
    assert torch.equal(filled.input_ids[:height, :width], batch.input_ids)
    assert (filled.input_ids[height:] == PAD).all()
    assert (filled.input_ids[:, width:] == PAD).all()
    if batching == "packed":
        assert filled.row_bounds is not None and batch.row_bounds is not None
        lengths = filled.row_bounds.diff()
        assert filled.row_bounds.dtype == torch.int32
        assert filled.row_bounds[0] == 0
        assert filled.row_bounds[-1] == shape.width, "no position is left out"
        assert 0 <= int(lengths.min()) and int(lengths.max()) <= shape.longest
        assert torch.equal(filled.row_bounds[: len(batch.row_bounds)], batch.row_bounds)
        assert filled.longest_row_tokens == shape.longest


def test_rows_that_fill_up_are_no_longer_than_the_longest(table: tuple[str, TokenTable]) -> None:
    name, rows = table
    task, _ = make_task(name)
    batch = task.lay_out(rows, range(3), batching="packed")
    wide = replace(static_shape(batch), width=batch.num_positions + 300, bounds=16)
    static = StaticBatch(wide, batch, device="cpu", pad_id=PAD)
    static.fill(batch, 1)
    assert static.batch.row_bounds is not None and static.batch.position_ids is not None
    assert int(static.batch.row_bounds.diff().max()) <= wide.longest
    assert int(static.batch.position_ids.max()) < wide.longest
    few = StaticBatch(replace(wide, bounds=5), batch, device="cpu", pad_id=PAD)
    with pytest.raises(AssertionError, match="longer than the longest"):
        few.fill(batch, 1)


def test_few_shapes_come_up(table: tuple[str, TokenTable]) -> None:
    name, rows = table
    task, _ = make_task(name)
    batches = [task.lay_out(rows, range(start, start + 8), batching="packed") for start in range(20)]
    assert len({batch.num_positions for batch in batches}) > 10
    shapes = {static_shape(batch) for batch in batches}
    assert len(shapes) <= 4
    assert all(shape.num_positions % 128 == 0 for shape in shapes)


def test_the_smallest_shape_that_covers_is_taken() -> None:
    batch = MicroBatch(torch.zeros(6, 17, dtype=torch.int64), None, torch.arange(6), torch.arange(6), 6, 100, 6)
    needed = static_shape(batch)
    assert needed == StaticShape(rows=8, width=24, kept=32, target_rows=0)
    wider, far_wider = replace(needed, width=28), replace(needed, width=64)
    assert find_covering([far_wider, wider, needed], batch) == needed
    assert find_covering([far_wider, wider], batch) == wider
    assert find_covering([far_wider], batch) is None, "it computes far more than needed"
    assert find_covering([replace(needed, rows=4), replace(needed, kept=16)], batch) is None
    packed = replace(needed, rows=1, width=256, bounds=16, longest=128)
    assert find_covering([packed], batch) is None


def test_rows_with_masks_are_not_filled_up() -> None:
    grid = torch.zeros(1, 4, dtype=torch.int64)
    plain = MicroBatch(grid, None, grid[0, :1], grid[:, :1], 1, 4, 1)
    assert why_not(plain) is None
    assert "by a mask" in str(why_not(replace(plain, position_ids=grid)))
    assert "encoder-decoder" in str(why_not(replace(plain, attention_mask=grid)))
    assert "encoder-decoder" in str(why_not(replace(plain, decoder_input_ids=grid)))
