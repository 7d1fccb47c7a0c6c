"""Compare a tuned classifier with the most frequent class of its training rows."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from lm_tuning.batching.held_out_loss import HeldOut, Predictions, choose_rows, count_classes
from lm_tuning.data.split.class_shares import choose_shown, describe_moved, list_moved
from lm_tuning.evaluation.base import (
    Comparison,
    EvaluationJob,
    base_evaluation_key,
    difference,
    finite,
    measure_loss,
    stage_base_evaluation,
)
from lm_tuning.evaluation.class_scores import (
    ConstantAnswer,
    MajorityClass,
    list_confusions,
    measure_constant,
    measure_majority,
    tabulate_classes,
)
from lm_tuning.evaluation.records import (
    ClassEvaluation,
    ClassFigures,
    ClassImprovement,
    ClassSample,
    ClassShare,
    ConstantFigures,
    MajorityFigures,
)
from lm_tuning.models.loading import load_tokenizer
from lm_tuning.models.record import location_of
from lm_tuning.models.tuned import load_tuned
from lm_tuning.text.decoding import decode
from lm_tuning.text.records import NO_LABEL
from lm_tuning.text.store.table import Int64Array, open_split

logger = logging.getLogger(__name__)

SAMPLE_COLUMNS = tuple(ClassSample.__annotations__)

# Most misclassified rows that are kept, those that the model was surest of.
MAX_WRONG_ROWS = 1000
NUM_RIGHT_ROWS = 20
MAX_SHARES = 20


def compare_with_majority(job: EvaluationJob) -> Comparison:
    """Measure the tuned classifier, and what always saying the most frequent class reaches on the same rows.

    Args:
        job: models, rows and settings. Where the base evaluations are kept, the counts of training rows are.
    """
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
    table, settings, evaluate = job.table, job.settings, job.settings.evaluate
    rows = choose_rows(len(table), evaluate.max_loss_rows, settings.seed)
    logger.info("Evaluating on %d of %d %s rows.", len(rows), len(table), job.split)
    model = load_tuned(job.tuned_folder, **settings.loading)
    names = class_names(model)
    held_out = measure_loss(job, model, tokenizer, rows, num_classes=len(names), label="Classes by the tuned model")
    # What it predicted is all that is needed from here on.
    del model
    predictions = held_out.predictions
    assert predictions is not None, "the task is a classification"
    # Of the rows that were scored: those without a class are left out by the measurement.
    references = table.labels[predictions.rows].astype(np.int64)  # (scored rows,)
    class_rows = np.bincount(labels, minlength=len(names))  # (classes,)
    # One guess knows the training rows, as a model does. The other knows the evaluated ones, so that no constant answer
    # is right more often.
    majority = measure_majority(class_rows, references)
    best = measure_constant(np.bincount(references, minlength=len(names)), references)
    counts = count_classes(references, predictions.classes, num_classes=len(names))

    def sample(index: int) -> ClassSample:
        row = table[int(predictions.rows[index])]
        return {
            "row_id": row.row_id,
            "text": decode(tokenizer, row.input_ids.tolist(), skip_special_tokens=True),
            "reference": names[references[index]],
            "base": names[majority.class_id],
            "tuned": names[predictions.classes[index]],
            "probability": float(predictions.probabilities[index]),
        }

    wrong, right = sort_out(predictions, references, seed=settings.seed)
    base = MajorityFigures(**_constant_figures(majority, names), nats_per_row=finite(majority.nats_per_row))
    tuned = ClassFigures(
        nats_per_row=finite(held_out.loss.mean_nats), accuracy=finite(counts.accuracy), macro_f1=finite(counts.macro_f1)
    )
    result: ClassEvaluation = {
        "split": job.split,
        "task": "sequence_classification",
        "num_rows": len(predictions.rows),
        "num_split_rows": len(table),
        "base": base,
        "tuned": tuned,
        "improvement": _improvement(base, tuned),
        "per_class": tabulate_classes(counts, names),
        "confusions": list_confusions(references, predictions.classes, names),
        "class_shares": _list_shares(class_rows, counts.rows, names),
        "samples": [sample(index) for index in choose_samples(wrong, right, evaluate.num_samples)],
        "num_train_rows": int(class_rows.sum()),
        "best_constant": _constant_figures(best, names),
        "tuned_method": job.tuning["method"],
        "tokens_key": job.tokens_key,
        "warnings": [
            *_warnings(held_out, majority, best, class_rows, references),
            *_share_warnings(class_rows, counts.rows, names, split=job.split),
        ],
        "skipped": job.skipped,
    }
    answers = [sample(index) for index in (*wrong[:MAX_WRONG_ROWS], *right)]
    return Comparison(result, answers, SAMPLE_COLUMNS, stored)


def class_names(model: Any) -> list[str]:
    """Return the names of a classifier's classes, in the order of their ids.

    Args:
        model: with ``id2label`` in its config.
    """
    return [str(model.config.id2label[index]) for index in range(int(model.config.num_labels))]


def sort_out(predictions: Predictions, references: Int64Array, *, seed: int) -> tuple[list[int], list[int]]:
    """Return the indices of all wrong rows, the surest first, and of a few right ones, spread over the split.

    Args:
        predictions: of a classifier.
        references: class of each row, ``(rows,)``.
        seed: decides which right rows are taken.
    """
    is_wrong = predictions.classes != references  # (rows,)
    wrong, right = np.flatnonzero(is_wrong), np.flatnonzero(~is_wrong)
    # A confident mistake is either a gap in what the model has learned or a row with a wrong label: both are worth
    # reading first. Stable, so that equally sure ones stay in the order of the rows.
    wrong = wrong[np.argsort(-predictions.probabilities[wrong], kind="stable")]
    return wrong.tolist(), right[choose_rows(len(right), NUM_RIGHT_ROWS, seed)].tolist()


def choose_samples(wrong: list[int], right: list[int], num_samples: int) -> list[int]:
    """Choose wrong rows, and of several samples at least one right row, where there are some.

    Args:
        wrong: indices of wrong rows, the most telling first.
        right: indices of right rows.
        num_samples: how many of both.
    """
    # As many right rows as wrong ones leave room for, and one in any case, to compare with.
    num_right = min(len(right), max(num_samples - len(wrong), 1 if num_samples > 1 else 0))
    return [*wrong[: num_samples - num_right], *right[:num_right]]


def _describe_nothing(job: EvaluationJob) -> ClassEvaluation:
    """Return the result where there is no row to evaluate on."""
    constant = ConstantFigures({"accuracy": None, "macro_f1": None, "class": None, "num_tied_classes": None})
    base = MajorityFigures(**constant, nats_per_row=None)
    tuned = ClassFigures(accuracy=None, macro_f1=None, nats_per_row=None)
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
        # A base whose loss is infinite has none in the result, and one of 0 cannot be undercut.
        "nats_per_row_fraction": -nats / base["nats_per_row"] if nats is not None and base["nats_per_row"] else None,
    }


def _constant_figures(constant: ConstantAnswer, names: list[str]) -> ConstantFigures:
    return {
        "accuracy": finite(constant.accuracy),
        "macro_f1": finite(constant.macro_f1),
        "class": names[constant.class_id],
        "num_tied_classes": constant.num_tied,
    }


def _list_shares(class_rows: Int64Array, rows: Int64Array, names: list[str]) -> list[ClassShare]:
    """List the largest classes of the training rows and of the evaluated ones, with their rows in both."""
    return [
        {"class": names[index], "num_train_rows": int(class_rows[index]), "num_rows": int(rows[index])}
        for index in choose_shown([class_rows, rows], most=MAX_SHARES)
    ]


def _share_warnings(class_rows: Int64Array, rows: Int64Array, names: list[str], *, split: str) -> list[str]:
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
