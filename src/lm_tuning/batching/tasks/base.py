"""The three things a model can be trained to do: how their rows become tensors, and which logits carry loss.

Everything else about training (steps, micro-batches, the division by the step's count) is the same for all of them,
and none of it trusts what a model class calls its loss.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from lm_tuning.batching.batch import MicroBatch
from lm_tuning.batching.chunked_loss import count_hits
from lm_tuning.batching.micro_batches import Batching, cut_rows
from lm_tuning.runtime.ranges import module_range, work_range
from lm_tuning.text.store.table import IGNORE_INDEX, labels_of
from lm_tuning.training.profile.trace import LOSS
from lm_tuning.training.settings import TaskName

if TYPE_CHECKING:
    from lm_tuning.batching.head_loss import HeadLoss
    from lm_tuning.batching.losses import LossShape
    from lm_tuning.text.store.table import TokenRow, TokenTable

Unit = Literal["token", "row"]


@dataclass(frozen=True)
class Packing:
    """How packed rows are told apart.

    Attributes:
        by_bounds: the model's attention is told where rows begin; otherwise positions that restart tell it.
        slot_multiple: slots of a packed micro-batch are filled up to a multiple of this.
    """

    by_bounds: bool = False
    slot_multiple: int = 1


class TrainingTask(ABC):
    """What is learned of a row.

    Attributes:
        name: the ``task`` parameter.
        unit: what a loss is divided by, ``token`` or ``row``; metrics are named after it.
        pad_id: fills the end of shorter padded rows.
        can_pack: whether rows may lie one after another in one sequence.
        packing: how packed rows are told apart.
        head_loss: makes the loss of a language model's head without all of its logits; ``None`` makes them all.
    """

    name: TaskName
    unit: Unit = "token"
    can_pack = True
    head_loss: HeadLoss | None = None

    def __init__(self, *, pad_id: int) -> None:
        """Take the id to pad with."""
        self.pad_id = pad_id
        self.packing = Packing()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the model's head behind: loader workers lay rows out and run nothing."""
        return {name: value for name, value in self.__dict__.items() if name != "head_loss"}

    def cut(
        self, table: TokenTable, rows: Sequence[int] | Any, *, budget_tokens: int, batching: Batching
    ) -> list[list[int]]:
        """Group rows into micro-batches, see :func:`lm_tuning.batching.micro_batches.cut_rows`."""
        return cut_rows(rows, table.lengths[rows], budget_tokens=budget_tokens, batching=batching)

    def _lay_out_inputs(self, examples: list[TokenRow], *, batching: Batching) -> tuple[dict[str, Any], Any]:
        """Return what :class:`MicroBatch` holds of a decoder's inputs, and the lengths of the rows."""
        lengths = np.array([len(example.input_ids) for example in examples])
        if batching == "padded":
            grid = padded([example.input_ids for example in examples], self.pad_id)
            return {"input_ids": torch.from_numpy(grid), "position_ids": None}, lengths
        filling = -int(lengths.sum()) % self.packing.slot_multiple
        parts = [*(example.input_ids for example in examples), np.full(filling, self.pad_id)]
        part_lengths = np.append(lengths, filling) if filling else lengths
        inputs: dict[str, Any] = {
            "input_ids": torch.from_numpy(np.concatenate(parts).astype(np.int64)[None]),
            "position_ids": torch.from_numpy(np.concatenate([np.arange(length) for length in part_lengths])[None]),
        }
        if self.packing.by_bounds:
            bounds = np.concatenate([[0], np.cumsum(part_lengths)]).astype(np.int32)
            longest = 1 << max(int(part_lengths.max()) - 1, 1).bit_length()
            inputs |= {"row_bounds": torch.from_numpy(bounds), "longest_row_tokens": longest}
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
        """Run the model on rows of one shape, with nothing of the training path.

        No micro-batch, packing, padding or selection takes part, so this is an ordinary forward pass of each row.

        Args:
            model: a model of this task on ``device``.
            rows: rows of the token table that are equal in :meth:`shape_of`.
            device: where the model is.

        Returns:
            Logits ``(targets, classes)`` and the targets, ``(targets,)``, of all rows one after another.
        """

    def sum_nats(
        self, model: Any, batch: MicroBatch, shape: LossShape, *, hits: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the model on a micro-batch and sum the loss of what is supervised in it.

        Args:
            model: a model of this task, wrapped or not, on the micro-batch's device.
            batch: the rows.
            shape: label smoothing and class weights.
            hits: receives what :func:`lm_tuning.batching.chunked_loss.count_hits` counts; only without gradient.

        Returns:
            A scalar in nats, float32.
        """
        with module_range(self.head_of(model), LOSS):
            logits = self.logits(model, batch)
        with work_range(LOSS):
            if hits is not None:
                hits += count_hits(logits.flatten(0, -2), batch.targets.flatten())
            return shape.sum_nats(logits, batch.targets)

    def head_of(self, model: Any) -> Any:
        """Return the layer that makes the logits of hidden states; ``None`` where the model names none."""
        find = getattr(_inner(model), "get_output_embeddings", None)
        return None if find is None else find()

    def shape_of(self, row: TokenRow) -> tuple[int, ...]:
        """Say what rows must share to go through the model side by side without padding."""
        return (len(row.input_ids),)

    @abstractmethod
    def model_loss(self, model: Any, row: TokenRow, *, device: torch.device | str) -> float | None:
        """Return what the model's class itself calls the loss of one row; ``None`` when it gives none."""


class CausalLanguageModeling(TrainingTask):
    """Predict every supervised token from those before it."""

    name: TaskName = "causal_lm"

    def lay_out(self, table: TokenTable, rows: Sequence[int], *, batching: Batching) -> MicroBatch:
        """Lay rows out; padded ones need no attention mask.

        Padding comes after every real token, so a causal model never sees it, and a mask would switch flash attention
        off.
        """
        examples = [table[row] for row in rows]
        inputs, lengths = self._lay_out_inputs(examples, batching=batching)
        label_grid = np.full(inputs["input_ids"].shape, IGNORE_INDEX, dtype=np.int64)
        labels = [labels_of(example) for example in examples]
        if batching == "packed":
            label_grid[0, : lengths.sum()] = np.concatenate(labels)
        else:
            for index, row_labels in enumerate(labels):
                label_grid[index, : lengths[index]] = row_labels
        # Position p predicts token p + 1. The first token of a row is never a target (its label is ignored), so no
        # prediction crosses from one packed row into the next.
        targets = label_grid[:, 1:]
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
        inputs = _model_inputs(batch)
        if keeps_logits(model):
            return model(**inputs, logits_to_keep=batch.kept_positions).logits  # type: ignore[no-any-return]
        return model(**inputs).logits[:, batch.kept_positions]  # type: ignore[no-any-return]

    def sum_nats(
        self, model: Any, batch: MicroBatch, shape: LossShape, *, hits: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the backbone, and the head a chunk of positions at a time where that gives the same."""
        if self.head_loss is None or shape.class_weights is not None:
            return super().sum_nats(model, batch, shape, hits=hits)
        hidden = backbone_of(model)(**_model_inputs(batch)).last_hidden_state[:, batch.kept_positions]
        with work_range(LOSS):
            return self.head_loss(
                hidden.flatten(0, 1), batch.targets.flatten(), label_smoothing=shape.label_smoothing, hits=hits
            )

    def logits_of_alike(
        self, model: Any, rows: Sequence[TokenRow], *, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the logits of all positions, then those before a supervised token."""
        labels = torch.from_numpy(np.stack([labels_of(row) for row in rows]))[:, 1:].to(device)
        logits = model(input_ids=stacked([row.input_ids for row in rows], device), use_cache=False).logits[:, :-1]
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
        examples = [table[row] for row in rows]
        inputs, lengths = self._lay_out_inputs(examples, batching=batching)
        starts = np.arange(len(rows)) * inputs["input_ids"].shape[1]
        last = np.cumsum(lengths) - 1 if batching == "packed" else starts + lengths - 1
        return MicroBatch(
            **inputs,
            kept_positions=torch.from_numpy(last),
            targets=torch.tensor([example.label for example in examples]),
            num_supervised=len(rows),
            num_tokens=int(lengths.sum()),
            num_rows=len(rows),
        )

    def logits(self, model: Any, batch: MicroBatch) -> torch.Tensor:
        """Run the backbone, and the head on the last tokens alone."""
        backbone, head = _parts(model)
        hidden = backbone(**_model_inputs(batch)).last_hidden_state.flatten(0, 1)[batch.kept_positions]
        return _apply_head(head, hidden)

    def head_of(self, model: Any) -> Any:
        """Return the layer that makes a class's logits."""
        return classification_head(model)

    def logits_of_alike(
        self, model: Any, rows: Sequence[TokenRow], *, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run head and backbone on whole rows, then take the last position."""
        backbone, head = _parts(model)
        input_ids = stacked([row.input_ids for row in rows], device)
        hidden = backbone(input_ids=input_ids, use_cache=False).last_hidden_state
        return _apply_head(head, hidden)[:, -1], torch.tensor([row.label for row in rows], device=device)

    def model_loss(self, model: Any, row: TokenRow, *, device: torch.device | str) -> float | None:
        """Let the model's class choose the token and the loss."""
        label = torch.tensor([row.label], device=device)
        return loss_of(model(input_ids=row_of(row.input_ids, device), labels=label, use_cache=False))


def get_task(name: str, *, pad_id: int, decoder_start_id: int | None = None) -> TrainingTask:
    """Return a task by its name.

    Args:
        name: the ``task`` parameter.
        pad_id: fills the end of shorter padded rows.
        decoder_start_id: what a decoder starts from; for ``seq2seq_lm``.
    """
    if name == "seq2seq_lm":
        from lm_tuning.batching.tasks.seq2seq import SequenceToSequence

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


def keeps_logits(model: Any) -> bool:
    """Say whether the model's forward can compute the logits of chosen positions alone."""
    model_class: Any = type(_inner(model))
    return _forward_keeps_logits(model_class)


@functools.cache
def _forward_keeps_logits(model_class: Any) -> bool:
    """Read it off the signature, once a class: this is asked for every micro-batch."""
    return "logits_to_keep" in inspect.signature(model_class.forward).parameters


def classification_head(model: Any) -> torch.nn.Module:
    """Return the head that turns hidden states into class logits."""
    head: torch.nn.Module = _parts(model)[1]
    return head


def _inner(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def backbone_of(model: Any) -> Any:
    """Return the part of a model that ends with hidden states; adapters sit inside it."""
    inner = _inner(model)
    return getattr(inner, inner.base_model_prefix)


def _parts(model: Any) -> tuple[Any, Any]:
    """Return the backbone and the head of a classifier; adapters sit inside both."""
    return backbone_of(model), _inner(model).score


def _apply_head(head: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Run the head in float32 where autocast does not choose a type: it is small, and trained in full."""
    if not torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(next(head.parameters()).dtype)
    return head(hidden)  # type: ignore[no-any-return]


def loss_of(output: Any) -> float | None:
    """Return the loss in a model's output as a number; ``None`` when it gives none."""
    loss = getattr(output, "loss", None)
    return None if loss is None else float(loss.detach())


def row_of(ids: Any, device: torch.device | str) -> torch.Tensor:
    """Return token ids as a batch of one, ``(1, tokens)``."""
    return stacked([ids], device)


def stacked(rows: Sequence[Any], device: torch.device | str) -> torch.Tensor:
    """Return rows of one length as ``(rows, tokens)``."""
    return torch.from_numpy(np.stack(rows).astype(np.int64)).to(device)


def padded(rows: list[Any], fill: int) -> Any:
    """Return rows as an array ``(rows, longest)``, filled up at their ends."""
    grid = np.full((len(rows), max(map(len, rows))), fill, dtype=np.int64)
    for index, row in enumerate(rows):
        grid[index, : len(row)] = row
    return grid


def _model_inputs(batch: MicroBatch) -> dict[str, Any]:
    """Return what a decoder is called with."""
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
    if batch.position_ids is not None:
        inputs["position_ids"] = batch.position_ids
    if batch.row_bounds is not None:
        # Under the names that transformers hands on to attention functions.
        inputs |= {"cu_seq_lens_q": batch.row_bounds, "max_length_q": batch.longest_row_tokens}
    return inputs
