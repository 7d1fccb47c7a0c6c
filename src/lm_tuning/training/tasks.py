"""The three things a model can be trained to do: how their rows become tensors, and which logits carry loss.

Everything else about training (steps, micro-batches, the division by the step's count) is the same for all of them,
and none of it trusts what a model class calls its loss.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from lm_tuning.text.token_table import IGNORE_INDEX, labels_of
from lm_tuning.training.batches import MicroBatch
from lm_tuning.training.cutting import Batching, cut_pairs, cut_rows
from lm_tuning.training.settings import TaskName

if TYPE_CHECKING:
    from lm_tuning.text.token_table import TokenRow, TokenTable

Unit = Literal["token", "row"]


class TrainingTask(ABC):
    """What is learned of a row.

    Attributes:
        name: the ``task`` parameter.
        unit: what a loss is divided by, ``token`` or ``row``; metrics are named after it.
        pad_id: fills the end of shorter padded rows.
        can_pack: whether rows may lie one after another in one sequence.
    """

    name: TaskName
    unit: Unit = "token"
    can_pack = True

    def __init__(self, *, pad_id: int) -> None:
        """Take the id to pad with."""
        self.pad_id = pad_id

    def cut(
        self, table: TokenTable, rows: Sequence[int] | Any, *, budget_tokens: int, batching: Batching
    ) -> list[list[int]]:
        """Group rows into micro-batches, see :func:`lm_tuning.training.cutting.cut_rows`."""
        return cut_rows(rows, table.lengths[rows], budget_tokens=budget_tokens, batching=batching)

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

    def row_logits(self, model: Any, row: TokenRow, *, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model on one row alone, see :meth:`logits_of_alike`."""
        return self.logits_of_alike(model, [row], device=device)

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
        input_ids, position_ids, lengths = _input_grid(examples, batching=batching, pad_id=self.pad_id)
        label_grid = np.full(input_ids.shape, IGNORE_INDEX, dtype=np.int64)
        labels = [labels_of(example) for example in examples]
        if batching == "packed":
            label_grid[0] = np.concatenate(labels)
        else:
            for index, row_labels in enumerate(labels):
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

    def logits(self, model: Any, batch: MicroBatch) -> torch.Tensor:
        """Run the model; its head computes the kept positions alone where it can."""
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
        if batch.position_ids is not None:
            inputs["position_ids"] = batch.position_ids
        if keeps_logits(model):
            return model(**inputs, logits_to_keep=batch.kept_positions).logits  # type: ignore[no-any-return]
        return model(**inputs).logits[:, batch.kept_positions]  # type: ignore[no-any-return]

    def logits_of_alike(
        self, model: Any, rows: Sequence[TokenRow], *, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the logits of all positions, then those before a supervised token."""
        labels = torch.from_numpy(np.stack([labels_of(row) for row in rows]))[:, 1:].to(device)
        logits = model(input_ids=_stacked([row.input_ids for row in rows], device), use_cache=False).logits[:, :-1]
        scored = labels != IGNORE_INDEX
        return logits[scored], labels[scored]

    def model_loss(self, model: Any, row: TokenRow, *, device: torch.device | str) -> float | None:
        """Pass unshifted labels, as transformers wants them."""
        labels = torch.from_numpy(labels_of(row))[None].to(device)
        return _loss_of(model(input_ids=_row_of(row.input_ids, device), labels=labels, use_cache=False))


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
        input_ids, position_ids, lengths = _input_grid(examples, batching=batching, pad_id=self.pad_id)
        starts = np.arange(len(rows)) * input_ids.shape[1]
        last = np.cumsum(lengths) - 1 if batching == "packed" else starts + lengths - 1
        return MicroBatch(
            input_ids=torch.from_numpy(input_ids),
            position_ids=None if position_ids is None else torch.from_numpy(position_ids),
            kept_positions=torch.from_numpy(last),
            targets=torch.tensor([example.label for example in examples]),
            num_supervised=len(rows),
            num_tokens=int(lengths.sum()),
            num_rows=len(rows),
        )

    def logits(self, model: Any, batch: MicroBatch) -> torch.Tensor:
        """Run the backbone, and the head on the last tokens alone."""
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
        if batch.position_ids is not None:
            inputs["position_ids"] = batch.position_ids
        backbone, head = _parts(model)
        hidden = backbone(**inputs).last_hidden_state.flatten(0, 1)[batch.kept_positions]
        return _apply_head(head, hidden)

    def logits_of_alike(
        self, model: Any, rows: Sequence[TokenRow], *, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run head and backbone on whole rows, then take the last position."""
        backbone, head = _parts(model)
        input_ids = _stacked([row.input_ids for row in rows], device)
        hidden = backbone(input_ids=input_ids, use_cache=False).last_hidden_state
        return _apply_head(head, hidden)[:, -1], torch.tensor([row.label for row in rows], device=device)

    def model_loss(self, model: Any, row: TokenRow, *, device: torch.device | str) -> float | None:
        """Let the model's class choose the token and the loss."""
        label = torch.tensor([row.label], device=device)
        return _loss_of(model(input_ids=_row_of(row.input_ids, device), labels=label, use_cache=False))


class SequenceToSequence(TrainingTask):
    """Read a source with an encoder and predict every token of its target with a decoder."""

    name: TaskName = "seq2seq_lm"
    can_pack = False

    def __init__(self, *, pad_id: int, decoder_start_id: int) -> None:
        """Take the id to pad with and the one that every target is predicted from first."""
        super().__init__(pad_id=pad_id)
        self.decoder_start_id = decoder_start_id

    def cut(
        self, table: TokenTable, rows: Sequence[int] | Any, *, budget_tokens: int, batching: Batching
    ) -> list[list[int]]:
        """Group rows by what encoder and decoder compute together, each padded to its longest."""
        targets = table.num_supervised[rows]
        return cut_pairs(rows, table.lengths[rows] - targets, targets, budget_tokens=budget_tokens)

    def lay_out(self, table: TokenTable, rows: Sequence[int], *, batching: Batching) -> MicroBatch:
        """Lay sources and targets out; an encoder looks both ways, so padded sources need a mask."""
        assert batching == "padded", batching
        examples = [table[row] for row in rows]
        parts = [_source_and_target(example) for example in examples]
        sources = _padded([source for source, _ in parts], self.pad_id)
        targets = _padded([target for _, target in parts], IGNORE_INDEX)
        decoder_input = np.full_like(targets, self.pad_id)
        decoder_input[:, 0] = self.decoder_start_id
        decoder_input[:, 1:] = np.where(targets[:, :-1] == IGNORE_INDEX, self.pad_id, targets[:, :-1])
        lengths = np.array([len(source) for source, _ in parts])
        mask = np.arange(sources.shape[1])[None] < lengths[:, None]
        return MicroBatch(
            input_ids=torch.from_numpy(sources),
            position_ids=None,
            kept_positions=torch.arange(targets.shape[1]),
            targets=torch.from_numpy(targets),
            num_supervised=int((targets != IGNORE_INDEX).sum()),
            num_tokens=sum(len(example.input_ids) for example in examples),
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
        labels = _stacked(targets, device)
        logits = model(input_ids=_stacked(sources, device), labels=labels, use_cache=False).logits
        return logits.flatten(0, 1), labels.flatten()

    def shape_of(self, row: TokenRow) -> tuple[int, ...]:
        """Return the lengths of source and target."""
        return tuple(map(len, _source_and_target(row)))

    def model_loss(self, model: Any, row: TokenRow, *, device: torch.device | str) -> float | None:
        """Pass the target as labels."""
        source, target = _source_and_target(row)
        return _loss_of(model(input_ids=_row_of(source, device), labels=_row_of(target, device), use_cache=False))


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


def _parts(model: Any) -> tuple[Any, Any]:
    """Return the backbone and the head of a classifier; adapters sit inside both."""
    inner = _inner(model)
    return getattr(inner, inner.base_model_prefix), inner.score


def _apply_head(head: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Run the head in float32 where autocast does not choose a type: it is small, and trained in full."""
    if not torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(next(head.parameters()).dtype)
    return head(hidden)  # type: ignore[no-any-return]


def _loss_of(output: Any) -> float | None:
    loss = getattr(output, "loss", None)
    return None if loss is None else float(loss.detach())


def _row_of(ids: Any, device: torch.device | str) -> torch.Tensor:
    return _stacked([ids], device)


def _stacked(rows: Sequence[Any], device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(np.stack(rows).astype(np.int64)).to(device)


def _source_and_target(row: TokenRow) -> tuple[Any, Any]:
    [(start, end)] = row.spans
    assert end == len(row.input_ids), "the target ends the row"
    return row.input_ids[:start], row.input_ids[start:]


def _padded(rows: list[Any], fill: int) -> Any:
    grid = np.full((len(rows), max(map(len, rows))), fill, dtype=np.int64)
    for index, row in enumerate(rows):
        grid[index, : len(row)] = row
    return grid


def _input_grid(examples: list[TokenRow], *, batching: Batching, pad_id: int) -> tuple[Any, Any, Any]:
    """Return input ids, positions (``None`` for padded rows) and lengths."""
    lengths = np.array([len(example.input_ids) for example in examples])
    if batching == "packed":
        input_ids = np.concatenate([example.input_ids for example in examples]).astype(np.int64)[None]
        return input_ids, np.concatenate([np.arange(length) for length in lengths])[None], lengths
    return _padded([example.input_ids for example in examples], pad_id), None, lengths
