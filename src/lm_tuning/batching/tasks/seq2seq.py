"""The task of an encoder-decoder: a source goes in, every token of its target is predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lm_tuning.batching.batch import MicroBatch
from lm_tuning.batching.micro_batches import Batching, split_pairs
from lm_tuning.batching.tasks.base import TrainingTask, loss_of, padded, row_of, stacked
from lm_tuning.parameters.base import TaskName
from lm_tuning.text.records import TokenRow
from lm_tuning.text.store.table import IGNORE_INDEX, TokenTable


class SequenceToSequence(TrainingTask):
    """Read a source with an encoder and predict every token of its target with a decoder."""

    name: TaskName = "seq2seq_lm"
    can_pack = False
    looks_back = False

    def __init__(self, *, pad_id: int, decoder_start_id: int) -> None:
        """Keep the id to pad with and the one that every target is predicted from first."""
        super().__init__(pad_id=pad_id)
        self.decoder_start_id = decoder_start_id

    def split(
        self, table: TokenTable, rows: Sequence[int] | Any, *, budget_tokens: int, batching: Batching
    ) -> list[list[int]]:
        """Group rows by what encoder and decoder compute together, each padded to its longest."""
        targets = table.num_supervised[rows]
        return split_pairs(rows, table.lengths[rows] - targets, targets, budget_tokens=budget_tokens)

    def lay_out(self, table: TokenTable, rows: Sequence[int], *, batching: Batching) -> MicroBatch:
        """Lay sources and targets out; an encoder looks both ways, so padded sources need a mask."""
        assert batching == "padded", batching
        sequences = [table[row] for row in rows]
        parts = [_source_and_target(sequence) for sequence in sequences]
        sources = padded([source for source, _ in parts], self.pad_id)
        targets = padded([target for _, target in parts], IGNORE_INDEX)
        # (rows, longest target): the target one position later, behind the start token
        decoder_input = np.full_like(targets, self.pad_id)
        decoder_input[:, 0] = self.decoder_start_id
        # IGNORE_INDEX is no token, so padding is given instead; a causal decoder never looks at it from before.
        decoder_input[:, 1:] = np.where(targets[:, :-1] == IGNORE_INDEX, self.pad_id, targets[:, :-1])
        lengths = np.array([len(source) for source, _ in parts])
        # (rows, longest source), by lengths: a source may hold the pad id as a token of its own.
        mask = np.arange(sources.shape[1])[None] < lengths[:, None]
        return MicroBatch(
            input_ids=torch.from_numpy(sources),
            position_ids=None,
            # Every position of the targets: the decoder sees nothing else.
            kept_positions=torch.arange(targets.shape[1]),
            targets=torch.from_numpy(targets),
            num_supervised=int((targets != IGNORE_INDEX).sum()),
            num_tokens=sum(len(sequence.input_ids) for sequence in sequences),
            num_rows=len(rows),
            attention_mask=torch.from_numpy(mask.astype(np.int64)),
            decoder_input_ids=torch.from_numpy(decoder_input),
        )

    def logits(self, model: Any, batch: MicroBatch) -> torch.Tensor:
        """Run encoder and decoder; padded target positions come last, so the causal decoder needs no mask."""
        return model(  # type: ignore[no-any-return]
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            decoder_input_ids=batch.decoder_input_ids,
            use_cache=False,
        ).logits

    def logits_of_alike(
        self, model: Any, rows: Sequence[TokenRow], *, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Let the model make the decoder's input of the targets."""
        sources, targets = zip(*(_source_and_target(row) for row in rows), strict=True)
        labels = stacked(targets, device)
        logits = model(input_ids=stacked(sources, device), labels=labels, use_cache=False).logits
        return logits.flatten(0, 1), labels.flatten()

    def shape_of(self, row: TokenRow) -> tuple[int, ...]:
        """Return the lengths of source and target."""
        return tuple(map(len, _source_and_target(row)))

    def model_loss(self, model: Any, row: TokenRow, *, device: torch.device | str) -> float | None:
        """Pass the target as labels."""
        source, target = _source_and_target(row)
        return loss_of(model(input_ids=row_of(source, device), labels=row_of(target, device), use_cache=False))


def _source_and_target(row: TokenRow) -> tuple[Any, Any]:
    [(start, end)] = row.spans
    assert end == len(row.input_ids), "the target ends the row"
    return row.input_ids[:start], row.input_ids[start:]
