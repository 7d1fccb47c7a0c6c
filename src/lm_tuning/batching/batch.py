"""Micro-batches of a step as tensors.

Masks come from lengths and spans, never from comparing ids with the pad id, so a tokenizer whose PAD is its EOS trains
like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass
class MicroBatch:
    """Rows that go through the model in one forward pass.

    Attributes:
        input_ids: token ids, ``(batch, sequence)``; packed rows lie one after another in a batch of 1. An
            encoder-decoder's are the sources.
        position_ids: ``(batch, sequence)``, restarting at 0 for each packed row; ``None`` for padded rows.
        kept_positions: positions whose logits are needed, ``(kept,)``: of the sequence for a language model,
            ascending; of the flattened ``(batch, sequence)`` grid for a classifier, one per row.
        targets: what each kept position must predict; ``IGNORE_INDEX`` where a row has nothing supervised there.
            ``(batch, kept)`` token ids for a language model, ``(rows,)`` classes for a classifier.
        num_supervised: supervised tokens, or rows for a classifier.
        num_tokens: real tokens, without padding.
        num_rows: rows.
        attention_mask: ``(batch, sequence)``, 1 for real tokens; ``None`` where a causal model needs none.
        decoder_input_ids: ``(batch, kept)``, for an encoder-decoder.
        row_bounds: where packed rows begin, and the end of the last one, ``(rows + 1,)``, int32, for the attention that
            is told so; ``None`` where positions or a mask keep rows apart. Padding at the end counts as a row.
        longest_row_tokens: with ``row_bounds``, an upper bound of the rows' lengths that hardly ever changes.
    """

    # (batch, sequence), int64; pad ids at the ends of rows, or of the whole sequence of packed rows
    input_ids: torch.Tensor
    position_ids: torch.Tensor | None
    # (kept,), int64: a head over 150,000 tokens costs more than a layer, so it sees no more positions than are needed
    kept_positions: torch.Tensor
    targets: torch.Tensor
    # Plain integers, not tensors: the host needs them for the divisor, and must not wait for the device to learn them.
    num_supervised: int
    num_tokens: int
    num_rows: int
    attention_mask: torch.Tensor | None = None
    decoder_input_ids: torch.Tensor | None = None
    row_bounds: torch.Tensor | None = None
    longest_row_tokens: int | None = None

    @property
    def num_positions(self) -> int:
        """Positions that the model computes, padding included."""
        return self.input_ids.numel() + (0 if self.decoder_input_ids is None else self.decoder_input_ids.numel())

    def to(self, device: torch.device | str) -> MicroBatch:
        """Copy to a device without waiting for the copy."""
        # `non_blocking` only helps from page-locked memory, which is what `pin_memory` is for; from other memory it
        # waits.
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> MicroBatch:
        """Move to page-locked memory; the DataLoader calls this."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        # What is no tensor (counts, bounds of lengths) stays as it is, so a new field needs no line here.
        changed: dict[str, Any] = {
            name: change(value) for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        return replace(self, **changed)


@dataclass
class StepBatch:
    """All of one optimizer step: one item of the loader.

    Attributes:
        step: 0-based optimizer step.
        row_ids: the input rows of the step, as the data reports number them.
        micro_batches: the step's rows, each in exactly one micro-batch.
        micro_batch_tokens: most positions of a micro-batch that it was split for; ``None`` for one from elsewhere.
    """

    step: int
    row_ids: list[int]
    micro_batches: list[MicroBatch]
    micro_batch_tokens: int | None = None

    @property
    def num_supervised(self) -> int:
        """Supervised tokens of the step (rows for a classifier): what its summed loss is divided by."""
        return sum(batch.num_supervised for batch in self.micro_batches)

    @property
    def num_tokens(self) -> int:
        """Real tokens of the step."""
        return sum(batch.num_tokens for batch in self.micro_batches)

    @property
    def num_positions(self) -> int:
        """Positions computed for the step, padding included."""
        return sum(batch.num_positions for batch in self.micro_batches)

    def pin_memory(self) -> StepBatch:
        """Move every micro-batch to page-locked memory; the DataLoader calls this."""
        return replace(self, micro_batches=[batch.pin_memory() for batch in self.micro_batches])
