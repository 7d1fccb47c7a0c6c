"""Measure one language model on held-out rows, and keep the measurement of a base so that it is made once."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_tuning.batching.held_out_loss import (
    HeldOutLoss,
    Int64Array,
    choose_micro_batch_tokens,
    measure_held_out,
)
from lm_tuning.evaluation.rouge import score_rouge
from lm_tuning.generation.generate import (
    Prompt,
    find_first_id,
    find_stop_ids,
    generate_answers,
    own_first_id,
)
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.runtime.precision import autocast
from lm_tuning.storage.digests import digest_values
from lm_tuning.storage.folders import FolderStore, StagedFolder
from lm_tuning.text.decoding import decode, special_ids

if TYPE_CHECKING:
    from lm_tuning.batching.tasks.base import TrainingTask
    from lm_tuning.text.store.table import TokenTable


@dataclass(frozen=True)
class HeldOutRows:
    """The rows that every compared model is measured on.

    Attributes:
        table: the evaluated split.
        loss_rows: indices of the rows whose loss is measured.
        prompts: rows to answer; empty when no row has a prompt.
        references: the true answer to each prompt, as text.
    """

    table: TokenTable
    loss_rows: Int64Array
    prompts: list[Prompt]
    references: list[str]


@dataclass(frozen=True)
class Measurement:
    """What one model does on the held-out rows.

    Attributes:
        loss: summed nats and counted tokens.
        answers: the generated text for each prompt, in their order.
    """

    loss: HeldOutLoss
    answers: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return plain values, from which :meth:`from_json` makes the same measurement."""
        return {"loss": asdict(self.loss), "answers": self.answers}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Measurement:
        """Read what :meth:`to_json` gave."""
        return cls(loss=HeldOutLoss(**values["loss"]), answers=list(values["answers"]))

    def figures(self, references: Sequence[str]) -> tuple[dict[str, Any], list[float]]:
        """Turn the measurement into the figures of the report.

        Args:
            references: the true answers, one for each answer.

        Returns:
            The figures, ``None`` where there is nothing to measure or no finite number, and ROUGE-L of each answer.
        """
        rouge = score_rouge(references, self.answers)
        figures = {
            "nats_per_token": finite(self.loss.mean_nats),
            "perplexity": finite(self.loss.perplexity),
            "rouge_l": rouge.rouge_l,
            "rouge_1": rouge.rouge_1,
            "rouge_2": rouge.rouge_2,
            "num_tokens": self.loss.num_supervised,
            "num_generated": len(self.answers),
            "num_empty": rouge.num_empty,
        }
        return figures, rouge.row_rouge_l


def measure_model(
    task: TrainingTask,
    model: Any,
    tokenizer: Any,
    rows: HeldOutRows,
    *,
    max_new_tokens: int,
    num_beams: int,
    micro_batch_tokens: int | None,
    generate_batch_rows: int,
    device: str,
    memory_bytes: int | None,
    weights_dtype: str,
    compute_dtype: str,
    name: str,
    has_own_ends: bool = False,
    on_progress: OnProgress = ignore_progress,
) -> Measurement:
    """Measure held-out loss and answers of a model.

    Args:
        task: how rows become tensors, and which logits carry loss.
        model: a language model on ``device``, wrapped or not.
        tokenizer: the one that made the rows, with its pad token set.
        rows: what to measure on.
        max_new_tokens: longest answer.
        num_beams: number of beams; 1 answers greedily.
        micro_batch_tokens: most positions of a forward pass; ``None`` chooses by memory.
        generate_batch_rows: prompts answered at once.
        device: ``cpu``, ``cuda`` or ``mps``.
        memory_bytes: memory of the device; ``None`` when unknown.
        weights_dtype: type of the weights.
        compute_dtype: type of the matrix products.
        name: how progress calls the model, such as ``base model``.
        has_own_ends: whether the model's own settings say where answers begin and end, as those of a tuned model do;
            otherwise the answers in the rows show it.
        on_progress: told the rows done.
    """
    if micro_batch_tokens is None:
        micro_batch_tokens = choose_micro_batch_tokens(
            rows.table,
            num_classes=model.config.get_text_config().vocab_size,
            on_gpu=device != "cpu",
            memory_bytes=memory_bytes,
        )
    with autocast(device, compute_dtype):
        held_out = measure_held_out(
            task,
            model,
            rows.table,
            rows.loss_rows,
            micro_batch_tokens=micro_batch_tokens,
            device=device,
            on_progress=on_progress,
            label=f"Held-out loss of the {name}",
        )
        answers: list[list[int]] = []
        if rows.prompts:
            stop_ids = find_stop_ids(model, tokenizer, [] if has_own_ends else rows.prompts)
            first_id = (
                own_first_id(model) if has_own_ends else find_first_id(tokenizer, rows.prompts, stop_ids=stop_ids)
            )
            answers = generate_answers(
                model,
                [prompt.input_ids for prompt in rows.prompts],
                max_new_tokens=max_new_tokens,
                batch_rows=generate_batch_rows,
                stop_ids=stop_ids,
                pad_id=task.pad_id,
                device=device,
                num_beams=num_beams,
                first_id=first_id,
                special_ids=special_ids(tokenizer),
                on_progress=on_progress,
                label=f"Answers of the {name}",
            )
    return Measurement(loss=held_out.loss, answers=decode_answers(tokenizer, answers))


def decode_answers(tokenizer: Any, answers: Sequence[Sequence[int]]) -> list[str]:
    """Turn token ids into texts without special tokens, character for character."""
    return [decode(tokenizer, ids, skip_special_tokens=True) for ids in answers]


def finite(value: float) -> float | None:
    """Return the value, ``None`` where JSON has no number for it."""
    return value if math.isfinite(value) else None


BASE_EVALUATION_VERSION = 3
"""Raise it when a model is measured in another way, so that older base evaluations are not reused."""

MEASUREMENT_NAME = "measurement.json"


@dataclass(frozen=True)
class Compared:
    """Two models on the same rows.

    Attributes:
        result: figures and samples, by the keys of the result.
        answers: one row each, with ``columns``.
        columns: names of the answers' values, in their order.
        base_evaluation: the measurement of the base, stored already or staged for it.
        warnings: what the user should know about the figures.
    """

    result: dict[str, Any]
    answers: list[dict[str, Any]]
    columns: tuple[str, ...]
    base_evaluation: StagedFolder | Path
    warnings: list[str] = field(default_factory=list)


def base_evaluation_key(**deciding: Any) -> str:
    """Return the key of a base evaluation.

    Args:
        **deciding: everything that its figures depend on.
    """
    return digest_values({"version": BASE_EVALUATION_VERSION, **deciding})


def read_base_evaluation(folder: Path) -> Any:
    """Read what :func:`stage_base_evaluation` wrote.

    Args:
        folder: a stored base evaluation.
    """
    return json.loads((folder / MEASUREMENT_NAME).read_text(encoding="utf-8"))


def stage_base_evaluation(
    cache: FolderStore, key: str, values: Any, *, columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> StagedFolder:
    """Write a base evaluation where publishing finds it.

    Args:
        cache: where base evaluations are kept.
        key: see :func:`base_evaluation_key`.
        values: the measurement; what ``json.dumps`` takes.
        columns: titles of the preview.
        rows: the preview's rows.
    """
    staged = cache.stage(key)
    (staged.path / MEASUREMENT_NAME).write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    preview = {"columns": list(columns), "data": [list(row) for row in rows]}
    (staged.path / "preview.json").write_text(json.dumps(preview, ensure_ascii=False), encoding="utf-8")
    return staged
