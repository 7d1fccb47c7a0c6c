"""The task of a causal language model: predict every supervised token from those before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lm_tuning.batching.batch import MicroBatch
from lm_tuning.batching.losses import PLAIN, LossShape
from lm_tuning.batching.micro_batches import Batching
from lm_tuning.batching.tasks.base import TrainingTask, loss_of, model_inputs, padded, row_of
from lm_tuning.models.structure import backbone_of, keeps_logits
from lm_tuning.parameters.base import TaskName
from lm_tuning.runtime.ranges import LOSS, work_range
from lm_tuning.text.records import TokenRow
from lm_tuning.text.store.table import IGNORE_INDEX, TokenTable, labels_of


class CausalLanguageModeling(TrainingTask):
    """Predict every supervised token from those before it."""

    name: TaskName = "causal_lm"

    def lay_out(self, table: TokenTable, rows: Sequence[int], *, batching: Batching) -> MicroBatch:
        """Lay rows out; padded ones need no attention mask.

        Padding comes after every real token, so a causal model never sees it, and a mask would switch flash attention
        off.
        """
        sequences = [table[row] for row in rows]
        inputs, lengths = self._lay_out_inputs(sequences, batching=batching)
        # (batch, sequence), as the input
        label_grid = np.full(inputs["input_ids"].shape, IGNORE_INDEX, dtype=np.int64)
        labels = [labels_of(sequence) for sequence in sequences]
        if batching == "packed":
            label_grid[0, : lengths.sum()] = np.concatenate(labels)
        else:
            for index, row_labels in enumerate(labels):
                label_grid[index, : lengths[index]] = row_labels
        # Position p predicts token p + 1. The first token of a row is never a target (its label is ignored), so no
        # prediction crosses from one packed row into the next.
        targets = label_grid[:, 1:]
        # (kept,): a column is kept where any row has a target, so that one selection serves all rows of the batch
        kept = np.flatnonzero((targets != IGNORE_INDEX).any(axis=0))
        targets = targets[:, kept]
        return MicroBatch(
            **inputs,
            kept_positions=torch.from_numpy(kept),
            targets=torch.from_numpy(np.ascontiguousarray(targets)),
            num_supervised=int((targets != IGNORE_INDEX).sum()),
            num_tokens=int(lengths.sum()),
            num_rows=len(rows),
        )

    def logits(self, model: Any, batch: MicroBatch) -> torch.Tensor:
        """Run the model; its head computes the kept positions alone where it can."""
        inputs = model_inputs(batch)
        if keeps_logits(model):
            return model(**inputs, logits_to_keep=batch.kept_positions).logits  # type: ignore[no-any-return]
        return model(**inputs).logits[:, batch.kept_positions]  # type: ignore[no-any-return]

    def sum_nats(
        self,
        model: Any,
        batch: MicroBatch,
        shape: LossShape = PLAIN,
        *,
        hits: torch.Tensor | None = None,
        each: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the backbone, and the head a chunk of positions at a time where that gives the same."""
        if self.head_loss is None or not shape.fits_chunks:
            return super().sum_nats(model, batch, shape, hits=hits, each=each)
        # (batch, sequence, features) to (batch, kept, features)
        hidden = backbone_of(model)(**model_inputs(batch)).last_hidden_state[:, batch.kept_positions]
        with work_range(LOSS):
            return self.head_loss(
                hidden.flatten(0, 1),
                batch.targets.flatten(),
                label_smoothing=shape.label_smoothing,
                hits=hits,
                each=each,
            )

    def logits_of_alike(
        self, model: Any, rows: Sequence[TokenRow], *, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Select the logits of all positions, then those before a supervised token."""
        # (rows, tokens - 1): what positions 0 to the last but one predict
        labels = torch.from_numpy(padded([labels_of(row) for row in rows], IGNORE_INDEX))[:, 1:].to(device)
        input_ids = torch.from_numpy(padded([row.input_ids for row in rows], self.pad_id)).to(device)
        logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]
        # (rows, tokens - 1), which selects (targets, vocabulary) and (targets,)
        scored = labels != IGNORE_INDEX
        return logits[scored], labels[scored]

    def model_loss(self, model: Any, row: TokenRow, *, device: torch.device | str) -> float | None:
        """Pass unshifted labels, as transformers wants them."""
        labels = torch.from_numpy(labels_of(row))[None].to(device)
        return loss_of(model(input_ids=row_of(row.input_ids, device), labels=labels, use_cache=False))
