"""The three things a model can be trained to do: how their rows become tensors, and which logits carry loss.

Everything else about training (steps, micro-batches, the division by the step's count) is the same for all of them,
and none of it trusts what a model class calls its loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np
import torch

from lm_tuning.batching.batch import MicroBatch
from lm_tuning.batching.head_loss import HeadLoss
from lm_tuning.batching.losses import PLAIN, LossShape, count_hits, judge_targets
from lm_tuning.batching.micro_batches import Batching, split_rows
from lm_tuning.models.structure import inner_model
from lm_tuning.parameters.base import TaskName
from lm_tuning.runtime.ranges import LOSS, module_range, work_range
from lm_tuning.text.records import TokenRow
from lm_tuning.text.store.table import Int64Array, TokenTable

Unit = Literal["token", "row"]


@dataclass(frozen=True)
class Packing:
    """How packed rows are told apart.

    Attributes:
        by_bounds: the model's attention is told where rows begin; otherwise positions that restart tell it.
        position_multiple: positions of a packed micro-batch are filled up to a multiple of this.
    """

    by_bounds: bool = False
    position_multiple: int = 1


class LaidOut(TypedDict):
    """What a :class:`MicroBatch` holds of a decoder's inputs."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor | None
    row_bounds: NotRequired[torch.Tensor]
    longest_row_tokens: NotRequired[int]


class ModelInputs(TypedDict):
    """What a decoder is called with."""

    input_ids: torch.Tensor
    use_cache: bool
    position_ids: NotRequired[torch.Tensor]
    cu_seq_lens_q: NotRequired[torch.Tensor]
    max_length_q: NotRequired[int | None]


class TrainingTask(ABC):
    """What is supervised of a row.

    Attributes:
        name: the ``task`` parameter.
        unit: what a loss is divided by, ``token`` or ``row``; metrics are named after it.
        pad_id: fills the end of shorter padded rows.
        can_pack: whether rows may lie one after another in one sequence.
        looks_back: whether a position sees none that come after it, unless the model is of an unusual kind.
        packing: how packed rows are told apart.
        head_loss: makes the loss of a language model's head without all of its logits; ``None`` makes them all.
    """

    name: TaskName
    unit: Unit = "token"
    can_pack = True
    looks_back = True
    head_loss: HeadLoss | None = None

    def __init__(self, *, pad_id: int) -> None:
        """Keep the id to pad with."""
        self.pad_id = pad_id
        self.packing = Packing()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the model's head behind: loader workers lay rows out and run nothing."""
        return {name: value for name, value in self.__dict__.items() if name != "head_loss"}

    def split(
        self, table: TokenTable, rows: Sequence[int] | Any, *, budget_tokens: int, batching: Batching
    ) -> list[list[int]]:
        """Group rows into micro-batches, see :func:`lm_tuning.batching.micro_batches.split_rows`."""
        return split_rows(rows, table.lengths[rows], budget_tokens=budget_tokens, batching=batching)

    def _lay_out_inputs(self, sequences: list[TokenRow], *, batching: Batching) -> tuple[LaidOut, Int64Array]:
        """Return what :class:`MicroBatch` holds of a decoder's inputs, and the lengths of the rows."""
        # (rows,)
        lengths = np.array([len(sequence.input_ids) for sequence in sequences])
        if batching == "padded":
            grid = padded([sequence.input_ids for sequence in sequences], self.pad_id)
            return {"input_ids": torch.from_numpy(grid), "position_ids": None}, lengths
        # Matrix products on a GPU run in tiles; the rest is one more row, from which nothing is learned.
        filling = -int(lengths.sum()) % self.packing.position_multiple
        parts = [*(sequence.input_ids for sequence in sequences), np.full(filling, self.pad_id)]
        part_lengths = np.append(lengths, filling) if filling else lengths
        inputs: LaidOut = {
            "input_ids": torch.from_numpy(np.concatenate(parts).astype(np.int64)[None]),
            "position_ids": torch.from_numpy(np.concatenate([np.arange(length) for length in part_lengths])[None]),
        }
        if self.packing.by_bounds:
            # (parts + 1,), int32, which is what variable-length attention takes
            bounds = np.concatenate([[0], np.cumsum(part_lengths)]).astype(np.int32)
            # Rounded up to a power of two: each other value would compile the attention once more.
            longest = 1 << max(int(part_lengths.max()) - 1, 1).bit_length()
            inputs["row_bounds"], inputs["longest_row_tokens"] = torch.from_numpy(bounds), longest
        return inputs, lengths

    @abstractmethod
    def lay_out(self, table: TokenTable, rows: Sequence[int], *, batching: Batching) -> MicroBatch:
        """Turn rows into one micro-batch of tensors.

        Args:
            table: where the rows lie.
            rows: row indices of the micro-batch.
            batching: ``packed`` lays the rows one after another, ``padded`` one under another.
        """

    @abstractmethod
    def logits(self, model: Any, batch: MicroBatch) -> torch.Tensor:
        """Run the model on a micro-batch.

        Args:
            model: a model of this task, wrapped or not, on the micro-batch's device.
            batch: the rows.

        Returns:
            ``(*batch.targets.shape, classes)``: what each target is predicted from.
        """

    @abstractmethod
    def logits_of_alike(
        self, model: Any, rows: Sequence[TokenRow], *, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model on rows side by side, with nothing of the training path.

        No micro-batch, packing, mask or selection takes part, so this is an ordinary forward pass of each row.

        Args:
            model: a model of this task on ``device``.
            rows: rows of the token table that are equal in :meth:`shape_of`; where :attr:`looks_back`, shorter ones are
                filled up at their ends, which no position before sees.
            device: where the model is.

        Returns:
            Logits ``(targets, classes)`` and the targets, ``(targets,)``, of all rows one after another.
        """

    def sum_nats(
        self,
        model: Any,
        batch: MicroBatch,
        shape: LossShape = PLAIN,
        *,
        hits: torch.Tensor | None = None,
        each: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the model on a micro-batch and sum the loss of what is supervised in it.

        Args:
            model: a model of this task, wrapped or not, on the micro-batch's device.
            batch: the rows.
            shape: label smoothing and class weights.
            hits: receives what :func:`lm_tuning.batching.losses.count_hits` counts; only without gradient.
            each: receives what :func:`lm_tuning.batching.losses.judge_targets` says of each target, in their order,
                ``(targets, 2)``; only without gradient and by the plain loss.

        Returns:
            A scalar in nats, float32.
        """
        # The head is the loss's part in a profile, though the model runs it.
        with module_range(self.head_of(model), LOSS):
            logits = self.logits(model, batch)
        with work_range(LOSS):
            if hits is not None:
                hits += count_hits(logits.flatten(0, -2), batch.targets.flatten())
            if each is not None:
                assert shape == PLAIN, "the loss of a target is the plain one"
                return each.copy_(judge_targets(logits.flatten(0, -2), batch.targets.flatten()))[:, 0].sum()
            return shape.sum_nats(logits, batch.targets)

    def head_of(self, model: Any) -> Any:
        """Return the layer that makes the logits of hidden states; ``None`` where the model names none."""
        find = getattr(inner_model(model), "get_output_embeddings", None)
        return None if find is None else find()

    def shape_of(self, row: TokenRow) -> tuple[int, ...]:
        """Return what rows must share to go through the model side by side without padding."""
        return (len(row.input_ids),)

    @abstractmethod
    def model_loss(self, model: Any, row: TokenRow, *, device: torch.device | str) -> float | None:
        """Return what the model's class itself calls the loss of one row; ``None`` when it gives none."""


def loss_of(output: Any) -> float | None:
    """Return the loss in a model's output as a number; ``None`` when it gives none."""
    loss = getattr(output, "loss", None)
    return None if loss is None else float(loss.detach())


def row_of(ids: Any, device: torch.device | str) -> torch.Tensor:
    """Return token ids as a batch of one, ``(1, tokens)``."""
    return stacked([ids], device)


def stacked(rows: Sequence[Any], device: torch.device | str) -> torch.Tensor:
    """Return rows of one length as ``(rows, tokens)``."""
    # int32 in the file, to save half of it; embeddings index by int64.
    return torch.from_numpy(np.stack(rows).astype(np.int64)).to(device)


def padded(rows: list[Any], fill: int) -> Any:
    """Return rows as an array ``(rows, longest)``, filled up at their ends."""
    # (rows, longest)
    grid = np.full((len(rows), max(map(len, rows))), fill, dtype=np.int64)
    for index, row in enumerate(rows):
        grid[index, : len(row)] = row
    return grid


def model_inputs(batch: MicroBatch) -> ModelInputs:
    """Return what a decoder is called with."""
    inputs: ModelInputs = {"input_ids": batch.input_ids, "use_cache": False}
    if batch.position_ids is not None:
        inputs["position_ids"] = batch.position_ids
    if batch.row_bounds is not None:
        # Under the names that transformers hands on to attention functions.
        inputs["cu_seq_lens_q"], inputs["max_length_q"] = batch.row_bounds, batch.longest_row_tokens
    return inputs
