"""Repair generation settings that could not be saved again."""

from __future__ import annotations

import logging
from typing import Any

from lm_tuning.errors import UserError

logger = logging.getLogger(__name__)

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_BEAMS = ("early_stopping", "length_penalty")
_CACHES = ("cache_implementation", "cache_config")
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def clean_generation_settings(model: Any, name_or_path: str) -> list[str]:
    """Take out settings that have no effect, with one warning that names them.

    Such as a temperature beside ``do_sample: false``: published models have them, and transformers refuses to save a
    model with them once anything about its generation was changed. That would be at the end of a training.

    Args:
        model: a loaded model; its ``generation_config`` is changed.
        name_or_path: what the model is called in messages.

    Returns:
        The keys that were taken out.

    Raises:
        UserError: the settings are wrong in another way, which only their author can mend.
    """
    settings = getattr(model, "generation_config", None)
    if settings is None or not _reasons(settings):
        return []
    without_effect: list[str] = []
    if settings.do_sample is not True:
        without_effect += _SAMPLING
    if settings.num_beams in (None, 1):
        without_effect += _BEAMS
    if settings.return_dict_in_generate is not True:
        without_effect += _OUTPUTS
    if settings.use_cache is False:
        without_effect += _CACHES
    removed = []
    for key in without_effect:
        before = getattr(settings, key, None)
        if before is None:
            continue
        # A value that is as good as none is no problem; only what makes the settings invalid is named.
        if f"`{key}`" in _reasons(settings):
            setattr(settings, key, None)
            removed.append(f"{key} = {before}")
    reasons = _reasons(settings)
    if reasons:
        raise UserError(
            f"generation_config.json of {name_or_path} is invalid, so the trained model could not be saved: {reasons} "
            "Mend the file, or take it away."
        )
    logger.warning(
        "generation_config.json of %s has settings without effect, which transformers would refuse to save: %s. They "
        "are left out (do_sample = %s, num_beams = %s).",
        name_or_path,
        ", ".join(removed),
        settings.do_sample,
        settings.num_beams,
    )
    return [entry.partition(" ")[0] for entry in removed]


def _reasons(settings: Any) -> str:
    """Return what transformers would say when it saves the settings, in one line; empty when nothing."""
    try:
        settings.validate(strict=True)
    except ValueError as error:
        lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
        told = [line for line in lines if line != "GenerationConfig is invalid:" and not line.startswith("If you're")]
        return " ".join(told)
    return ""
