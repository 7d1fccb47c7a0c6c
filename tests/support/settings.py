"""Settings of tiny trainings, and changes to them by the names that parameters have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from lm_tuning.models.record import BaseModelRecord
from lm_tuning.parameters.train import TrainParameters
from lm_tuning.training.settings import TrainingSettings


def base_record(folder: Path, **changes: Any) -> BaseModelRecord:
    """Describe the base model in a folder."""
    record = {
        "name_or_path": str(folder),
        "revision": None,
        "trust_remote_code": False,
        "digest": "base-1",
        "tokenizer_digest": "tokenizer-1",
        "is_embedded": False,
    }
    return BaseModelRecord(**(record | changes))


def make_settings(folder: Path, **changes: Any) -> TrainingSettings:
    """Return a full fine-tuning on a CPU in float32, without a schedule of learning rates.

    Args:
        folder: of the base model.
        **changes: see :func:`vary`.
    """
    settings = TrainingSettings(
        train=TrainParameters(
            method="full", gradient_checkpointing=False, eval_max_rows=None, trainer={"lr_scheduler_type": "constant"}
        ),
        base=base_record(folder),
        tokens_key="tokens-1",
        weights_dtype="float32",
        compute_dtype="float32",
        device="cpu",
        seed=7,
    )
    return vary(settings, **changes)


def vary(settings: TrainingSettings, **changes: Any) -> TrainingSettings:
    """Return settings of which some are others.

    Args:
        settings: to begin with.
        **changes: fields of the settings or of the group ``train``. A group in it may be given as a dict of what is not
            as usual. They are checked like a user's.
    """
    of_train = {name: changes.pop(name) for name in [*changes] if name in TrainParameters.model_fields}
    kept = {name: getattr(settings.train, name) for name in TrainParameters.model_fields}
    return replace(settings, train=TrainParameters.model_validate(kept | of_train), **changes)
