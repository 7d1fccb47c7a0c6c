"""Inspect a run's rows by its parameters and its model."""

from __future__ import annotations

from lm_tuning.models.loading import load_tokenizer, read_config
from lm_tuning.models.record import location_of
from lm_tuning.models.structure import position_limit
from lm_tuning.parameters import ModelParameters, PreflightParameters, TokenizeParameters, TrainParameters
from lm_tuning.preflight.figures import inspect_tokens
from lm_tuning.preflight.records import PreflightFigures, StoredRows
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.runtime.device import current_device


def inspect_run(
    rows: StoredRows,
    *,
    model: ModelParameters,
    tokenize: TokenizeParameters,
    train: TrainParameters,
    preflight: PreflightParameters,
    seed: int,
    on_progress: OnProgress = ignore_progress,
) -> PreflightFigures:
    """Inspect the tokens of a run as its training would use them, with the tokenizer and the config of its model.

    Args:
        rows: what is stored of them.
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
    location = location_of(rows.base_model)
    # The config alone says how many positions and embeddings there are: no weights are read, so no GPU is needed.
    tokenizer, config = load_tokenizer(**location), read_config(**location)
    return inspect_tokens(
        rows,
        tokenizer,
        model=model,
        tokenize=tokenize,
        train=train,
        preflight=preflight,
        seed=seed,
        device=current_device().kind,
        max_positions=position_limit(config),
        num_embeddings=getattr(config.get_text_config(), "vocab_size", None),
        on_progress=on_progress,
    )
