"""Load the model that is trained and decide which of its weights are, before the first step."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_tuning.batching.losses import LossShape, balance_classes
from lm_tuning.batching.tasks.base import TrainingTask
from lm_tuning.batching.tasks.kinds import task_of
from lm_tuning.data.format.labels import refuse_unknown_weights
from lm_tuning.models.record import location_of
from lm_tuning.runtime.precision import autocast
from lm_tuning.training.health.first_loss import fresh_head_spread, scale_fresh_head
from lm_tuning.training.settings import TrainingSettings
from lm_tuning.training.setup.adapters import add_lora, check_targets
from lm_tuning.training.setup.freezing import freeze_modules

if TYPE_CHECKING:
    from lm_tuning.batching.step_loader import StepDataset
    from lm_tuning.text.store.table import TokenTable
    from lm_tuning.training.health.report import HealthReport

logger = logging.getLogger(__name__)


@dataclass
class ReadyModel:
    """A model that can be trained.

    Attributes:
        model: on its device, with adapters or frozen parts as the method asks.
        tokenizer: the model's, with a pad token.
        task: which of its logits carry loss.
        has_fresh_head: whether its classification head is new.
    """

    model: Any
    tokenizer: Any
    task: TrainingTask
    has_fresh_head: bool


def build_skeleton_of(settings: TrainingSettings) -> Any:
    """Build the model that will be trained without weights and adapters, see ``build_skeleton``.

    Args:
        settings: of the training.

    Raises:
        UserError: the config cannot be read, is none for the task, or its class cannot be built so.
    """
    from lm_tuning.models.loading import build_skeleton

    return build_skeleton(**location_of(settings.base), task=settings.task, label_map=settings.label_map)


def set_up_model(settings: TrainingSettings) -> ReadyModel:
    """Load tokenizer and weights, seed the run, and put adapters or frozen parts in place.

    Args:
        settings: of the training.

    Raises:
        UserError: the model cannot be loaded, or adapter targets or frozen parts are none of its modules.
    """
    from transformers import set_seed

    from lm_tuning.models.loading import load_model, load_tokenizer

    train, location = settings.train, location_of(settings.base)
    if train.method != "full" and train.lora.target_modules != "all-linear":
        # A mistyped name should not cost the time that loading the weights takes.
        check_targets(build_skeleton_of(settings), train.lora.target_modules)
    tokenizer = load_tokenizer(**location)
    # Before the weights are loaded, since a head that the model lacks is drawn then, and adapters after it.
    set_seed(settings.seed)
    model: Any = load_model(
        **location,
        task=settings.task,
        label_map=settings.label_map,
        dtype=settings.weights_dtype,
        attention=settings.attention,
        device=settings.device,
        pad_token_id=tokenizer.pad_token_id,
        quantization=_quantization(settings),
    )
    has_fresh_head = bool(getattr(model, "lm_tuning_fresh_head", False))
    if train.method != "full":
        model = add_lora(model, train.lora, task=settings.task)
    elif train.freeze:
        freeze_modules(model, train.freeze)
    if train.method != "qlora":
        model.to(settings.device)  # quantized weights cannot be moved, and lie there already
    model.config.use_cache = False
    task = task_of(model, settings.task, pad_id=int(tokenizer.pad_token_id))
    return ReadyModel(model, tokenizer, task, has_fresh_head)


def choose_loss_shape(settings: TrainingSettings, train_rows: TokenTable) -> LossShape:
    """Turn label smoothing and class weights into numbers.

    Raises:
        UserError: a class weight is given to no class.
    """
    weights = None
    given = settings.train.class_weights
    if given is not None:
        label_map = settings.label_map or {}
        labels = train_rows.labels
        # Classes that the head does not tell apart are named once the model is there.
        known = labels[(labels >= 0) & (labels < len(label_map))]
        counts = np.bincount(known, minlength=len(label_map)).tolist()
        weights = balance_classes(counts)
        if given != "balanced":
            refuse_unknown_weights(given, label_map)
            raw = [given.get(name, 1.0) for name in label_map]
            # Over rows, so that weights move loss between classes and leave its size, and with it the rate, alone. Rows
            # of no known class alone are refused once the model is there.
            mean = sum(weight * count for weight, count in zip(raw, counts, strict=True)) / max(sum(counts), 1) or 1.0
            weights = tuple(weight / mean for weight in raw)
    return LossShape(label_smoothing=settings.train.label_smoothing, class_weights=weights)


def scale_head(ready: ReadyModel, steps: StepDataset, settings: TrainingSettings, health: HealthReport) -> None:
    """Scale a fresh classification head by the logits of the first rows, see :func:`scale_fresh_head`.

    Args:
        ready: the model.
        steps: the run's steps; rows of the first one are looked at.
        settings: of the training.
        health: receives the spread (standard deviation) of its weights, and of its logits where it was scaled.
    """
    drawn = fresh_head_spread(ready.model)
    with autocast(settings.device, settings.compute_dtype):
        spread = scale_fresh_head(ready.task, ready.model, steps[0], device=settings.device)
    weights = drawn if spread is None else fresh_head_spread(ready.model)
    health.facts["fresh_head_scaled_from_spread"] = spread
    health.facts["fresh_head_weights_spread"] = weights
    health.facts["fresh_head_drawn_weights_spread"] = drawn
    scaled = ""
    if spread is not None:
        scaled = f" (drawn with {drawn:.3g} and scaled down, since the logits had a spread of {spread:.2f})"
    logger.info("The new classification head has weights with a spread of %.3g%s.", weights, scaled)


def _quantization(settings: TrainingSettings) -> Any:
    if settings.train.method != "qlora":
        return None
    from lm_tuning.models.quantization import Quantization

    return Quantization(**settings.train.qlora.model_dump(), compute_dtype=settings.compute_dtype)
