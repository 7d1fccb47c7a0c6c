"""Look at the first step before it is made: what loss is expected, what is trained, what the model will see."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lm_tuning.batching import packed_attention
from lm_tuning.batching.batch import StepBatch
from lm_tuning.batching.held_out_loss import evaluating
from lm_tuning.batching.losses import PLAIN, LossShape
from lm_tuning.batching.step_loader import StepDataset
from lm_tuning.batching.tasks.base import TrainingTask
from lm_tuning.runtime.memory_errors import is_out_of_memory
from lm_tuning.text.decoding import decode, mark_supervised_text
from lm_tuning.text.records import NO_LABEL
from lm_tuning.training.health.batch_checks import check_alignment
from lm_tuning.training.health.first_gradient import ExpectedGradient, GradientMeasure
from lm_tuning.training.health.first_loss import DROPOUT_TOLERANCE, ExpectedFirstLoss, has_dropout
from lm_tuning.training.health.plain_loss import PlainLoss, begin_movement, check_logits, measure_plain_loss, measuring
from lm_tuning.training.health.records import SHOWN_NAMES, Facts, Finding
from lm_tuning.training.health.report import HealthReport, stop_if_needed
from lm_tuning.training.health.table_checks import count_embeddings
from lm_tuning.wording import count_of, name_first

if TYPE_CHECKING:
    from lm_tuning.text.records import TokenRow
    from lm_tuning.training.settings import TrainingSettings
    from lm_tuning.training.setup.model import ReadyModel

logger = logging.getLogger(__name__)

# Relative difference from which the loss that a model class returns counts as another one.
MODEL_LOSS_TOLERANCE = 0.01

# A base model is suspicious when its loss is this many times that of an untrained head.
WORSE_FACTOR = 1.1


def measure_first_step(
    health: HealthReport, ready: ReadyModel, steps: StepDataset, settings: TrainingSettings, shape: LossShape
) -> ExpectedFirstLoss | None:
    """Fill the health report and say what is expected, without touching the run's random state.

    Args:
        health: receives facts and findings.
        ready: the model on its device, as it will be trained.
        steps: the run's steps.
        settings: of the training.
        shape: label smoothing and class weights.

    Returns:
        The first step's loss and gradient by a plain forward and backward pass, to compare the first step with;
        ``None`` where the step has nothing supervised and the run goes on all the same.

    Raises:
        UserError: a check found what must not be trained on.
    """
    task, model, tokenizer = steps.task, ready.model, ready.tokenizer
    batch = steps[0]
    rows = [steps.table[int(row)] for row in steps.plan.rows_of_step(0)]
    if not batch.num_supervised:
        return None  # there is no loss to measure, which the health report says
    train, has_fresh_head = settings.train, ready.has_fresh_head
    noise = [
        *(["dropout"] if has_dropout(model) else []),
        *(["the noise of NEFTune"] if train.neftune_noise_alpha is not None else []),
    ]
    is_random = bool(noise)
    num_classes = _num_classes(model, task)
    with health.timing():
        # Random numbers are put back afterwards, so that a run with the checks trains like one without.
        with measuring(settings):
            plain, gradient = _measure(task, model, rows, settings, shape, is_random=is_random)
            row, row_nats = plain.shortest_row, plain.shortest_nats
            # What transformers' own loss makes of the same row; it is not used, so a difference is no more than a note.
            with evaluating(model):
                own = task.model_loss(model, row, device=settings.device)
            alignments, shifted = check_alignment(task, model, row, row_nats, device=settings.device)
        tolerance = train.health.tolerance_fraction
        expected = ExpectedFirstLoss(
            steps=steps,
            settings=settings,
            shape=shape,
            nats=plain.nats,
            tolerance=max(tolerance, DROPOUT_TOLERANCE) if is_random else tolerance,
            fresh_head_classes=num_classes if has_fresh_head else None,
            noise=tuple(noise),
        )
        # All classes equally likely: what a model of random weights has, and the line that no base model may pass by
        # far.
        untrained = _untrained_nats(num_classes, rows, shape)
        facts: Facts = {
            "task": task.name,
            f"untrained_head_nats_per_{task.unit}": untrained,
            f"first_step_measured_nats_per_{task.unit}": plain.nats,
            "first_loss_tolerance": expected.tolerance,
            "first_step_rows": len(rows),
            "first_step_tokens": batch.num_tokens,
            **_describe_supervision(task, batch),
            "first_step_padding_fraction": 1 - batch.num_tokens / batch.num_positions,
            "first_step_micro_batches": len(batch.micro_batches),
            "model_loss_of_shortest_row": own,
            "our_loss_of_shortest_row": row_nats,
            "logits": plain.logits,
            "pad_token": tokenizer.pad_token,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token": tokenizer.eos_token,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token": tokenizer.bos_token,
            "pad_is_eos": tokenizer.pad_token_id == tokenizer.eos_token_id,
            "attention": _attention_path(model, steps),
            "first_example": _show_row(model, tokenizer, rows[0]),
        }
        health.facts.update(facts)
        if alignments:
            health.facts["nats_per_token_by_alignment"] = alignments
        compute = settings.compute_dtype
        for finding in check_logits(plain.logits, dtype=compute, has_fresh_head=has_fresh_head):
            is_broken = finding.code == "logits-not-finite"
            health.add(_name_broken_weights(finding, model, compute_dtype=compute) if is_broken else finding)
        if shifted is not None:
            health.add(shifted)
        # What is not a number, or of other labels, says nothing more of the rest: one cause, one finding.
        is_sound = math.isfinite(plain.nats) and shifted is None
        if is_sound:
            _check_model_loss(health, own, row_nats)
        # Randomness makes the step itself a vague witness of its layout; without it, the step says as much as this.
        agrees = is_sound and (not is_random or expected.measure_layout(health, model, batch))
        if agrees and has_fresh_head:
            check_fresh_head(health, plain)
        elif agrees and plain.nats > WORSE_FACTOR * untrained:
            health.add(
                Finding(
                    code="worse-than-untrained",
                    measured=f"the base model has {plain.nats:.3f} nats per {task.unit} on the first rows",
                    expected=f"less than the {untrained:.3f} of an untrained head, for which all {num_classes} are "
                    "equally likely",
                    cause="The text is not what the model was trained on, or tokenizer and model do not belong "
                    "together.",
                    change="Look at model.name_or_path and at the first example in the health report.",
                )
            )
    _say(facts, batch, len(rows), unit=task.unit)
    health.tell()
    stop_if_needed(health)
    if not is_sound:
        return expected
    if gradient is not None:
        health.facts["last_layer_measured_gradient_norm"] = gradient.norm
    return replace(expected, gradient=gradient, movement=begin_movement(task, model, row, row_nats, settings))


def _measure(
    task: TrainingTask,
    model: Any,
    rows: list[TokenRow],
    settings: TrainingSettings,
    shape: LossShape,
    *,
    is_random: bool,
) -> tuple[PlainLoss, ExpectedGradient | None]:
    """Measure loss and gradient of the first step's rows; the loss alone where memory does not suffice for both."""
    # Only language models have a logit for every token of a vocabulary at every position.
    vocabulary = 0 if task.unit == "row" else _num_classes(model, task)
    device = settings.device
    # One forward pass serves both: measured apart, the start would take nearly twice as long.
    measure = GradientMeasure(model, device=device, compute_dtype=settings.compute_dtype, vocabulary=vocabulary)
    try:
        with measure.watching():
            plain = measure_plain_loss(task, model, rows, shape=shape, device=device, gradient=measure)
            return plain, measure.finish(plain.count, is_random=is_random)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    logger.info("The gradient before step 1 is not measured: it does not fit into the memory beside the model.")
    # The allocator keeps what the failed pass had, in blocks of its sizes; the second try needs others.
    if device == "cuda":
        torch.cuda.empty_cache()
    return measure_plain_loss(task, model, rows, shape=shape, device=device), None


def _name_broken_weights(finding: Finding, model: torch.nn.Module, *, compute_dtype: str) -> Finding:
    """Name the parameters that hold NaN or infinities, if it is they that make the logits so, and advise on that."""
    broken = {
        name: parameter.dtype
        for name, parameter in model.named_parameters()
        # Quantized weights are integers, which say nothing: what they stand for lies in their scales.
        if parameter.is_floating_point() and not bool(parameter.detach().isfinite().all())
    }
    if not broken:
        if compute_dtype != "float16":
            change = "Look at model.name_or_path: its weights are far too large."
            finding = replace(finding, change=change)
        return replace(finding, cause="The weights are numbers, and the forward pass overflows.")
    change = "Look at model.name_or_path: it needs weights that are numbers, which no precision makes of these."
    if torch.float16 in broken.values():
        change += " Weights that are numbers in their file do not fit into float16: set model.dtype=float32."
    cause = f"The weights hold NaN or infinities: {name_first([*broken], SHOWN_NAMES)}."
    return replace(finding, cause=cause, change=change)


def _check_model_loss(health: HealthReport, own: float | None, ours: float) -> None:
    if own is None or math.isclose(own, ours, rel_tol=MODEL_LOSS_TOLERANCE, abs_tol=0.01):
        return
    health.add(
        Finding(
            code="model-loss-differs",
            measured=f"the model's class gives the first step's shortest row a loss of {own:.4f}",
            expected=f"{ours:.4f}, the mean over what is supervised in it",
            cause="Its loss is another one (a sum, a scaled one, or of other positions).",
            change="Nothing has to be changed: the loss that is trained on and logged is not taken from the model.",
        )
    )


def check_fresh_head(health: HealthReport, plain: PlainLoss) -> None:
    """Compare a fresh head's loss with what its own logits make likely: chance, plus what their spread costs."""
    assert plain.class_logits is not None and plain.labels is not None, "only classifiers have one"
    # Without smoothing and class weights, for which the expectation would be another one.
    measured = float(PLAIN.sum_nats(plain.class_logits, plain.labels)) / len(plain.labels)
    expected, band = expected_fresh_head_loss(plain.class_logits, plain.labels)
    health.facts["fresh_head_expected_nats_per_row"] = expected
    # The band is of the spread alone; a hundredth beyond it is the arithmetic's.
    band += 0.01 * expected
    if abs(measured - expected) > band:
        health.add(
            Finding(
                code="fresh-head-off",
                measured=f"the new head has {measured:.4f} nats per row on the first rows",
                expected=f"{expected:.4f} ± {band:.4f}: log(classes) and half the variance of the logits",
                cause="The head is not new, or the labels do not fit its classes.",
                change="Look at the label map in the data report and at model.name_or_path.",
            )
        )


def expected_fresh_head_loss(logits: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[float, float]:
    """Describe at what loss a head of random weights starts.

    Its logits have nothing to do with the labels, so a row loses ``logsumexp(z) - z_y`` with a random y: log of the
    classes plus half the variance of z over the classes. Their scatter is the spread of z, over the root of the rows.
    Rows of one class scatter together where a backbone gives all rows nearly the same state; the band then goes by
    how the labels are spread, if they are given.

    Args:
        logits: ``(rows, classes)``.
        labels: class of each row, ``(rows,)``.

    Returns:
        The expected loss in nats per row, and four standard deviations of it.
    """
    num_rows, num_classes = logits.shape
    # (rows, classes) -> (rows,) -> the mean; of all classes, not of a sample of them, hence without Bessel's
    # correction.
    variance = float(logits.detach().float().var(dim=-1, correction=0).mean())
    # Independent rows: the variance of their mean is one over their number.
    share = 1 / num_rows
    if labels is not None:
        counts = torch.bincount(labels.flatten(), minlength=num_classes).double()
        # Sum of squared shares of the classes: 1 over the number of classes that the rows are evenly of, 1 for one
        # class.
        share = max(share, float((counts / num_rows).square().sum()))
    return math.log(num_classes) + variance / 2, 4 * math.sqrt(variance * share)


def _num_classes(model: Any, task: TrainingTask) -> int:
    if task.unit == "row":
        return int(model.config.num_labels)
    return count_embeddings(model)


def _untrained_nats(num_classes: int, rows: list[TokenRow], shape: LossShape) -> float:
    """Return the loss of these rows when all classes are equally likely; weights of few rows are not 1 in the mean."""
    # With weights the mean over few rows depends on which classes they are of.
    if shape.class_weights is None:
        return math.log(num_classes)
    labels = torch.tensor([row.label for row in rows])
    return float(shape.sum_nats(torch.zeros(len(rows), num_classes), labels)) / len(rows)


def _describe_supervision(task: TrainingTask, batch: StepBatch) -> Facts:
    if task.unit == "row":
        return {"first_step_labelled_rows": batch.num_supervised}
    return {
        "first_step_supervised_tokens": batch.num_supervised,
        "first_step_supervised_fraction": batch.num_supervised / batch.num_tokens,
    }


def _show_row(model: Any, tokenizer: Any, row: TokenRow) -> str:
    """Write a row with what it teaches between marks."""
    if row.label == NO_LABEL:
        return mark_supervised(tokenizer, row)
    name = (getattr(model.config, "id2label", None) or {}).get(row.label, row.label)
    return f"{decode(tokenizer, row.input_ids)} ⟦{name}⟧"


def mark_supervised(tokenizer: Any, row: TokenRow, *, max_characters: int = 2000) -> str:
    """Decode a row with the supervised parts between ⟦ and ⟧; a long text loses its middle."""
    text = mark_supervised_text(tokenizer, row)
    if len(text) > max_characters:
        half = max_characters // 2
        text = f"{text[:half]} … {text[-half:]}"
    return text


def _attention_path(model: Any, steps: StepDataset) -> str:
    implementation = getattr(model.config, "_attn_implementation", "unknown")
    if steps.task.name == "seq2seq_lm":
        return f"{implementation}, padded sources kept out by a mask"
    if implementation == packed_attention.NAME:
        on_gpu = next(model.parameters()).is_cuda
        how = "in one variable-length kernel" if on_gpu else "row by row"
        return f"each packed row attends to itself, {how}, without a mask"
    if steps.batching == "packed":
        return f"{implementation}, packed rows kept apart by an explicit mask (no flash kernel)"
    return f"{implementation}, right-padded without a mask (flash kernel possible)"


def _say(facts: Facts, batch: StepBatch, num_rows: int, *, unit: str) -> None:
    supervised = f"{batch.num_supervised} supervised ({batch.num_supervised / batch.num_tokens:.1%})"
    logger.info(
        "Before step 1: measured loss %.4f nats/%s (an untrained head would have %.2f); %s, %s, "
        "%s, padding %.1f %%, %s; PAD %r (%s EOS %r); attention: %s",
        facts[f"first_step_measured_nats_per_{unit}"],
        unit,
        facts[f"untrained_head_nats_per_{unit}"],
        count_of(num_rows, "row"),
        count_of(batch.num_tokens, "token"),
        supervised if unit == "token" else "one class each",
        100 * (1 - batch.num_tokens / batch.num_positions),
        count_of(len(batch.micro_batches), "micro-batch"),
        facts["pad_token"],
        "equals" if facts["pad_is_eos"] else "differs from",
        facts["eos_token"],
        facts["attention"],
    )
    logger.info("First example, supervised part between ⟦ and ⟧:\n%s", facts["first_example"])
