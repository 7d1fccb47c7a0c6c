"""Compare the tuned model with its base on the rows that were held out."""

from __future__ import annotations

import logging
from pathlib import Path

from lm_tuning.errors import UserError
from lm_tuning.evaluation.base import Comparison, EvaluationJob
from lm_tuning.evaluation.classes import compare_with_majority
from lm_tuning.evaluation.language import compare_language_models
from lm_tuning.evaluation.settings import EvaluationSettings
from lm_tuning.models.tuned import read_tuning
from lm_tuning.parameters.evaluate import HeldOutChoice
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.runtime.threads import heap_set_aside
from lm_tuning.storage.folders import FolderStore, read_manifest
from lm_tuning.text.store.table import TokenTable, open_split

__all__ = ["Comparison", "EvaluationSettings", "evaluate_models"]

logger = logging.getLogger(__name__)


def evaluate_models(
    tuned_folder: Path,
    tokens_folder: Path,
    base_cache: FolderStore,
    settings: EvaluationSettings,
    *,
    on_progress: OnProgress = ignore_progress,
) -> Comparison:
    """Measure base and tuned model on held-out rows: the split that ``evaluate.split`` says.

    The base model's measurement is reused while the model, the rows and the settings that decide it stay. For an
    adapter the base is loaded once and gets the adapter afterwards; otherwise one model is loaded after the other. A
    classifier's base has no head for the classes, so the most frequent class of the training rows stands in for it.

    Args:
        tuned_folder: adapter or full weights with their ``tuning.json``.
        tokens_folder: a published folder of tokenized splits.
        base_cache: where measurements of base models are kept.
        settings: everything else that decides the figures.
        on_progress: told the rows done.

    Returns:
        The comparison; without held-out rows one that says so.

    Raises:
        UserError: the tuned model, its base or the tokens cannot be read, or the model was trained on other tokens.
    """
    tuning = read_tuning(tuned_folder)
    tokens_key = read_manifest(tokens_folder)["key"]
    _check_tokens(tuned_folder, tuning.get("tokens_key"), tokens_key)
    split, table = choose_split(tokens_folder, settings.evaluate.split)
    job = EvaluationJob(
        settings=settings,
        tuning=tuning,
        tuned_folder=tuned_folder,
        tokens_folder=tokens_folder,
        tokens_key=tokens_key,
        split=split,
        table=table,
        base_cache=base_cache,
        on_progress=on_progress,
    )
    # An encoder-decoder is a language model here: loss by token and answers, only that it reads the prompt apart.
    is_classifier = tuning["task"] == "sequence_classification"
    with heap_set_aside():  # garbage is collected by hand between two models
        compared = compare_with_majority(job) if is_classifier else compare_language_models(job)
    for warning in compared.result["warnings"]:
        logger.warning("%s", warning)
    return compared


def choose_split(tokens_folder: Path, wanted: HeldOutChoice = "auto") -> tuple[str | None, TokenTable]:
    """Choose the split to evaluate.

    Args:
        tokens_folder: a published folder of tokenized splits.
        wanted: ``validation``, ``test``, or ``auto``: ``test`` if it has supervised rows, else ``validation``.

    Returns:
        The split's name, ``None`` when neither has any, and its table.

    Raises:
        UserError: the wanted split has no supervised row.
    """
    names: tuple[str, ...] = ("test", "validation") if wanted == "auto" else (wanted,)
    tables = {name: open_split(tokens_folder, name) for name in names}
    for name, table in tables.items():
        # By what is supervised and not by rows: of a row without any nothing can be measured.
        if table.num_supervised.any():
            return name, table
    if wanted != "auto":
        raise UserError(
            f"evaluate.split = {wanted}, but that split has no row to evaluate on: set split.{wanted} or "
            f"data.{wanted}_path and train again, or evaluate.split = auto."
        )
    return None, tables["validation"]


def _check_tokens(tuned_folder: Path, trained_on: str | None, tokens_key: str) -> None:
    # No question of caching: where the split was drawn again, rows of the test may have been learned by heart.
    if trained_on != tokens_key:
        raise UserError(
            f"{tuned_folder} was trained on the token set {trained_on}, but the present one is {tokens_key}: rows that "
            "are held out now may have been trained on. Train on the present rows with "
            "`kedro run --pipelines=train,evaluate`, or set the parameters of data, split, tokenize and model back to "
            "those of that training and make its token set again with `kedro run --pipelines=split,tokenize,evaluate`."
        )
