"""Compare two language models by their loss and by the answers that they give."""

from __future__ import annotations

import gc
import json
import logging
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from lm_tuning.batching.held_out_loss import choose_rows
from lm_tuning.evaluation.answer_analysis import analyse_answers, answered_rows
from lm_tuning.evaluation.base import (
    MEASUREMENT_NAME,
    NOTHING_MEASURED,
    Comparison,
    EvaluationJob,
    HeldOutRows,
    Measurement,
    base_evaluation_key,
    decode_answers,
    measure_model,
    scored_rows,
    stage_base_evaluation,
)
from lm_tuning.evaluation.language_scores import LanguageScores, LossRows, score_language_models, score_nothing
from lm_tuning.evaluation.parts import figures_by_part
from lm_tuning.evaluation.quantized import check_quantized, compare_quantized, measure_quantized
from lm_tuning.evaluation.records import (
    LanguageAnswer,
    LanguageEvaluation,
    LanguageSample,
)
from lm_tuning.evaluation.scores.answered import Answered
from lm_tuning.evaluation.scores.score import Scorer
from lm_tuning.generation.describe import describe_generation
from lm_tuning.generation.generate import collect_prompts
from lm_tuning.models.loading import load_tokenizer, read_config
from lm_tuning.models.record import location_of
from lm_tuning.models.structure import check_answer_room
from lm_tuning.models.tuned import attach_adapter, load_base, load_tuned
from lm_tuning.parameters.generation import GenerationParameters
from lm_tuning.storage.folders import StagedFolder
from lm_tuning.text.decoding import decode
from lm_tuning.text.store.origins import read_origins

logger = logging.getLogger(__name__)

ANSWER_COLUMNS = tuple(LanguageAnswer.__annotations__)


def compare_language_models(job: EvaluationJob) -> Comparison:
    """Measure the base model, unless that was done before, and the tuned one.

    Args:
        job: models, rows and settings.
    """
    settings, evaluate, base = job.settings, job.settings.evaluate, job.tuning["base"]
    scorer = Scorer(evaluate.scores)
    # All that the figures depend on and nothing else: how many rows share a batch only changes speed.
    key = base_evaluation_key(
        task=job.tuning["task"],
        base=[base["digest"], base["tokenizer_digest"], job.tuning["quantization"]],
        rows=[job.tokens_key, job.split, settings.seed, evaluate.max_loss_rows, evaluate.num_generate_rows],
        answers=_deciding(evaluate.generation, settings.seed),
        # What decides the last digits. Only a graphics card has TF32, so elsewhere the switch makes no other key.
        precision=[
            settings.device,
            settings.weights_dtype,
            settings.compute_dtype,
            settings.tf32 and settings.device == "cuda",
            settings.attention,
            # Earlier versions padded rows on a graphics card, too.
            *(["packed"] if settings.device == "cuda" else []),
        ],
    )
    if job.split is None:
        stored = job.base_cache.find(key) or _stage(job, key, None)
        nothing = score_nothing(scorer, NOTHING_MEASURED)
        return Comparison(_describe(job, 0, nothing, samples=[]), [], ANSWER_COLUMNS, stored)
    check_quantized(job)
    where = location_of(base)
    tokenizer = load_tokenizer(**where)
    rows = choose_held_out(job, tokenizer)
    asked = Answered(
        row_ids=[prompt.row_id for prompt in rows.prompts],
        prompts=[decode(tokenizer, prompt.input_ids, skip_special_tokens=True) for prompt in rows.prompts],
        references=rows.references,
        answers=[],
    )
    origins = read_origins(job.tokens_folder)
    scorer.check_references(asked, **({} if origins is None else {"find_row": origins.describe}))
    # By the config alone, before minutes go into the loss of the base model.
    if rows.prompts:
        check_answer_room(read_config(**where), max_new_tokens=evaluate.generation.max_new_tokens)
    logger.info(
        "Evaluating on %d of %d %s rows, answering %d.",
        len(rows.loss_rows),
        len(job.table),
        job.split,
        len(rows.prompts),
    )
    before, after, stored = _measure_both(job, tokenizer, rows, key=key)
    loss_rows = _rows_of_loss(job, tokenizer, rows)
    scores = score_language_models(scorer, before, after, asked=asked, rows=loss_rows)
    samples, answers = _list_answers(asked, before, after, scores)
    shown = [samples[index] for index in choose_rows(len(samples), evaluate.num_samples, settings.seed)]
    result = _describe(job, before.loss.num_rows, scores, samples=shown)
    result["signatures"] = scores.signatures
    result["warnings"] += _warn_of_scores(scores, before, stored)
    if parts := figures_by_part(scores.scored, origins):
        result["parts"], result["group_column"] = parts, origins.group_column if origins else None
    if scores.failed:
        result["failed_scores"] = scores.failed
    result["generation"] = describe_generation(evaluate.generation, seed=settings.seed)
    if evaluate.quantization != "none":
        quantized = measure_quantized(job, tokenizer, rows, has_own_ends=_has_own_ends(job))
        _free_memory(settings.device)
        result["quantized"] = compare_quantized(
            evaluate.quantization,
            figures=(scores.tuned, score_language_models(scorer, after, quantized, asked=asked, rows=loss_rows).tuned),
            usage=(after.usage, quantized.usage),
        )
    if not rows.prompts:
        result["no_answers"] = _explain_no_answers(evaluate.num_generate_rows)
    analysis = analyse_answers(
        answered_rows(answers),
        scores.scored,
        table=job.table,
        tokenizer=tokenizer,
        num_samples=evaluate.num_samples,
        origins=origins,
    )
    result = cast("LanguageEvaluation", {**result, **analysis})
    return Comparison(result, answers, ANSWER_COLUMNS, stored, scores.scored)


def _list_answers(
    asked: Answered, before: Measurement, after: Measurement, scores: LanguageScores
) -> tuple[list[LanguageSample], list[LanguageAnswer]]:
    """Return what both models answered, as it is shown and as it is stored."""
    samples = [
        LanguageSample(row_id=int(row_id), prompt=prompt, reference=reference, base=base_answer, tuned=tuned_answer)
        for row_id, prompt, reference, base_answer, tuned_answer in zip(
            asked.row_ids, asked.prompts, asked.references, before.answers, after.answers, strict=True
        )
    ]
    base_rouge, tuned_rouge = scores.of_rows("rouge_l", num_rows=len(samples))
    answers = [
        LanguageAnswer(
            **sample,
            base_rouge_l=base_rouge[index],
            tuned_rouge_l=tuned_rouge[index],
            base_finish_reason=before.finish_reasons[index] if before.finish_reasons else None,
            tuned_finish_reason=after.finish_reasons[index],
            base_log_prob=before.log_probs[index] if before.log_probs else None,
            tuned_log_prob=after.log_probs[index],
        )
        for index, sample in enumerate(samples)
    ]
    return samples, answers


def _rows_of_loss(job: EvaluationJob, tokenizer: Any, rows: HeldOutRows) -> LossRows:
    """Return ids and bytes of the rows with a loss."""
    indices = scored_rows(job.table, rows.loss_rows)
    texts = (
        decode(tokenizer, row.input_ids[start:end], skip_special_tokens=True)
        for row in (job.table[index] for index in indices)
        for start, end in row.spans
    )
    spans = np.array([len(job.table[index].spans) for index in indices], dtype=np.int64)
    sizes = np.fromiter((len(text.encode("utf-8", "surrogatepass")) for text in texts), dtype=np.int64)
    return LossRows(job.table.row_ids[indices], np.add.reduceat(sizes, np.cumsum(spans) - spans))


def _warn_of_scores(scores: LanguageScores, before: Measurement, stored: StagedFolder | Path) -> list[str]:
    """Return which scores are missing, and why."""
    warnings = [
        f"No score {name}: {reason} All other figures are whole; correct the function and evaluate again with "
        "kedro run --pipelines=evaluate."
        for name, reason in scores.failed.items()
    ]
    if before.by_row is None:
        where = stored if isinstance(stored, Path) else stored.path
        warnings.append(
            f"The base model's stored measurement, {where}, is of an earlier version and has no loss of each row, so "
            "token accuracy, intervals of the loss and the loss by group are missing. Remove that folder, and the base "
            "is measured again."
        )
    return warnings


def _deciding(generation: GenerationParameters, seed: int) -> list[object]:
    """Return what decides answers, for a key."""
    deciding: list[object] = [generation.max_new_tokens, generation.num_beams]
    # Left out where it is as it always was, so that what earlier versions measured is found again.
    further = {
        name: value
        for name, value in generation.model_dump(exclude_defaults=True).items()
        if name not in ("max_new_tokens", "num_beams", "seed")
    }
    if generation.do_sample:
        further["seed"] = seed if generation.seed is None else generation.seed
    return [*deciding, *([further] if further else [])]


def _explain_no_answers(num_generate_rows: int) -> str:
    if num_generate_rows == 0:
        return "evaluate.num_generate_rows: 0 leaves answers out"
    return "the rows have no prompt to answer"


def choose_held_out(job: EvaluationJob, tokenizer: Any) -> HeldOutRows:
    """Choose the rows to measure on, spread over the split.

    Args:
        job: the evaluated split and the settings.
        tokenizer: decodes the references.
    """
    seed, evaluate, num_rows = job.settings.seed, job.settings.evaluate, len(job.table)
    # Apart from the rows for the loss, and fewer: an answer takes a forward pass for each of its tokens.
    wanted = choose_rows(num_rows, evaluate.num_generate_rows, seed)
    prompts = collect_prompts(job.table, wanted)
    if len(prompts) < len(wanted):
        logger.info(
            "Rows without a prompt to answer, left out of ROUGE: %d of %d.", len(wanted) - len(prompts), len(wanted)
        )
    return HeldOutRows(
        loss_rows=choose_rows(num_rows, evaluate.max_loss_rows, seed),
        prompts=prompts,
        references=decode_answers(tokenizer, [prompt.reference_ids for prompt in prompts]),
    )


def _measure_both(
    job: EvaluationJob, tokenizer: Any, rows: HeldOutRows, *, key: str
) -> tuple[Measurement, Measurement, StagedFolder | Path]:
    """Measure the base model, unless that was done before, and the tuned one; never hold two models."""
    settings, tuning = job.settings, job.tuning

    def load() -> Any:
        return load_base(
            tuning,
            pad_token_id=int(tokenizer.pad_token_id),
            compute_dtype=settings.compute_dtype,
            **settings.loading,
        )

    base_model: Any = None
    stored: StagedFolder | Path | None = job.base_cache.find(key)
    if isinstance(stored, Path):
        logger.info("Evaluation of the base model: reused %s", stored)
        record = json.loads((stored / MEASUREMENT_NAME).read_text(encoding="utf-8"))
        before = Measurement.from_json(record, job.table, rows.loss_rows)
    else:
        base_model = load()
        before = measure_model(job, base_model, tokenizer, rows, name="base model")
        stored = _stage(job, key, before)
    if tuning["method"] == "full":
        # The last reference to it: two models at once may be more than the memory holds.
        base_model = None
        _free_memory(settings.device)
        tuned_model = load_tuned(job.tuned_folder, **settings.loading)
    else:
        # The adapter goes into the base that is loaded already, which is no base any more from here on.
        tuned_model = attach_adapter(load() if base_model is None else base_model, job.tuned_folder)
    after = measure_model(job, tuned_model, tokenizer, rows, name="tuned model", has_own_ends=_has_own_ends(job))
    del base_model, tuned_model
    _free_memory(settings.device)
    return before, after, stored


def _has_own_ends(job: EvaluationJob) -> bool:
    # Models that an earlier version has tuned were stored with the settings of their base.
    return job.tuning.get("stop_token_ids") is not None


def _stage(job: EvaluationJob, key: str, measurement: Measurement | None) -> StagedFolder:
    preview = {"answer of the base model": measurement.answers if measurement else []}
    values = None if measurement is None else measurement.to_json()
    return stage_base_evaluation(job.base_cache, key, values, preview=preview)


def _free_memory(device: str) -> None:
    """Hand back the memory of models that are no longer referenced, before the next one is loaded."""
    # A circle of references, such as a hook that holds its module, keeps weights until the collector comes by.
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _describe(
    job: EvaluationJob,
    num_rows: int,
    scores: LanguageScores,
    *,
    samples: list[LanguageSample],
) -> LanguageEvaluation:
    """Gather figures and say how much better the tuned model is."""
    base, tuned = scores.base, scores.tuned
    task = job.tuning["task"]
    assert task != "sequence_classification", "a classifier is compared with a class"
    return {
        "split": job.split,
        "task": task,
        "num_rows": num_rows,
        "num_split_rows": len(job.table) if job.split else 0,
        "base": base,
        "tuned": tuned,
        "improvement": scores.improvement,
        "samples": samples,
        "tuned_method": job.tuning["method"],
        "tokens_key": job.tokens_key,
        "warnings": [
            f"The {name} model's held-out loss is not a finite number: its weights may be damaged."
            for name, figures in (("base", base), ("tuned", tuned))
            if job.split and figures["nats_per_token"] is None
        ],
        "skipped": job.skipped,
    }
