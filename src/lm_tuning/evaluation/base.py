"""Measure one language model on held-out rows, and keep the measurement of a base so that it is made once."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lm_tuning.batching import packed_attention
from lm_tuning.batching.held_out_loss import HeldOut, HeldOutLoss, measure_held_out
from lm_tuning.batching.tasks.base import Packing
from lm_tuning.batching.tasks.registry import task_of
from lm_tuning.evaluation.records import (
    ClassRowsRecord,
    ClassSample,
    EvaluationRecord,
    LanguageAnswer,
    LanguageFigures,
    LossRecord,
    MeasurementRecord,
)
from lm_tuning.evaluation.rouge import score_rouge
from lm_tuning.evaluation.settings import EvaluationSettings
from lm_tuning.evaluation.usage import Stopwatch, Usage
from lm_tuning.generation.answers import Answer, FinishReason, answer_text
from lm_tuning.generation.generate import Prompt, find_first_id, find_stop_ids, generate_answers, own_first_id
from lm_tuning.models.quantization import weight_bytes
from lm_tuning.models.record import TuningRecord
from lm_tuning.models.tuned import merge_adapter
from lm_tuning.progress import OnProgress
from lm_tuning.runtime.precision import autocast
from lm_tuning.storage.digests import digest_values
from lm_tuning.storage.folders import FolderStore, StagedFolder
from lm_tuning.text.decoding import decode, special_ids
from lm_tuning.text.store.table import Int64Array, TokenTable

if TYPE_CHECKING:
    from pandas import DataFrame

SKIPPED = "Neither test nor validation has rows to evaluate on: set split.test or split.validation."


@dataclass(frozen=True)
class EvaluationJob:
    """What is settled before a model is loaded.

    Attributes:
        settings: what decides the evaluation.
        tuning: how the tuned model was made.
        tuned_folder: where it lies.
        tokens_folder: the tokenized splits.
        tokens_key: their key.
        split: the evaluated split; ``None`` when there is no row to evaluate on.
        table: its rows.
        base_cache: where measurements of base models are kept.
        on_progress: told the rows done.
    """

    settings: EvaluationSettings
    tuning: TuningRecord
    tuned_folder: Path
    tokens_folder: Path
    tokens_key: str
    split: str | None
    table: TokenTable
    base_cache: FolderStore
    on_progress: OnProgress

    @property
    def skipped(self) -> str | None:
        """Why nothing is measured; ``None`` when something is."""
        return None if self.split else SKIPPED


@dataclass(frozen=True)
class Comparison:
    """Two models on the same rows.

    Attributes:
        result: figures of both models, a few samples and warnings; what ``json.dumps`` takes.
        answers: one row for each answered prompt; of a classifier the rows that it got wrong, and some right ones.
        columns: names of the answers' values, in their order.
        base_evaluation: the measurement of the base model, stored already or staged for it.
    """

    result: EvaluationRecord
    answers: Sequence[LanguageAnswer | ClassSample]
    columns: tuple[str, ...]
    base_evaluation: StagedFolder | Path

    def table(self) -> DataFrame:
        """Return the answers as a frame rather than a list, so that their file has its header even without rows."""
        from pandas import DataFrame

        return DataFrame(self.answers, columns=list(self.columns))


@dataclass(frozen=True)
class HeldOutRows:
    """The rows that every compared model is measured on.

    Attributes:
        loss_rows: indices of the rows whose loss is measured.
        prompts: rows to answer; empty when no row has a prompt.
        references: the true answer to each prompt, as text.
    """

    loss_rows: Int64Array  # (rows,)
    prompts: list[Prompt]
    references: list[str]


@dataclass(frozen=True)
class Measurement:
    """What one model does on the held-out rows.

    Attributes:
        loss: summed nats and counted tokens.
        answers: the generated text for each prompt, in their order.
        finish_reasons: why each answer ended; empty where an earlier version measured and did not note it.
        log_probs: logarithm of each answer's probability, ``None`` where nobody knows; empty as the reasons are.
        usage: what it took, which is not stored; ``None`` for a measurement of an earlier run.
    """

    loss: HeldOutLoss
    answers: list[str]
    finish_reasons: list[FinishReason] = field(default_factory=list)
    log_probs: list[float | None] = field(default_factory=list)
    usage: Usage | None = None

    def to_json(self) -> MeasurementRecord:
        """Return plain values, from which :meth:`from_json` makes the same measurement."""
        loss = self.loss
        record = LossRecord(nats=loss.nats, num_supervised=loss.num_supervised, num_rows=loss.num_rows, unit=loss.unit)
        return MeasurementRecord(
            loss=record, answers=self.answers, finish_reasons=self.finish_reasons, log_probs=self.log_probs
        )

    @classmethod
    def from_json(cls, record: MeasurementRecord) -> Measurement:
        """Read what :meth:`to_json` gave."""
        return cls(
            loss=HeldOutLoss(**record["loss"]),
            answers=record["answers"],
            finish_reasons=record.get("finish_reasons", []),
            log_probs=record.get("log_probs", []),
        )

    def figures(self, references: Sequence[str]) -> tuple[LanguageFigures, list[float]]:
        """Turn the measurement into the figures of the report.

        Args:
            references: the true answers, one for each answer.

        Returns:
            The figures, ``None`` where there is nothing to measure or no finite number, and ROUGE-L of each answer.
        """
        rouge = score_rouge(references, self.answers)
        figures = LanguageFigures(
            nats_per_token=finite(self.loss.mean_nats),
            perplexity=finite(self.loss.perplexity),
            rouge_l=rouge.rouge_l,
            rouge_1=rouge.rouge_1,
            rouge_2=rouge.rouge_2,
            num_tokens=self.loss.num_supervised,
            num_generated=len(self.answers),
            num_empty=rouge.num_empty,
        )
        return figures, rouge.row_rouge_l


# Of a split without rows. Its figures come out as missing ones and not as 0, which would look like a perfect loss.
NOTHING_MEASURED = Measurement(HeldOutLoss(nats=0.0, num_supervised=0, num_rows=0), answers=[])


def measure_model(
    job: EvaluationJob, model: Any, tokenizer: Any, rows: HeldOutRows, *, name: str, has_own_ends: bool = False
) -> Measurement:
    """Measure held-out loss and answers of a model.

    Args:
        job: the evaluated split and how it is measured.
        model: a language model on the device, wrapped or not.
        tokenizer: the one that made the rows, with its pad token set.
        rows: what to measure on.
        name: how progress calls the model, such as ``base model``.
        has_own_ends: whether the model's own settings say where answers begin and end, as those of a tuned model do;
            otherwise the answers in the rows show it.
    """
    settings = job.settings
    wanted_rows = settings.evaluate.generate_batch_rows
    answers: list[Answer] = []
    watch = Stopwatch(settings.device)
    # Of the text part, which is the whole config for a model of text alone.
    num_classes = model.config.get_text_config().vocab_size
    with watch.timing("loss"):
        held_out = measure_loss(
            job, model, tokenizer, rows.loss_rows, num_classes=num_classes, label=f"Held-out loss of the {name}"
        )
    if rows.prompts:
        # The settings of a base model may name another token than the one that ends these rows; those of a tuned model
        # were written from its rows when it was stored.
        stop_ids = find_stop_ids(model, tokenizer, [] if has_own_ends else rows.prompts)
        first_id = own_first_id(model) if has_own_ends else find_first_id(tokenizer, rows.prompts, stop_ids=stop_ids)
        # After the loss, which is of the model as it was trained; nothing else is measured of it afterwards.
        merge_adapter(model)
        with autocast(settings.device, settings.compute_dtype), watch.timing("answers"):
            answers = generate_answers(
                model,
                [prompt.input_ids for prompt in rows.prompts],
                generation=settings.evaluate.generation,
                seed=settings.seed,
                row_ids=[prompt.row_id for prompt in rows.prompts],
                tokenizer=tokenizer,
                batch_rows=None if wanted_rows == "auto" else wanted_rows,
                stop_ids=stop_ids,
                pad_id=int(tokenizer.pad_token_id),
                device=settings.device,
                first_id=first_id,
                special_ids=special_ids(tokenizer),
                on_progress=job.on_progress,
                label=f"Answers of the {name}",
            )
    return Measurement(
        loss=held_out.loss,
        answers=[answer_text(tokenizer, answer) for answer in answers],
        finish_reasons=[answer.finish_reason for answer in answers],
        log_probs=[answer.log_prob for answer in answers],
        usage=Usage(
            weights_bytes=weight_bytes(model),
            loss_tokens_per_second=watch.speed("loss", int(job.table.lengths[rows.loss_rows].sum())),
            answer_tokens_per_second=watch.speed("answers", sum(len(answer.ids) for answer in answers)),
        ),
    )


def measure_loss(
    job: EvaluationJob, model: Any, tokenizer: Any, rows: Int64Array, *, num_classes: int, label: str
) -> HeldOut:
    """Measure the held-out loss of a model, and of a classifier what it predicts.

    Args:
        job: the evaluated split and how it is measured.
        model: of the task, on the device, wrapped or not.
        tokenizer: the one that made the rows, with its pad token set.
        rows: row indices, ``(rows,)``.
        num_classes: logits of one position: the vocabulary of a language model, classes of a classifier.
        label: what progress calls it.
    """
    settings = job.settings
    task = task_of(model, job.tuning["task"], pad_id=int(tokenizer.pad_token_id))
    with autocast(settings.device, settings.compute_dtype):
        packs = task.can_pack and packed_attention.runs_in_kernel(
            model,
            device=settings.device,
            dtype=getattr(torch, settings.compute_dtype),
            longest_row_tokens=int(job.table.lengths.max(initial=0)),
        )
    if packs:
        task.packing = Packing(by_bounds=True)
    attention = packed_attention.attending_to_packed(model) if packs else nullcontext()
    with autocast(settings.device, settings.compute_dtype), attention:
        return measure_held_out(
            task,
            model,
            job.table,
            rows,
            micro_batch_tokens=settings.micro_batch_tokens(job.table, num_classes=num_classes),
            device=settings.device,
            batching="packed" if packs else "padded",
            on_progress=job.on_progress,
            label=label,
        )


def decode_answers(tokenizer: Any, answers: Sequence[Sequence[int]]) -> list[str]:
    """Turn token ids into texts without special tokens, character for character."""
    return [decode(tokenizer, ids, skip_special_tokens=True) for ids in answers]


def finite(value: float) -> float | None:
    """Return the value, ``None`` where JSON has no number for it."""
    # json.dumps would write NaN and Infinity, which no other reader of JSON takes.
    return value if math.isfinite(value) else None


def difference(before: float | None, after: float | None) -> float | None:
    """Return by how much a figure rose, ``None`` where one of both is missing."""
    return None if before is None or after is None else after - before


# Raise it when a model is measured in another way, so that older base evaluations are not reused.
BASE_EVALUATION_VERSION = 3

MEASUREMENT_NAME = "measurement.json"


def base_evaluation_key(**deciding: Any) -> str:
    """Return the key of a base evaluation.

    Args:
        **deciding: everything that its figures depend on.
    """
    return digest_values({"version": BASE_EVALUATION_VERSION, **deciding})


def stage_base_evaluation(
    cache: FolderStore,
    key: str,
    values: MeasurementRecord | ClassRowsRecord | None,
    *,
    preview: Mapping[str, Sequence[str | int]],
) -> StagedFolder:
    """Write a base evaluation where publishing finds it.

    Args:
        cache: where base evaluations are kept.
        key: see :func:`base_evaluation_key`.
        values: the measurement; ``None`` where there was nothing to measure.
        preview: columns of a table for the graph, by their titles.
    """
    # Not published here: the catalog does that when the node has returned, so a run that fails leaves nothing.
    staged = cache.stage(key)
    # As kedro viz shows a table.
    table = {"columns": list(preview), "data": list(zip(*preview.values(), strict=True))}
    for name, content in ((MEASUREMENT_NAME, values), ("preview.json", table)):
        (staged.path / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return staged
