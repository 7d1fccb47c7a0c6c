"""Turn the parameters of training into the plain values that a training is told."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_tuning.errors import UserError
from lm_tuning.models.record import BaseModelRecord
from lm_tuning.parameters import ModelParameters, TrainParameters

if TYPE_CHECKING:
    from lm_tuning.text.records import TokenSummary
    from lm_tuning.training.settings import TrainingSettings

logger = logging.getLogger(__name__)


def gather_settings(
    tokenized_examples: Path,
    base_model: BaseModelRecord,
    *,
    train: TrainParameters,
    model: ModelParameters,
    seed: int,
    task: str,
    num_beams: int = 1,
    run_id: str | None = None,
) -> TrainingSettings:
    """Gather the settings of a training, choosing device and dtypes, and log what was chosen.

    Args:
        tokenized_examples: folder of the stored tokens.
        base_model: what is tuned.
        train: group ``train``.
        model: group ``model``.
        seed: of the run.
        task: the ``task`` parameter.
        num_beams: ``evaluate.num_beams``, stored with the tuned model.
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
        base=dict(base_model),
        tokens_key=manifest["key"],
        sources=[dict(source) for source in tokens["sources"]],
        task=task,  # type: ignore[arg-type]
        label_map=tokens["label_map"],
        rendering=_rendering(tokens),
        weights_dtype=precision.weights,
        compute_dtype=precision.compute,
        device=device.kind,
        attention=model.attention,
        method=train.method,
        lora=train.lora.model_dump(),
        qlora=train.qlora.model_dump(),
        freeze=train.freeze,
        neftune_noise_alpha=train.neftune_noise_alpha,
        label_smoothing=train.label_smoothing,
        class_weights=train.class_weights,
        best_metric=train.best_metric,
        early_stopping_evals=train.early_stopping_evals,
        severities=dict(train.health.severity),
        seed=seed,
        learning_rate=train.learning_rate,
        effective_batch_rows=train.effective_batch_rows,
        effective_batch_tokens=train.effective_batch_tokens,
        num_epochs=train.num_epochs,
        max_steps=train.max_steps,
        micro_batch_tokens=None if train.micro_batch_tokens == "auto" else train.micro_batch_tokens,
        batching=train.batching,
        compile=None if train.compile == "auto" else train.compile,
        activation_checkpointing=None if train.gradient_checkpointing == "auto" else train.gradient_checkpointing,
        memory_fraction=train.memory_fraction,
        num_loader_workers=None if train.num_loader_workers == "auto" else train.num_loader_workers,
        save_every_steps=train.save_every_steps,
        keep_checkpoints=train.keep_checkpoints,
        eval_every_steps=train.eval_every_steps,
        eval_max_rows=train.eval_max_rows,
        load_best=train.load_best,
        resume=train.resume,
        probe_first_step=train.health.probe,
        first_loss_tolerance=train.health.tolerance_fraction,
        first_loss_severity=train.health.on_mismatch,
        trainer=dict(train.trainer),
        num_beams=num_beams,
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


def _rendering(tokens: TokenSummary) -> dict[str, Any]:
    """Return how the chat template was called for the rows; nothing where no template wrote them."""
    if tokens.get("rendering") != "chat template":
        return {}
    return {"template_arguments": tokens["template_arguments"], "system_turn": tokens["system_turn"]}
