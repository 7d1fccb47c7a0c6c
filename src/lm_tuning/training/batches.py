"""Lay the micro-batches of a step out as tensors.

Masks come from lengths and spans, never from comparing ids with the pad id, so a tokenizer whose PAD is
its EOS trains like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from lm_tuning.training.cutting import Batching, cut_rows

if TYPE_CHECKING:
    from lm_tuning.text.token_table import TokenTable
    from lm_tuning.training.step_plan import StepPlan

__all__ = ["Batching", "MicroBatch", "StepBatch", "StepDataset", "cut_rows", "lay_out"]


@dataclass
class MicroBatch:
    """Rows that go through the model in one forward pass.

    Attributes:
        input_ids: token ids, ``(batch, sequence)``; packed rows lie one after another in a batch of 1.
        position_ids: ``(batch, sequence)``, restarting at 0 for each packed row; ``None`` for padded rows.
        kept_positions: sequence positions whose logits are needed, ascending, ``(kept,)``.
        targets: the token that each kept position must predict, ``(batch, kept)``; ``IGNORE_INDEX``
            where a row of the batch has no supervised token there.
        num_supervised: supervised tokens.
        num_tokens: real tokens, without padding.
        num_rows: rows.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor | None
    kept_positions: torch.Tensor
    targets: torch.Tensor
    num_supervised: int
    num_tokens: int
    num_rows: int

    @property
    def num_slots(self) -> int:
        """Positions that the model computes, padding included."""
        return self.input_ids.numel()

    def to(self, device: torch.device | str) -> MicroBatch:
        """Copy to a device without waiting for the copy."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> MicroBatch:
        """Move to page-locked memory; the DataLoader calls this."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        return replace(
            self,
            input_ids=change(self.input_ids),
            position_ids=None if self.position_ids is None else change(self.position_ids),
            kept_positions=change(self.kept_positions),
            targets=change(self.targets),
        )


@dataclass
class StepBatch:
    """All of one optimizer step: one item of the loader.

    Attributes:
        step: 0-based optimizer step.
        row_ids: the input rows of the step, as the data reports number them.
        micro_batches: the step's rows, each in exactly one micro-batch.
    """

    step: int
    row_ids: list[int]
    micro_batches: list[MicroBatch]

    @property
    def num_supervised(self) -> int:
        """Supervised tokens of the step: what its summed loss is divided by."""
        return sum(batch.num_supervised for batch in self.micro_batches)

    @property
    def num_tokens(self) -> int:
        """Real tokens of the step."""
        return sum(batch.num_tokens for batch in self.micro_batches)

    @property
    def num_slots(self) -> int:
        """Positions computed for the step, padding included."""
        return sum(batch.num_slots for batch in self.micro_batches)

    def pin_memory(self) -> StepBatch:
        """Move every micro-batch to page-locked memory; the DataLoader calls this."""
        return StepBatch(self.step, self.row_ids, [batch.pin_memory() for batch in self.micro_batches])


def lay_out(table: TokenTable, rows: Sequence[int], *, batching: Batching, pad_id: int) -> MicroBatch:
    """Turn rows into one micro-batch of tensors.

    Args:
        table: where the rows lie.
        rows: row indices of the micro-batch.
        batching: ``packed`` lays the rows one after another, ``padded`` one under another.
        pad_id: fills the end of shorter padded rows. Those positions come after every real token, so a causal
            model never sees them, and no attention mask is needed (a mask would switch flash attention off).
    """
    from lm_tuning.text.token_table import IGNORE_INDEX, labels_of

    examples = [table[row] for row in rows]
    lengths = np.array([len(example.input_ids) for example in examples])
    labels = [labels_of(example) for example in examples]
    if batching == "packed":
        input_ids = np.concatenate([example.input_ids for example in examples]).astype(np.int64)[None]
        position_ids = np.concatenate([np.arange(length) for length in lengths])[None]
        label_grid = np.concatenate(labels)[None]
    else:
        shape = (len(rows), int(lengths.max()))
        input_ids = np.full(shape, pad_id, dtype=np.int64)
        label_grid = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        position_ids = None
        for index, (example, row_labels) in enumerate(zip(examples, labels, strict=True)):
            input_ids[index, : lengths[index]] = example.input_ids
            label_grid[index, : lengths[index]] = row_labels
    # Position p predicts token p + 1. The first token of a row is never a target (its label is ignored), so no
    # prediction crosses from one packed row into the next.
    targets = label_grid[:, 1:]
    kept = np.flatnonzero((targets != IGNORE_INDEX).any(axis=0))
    targets = targets[:, kept]
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=None if position_ids is None else torch.from_numpy(position_ids),
        kept_positions=torch.from_numpy(kept),
        targets=torch.from_numpy(np.ascontiguousarray(targets)),
        num_supervised=int((targets != IGNORE_INDEX).sum()),
        num_tokens=int(lengths.sum()),
        num_rows=len(rows),
    )


class StepDataset(torch.utils.data.Dataset[StepBatch]):
    """Map a step number to its micro-batches; loader workers run this off the critical path."""

    def __init__(
        self, table: TokenTable, plan: StepPlan, *, micro_batch_tokens: int, batching: Batching, pad_id: int
    ) -> None:
        """Keep where the rows lie and how a step is cut.

        Args:
            table: tokenized training rows.
            plan: which rows form each step.
            micro_batch_tokens: most slots of a micro-batch.
            batching: ``packed`` or ``padded``.
            pad_id: see :func:`lay_out`.
        """
        self.table = table
        self.plan = plan
        self.micro_batch_tokens = micro_batch_tokens
        self.batching: Batching = batching
        self.pad_id = pad_id

    def __len__(self) -> int:
        """Return the optimizer steps of the whole run."""
        return self.plan.total_steps

    def __getitem__(self, step: int) -> StepBatch:
        """Build the micro-batches of a 0-based optimizer step."""
        rows = self.plan.rows_of_step(step)
        groups = cut_rows(rows, self.table.lengths[rows], budget_tokens=self.micro_batch_tokens, batching=self.batching)
        return StepBatch(
            step=step,
            row_ids=[int(row_id) for row_id in self.table.row_ids[rows]],
            micro_batches=[lay_out(self.table, group, batching=self.batching, pad_id=self.pad_id) for group in groups],
        )
