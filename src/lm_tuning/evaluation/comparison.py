"""Compare the tuned model with its base on the rows that were held out."""

from __future__ import annotations

import gc
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_tuning.errors import UserError
from lm_tuning.evaluation.generation import collect_prompts
from lm_tuning.evaluation.held_out_loss import choose_rows
from lm_tuning.evaluation.measurement import HeldOutRows, Measurement, decode_answers, measure_model
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.storage.digests import digest_values
from lm_tuning.storage.folders import FolderStore, StagedFolder, read_manifest
from lm_tuning.text.token_table import TokenTable, open_split

logger = logging.getLogger(__name__)

BASE_EVALUATION_VERSION = 1
"""Raise it when a model is measured in another way, so that older base evaluations are not reused."""

MEASUREMENT_NAME = "measurement.json"
SAMPLE_COLUMNS = ("row_id", "prompt", "reference", "base", "tuned")
ANSWER_COLUMNS = (*SAMPLE_COLUMNS, "base_rouge_l", "tuned_rouge_l")


@dataclass(frozen=True)
class Comparison:
    """What :func:`evaluate_models` returns.

    Attributes:
        result: figures of both models, a few samples and warnings; what ``json.dumps`` takes.
        answers: one row for each answered prompt, with ``ANSWER_COLUMNS``.
        base_evaluation: the measurement of the base model, stored already or staged for it.
    """

    result: dict[str, Any]
    answers: list[dict[str, Any]]
    base_evaluation: StagedFolder | Path


def evaluate_models(
    tuned_folder: Path,
    tokens_folder: Path,
    base_cache: FolderStore,
    *,
    seed: int,
    device: str,
    weights_dtype: str,
    compute_dtype: str,
    tf32: bool = True,
    attention: str = "auto",
    memory_bytes: int | None = None,
    max_loss_rows: int | None = None,
    num_generate_rows: int = 64,
    max_new_tokens: int = 32,
    micro_batch_tokens: int | None = None,
    generate_batch_rows: int = 16,
    num_samples: int = 5,
    on_progress: OnProgress = ignore_progress,
) -> Comparison:
    """Measure base and tuned model on the test split, or on the validation split when there is no test row.

    The base model's measurement is reused while the model, the rows and the settings that decide it stay. For a LoRA
    model the base is loaded once and gets the adapter afterwards; otherwise one model is loaded after the other.

    Args:
        tuned_folder: adapter or full weights with their ``tuning.json``.
        tokens_folder: a published folder of tokenized splits.
        base_cache: where measurements of base models are kept.
        seed: decides which rows are taken.
        device: ``cpu``, ``cuda`` or ``mps``.
        weights_dtype: type that both models are loaded in.
        compute_dtype: type of the matrix products.
        tf32: whether float32 matrices are multiplied in TF32, which the measured loss depends on.
        attention: attention implementation, or ``auto``.
        memory_bytes: memory of the device; ``None`` when unknown.
        max_loss_rows: rows whose loss is measured; ``None`` means all.
        num_generate_rows: rows answered; 0 leaves generation out.
        max_new_tokens: longest answer.
        micro_batch_tokens: most token slots of a forward pass; ``None`` chooses by memory.
        generate_batch_rows: prompts answered at once.
        num_samples: answers of both models that the result shows.
        on_progress: told the rows done.

    Returns:
        The comparison; without held-out rows one that says so.

    Raises:
        UserError: the tuned model, its base or the tokens cannot be read, or the model was trained on other tokens.
    """
    from lm_tuning.models.loading import load_tokenizer
    from lm_tuning.models.tuned import read_tuning

    tuning = read_tuning(tuned_folder)
    base: dict[str, Any] = tuning["base"]
    tokens_key = read_manifest(tokens_folder)["key"]
    trained_on = tuning.get("tokens_key")
    if trained_on != tokens_key:
        raise UserError(
            f"{tuned_folder} was trained on the token set {trained_on}, but the present one is {tokens_key}: rows that "
            "are held out now may have been trained on. Train on the present rows with "
            "`kedro run --pipelines=train,evaluate`, or set the parameters of data, split, tokenize and model back to "
            "those of that training and make its token set again with `kedro run --pipelines=split,tokenize,evaluate`."
        )
    split, table = choose_split(tokens_folder)
    key = digest_values(
        {
            "version": BASE_EVALUATION_VERSION,
            "base": [base["digest"], base["tokenizer_digest"]],
            "rows": [tokens_key, split, seed, max_loss_rows, num_generate_rows, max_new_tokens],
            "precision": [device, weights_dtype, compute_dtype, tf32 and device == "cuda", attention],
        }
    )
    if split is None:
        return Comparison(
            result=_describe_skipped(tuning, tokens_key),
            answers=[],
            base_evaluation=base_cache.find(key) or _stage(base_cache, key, None),
        )

    tokenizer = load_tokenizer(
        base["name_or_path"],
        revision=base.get("revision"),
        trust_remote_code=bool(base.get("trust_remote_code")),
    )
    rows = choose_held_out(
        table, tokenizer, seed=seed, max_loss_rows=max_loss_rows, num_generate_rows=num_generate_rows
    )
    logger.info(
        "Evaluating on %d of %d %s rows, answering %d.", len(rows.loss_rows), len(table), split, len(rows.prompts)
    )
    loading = {"dtype": weights_dtype, "attention": attention, "device": device}
    measuring: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "micro_batch_tokens": micro_batch_tokens,
        "generate_batch_rows": generate_batch_rows,
        "device": device,
        "memory_bytes": memory_bytes,
        "weights_dtype": weights_dtype,
        "compute_dtype": compute_dtype,
        "on_progress": on_progress,
    }

    before, after, stored = _measure_both(
        tuning, tuned_folder, tokenizer, rows, base_cache=base_cache, key=key, loading=loading, measuring=measuring
    )
    base_figures, base_rouge = before.figures(rows.references)
    tuned_figures, tuned_rouge = after.figures(rows.references)
    answers = [
        {
            "row_id": prompt.row_id,
            "prompt": str(tokenizer.decode(prompt.input_ids, skip_special_tokens=True)).strip(),
            "reference": rows.references[index],
            "base": before.answers[index],
            "tuned": after.answers[index],
            "base_rouge_l": base_rouge[index],
            "tuned_rouge_l": tuned_rouge[index],
        }
        for index, prompt in enumerate(rows.prompts)
    ]
    result = {
        "split": split,
        "task": "causal_lm",
        "num_rows": before.loss.num_rows,
        "base": base_figures,
        "tuned": tuned_figures,
        "improvement": _improvement(base_figures, tuned_figures),
        "samples": [
            {name: answers[index][name] for name in SAMPLE_COLUMNS}
            for index in choose_rows(len(answers), num_samples, seed)
        ],
        "tuned_method": tuning["method"],
        "tokens_key": tokens_key,
        "warnings": _warnings(base_figures, tuned_figures),
        "skipped": None,
    }
    for warning in result["warnings"]:
        logger.warning("%s", warning)
    return Comparison(result=result, answers=answers, base_evaluation=stored)


def choose_split(tokens_folder: Path) -> tuple[str | None, TokenTable]:
    """Choose the split to evaluate: ``test`` if it has supervised rows, else ``validation``.

    Returns:
        The split's name, ``None`` when neither has any, and its table.
    """
    table = open_split(tokens_folder, "test")
    if table.num_supervised.any():
        return "test", table
    table = open_split(tokens_folder, "validation")
    return ("validation" if table.num_supervised.any() else None), table


def choose_held_out(
    table: TokenTable, tokenizer: Any, *, seed: int, max_loss_rows: int | None, num_generate_rows: int
) -> HeldOutRows:
    """Choose the rows to measure on, spread over the split.

    Args:
        table: the evaluated split.
        tokenizer: decodes the references.
        seed: decides which rows are taken.
        max_loss_rows: rows whose loss is measured; ``None`` means all.
        num_generate_rows: rows to answer.
    """
    wanted = choose_rows(len(table), num_generate_rows, seed)
    prompts = collect_prompts(table, wanted)
    if len(prompts) < len(wanted):
        logger.info(
            "%d of %d rows have no prompt to answer and are left out of ROUGE.", len(wanted) - len(prompts), len(wanted)
        )
    return HeldOutRows(
        table=table,
        loss_rows=choose_rows(len(table), max_loss_rows, seed),
        prompts=prompts,
        references=decode_answers(tokenizer, [prompt.reference_ids for prompt in prompts]),
    )


def _measure_both(
    tuning: dict[str, Any],
    tuned_folder: Path,
    tokenizer: Any,
    rows: HeldOutRows,
    *,
    base_cache: FolderStore,
    key: str,
    loading: dict[str, Any],
    measuring: dict[str, Any],
) -> tuple[Measurement, Measurement, StagedFolder | Path]:
    """Measure the base model, unless that was done before, and the tuned one; never hold two models."""
    from lm_tuning.models.tuned import attach_adapter, load_tuned

    base_model: Any = None
    stored: StagedFolder | Path | None = base_cache.find(key)
    if isinstance(stored, Path):
        logger.info("Evaluation of the base model: reused %s", stored)
        before = Measurement.from_json(json.loads((stored / MEASUREMENT_NAME).read_text(encoding="utf-8")))
    else:
        base_model = _load_base(tuning["base"], tokenizer, loading)
        before = measure_model(base_model, tokenizer, rows, name="base model", **measuring)
        stored = _stage(base_cache, key, before)
    if tuning["method"] == "lora":
        if base_model is None:
            base_model = _load_base(tuning["base"], tokenizer, loading)
        tuned_model = attach_adapter(base_model, tuned_folder)
    else:
        base_model = None
        _free_memory(loading["device"])
        tuned_model = load_tuned(tuned_folder, **loading)
    after = measure_model(tuned_model, tokenizer, rows, name="tuned model", **measuring)
    del base_model, tuned_model
    _free_memory(loading["device"])
    return before, after, stored


def _load_base(base: dict[str, Any], tokenizer: Any, loading: dict[str, Any]) -> Any:
    from lm_tuning.models.loading import load_model

    return load_model(
        base["name_or_path"],
        revision=base.get("revision"),
        trust_remote_code=bool(base.get("trust_remote_code")),
        pad_token_id=int(tokenizer.pad_token_id),
        **loading,
    )


def _stage(cache: FolderStore, key: str, measurement: Measurement | None) -> StagedFolder:
    """Write the base model's measurement where publishing finds it."""
    staged = cache.stage(key)
    values = None if measurement is None else measurement.to_json()
    (staged.path / MEASUREMENT_NAME).write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    answers = [] if measurement is None else measurement.answers
    preview = {"columns": ["answer of the base model"], "data": [[answer] for answer in answers]}
    (staged.path / "preview.json").write_text(json.dumps(preview, ensure_ascii=False), encoding="utf-8")
    return staged


def _free_memory(device: str) -> None:
    """Hand back the memory of models that are no longer referenced, before the next one is loaded."""
    import torch

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _improvement(base: dict[str, Any], tuned: dict[str, Any]) -> dict[str, float | None]:
    """Say how much better the tuned model is; positive is better."""

    def fall(name: str) -> float | None:
        if base[name] is None or tuned[name] is None or not base[name]:
            return None
        return float((base[name] - tuned[name]) / base[name])

    has_rouge = base["rouge_l"] is not None and tuned["rouge_l"] is not None
    return {
        "nats_per_token_fraction": fall("nats_per_token"),
        "perplexity_fraction": fall("perplexity"),
        "rouge_l_difference": tuned["rouge_l"] - base["rouge_l"] if has_rouge else None,
    }


def _warnings(base: dict[str, Any], tuned: dict[str, Any]) -> list[str]:
    warnings = []
    for name, figures in (("base", base), ("tuned", tuned)):
        if figures["nats_per_token"] is None:
            warnings.append(f"The {name} model's held-out loss is not a finite number: its weights may be damaged.")
    return warnings


def _describe_skipped(tuning: dict[str, Any], tokens_key: str) -> dict[str, Any]:
    """Build a result of the usual shape that has nothing in it."""
    nothing = {
        "nats_per_token": None,
        "perplexity": None,
        "rouge_l": None,
        "rouge_1": None,
        "rouge_2": None,
        "num_tokens": 0,
        "num_generated": 0,
        "num_empty": 0,
    }
    return {
        "split": None,
        "task": "causal_lm",
        "num_rows": 0,
        "base": nothing,
        "tuned": dict(nothing),
        "improvement": _improvement(nothing, nothing),
        "samples": [],
        "tuned_method": tuning["method"],
        "tokens_key": tokens_key,
        "warnings": [],
        "skipped": "Neither test nor validation has rows to evaluate on: set split.test or split.validation.",
    }
