"""Compare the tuned model with its base on the rows that were held out."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_tuning.errors import UserError
from lm_tuning.evaluation import classes, language
from lm_tuning.evaluation.base import Compared
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.storage.folders import FolderStore, StagedFolder, read_manifest
from lm_tuning.text.store.table import TokenTable, open_split

if TYPE_CHECKING:
    from pandas import DataFrame

logger = logging.getLogger(__name__)

SKIPPED = "Neither test nor validation has rows to evaluate on: set split.test or split.validation."


@dataclass(frozen=True)
class Comparison:
    """What :func:`evaluate_models` returns.

    Attributes:
        result: figures of both models, a few samples and warnings; what ``json.dumps`` takes.
        answers: one row for each answered prompt; of a classifier the rows that it got wrong, and some right ones.
        columns: names of the answers' values, in their order.
        base_evaluation: the measurement of the base model, stored already or staged for it.
    """

    result: dict[str, Any]
    answers: list[dict[str, Any]]
    columns: tuple[str, ...]
    base_evaluation: StagedFolder | Path

    def table(self) -> DataFrame:
        """Return the answers as a frame rather than a list, so that their file has its header even without rows."""
        from pandas import DataFrame

        return DataFrame(self.answers, columns=list(self.columns))


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
    num_beams: int = 1,
    micro_batch_tokens: int | None = None,
    generate_batch_rows: int = 16,
    num_samples: int = 5,
    on_progress: OnProgress = ignore_progress,
) -> Comparison:
    """Measure base and tuned model on the test split, or on the validation split when there is no test row.

    The base model's measurement is reused while the model, the rows and the settings that decide it stay. For an
    adapter the base is loaded once and gets the adapter afterwards; otherwise one model is loaded after the other. A
    classifier's base has no head for the classes, so the most frequent class of the training rows stands in for it.

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
        max_loss_rows: rows whose loss or class is measured; ``None`` means all.
        num_generate_rows: rows answered; 0 leaves generation out. A classifier answers none.
        max_new_tokens: longest answer.
        num_beams: number of beams; 1 answers greedily.
        micro_batch_tokens: most positions of a forward pass; ``None`` chooses by memory.
        generate_batch_rows: prompts answered at once.
        num_samples: rows that the result shows.
        on_progress: told the rows done.

    Returns:
        The comparison; without held-out rows one that says so.

    Raises:
        UserError: the tuned model, its base or the tokens cannot be read, or the model was trained on other tokens.
    """
    from lm_tuning.models.tuned import read_tuning

    tuning = read_tuning(tuned_folder)
    tokens_key = read_manifest(tokens_folder)["key"]
    _check_tokens(tuned_folder, tuning.get("tokens_key"), tokens_key)
    split, table = choose_split(tokens_folder)
    loading = {"dtype": weights_dtype, "attention": attention, "device": device}
    measuring: dict[str, Any] = {
        "micro_batch_tokens": micro_batch_tokens,
        "device": device,
        "memory_bytes": memory_bytes,
        "weights_dtype": weights_dtype,
        "compute_dtype": compute_dtype,
        "on_progress": on_progress,
    }
    choosing: dict[str, Any] = {"seed": seed, "max_loss_rows": max_loss_rows, "num_samples": num_samples}
    compared: Compared
    if tuning["task"] == "sequence_classification":
        compared = classes.compare_with_majority(
            tuning,
            tuned_folder,
            open_split(tokens_folder, "train"),
            table if split else None,
            base_cache,
            **choosing,
            loading=loading,
            measuring=measuring,
        )
    else:
        compared = language.compare_language_models(
            tuning,
            tuned_folder,
            table if split else None,
            base_cache,
            **choosing,
            rows_from=[tokens_key, split],
            precision=[device, weights_dtype, compute_dtype, tf32 and device == "cuda", attention],
            num_generate_rows=num_generate_rows,
            loading=loading,
            measuring=measuring,
            generating={
                "max_new_tokens": max_new_tokens,
                "num_beams": num_beams,
                "generate_batch_rows": generate_batch_rows,
            },
        )
    result = {
        "split": split,
        "task": tuning["task"],
        **compared.result,
        "tuned_method": tuning["method"],
        "tokens_key": tokens_key,
        "warnings": compared.warnings,
        "skipped": None if split else SKIPPED,
    }
    for warning in compared.warnings:
        logger.warning("%s", warning)
    return Comparison(result, compared.answers, compared.columns, compared.base_evaluation)


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


def _check_tokens(tuned_folder: Path, trained_on: str | None, tokens_key: str) -> None:
    if trained_on != tokens_key:
        raise UserError(
            f"{tuned_folder} was trained on the token set {trained_on}, but the present one is {tokens_key}: rows that "
            "are held out now may have been trained on. Train on the present rows with "
            "`kedro run --pipelines=train,evaluate`, or set the parameters of data, split, tokenize and model back to "
            "those of that training and make its token set again with `kedro run --pipelines=split,tokenize,evaluate`."
        )
