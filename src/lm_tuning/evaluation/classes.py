"""Compare a tuned classifier with the most frequent class of its training rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lm_tuning.batching.held_out_loss import HeldOut, choose_rows, count_classes
from lm_tuning.data.split.class_shares import choose_shown, describe_moved, list_moved
from lm_tuning.errors import UserError
from lm_tuning.evaluation.base import (
    Comparison,
    EvaluationJob,
    base_evaluation_key,
    difference,
    finite,
    stage_base_evaluation,
)
from lm_tuning.evaluation.calibration import abstain, calibrate, cover
from lm_tuning.evaluation.class_errors import (
    MAX_WRONG_ROWS,
    NUM_MISLABELLED,
    SAMPLE_COLUMNS,
    ClassAnswers,
    choose_samples,
    sort_out,
)
from lm_tuning.evaluation.class_plots import draw_calibration, draw_confusions
from lm_tuning.evaluation.class_quantized import compare_quantized_classes, measure_classifier
from lm_tuning.evaluation.class_rows import ClassRows, choose_top_k, guess_by_frequency, score_classes
from lm_tuning.evaluation.class_scores import (
    ConstantAnswer,
    MajorityClass,
    list_confusions,
    measure_constant,
    measure_majority,
    tabulate_classes,
)
from lm_tuning.evaluation.parts import figures_by_part
from lm_tuning.evaluation.quantized import check_quantized
from lm_tuning.evaluation.records import (
    ClassEvaluation,
    ClassFigures,
    ClassImprovement,
    ClassShare,
    ConstantFigures,
    MajorityFigures,
    MoreFigures,
)
from lm_tuning.evaluation.statistics.scored_rows import ScoredRows
from lm_tuning.models.loading import load_tokenizer
from lm_tuning.models.record import location_of
from lm_tuning.models.tuned import read_label_map
from lm_tuning.text.records import NO_LABEL
from lm_tuning.text.store.origins import read_origins
from lm_tuning.text.store.table import Int64Array, open_split

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

MAX_SHARES = 20

# Scores that both models have, apart from the loss, which may be missing for one of them.
_SCORES = ("accuracy", "macro_f1", "micro_f1", "weighted_f1", "top_k_accuracy")


def compare_with_majority(job: EvaluationJob) -> Comparison:
    """Measure the tuned classifier, and what always saying the most frequent class reaches on the same rows.

    Args:
        job: models, rows and settings. Where the base evaluations are kept, the counts of training rows are.

    Raises:
        UserError: ``evaluate.top_k`` is more than there are classes, or ``evaluate.quantization`` cannot be had.
    """
    _check_top_k(job)
    check_quantized(job)
    labels = open_split(job.tokens_folder, "train").labels  # (rows,)
    labels = labels[labels != NO_LABEL]
    # Up to the last class that occurs: how many there are is known once the model is loaded, and this is done without.
    class_rows = np.bincount(labels)  # (classes that may occur,)
    key = base_evaluation_key(task="sequence_classification", tokens=job.tokens_key)
    stored = job.base_cache.find(key) or stage_base_evaluation(
        job.base_cache,
        key,
        {"class_rows": class_rows.tolist()},
        preview={"class id": range(len(class_rows)), "training rows": class_rows.tolist()},
    )
    if job.split is None:
        return Comparison(_describe_nothing(job), [], SAMPLE_COLUMNS, stored)
    tokenizer = load_tokenizer(**location_of(job.tuning["base"]))
    rows = choose_rows(len(job.table), job.settings.evaluate.max_loss_rows, job.settings.seed)
    logger.info("Evaluating on %d of %d %s rows.", len(rows), len(job.table), job.split)
    measured = measure_classifier(job, tokenizer, rows)
    predictions, names = measured.predictions, measured.names
    class_rows = np.bincount(labels, minlength=len(names))  # (classes,)
    answers = ClassAnswers(job.table, predictions, names, int(class_rows.argmax()), tokenizer, job.settings.seed)
    wrong, right = sort_out(predictions, answers.references, seed=job.settings.seed)
    guessed = guess_by_frequency(class_rows, answers.references)
    scored = _score_both(job, answers, guessed)
    samples = choose_samples(wrong, right, job.settings.evaluate.num_samples)
    result = _describe(job, answers, measured.held_out, class_rows, scored, samples)
    if parts := figures_by_part(scored, origins := read_origins(job.tokens_folder)):
        result["parts"], result["group_column"] = parts, origins.group_column if origins else None
    if (quantization := job.settings.evaluate.quantization) != "none":
        quantized = measure_classifier(job, tokenizer, rows, quantization=quantization)
        result["quantized"] = compare_quantized_classes(job, measured, quantized)
    return Comparison(
        result,
        answers.samples([*wrong[:MAX_WRONG_ROWS], *right]),
        SAMPLE_COLUMNS,
        stored,
        scored,
        figures=_draw(answers),
    )


def _check_top_k(job: EvaluationJob) -> None:
    """Refuse a k that every row would be within, before a model is loaded."""
    label_map, top_k = read_label_map(job.tuned_folder), job.settings.evaluate.top_k
    if label_map is not None and isinstance(top_k, int) and top_k > len(label_map):
        raise UserError(
            f"evaluate.top_k = {top_k}: the model has {len(label_map)} classes, so its {top_k} likeliest ones are more "
            "than there are. It takes auto, or a number from 1 to "
            f"{len(label_map)}."
        )


def _score_both(
    job: EvaluationJob, answers: ClassAnswers, guessed: ClassRows
) -> dict[str, tuple[ScoredRows, ScoredRows]]:
    """Score the guess and the tuned model, row by row."""
    made = answers.predictions
    top_k = choose_top_k(job.settings.evaluate.top_k, len(answers.names))
    base, tuned = (
        score_classes(one, answers.references, answers.row_ids, num_classes=len(answers.names), top_k=top_k)
        for one in (guessed, ClassRows(made.classes, made.ranks, made.nats))
    )
    return {name: (base[name], tuned[name]) for name in base}


def _draw(answers: ClassAnswers) -> dict[str, Figure]:
    """Draw which classes are taken for which, and how sure the model is."""
    made = answers.predictions
    is_right = made.classes == answers.references
    calibration = calibrate(made.probabilities, is_right)
    figures = {"confusion_matrix": draw_confusions(answers.references, made.classes, answers.names)}
    if calibration.bins:
        figures["calibration"] = draw_calibration(calibration, cover(made.probabilities, is_right))
    return figures


def _describe(  # noqa: PLR0917
    job: EvaluationJob,
    answers: ClassAnswers,
    held_out: HeldOut,
    class_rows: Int64Array,
    scored: Mapping[str, tuple[ScoredRows, ScoredRows]],
    samples: list[int],
) -> ClassEvaluation:
    """Build what is stored."""
    made, names, references = answers.predictions, answers.names, answers.references
    # One guess knows the training rows, as a model does. The other knows the evaluated ones, so that no constant answer
    # is right more often.
    majority = measure_majority(class_rows, references)
    best = measure_constant(np.bincount(references, minlength=len(names)), references)
    counts = count_classes(references, made.classes, num_classes=len(names))
    is_right = made.classes == references
    calibration = calibrate(made.probabilities, is_right)
    values = {
        name: [finite(scored[name][index].value) if name in scored else None for index in (0, 1)] for name in _SCORES
    }
    base = MajorityFigures(
        **_constant_figures(majority, names),
        **_more_figures(values, 0),
        nats_per_row=finite(majority.nats_per_row),
    )
    tuned = ClassFigures(
        nats_per_row=finite(held_out.loss.mean_nats),
        accuracy=finite(counts.accuracy),
        macro_f1=finite(counts.macro_f1),
        **_more_figures(values, 1),
        calibration_error=finite(calibration.error),
        mean_probability=finite(calibration.mean_probability),
    )
    result: ClassEvaluation = {
        "split": job.split,
        "task": "sequence_classification",
        "num_rows": len(made.rows),
        "num_split_rows": len(job.table),
        "base": base,
        "tuned": tuned,
        "improvement": _improvement(base, tuned),
        "top_k": str(choose_top_k(job.settings.evaluate.top_k, len(names)) or ""),
        "per_class": tabulate_classes(counts, names),
        "confusions": list_confusions(references, made.classes, names),
        "class_shares": _list_shares(class_rows, counts.rows, names),
        "samples": answers.samples(samples),
        "calibration_bins": calibration.bins,
        "coverage": cover(made.probabilities, is_right),
        "hardest": answers.hard_rows(answers.hardest()),
        "num_likely_mislabelled": len(answers.mislabelled),
        "likely_mislabelled": answers.hard_rows(answers.mislabelled[:NUM_MISLABELLED].tolist()),
        "num_train_rows": int(class_rows.sum()),
        "best_constant": _constant_figures(best, names),
        "tuned_method": job.tuning["method"],
        "tokens_key": job.tokens_key,
        "warnings": [
            *_warnings(held_out, majority, best, class_rows, references),
            *_share_warnings(class_rows, counts.rows, names, split=str(job.split)),
        ],
        "skipped": job.skipped,
    }
    if job.settings.evaluate.abstain_below is not None:
        result["abstaining"] = abstain(made.probabilities, is_right, job.settings.evaluate.abstain_below)
    return result


def _describe_nothing(job: EvaluationJob) -> ClassEvaluation:
    """Return the result where there is no row to evaluate on."""
    constant = ConstantFigures({"accuracy": None, "macro_f1": None, "class": None, "num_tied_classes": None})
    more = _more_figures({name: [None, None] for name in _SCORES}, 0)
    base = MajorityFigures(**constant, **more, nats_per_row=None)
    tuned = ClassFigures(
        accuracy=None, macro_f1=None, **more, nats_per_row=None, calibration_error=None, mean_probability=None
    )
    return {
        "split": job.split,
        "task": "sequence_classification",
        "num_rows": 0,
        "num_split_rows": 0,
        "base": base,
        "tuned": tuned,
        "improvement": _improvement(base, tuned),
        "per_class": [],
        "confusions": [],
        "class_shares": [],
        "samples": [],
        "top_k": "",
        "calibration_bins": [],
        "coverage": [],
        "hardest": [],
        "likely_mislabelled": [],
        "best_constant": constant,
        "tuned_method": job.tuning["method"],
        "tokens_key": job.tokens_key,
        "warnings": [],
        "skipped": job.skipped,
    }


def _improvement(base: MajorityFigures, tuned: ClassFigures) -> ClassImprovement:
    """Compare the figures; positive is better."""
    nats = difference(base["nats_per_row"], tuned["nats_per_row"])
    return {
        "accuracy_difference": difference(base["accuracy"], tuned["accuracy"]),
        "macro_f1_difference": difference(base["macro_f1"], tuned["macro_f1"]),
        "micro_f1_difference": difference(base["micro_f1"], tuned["micro_f1"]),
        "weighted_f1_difference": difference(base["weighted_f1"], tuned["weighted_f1"]),
        "top_k_accuracy_difference": difference(base["top_k_accuracy"], tuned["top_k_accuracy"]),
        # A base whose loss is infinite has none in the result, and one of 0 cannot be undercut.
        "nats_per_row_fraction": -nats / base["nats_per_row"] if nats is not None and base["nats_per_row"] else None,
    }


def _more_figures(values: Mapping[str, list[float | None]], model: int) -> MoreFigures:
    """Return the scores that later versions added, of the base (0) or the tuned model (1)."""
    return {
        "micro_f1": values["micro_f1"][model],
        "weighted_f1": values["weighted_f1"][model],
        "top_k_accuracy": values["top_k_accuracy"][model],
    }


def _constant_figures(constant: ConstantAnswer, names: Sequence[str]) -> ConstantFigures:
    return {
        "accuracy": finite(constant.accuracy),
        "macro_f1": finite(constant.macro_f1),
        "class": names[constant.class_id],
        "num_tied_classes": constant.num_tied,
    }


def _list_shares(class_rows: Int64Array, rows: Int64Array, names: Sequence[str]) -> list[ClassShare]:
    """List the largest classes of the training rows and of the evaluated ones, with their rows in both."""
    return [
        {"class": names[index], "num_train_rows": int(class_rows[index]), "num_rows": int(rows[index])}
        for index in choose_shown([class_rows, rows], most=MAX_SHARES)
    ]


def _share_warnings(class_rows: Int64Array, rows: Int64Array, names: Sequence[str], *, split: str) -> list[str]:
    moved = list_moved(class_rows, rows, names)
    if not moved:
        return []
    return [
        f"Classes whose share differs a lot between the training rows and the evaluated {split} rows, by more than "
        f"chance: {describe_moved(moved, split=split)}. Compare the accuracy with the best constant answer on this "
        "split, and read the figures by class."
    ]


def _warnings(
    held_out: HeldOut, majority: MajorityClass, best: ConstantAnswer, class_rows: Int64Array, references: Int64Array
) -> list[str]:
    warnings = []
    if finite(held_out.loss.mean_nats) is None:
        warnings.append("The tuned model's held-out loss is not a finite number: its weights may be damaged.")
    num_unseen = int((class_rows[references] == 0).sum())
    if num_unseen:
        are = "row is of a class" if num_unseen == 1 else "rows are of classes"
        warnings.append(
            f"{num_unseen:,} evaluated {are} without a training row. The model cannot have learned that, and the loss "
            "of the class frequencies is infinite, so it is left out."
        )
    # One of both is enough: the best constant answer is right for at least as many rows as the majority class.
    if held_out.metrics["accuracy"] <= majority.accuracy:
        warnings.append(
            "The tuned model is right no more often than always saying the most frequent class of the training rows: "
            "it has not learned the task."
        )
    elif held_out.metrics["accuracy"] <= best.accuracy:
        warnings.append(
            f"The tuned model is right for {held_out.metrics['accuracy']:.2%} of the evaluated rows, no more often "
            f"than always answering their most frequent class ({best.accuracy:.2%})."
        )
    return warnings
