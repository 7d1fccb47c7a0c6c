"""Settle for a run what its parameters leave open: device, dtypes, and what the stored tokens say."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lm_tuning.errors import UserError
from lm_tuning.models.record import BaseModelRecord, RenderingRecord
from lm_tuning.parameters import GenerationParameters, ModelParameters, TrainParameters
from lm_tuning.parameters.base import TaskName

if TYPE_CHECKING:
    from lm_tuning.text.records import TokenSummary
    from lm_tuning.training.settings import TrainingSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingGroups:
    """What the parameters say of a training.

    Attributes:
        train: group ``train``.
        model: group ``model``.
        seed: of the run.
        task: the ``task`` parameter.
        generation: ``evaluate.generation``, stored with the tuned model.
    """

    train: TrainParameters
    model: ModelParameters
    seed: int
    task: TaskName
    generation: GenerationParameters = field(default_factory=GenerationParameters)


def gather_settings(
    tokenized_examples: Path, base_model: BaseModelRecord, groups: TrainingGroups, *, run_id: str | None = None
) -> TrainingSettings:
    """Gather the settings of a training, choosing device and dtypes, and log what was chosen.

    Args:
        tokenized_examples: folder of the stored tokens.
        base_model: what is tuned.
        groups: of parameters.
        run_id: tracking run to write into checkpoints; ``None`` without.

    Raises:
        UserError: the tokens were made for another task, rows are longer than the model can take, or the formats do
            not go with the device.
    """
    from lm_tuning.runtime.backend import describe_optimizer_limit
    from lm_tuning.runtime.device import describe_device
    from lm_tuning.runtime.precision import choose_precision
    from lm_tuning.storage.folders import read_manifest
    from lm_tuning.text.store.table import open_split
    from lm_tuning.text.tokenize import read_token_summary
    from lm_tuning.training.health.table_reading import refuse_long_rows
    from lm_tuning.training.settings import TrainingSettings

    train, model, task = groups.train, groups.model, groups.task
    device = describe_device()
    precision = choose_precision(device, requested=train.precision, method=train.method, weights_dtype=model.dtype)
    tokens = read_token_summary(tokenized_examples)
    if tokens["task"] != task:
        raise UserError(
            f"The stored tokens in {tokenized_examples} were made for task = {tokens['task']}, and task = {task}: make "
            "them again with kedro run --pipelines=train (the same --env and --params)."
        )
    manifest = read_manifest(tokenized_examples)
    refuse_long_rows(
        tokenized_examples,
        base_model,
        task=task,
        label_map=tokens["label_map"],
        limits=manifest["facts"].get("sources", {}).get("tokenize", {}),
    )
    settings = TrainingSettings(
        train=train,
        base=base_model,
        tokens_key=manifest["key"],
        weights_dtype=precision.weights,
        compute_dtype=precision.compute,
        device=device.kind,
        seed=groups.seed,
        sources=tokens["sources"],
        task=task,
        label_map=tokens["label_map"],
        rendering=_rendering(tokens),
        attention=model.attention,
        generation=groups.generation,
        run_id=run_id,
    )
    if train.eval_every_steps is not None and not len(open_split(tokenized_examples, "validation")):
        logger.warning(
            "train.eval_every_steps = %d measures nothing, since the validation split has no rows: set "
            "split.validation or data.validation_path, or train.eval_every_steps = null.",
            train.eval_every_steps,
        )
    logger.info("Precision: %s", precision.reason)
    if precision.warning:
        logger.warning("%s", precision.warning)
    limit = describe_optimizer_limit(train.trainer.get("optim"), device=device.kind)
    if limit is not None:
        logger.warning("%s", limit)
    return settings


def _rendering(tokens: TokenSummary) -> RenderingRecord:
    """Return how the rows were written, so that the tuned model is asked in the same way."""
    from lm_tuning.data.format.columns import SEQUENCE_CLASSIFICATION

    if tokens["task"] == SEQUENCE_CLASSIFICATION:
        return {}
    rendering: RenderingRecord = {"format": tokens["format"], "control_tokens": tokens["control_tokens"]}
    if tokens.get("rendering") == "chat template":
        rendering |= {"template_arguments": tokens["template_arguments"], "system_turn": tokens["system_turn"]}
    return rendering
