"""Inspect a run's rows by its parameters and its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_tuning.models.loading import load_tokenizer, read_config
from lm_tuning.models.record import BaseModelRecord, location_of
from lm_tuning.models.structure import position_limit
from lm_tuning.parameters import ModelParameters, PreflightParameters, TokenizeParameters, TrainParameters
from lm_tuning.preflight.figures import inspect_tokens
from lm_tuning.preflight.records import EarlierReports
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.runtime.device import current_device

_AS_THEY_ARE = {
    *("effective_batch_rows", "effective_batch_tokens", "num_epochs", "max_steps", "batching"),
    *("eval_every_steps", "save_every_steps", "load_best"),
}
"""Parameters of ``train`` that ``inspect_tokens`` takes as they are."""


def inspect_run(
    tokens: Path,
    splits: Path,
    base_model: BaseModelRecord,
    *,
    reports: EarlierReports,
    model: ModelParameters,
    tokenize: TokenizeParameters,
    train: TrainParameters,
    preflight: PreflightParameters,
    seed: int,
    on_progress: OnProgress = ignore_progress,
) -> dict[str, Any]:
    """Inspect the tokens of a run as its training would use them, with the tokenizer and the config of its model.

    Args:
        tokens: folder of tokens.
        splits: folder of the splits that they were made from.
        base_model: see ``describe_base_model``.
        reports: what earlier steps say of the rows: ``token_summary``, ``split_summary`` and ``data_report``.
        model: the ``model`` parameters.
        tokenize: the ``tokenize`` parameters.
        train: the ``train`` parameters.
        preflight: the ``preflight`` parameters.
        seed: order of rows.
        on_progress: receives rows and steps done.

    Returns:
        All figures, see ``inspect_tokens``.

    Raises:
        UserError: the tokens were made from other splits, or the parameters allow no plan.
    """
    location = location_of(base_model)
    tokenizer, config = load_tokenizer(**location), read_config(**location)
    return inspect_tokens(
        tokens,
        splits,
        tokenizer,
        model_name=base_model["name_or_path"],
        token_summary=reports["token_summary"],
        split_summary=reports["split_summary"],
        findings=reports["data_report"]["facts"]["findings"],
        device=current_device().kind,
        attention=model.attention,
        max_length_tokens=tokenize.max_length_tokens,
        max_positions=position_limit(config),
        seed=seed,
        **train.model_dump(include=_AS_THEY_ARE),
        micro_batch_tokens=None if train.micro_batch_tokens == "auto" else train.micro_batch_tokens,
        warmup_steps=train.trainer.get("warmup_steps", 0),
        num_examples=preflight.num_examples,
        num_embeddings=getattr(config.get_text_config(), "vocab_size", None),
        on_progress=on_progress,
    )
