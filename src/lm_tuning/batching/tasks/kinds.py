"""The three tasks: what each makes of its rows, and which logits carry loss; and how one is found by its name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lm_tuning.batching.batch import MicroBatch
from lm_tuning.batching.losses import PLAIN, LossShape
from lm_tuning.batching.micro_batches import Batching, split_pairs
from lm_tuning.batching.tasks.base import TrainingTask, Unit, loss_of, model_inputs, padded, row_of, stacked
from lm_tuning.models.structure import backbone_of, classification_head, classifier_parts, keeps_logits
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
        self, model: Any, batch: MicroBatch, shape: LossShape = PLAIN, *, hits: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the backbone, and the head a chunk of positions at a time where that gives the same."""
        if self.head_loss is None or not shape.fits_chunks:
            return super().sum_nats(model, batch, shape, hits=hits)
        # (batch, sequence, features) to (batch, kept, features)
        hidden = backbone_of(model)(**model_inputs(batch)).last_hidden_state[:, batch.kept_positions]
        with work_range(LOSS):
            return self.head_loss(
                hidden.flatten(0, 1), batch.targets.flatten(), label_smoothing=shape.label_smoothing, hits=hits
            )

    def logits_of_alike(
        self, model: Any, rows: Sequence[TokenRow], *, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Select the logits of all positions, then those before a supervised token."""
        # (rows, tokens - 1): what positions 0 to the last but one predict
        labels = torch.from_numpy(np.stack([labels_of(row) for row in rows]))[:, 1:].to(device)
        logits = model(input_ids=stacked([row.input_ids for row in rows], device), use_cache=False).logits[:, :-1]
        # (rows, tokens - 1), which selects (targets, vocabulary) and (targets,)
        scored = labels != IGNORE_INDEX
        return logits[scored], labels[scored]

    def model_loss(self, model: Any, row: TokenRow, *, device: torch.device | str) -> float | None:
        """Pass unshifted labels, as transformers wants them."""
        labels = torch.from_numpy(labels_of(row))[None].to(device)
        return loss_of(model(input_ids=row_of(row.input_ids, device), labels=labels, use_cache=False))


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
        """Run head and backbone on whole rows, then take the last position."""
        backbone, head = classifier_parts(model)
        input_ids = stacked([row.input_ids for row in rows], device)
        hidden = backbone(input_ids=input_ids, use_cache=False).last_hidden_state
        return _apply_head(head, hidden)[:, -1], torch.tensor([row.label for row in rows], device=device)

    def model_loss(self, model: Any, row: TokenRow, *, device: torch.device | str) -> float | None:
        """Let the model's class choose the token and the loss."""
        label = torch.tensor([row.label], device=device)
        return loss_of(model(input_ids=row_of(row.input_ids, device), labels=label, use_cache=False))


def _apply_head(head: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Run the head in float32 where autocast does not choose a type: it is small, and trained in full."""
    if not torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(next(head.parameters()).dtype)
    return head(hidden)  # type: ignore[no-any-return]


class SequenceToSequence(TrainingTask):
    """Read a source with an encoder and predict every token of its target with a decoder."""

    name: TaskName = "seq2seq_lm"
    can_pack = False

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


def get_task(name: str, *, pad_id: int, decoder_start_id: int | None = None) -> TrainingTask:
    """Return a task by its name.

    Args:
        name: the ``task`` parameter.
        pad_id: fills the end of shorter padded rows.
        decoder_start_id: what a decoder starts from; for ``seq2seq_lm``.
    """
    if name == "seq2seq_lm":
        assert decoder_start_id is not None, "an encoder-decoder's config names it"
        return SequenceToSequence(pad_id=pad_id, decoder_start_id=decoder_start_id)
    return {"causal_lm": CausalLanguageModeling, "sequence_classification": SequenceClassification}[name](pad_id=pad_id)


def task_of(model: Any, name: str, *, pad_id: int) -> TrainingTask:
    """Return the task of a loaded model.

    Args:
        model: as ``load_model`` returns it.
        name: the ``task`` parameter.
        pad_id: fills the end of shorter padded rows.
    """
    return get_task(name, pad_id=pad_id, decoder_start_id=getattr(model.config, "decoder_start_token_id", None))
