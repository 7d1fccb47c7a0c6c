"""Nodes of the tokenize pipeline."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lm_tuning.errors import UserError
from lm_tuning.parameters.data import DataParameters, SplitParameters
from lm_tuning.parameters.model import ModelParameters
from lm_tuning.parameters.results import EvaluateParameters
from lm_tuning.parameters.text import TokenizeParameters
from lm_tuning.parameters.train import TrainParameters
from lm_tuning.pipelines.split.nodes import split_settings
from lm_tuning.storage.digests import digest_values
from lm_tuning.storage.folders import SCHEMA_VERSION, FolderStore, StagedFolder, read_manifest

logger = logging.getLogger(__name__)

DIGEST_CACHE = Path("data/.cache/digests.json")


def prepare_base_model(model: ModelParameters, evaluate: EvaluateParameters, task: str) -> dict[str, Any]:
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
    from lm_tuning.progress import show_progress

    with show_progress() as on_progress:
        base_model = describe_base_model(
            model.name_or_path,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            digest_cache=DIGEST_CACHE,
            on_progress=on_progress,
        )
    where = {name: base_model[name] for name in ("name_or_path", "revision", "trust_remote_code")}
    config = check_model(**where, task=task)
    if evaluate.num_generate_rows and task != "sequence_classification":
        check_answer_room(config, max_new_tokens=evaluate.max_new_tokens)
    logger.info("Base model: %s (digest %s)", base_model["name_or_path"], base_model["digest"])
    return base_model


def tokenize_examples(
    example_splits: Path,
    base_model: dict[str, Any],
    *,
    token_cache: FolderStore,
    tokenize: TokenizeParameters,
    data: DataParameters,
    split: SplitParameters,
    train: TrainParameters,
    seed: int,
    task: str,
) -> tuple[StagedFolder | Path, dict[str, Any], bytes, dict[str, Any]]:
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
    from lm_tuning.data.format.labels import refuse_unknown_weights
    from lm_tuning.data.split.folder import find_staleness, read_summary
    from lm_tuning.models.loading import load_tokenizer
    from lm_tuning.progress import show_progress
    from lm_tuning.text.store.summary import describe_tokens, read_lengths, write_lengths
    from lm_tuning.text.tokenize import TOKENS_VERSION, read_token_report, read_token_summary, write_tokens
    from lm_tuning.text.tokenizers.limit_losses import refuse_losses

    rows = data.model_dump()
    stale = find_staleness(
        read_manifest(example_splits)["facts"],
        sources={"train": rows["path"], "validation": rows["validation_path"], "test": rows["test_path"]},
        settings=split_settings(data, split, seed=seed, task=task),
        digest_cache=DIGEST_CACHE,
    )
    if stale:
        raise UserError(
            [
                f"The stored splits in {example_splits} do not belong to the present rows and parameters, so nothing "
                "is trained on them:",
                *(f"  - {difference}" for difference in stale),
                "Set these back, or make the splits again with kedro run --pipelines=split (the same --env and "
                "--params). A training goes on from its checkpoint (train.resume=true) with its own rows only: for "
                "that, set them back.",
            ]
        )
    refuse_unknown_weights(train.class_weights, read_summary(example_splits).get("label_map"))
    sources = {
        "schema_version": SCHEMA_VERSION,
        "tokens_version": TOKENS_VERSION,
        "splits": read_manifest(example_splits)["key"],
        "tokenizer": base_model["tokenizer_digest"],
        "tokenize": _deciding(tokenize),
        "task": task,
    }
    key = digest_values(sources)
    found = token_cache.find(key)
    losses = {
        "max_lost_fraction": tokenize.max_lost_fraction,
        "max_positions": _find_positions(base_model),
        "model_name": base_model["name_or_path"],
    }
    if found:
        summary = read_token_summary(found)
        refuse_losses(summary, **losses)
        logger.info("Tokens reused: %s, in %s", describe_tokens(summary), found)
        _warn_of_long_rows(found, base_model, task=task)
        return found, summary, read_lengths(found), read_token_report(found)
    _warn_of_older_tokens(token_cache)
    tokenizer = load_tokenizer(
        base_model["name_or_path"],
        revision=base_model["revision"],
        trust_remote_code=base_model["trust_remote_code"],
    )
    with token_cache.stage(key) as staged, show_progress() as on_progress:
        settings = tokenize.model_dump()
        del settings["max_lost_fraction"]
        summary = write_tokens(
            staged.path,
            example_splits,
            tokenizer,
            task=task,
            **settings,
            on_bad_row=data.on_bad_row,
            max_bad_fraction=data.max_bad_fraction,
            on_progress=on_progress,
        )
        refuse_losses(summary, **losses)
        limits = {name: settings[name] for name in ("max_length_tokens", "max_target_tokens")}
        write_lengths(staged.path, task=task, **limits)
        staged.facts = {"sources": sources, "base_model": base_model}
    logger.info("Tokens made: %s, in %s", describe_tokens(summary), token_cache.root / key)
    _warn_of_long_rows(staged.path, base_model, task=task)
    return staged, summary, read_lengths(staged.path), read_token_report(staged.path)


def _deciding(tokenize: TokenizeParameters) -> dict[str, Any]:
    """Return the parameters that decide what tokens come out; arguments of the template only where there are any.

    What only decides whether tokens are taken is none.
    """
    settings = tokenize.model_dump()
    del settings["max_lost_fraction"]
    if not settings["template_arguments"]:
        del settings["template_arguments"]
    return settings


def _warn_of_older_tokens(token_cache: FolderStore) -> None:
    """Log why tokens are rebuilt where another version has stored others of the same rows."""
    from lm_tuning.text.tokenize import TOKENS_VERSION

    try:
        current = token_cache.current()
    except UserError:  # none, or a damaged one: there is nothing to compare with
        return
    version = read_manifest(current)["facts"].get("sources", {}).get("tokens_version")
    if version is not None and version != TOKENS_VERSION:
        logger.warning(
            "The stored tokens in %s were made by another version, which makes others of the same rows (see "
            "CHANGELOG.md), so tokens are made again.",
            current,
        )


def _find_positions(base_model: dict[str, Any]) -> int | None:
    """Return the positions in the model's config; ``None`` where it names none."""
    from lm_tuning.models.loading import read_config
    from lm_tuning.models.structure import position_limit

    return position_limit(
        read_config(**{name: base_model[name] for name in ("name_or_path", "revision", "trust_remote_code")})
    )


def _warn_of_long_rows(folder: Path, base_model: dict[str, Any], *, task: str) -> None:
    """Log at once which rows are longer than the positions in the model's config; training refuses or reports them."""
    from lm_tuning.training.health.table_reading import find_long_rows

    limit = _find_positions(base_model)
    for rows in find_long_rows(folder, limit, task=task) if limit else ():
        logger.warning(
            "Longer than the %d positions in the config of %s: %s. A model that learned a weight for each position "
            "cannot be trained on them, others are bad at positions that they never saw: lower %s.",
            limit,
            base_model["name_or_path"],
            rows.describe(),
            rows.key,
        )
