"""The task of a classifier: predict the class of a row from its last real token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lm_tuning.batching.batch import MicroBatch
from lm_tuning.batching.micro_batches import Batching
from lm_tuning.batching.tasks.base import TrainingTask, Unit, loss_of, model_inputs, padded, row_of
from lm_tuning.models.structure import classification_head, classifier_parts
from lm_tuning.parameters.base import TaskName
from lm_tuning.text.records import TokenRow
from lm_tuning.text.store.table import TokenTable


class SequenceClassification(TrainingTask):
    """Predict the class of a row from its last real token.

    That token is known from the rows' lengths. Model classes look for the last token that is not the pad token
    instead, which is another one when a text ends in a token that is also the padding.
    """

    name: TaskName = "sequence_classification"
    unit: Unit = "row"

    def lay_out(self, table: TokenTable, rows: Sequence[int], *, batching: Batching) -> MicroBatch:
        """Lay rows out; the kept positions are those of the last tokens in the flattened grid."""
        sequences = [table[row] for row in rows]
        inputs, lengths = self._lay_out_inputs(sequences, batching=batching)
        # (rows,): where each row begins in the flattened grid
        starts = np.arange(len(rows)) * inputs["input_ids"].shape[1]
        # (rows,)
        last = np.cumsum(lengths) - 1 if batching == "packed" else starts + lengths - 1
        return MicroBatch(
            **inputs,
            kept_positions=torch.from_numpy(last),
            targets=torch.tensor([sequence.label for sequence in sequences]),
            num_supervised=len(rows),
            num_tokens=int(lengths.sum()),
            num_rows=len(rows),
        )

    def logits(self, model: Any, batch: MicroBatch) -> torch.Tensor:
        """Run the backbone, and the head on the last tokens alone."""
        backbone, head = classifier_parts(model)
        # (batch, sequence, features) to (rows, features)
        hidden = backbone(**model_inputs(batch)).last_hidden_state.flatten(0, 1)[batch.kept_positions]
        return _apply_head(head, hidden)

    def head_of(self, model: Any) -> Any:
        """Return the layer that makes a class's logits."""
        return classification_head(model)

    def logits_of_alike(
        self, model: Any, rows: Sequence[TokenRow], *, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run head and backbone on whole rows, then take each row's last position."""
        backbone, head = classifier_parts(model)
        input_ids = torch.from_numpy(padded([row.input_ids for row in rows], self.pad_id)).to(device)
        hidden = backbone(input_ids=input_ids, use_cache=False).last_hidden_state
        last = torch.tensor([len(row.input_ids) - 1 for row in rows], device=device)
        # (rows, tokens, classes) to (rows, classes)
        logits = _apply_head(head, hidden)[torch.arange(len(rows), device=device), last]
        return logits, torch.tensor([row.label for row in rows], device=device)

    def model_loss(self, model: Any, row: TokenRow, *, device: torch.device | str) -> float | None:
        """Let the model's class choose the token and the loss."""
        label = torch.tensor([row.label], device=device)
        return loss_of(model(input_ids=row_of(row.input_ids, device), labels=label, use_cache=False))


def _apply_head(head: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Run the head in float32 where autocast does not choose a type: it is small, and trained in full."""
    if not torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(next(head.parameters()).dtype)
    return head(hidden)  # type: ignore[no-any-return]
