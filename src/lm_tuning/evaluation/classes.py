"""Compare a tuned classifier with the most frequent class of its training rows."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_tuning.batching.class_counts import Int64Array, count_classes
from lm_tuning.batching.held_out_loss import (
    HeldOut,
    Predictions,
    choose_micro_batch_tokens,
    choose_rows,
    measure_held_out,
)
from lm_tuning.data.split.class_shares import choose_shown, describe_moved, list_moved
from lm_tuning.evaluation.base import Compared, base_evaluation_key, decode_answers, finite, stage_base_evaluation
from lm_tuning.evaluation.class_scores import (
    ConstantAnswer,
    MajorityClass,
    list_confusions,
    measure_constant,
    measure_majority,
    tabulate_classes,
)
from lm_tuning.runtime.precision import autocast
from lm_tuning.storage.folders import FolderStore

if TYPE_CHECKING:
    from lm_tuning.text.store.table import TokenTable

logger = logging.getLogger(__name__)

SAMPLE_COLUMNS = ("row_id", "text", "reference", "base", "tuned", "probability")
BASE_COLUMNS = ("class id", "training rows")

MAX_WRONG_ROWS = 1000
"""Most misclassified rows that are kept, those that the model was surest of."""

NUM_RIGHT_ROWS = 20
MAX_SHARES = 20


def compare_with_majority(
    tuning: dict[str, Any],
    tuned_folder: Path,
    train_table: TokenTable,
    table: TokenTable | None,
    base_cache: FolderStore,
    *,
    seed: int,
    max_loss_rows: int | None,
    num_samples: int,
    loading: dict[str, Any],
    measuring: dict[str, Any],
) -> Compared:
    """Measure the tuned classifier, and what always saying the most frequent class reaches on the same rows.

    Args:
        tuning: how the tuned model was made.
        tuned_folder: where it lies.
        train_table: the rows that it was trained on, for how frequent each class is.
        table: the evaluated split; ``None`` without one.
        base_cache: where base evaluations are kept; here the counts of training rows.
        seed: decides which rows are taken.
        max_loss_rows: rows to classify; ``None`` means all.
        num_samples: rows that the result shows.
        loading: ``dtype``, ``attention`` and ``device`` of the model.
        measuring: arguments of :func:`measure_classifier`.
    """
    from lm_tuning.models.loading import load_tokenizer
    from lm_tuning.models.tuned import load_tuned

    class_rows = np.bincount(train_table.labels[train_table.labels >= 0])
    key = base_evaluation_key(task="sequence_classification", tokens=tuning["tokens_key"])
    stored = base_cache.find(key) or stage_base_evaluation(
        base_cache,
        key,
        {"class_rows": class_rows.tolist()},
        columns=BASE_COLUMNS,
        rows=list(enumerate(class_rows.tolist())),
    )
    if table is None:
        nothing = {"accuracy": None, "macro_f1": None, "nats_per_row": None}
        constant = {"accuracy": None, "macro_f1": None, "class": None, "num_tied_classes": None}
        figures = _figures(0, 0, {**nothing, **constant}, nothing)
        return Compared({**figures, "best_constant": constant}, [], SAMPLE_COLUMNS, stored)
    base = tuning["base"]
    tokenizer = load_tokenizer(
        base["name_or_path"],
        revision=base.get("revision"),
        trust_remote_code=bool(base.get("trust_remote_code")),
    )
    rows = choose_rows(len(table), max_loss_rows, seed)
    logger.info("Evaluating on %d of %d %s rows.", len(rows), len(table), table.path.stem)
    model = load_tuned(tuned_folder, **loading)
    names = class_names(model)
    held_out = measure_classifier(model, tokenizer, table, rows, **measuring)
    del model
    predictions = held_out.predictions
    assert predictions is not None, "the task is a classification"
    references = table.labels[predictions.rows].astype(np.int64)
    class_rows = np.bincount(train_table.labels[train_table.labels >= 0], minlength=len(names))
    majority = measure_majority(class_rows, references)
    best = measure_constant(np.bincount(references, minlength=len(names)), references)
    counts = count_classes(references, predictions.classes, num_classes=len(names))

    def describe(index: int) -> dict[str, Any]:
        row = table[int(predictions.rows[index])]
        return {
            "row_id": row.row_id,
            "text": decode_answers(tokenizer, [row.input_ids.tolist()])[0],
            "reference": names[references[index]],
            "base": names[majority.class_id],
            "tuned": names[predictions.classes[index]],
            "probability": float(predictions.probabilities[index]),
        }

    wrong, right = sort_out(predictions, references, seed=seed)
    base_figures = {**_constant_figures(majority, names), "nats_per_row": finite(majority.nats_per_row)}
    tuned_figures = {name: finite(value) for name, value in held_out.figures.items()}
    return Compared(
        result={
            **_figures(len(predictions.rows), len(table), base_figures, tuned_figures),
            "num_train_rows": int(class_rows.sum()),
            "best_constant": _constant_figures(best, names),
            # Lists, since numbers in dicts become metrics, and there may be hundreds of classes.
            "per_class": tabulate_classes(counts, names),
            "confusions": list_confusions(references, predictions.classes, names),
            "class_shares": _list_shares(class_rows, counts.rows, names),
            "samples": [describe(index) for index in choose_samples(wrong, right, num_samples)],
        },
        answers=[describe(index) for index in (*wrong[:MAX_WRONG_ROWS], *right)],
        columns=SAMPLE_COLUMNS,
        base_evaluation=stored,
        warnings=[
            *_warnings(held_out, majority, best, class_rows, references),
            *_share_warnings(class_rows, counts.rows, names, split=table.path.stem),
        ],
    )


def measure_classifier(
    model: Any,
    tokenizer: Any,
    table: TokenTable,
    rows: Int64Array,
    *,
    micro_batch_tokens: int | None,
    device: str,
    memory_bytes: int | None,
    weights_dtype: str,
    compute_dtype: str,
    **reporting: Any,
) -> HeldOut:
    """Classify rows and measure the loss of their classes.

    Args:
        model: a classifier on ``device``, wrapped or not.
        tokenizer: the one that made the rows, with its pad token set.
        table: where the rows lie.
        rows: row indices.
        micro_batch_tokens: most positions of a forward pass; ``None`` chooses by memory.
        device: ``cpu``, ``cuda`` or ``mps``.
        memory_bytes: memory of the device; ``None`` when unknown.
        weights_dtype: type of the weights.
        compute_dtype: type of the matrix products.
        **reporting: ``on_progress``.
    """
    from lm_tuning.batching.tasks.registry import task_of

    if micro_batch_tokens is None:
        micro_batch_tokens = choose_micro_batch_tokens(
            table, num_classes=int(model.config.num_labels), on_gpu=device != "cpu", memory_bytes=memory_bytes
        )
    with autocast(device, compute_dtype):
        return measure_held_out(
            task_of(model, "sequence_classification", pad_id=int(tokenizer.pad_token_id)),
            model,
            table,
            rows,
            micro_batch_tokens=micro_batch_tokens,
            device=device,
            label="Classes by the tuned model",
            **reporting,
        )


def class_names(model: Any) -> list[str]:
    """Return the names of a classifier's classes, in the order of their ids.

    Args:
        model: with ``id2label`` in its config.
    """
    return [str(model.config.id2label[index]) for index in range(int(model.config.num_labels))]


def sort_out(predictions: Predictions, references: Int64Array, *, seed: int) -> tuple[list[int], list[int]]:
    """Return the indices of all wrong rows, the surest first, and of a few right ones, spread over the split.

    A confident mistake is either a gap in what the model has learned or a row with a wrong label: both are worth
    reading first.

    Args:
        predictions: of a classifier.
        references: class of each row, ``(rows,)``.
        seed: decides which right rows are taken.
    """
    is_wrong = predictions.classes != references
    wrong, right = np.flatnonzero(is_wrong), np.flatnonzero(~is_wrong)
    wrong = wrong[np.argsort(-predictions.probabilities[wrong], kind="stable")]
    return wrong.tolist(), right[choose_rows(len(right), NUM_RIGHT_ROWS, seed)].tolist()


def choose_samples(wrong: list[int], right: list[int], num_samples: int) -> list[int]:
    """Choose wrong rows, and of several samples at least one right row, where there are some.

    Args:
        wrong: indices of wrong rows, the most telling first.
        right: indices of right rows.
        num_samples: how many of both.
    """
    num_right = min(len(right), max(num_samples - len(wrong), 1 if num_samples > 1 else 0))
    return [*wrong[: num_samples - num_right], *right[:num_right]]


def _figures(num_rows: int, num_split_rows: int, base: dict[str, Any], tuned: dict[str, Any]) -> dict[str, Any]:
    """Gather figures and say how much better the tuned model is; positive is better."""

    def difference(name: str) -> float | None:
        return None if base[name] is None or tuned[name] is None else tuned[name] - base[name]

    nats = difference("nats_per_row")
    return {
        "num_rows": num_rows,
        "num_split_rows": num_split_rows,
        "base": base,
        "tuned": tuned,
        "improvement": {
            "accuracy_difference": difference("accuracy"),
            "macro_f1_difference": difference("macro_f1"),
            "nats_per_row_fraction": -nats / base["nats_per_row"]
            if nats is not None and base["nats_per_row"]
            else None,
        },
        "per_class": [],
        "confusions": [],
        "class_shares": [],
        "samples": [],
    }


def _constant_figures(constant: ConstantAnswer, names: list[str]) -> dict[str, Any]:
    return {
        "accuracy": finite(constant.accuracy),
        "macro_f1": finite(constant.macro_f1),
        "class": names[constant.class_id],
        "num_tied_classes": constant.num_tied,
    }


def _list_shares(class_rows: Int64Array, rows: Int64Array, names: list[str]) -> list[dict[str, Any]]:
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
