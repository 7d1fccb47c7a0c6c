"""Measure the tuned model once more with its weights in fewer bits, and put both measurements side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, cast

from lm_tuning.errors import UserError
from lm_tuning.evaluation.base import EvaluationJob, HeldOutRows, Measurement, difference, measure_model
from lm_tuning.evaluation.records import (
    EvaluationRecord,
    LanguageEvaluation,
    LanguageFigures,
    ModelUsage,
    QuantizedEvaluation,
)
from lm_tuning.evaluation.usage import Usage
from lm_tuning.models.quantization import QUANTIZED, check_quantization, choose_quantization
from lm_tuning.models.record import QuantizationRecord
from lm_tuning.models.tuned import load_tuned
from lm_tuning.reporting.document import Paragraph, Section, Table
from lm_tuning.reporting.text import NOTHING, write_difference, write_fall, write_number
from lm_tuning.wording import write_speed

_KEY = "evaluate.quantization"


def check_quantized(job: EvaluationJob) -> None:
    """Refuse a second measurement that cannot be made or would be the first one again, before models are loaded.

    Args:
        job: what is evaluated.

    Raises:
        UserError: bitsandbytes cannot be had, or the model was trained over weights of these bits.
    """
    name = job.settings.evaluate.quantization
    if name == "none":
        return
    if _is_same(name, job.tuning["quantization"]):
        raise UserError(
            f"{_KEY} = {name}, but {job.tuned_folder} was trained over weights that are held so, and is measured so "
            f"anyway: set {_KEY} = none."
        )
    check_quantization(job.settings.device, setting=f"{_KEY} = {name}", instead=f"{_KEY} = none")


def _is_same(name: str, held: QuantizationRecord | None) -> bool:
    if held is None:
        return False
    wanted = QUANTIZED[name]
    return held["bits"] == wanted.bits and (wanted.bits == 8 or held.get("quant_type", "nf4") == wanted.quant_type)


def measure_quantized(job: EvaluationJob, tokenizer: Any, rows: HeldOutRows, *, has_own_ends: bool) -> Measurement:
    """Measure the tuned model with its weights in fewer bits.

    An adapter stays as it was trained, beside a quantized base.

    Args:
        job: what is evaluated; it names the bits.
        tokenizer: the one that made the rows.
        rows: what to measure on.
        has_own_ends: see :func:`lm_tuning.evaluation.base.measure_model`.
    """
    settings = job.settings
    name = settings.evaluate.quantization
    held = choose_quantization(name, compute_dtype=settings.compute_dtype)
    model = load_tuned(job.tuned_folder, quantization=held, **settings.loading)
    return measure_model(job, model, tokenizer, rows, name=f"tuned model in {name}", has_own_ends=has_own_ends)


def compare_quantized(
    name: Literal["int8", "nf4"],
    *,
    figures: tuple[LanguageFigures, LanguageFigures],
    usage: tuple[Usage | None, Usage | None],
) -> QuantizedEvaluation:
    """Compare a model in fewer bits with itself as it was trained.

    Args:
        name: ``int8`` or ``nf4``.
        figures: as trained, and in fewer bits.
        usage: likewise.
    """
    trained, quantized = figures
    before, after = usage
    assert before is not None and after is not None, "both were measured just now"
    loss_before, loss_after = trained["nats_per_token"], quantized["nats_per_token"]
    rise = (loss_after - loss_before) / loss_before if loss_before and loss_after is not None else None
    speeds = (before.answer_tokens_per_second, after.answer_tokens_per_second)
    return QuantizedEvaluation(
        quantization=name,
        figures=quantized,
        usage=_as_record(after),
        unquantized_usage=_as_record(before),
        nats_per_token_rise_fraction=rise,
        rouge_l_difference=difference(trained["rouge_l"], quantized["rouge_l"]),
        weights_bytes_fraction=after.weights_bytes / before.weights_bytes,
        answer_speed_factor=speeds[1] / speeds[0] if speeds[0] and speeds[1] else None,
    )


def _as_record(usage: Usage) -> ModelUsage:
    return ModelUsage(
        weights_bytes=usage.weights_bytes,
        loss_tokens_per_second=usage.loss_tokens_per_second,
        answer_tokens_per_second=usage.answer_tokens_per_second,
    )


def quantized_section(result: EvaluationRecord) -> Section | None:
    """Lay out the table of both measurements; ``None`` where there is one alone.

    Args:
        result: of an evaluation.
    """
    if result["task"] == "sequence_classification" or "quantized" not in result:
        return None
    found, trained = result["quantized"], result["tuned"]
    figures, before, after = found["figures"], found["unquantized_usage"], found["usage"]
    rise = found["nats_per_token_rise_fraction"]
    lines = [
        (
            "Held-out loss (nats per token)",
            write_number(trained["nats_per_token"], 4),
            write_number(figures["nats_per_token"], 4),
            write_fall(None if rise is None else -rise),
        ),
        *_scores(result, figures),
        (
            "Weights (MiB)",
            write_number(before["weights_bytes"] / 2**20, 1),
            write_number(after["weights_bytes"] / 2**20, 1),
            f"x {found['weights_bytes_fraction']:.2f}",
        ),
        _speeds("Loss (tokens per second)", before["loss_tokens_per_second"], after["loss_tokens_per_second"]),
        _speeds("Answers (tokens per second)", before["answer_tokens_per_second"], after["answer_tokens_per_second"]),
    ]
    name = found["quantization"]
    said = f"The tuned model on the same rows with its weights in {name}, by bitsandbytes; an adapter is not quantized."
    return Section("quantized", f"In {name}", [Paragraph(said), Table("", ("", "As trained", name, "Change"), lines)])


def _scores(result: LanguageEvaluation, figures: LanguageFigures) -> Iterator[tuple[str, str, str, str]]:
    """Yield a line for each further score; one of the project's own may be missing in fewer bits."""
    for score in result.get("scores", []):
        if score["name"] == "nats_per_token":
            continue
        before, after = score["tuned"]["value"], cast("dict[str, float | None]", figures).get(score["name"])
        title = f"{score['title']} ({score['unit']})" if score["unit"] else score["title"]
        yield title, write_number(before, 4), write_number(after, 4), write_difference(difference(before, after))


def _speeds(name: str, before: float | None, after: float | None) -> tuple[str, str, str, str]:
    if before is None or after is None:
        return name, NOTHING, NOTHING, NOTHING
    return name, write_speed(before), write_speed(after), f"x {after / before:.2f}"
