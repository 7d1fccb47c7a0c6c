"""Nodes of the tokenize pipeline."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lm_tuning.errors import UserError
from lm_tuning.models.record import BaseModelRecord, location_of
from lm_tuning.parameters import EvaluateParameters, ModelParameters
from lm_tuning.parameters.data import DataParameters, SplitParameters, TokenizeParameters
from lm_tuning.parameters.train import TrainParameters
from lm_tuning.pipelines import DIGEST_CACHE
from lm_tuning.progress import show_progress
from lm_tuning.reporting.document import ReportSection
from lm_tuning.storage.digests import digest_values
from lm_tuning.storage.folders import FolderStore, StagedFolder, read_manifest
from lm_tuning.text.records import TokenManifest, TokensFacts, TokenSources, TokenSummary

logger = logging.getLogger(__name__)


def prepare_base_model(model: ModelParameters, evaluate: EvaluateParameters, task: str) -> BaseModelRecord:
    """Pin the base model down, converting the default one first when it is asked for and not there yet.

    What its config says against the run is found here, before rows are split and tokenized.

    Args:
        model: the ``model`` parameters.
        evaluate: the ``evaluate`` parameters, whose answers must fit into the model.
        task: the ``task`` parameter.

    Returns:
        ``name_or_path``, ``revision``, ``digest``, ``tokenizer_digest``, ``trust_remote_code`` and ``is_embedded``.

    Raises:
        UserError: the model is not there or not whole, is none for the task, or answers do not fit into it.
    """
    from lm_tuning.models.base_model import describe_base_model
    from lm_tuning.models.loading import check_model
    from lm_tuning.models.structure import check_answer_room

    with show_progress() as on_progress:
        base_model = describe_base_model(
            model.name_or_path,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            digest_cache=DIGEST_CACHE,
            on_progress=on_progress,
        )
    # The config alone: loading the weights only to refuse them would take minutes for a large model.
    config = check_model(**location_of(base_model), task=task)
    if evaluate.num_generate_rows and task != "sequence_classification":
        check_answer_room(config, max_new_tokens=evaluate.generation.max_new_tokens)
    logger.info("Base model: %s (digest %s)", base_model["name_or_path"], base_model["digest"])
    return base_model


def tokenize_examples(
    example_splits: Path,
    base_model: BaseModelRecord,
    *,
    token_cache: FolderStore,
    tokenize: TokenizeParameters,
    data: DataParameters,
    split: SplitParameters,
    train: TrainParameters,
    seed: int,
    task: str,
) -> tuple[StagedFolder | Path, TokenSummary, bytes, ReportSection[TokensFacts]]:
    """Tokenize the splits, or find that the same was done before.

    Args:
        example_splits: the folder of splits.
        base_model: whose tokenizer, see ``prepare_base_model``.
        token_cache: the store of tokens.
        tokenize: the ``tokenize`` parameters.
        data: the ``data`` parameters, which the splits must have been made with.
        split: the ``split`` parameters, likewise.
        train: the ``train`` parameters, whose class weights must name classes that there are.
        seed: of the splits, likewise.
        task: the ``task`` parameter.

    Returns:
        The folder of tokens to publish, its summary, a picture of the lengths, and a section of the data report.

    Raises:
        UserError: the stored splits belong to other rows or parameters, a class weight is that of no class, or the
            limits cut too many of the tokens away.
    """
    from lm_tuning.text.tokenize import make_tokens, read_outputs, token_sources

    _refuse_unfit_splits(example_splits, data, split, train, seed=seed, task=task)
    sources = token_sources(example_splits, base_model, tokenize, task=task)
    make = partial(make_tokens, splits=example_splits, base_model=base_model, tokenize=tokenize, data=data, task=task)
    tokens, folder = _find_or_make(token_cache, sources, base_model, tokenize, make)
    # Before the outputs are read: rows that a model cannot take end the training later, after hours at worst.
    _warn_of_long_rows(folder, base_model, task=task)
    return tokens, *read_outputs(folder)


def _refuse_unfit_splits(
    splits: Path, data: DataParameters, split: SplitParameters, train: TrainParameters, *, seed: int, task: str
) -> None:
    """Refuse splits of other rows or parameters, and weights of classes that they do not have."""
    from lm_tuning.data.format.labels import refuse_unknown_weights
    from lm_tuning.data.settings import refuse_other_splits
    from lm_tuning.data.split.folder import read_summary

    # Somebody may run this pipeline alone, after the parameters or the files have changed.
    refuse_other_splits(splits, data, split, seed=seed, task=task, digest_cache=DIGEST_CACHE)
    refuse_unknown_weights(train.class_weights, read_summary(splits).get("label_map"))


def _find_or_make(
    store: FolderStore,
    sources: TokenSources,
    base_model: BaseModelRecord,
    tokenize: TokenizeParameters,
    make: Callable[..., None],
) -> tuple[StagedFolder | Path, Path]:
    """Return the tokens to publish, and where they lie now."""
    from lm_tuning.text.tokenize import refuse_stored_losses

    def fill(staged: StagedFolder) -> None:
        _warn_of_older_tokens(store)  # only where tokens are made: reused ones are of this version
        with show_progress() as on_progress:
            make(staged.path, on_progress=on_progress)
        facts: TokenManifest = {"sources": sources, "base_model": base_model}
        staged.facts = facts

    key = digest_values(sources)
    tokens, folder = store.find_or_make(key, fill)
    # tokenize.max_lost_fraction is no part of the key, so stored tokens may lose more than is allowed today.
    if is_reused := isinstance(tokens, Path):
        refuse_stored_losses(folder, base_model, tokenize)
    _log_tokens(folder, store.root / key, is_reused=is_reused)
    return tokens, folder


def _log_tokens(folder: Path, stored_at: Path, *, is_reused: bool) -> None:
    """Log what the tokens are."""
    from lm_tuning.text.summary import describe_tokens
    from lm_tuning.text.tokenize import read_token_summary

    outcome = "reused" if is_reused else "made"
    logger.info("Tokens %s: %s, in %s", outcome, describe_tokens(read_token_summary(folder)), stored_at)


def _warn_of_older_tokens(token_cache: FolderStore) -> None:
    """Log why tokens are rebuilt where another version has stored others of the same rows."""
    from lm_tuning.text.tokenize import TOKENS_VERSION

    # The newest folder, whatever its key: the key holds the version, so it cannot be looked up by another one.
    try:
        current = token_cache.current()
    except UserError:  # none, or a damaged one: there is nothing to compare with
        return
    # The first versions of this project stored no sources.
    version = read_manifest(current)["facts"].get("sources", {}).get("tokens_version")
    if version is not None and version != TOKENS_VERSION:
        logger.warning(
            "The stored tokens in %s were made by another version, which makes others of the same rows (see "
            "CHANGELOG.md), so tokens are made again.",
            current,
        )


def _warn_of_long_rows(folder: Path, base_model: BaseModelRecord, *, task: str) -> None:
    """Log at once which rows are longer than the positions in the model's config; training refuses or reports them."""
    from lm_tuning.text.tokenize import positions_of
    from lm_tuning.training.health.table_reading import find_long_rows

    # None of a model whose config names no limit, such as one with relative positions.
    limit = positions_of(base_model)
    for rows in find_long_rows(folder, limit, task=task) if limit else ():
        logger.warning(
            "Longer than the %d positions in the config of %s: %s. A model that learned a weight for each position "
            "cannot be trained on them, others are bad at positions that they never saw: lower %s.",
            limit,
            base_model["name_or_path"],
            rows.describe(),
            rows.key,
        )
