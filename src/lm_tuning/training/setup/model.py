"""Load the model that is trained and decide which of its weights are, before the first step."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from lm_tuning.batching.held_out_loss import evaluating
from lm_tuning.batching.losses import LossShape, balance_classes
from lm_tuning.batching.step_loader import StepDataset
from lm_tuning.batching.tasks.base import TrainingTask
from lm_tuning.batching.tasks.registry import task_of
from lm_tuning.data.format.labels import refuse_unknown_weights
from lm_tuning.errors import UserError
from lm_tuning.models.record import location_of
from lm_tuning.models.structure import HEAD, classification_head
from lm_tuning.runtime.precision import autocast
from lm_tuning.text.store.table import TokenTable
from lm_tuning.training.health.report import HealthReport
from lm_tuning.training.settings import TrainingSettings
from lm_tuning.training.setup.adapters import add_lora, check_targets
from lm_tuning.wording import count_of

logger = logging.getLogger(__name__)

# Largest standard deviation of a fresh head's logits: above it the first loss lies visibly over log(classes).
FRESH_HEAD_SPREAD = 0.1

_NUM_NAMES = 12


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
    from lm_tuning.models.loading import load_model, load_tokenizer
    from lm_tuning.models.quantization import import_bitsandbytes

    import_bitsandbytes()  # before PEFT, and what of transformers imports PEFT
    from transformers import set_seed

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


def _quantization(settings: TrainingSettings) -> Any:
    if settings.train.method != "qlora":
        return None
    from lm_tuning.models.quantization import Quantization

    return Quantization(**settings.train.qlora.model_dump(), compute_dtype=settings.compute_dtype)


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
    """Scale a fresh classification head so that its logits hardly differ, and the first loss is log(classes).

    A head with the usual random weights starts at log(classes) plus half the variance of its logits, which differs
    from model to model and hides a loss that is off for another reason.

    Args:
        ready: the model.
        steps: the run's steps; the logits of the first one are measured, so that the scale does not depend on how it is
            split.
        settings: of the training.
        health: receives the spread (standard deviation) of its weights, and of its logits where it was scaled.
    """
    model = ready.model
    # An adapter library keeps the original head beside the copy that is trained.
    head = [weight for name, weight in classification_head(model).named_parameters() if "original" not in name]
    drawn, scaled = _spread(head), ""
    # Without dropout, whose zeros would be measured as a part of the spread.
    with autocast(settings.device, settings.compute_dtype), evaluating(model):
        # (rows, classes) of the whole step; over all of them at once, since a class may be offset from the others.
        spread = _spread([ready.task.logits(model, batch.to(settings.device)) for batch in steps[0].micro_batches])
        if spread > FRESH_HEAD_SPREAD:
            for weight in head:
                weight.mul_(FRESH_HEAD_SPREAD / spread)
            scaled = f" (drawn with {drawn:.3g} and scaled down, since the logits had a spread of {spread:.2f})"
    weights = _spread(head)
    health.facts["fresh_head_scaled_from_spread"] = spread if scaled else None
    health.facts["fresh_head_weights_spread"] = weights
    health.facts["fresh_head_drawn_weights_spread"] = drawn
    logger.info("The new classification head has weights with a spread of %.3g%s.", weights, scaled)


def _spread(tensors: Sequence[torch.Tensor]) -> float:
    """Return the standard deviation of all numbers of some tensors together."""
    return float(torch.cat([tensor.detach().float().flatten() for tensor in tensors]).std())


def freeze_modules(model: Any, patterns: Sequence[str]) -> list[str]:
    """Freeze every module that a pattern names, with all that lies in it.

    A pattern is a module's whole name or its end after a dot, with ``*`` for any characters: ``embed_tokens``,
    ``layers.0``, ``layers.1?``, ``*.mlp``. ``layers.1`` is one layer and not ten.

    Args:
        model: whose parameters are all trainable.
        patterns: names of modules.

    Returns:
        The names of the modules that were frozen, in the model's order.

    Raises:
        UserError: a pattern matches nothing, or a new classification head would be frozen. That nothing is left to
            train is a finding of the health checks.
    """
    names = [name for name, _ in model.named_modules() if name]
    found = {pattern: [name for name in names if _matches(name, pattern)] for pattern in patterns}
    problems = [_describe_missing(pattern, names) for pattern, matches in found.items() if not matches]
    frozen = [name for name in names if any(name in matches for matches in found.values())]
    if HEAD in frozen and getattr(model, "lm_tuning_fresh_head", False):
        problems.append(
            f"train.freeze = {list(patterns)} freezes the classification head ({HEAD}), which is new and random: "
            "it has to be trained."
        )
    modules = dict(model.named_modules())
    parameters = {id(parameter) for name in frozen for parameter in modules[name].parameters()}
    if problems:
        raise UserError(problems)
    shared = _shared_outside(model, frozen, parameters)
    for name in frozen:
        modules[name].requires_grad_(False)
    logger.info(
        "Frozen by train.freeze: %s, %s of %s parameters.",
        count_of(len(frozen), "module"),
        f"{sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad):,}",
        f"{sum(parameter.numel() for parameter in model.parameters()):,}",
    )
    if shared:
        logger.warning("Frozen with them, since they share their weights: %s.", ", ".join(shared))
    return frozen


def find_frozen_parameters(model: Any, patterns: Sequence[str]) -> set[int]:
    """Return the identities (``id``) of the parameters that patterns freeze, see :func:`freeze_modules`."""
    return {
        id(parameter)
        for name, module in model.named_modules()
        if name and any(_matches(name, pattern) for pattern in patterns)
        for parameter in module.parameters()
    }


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _describe_missing(pattern: str, names: Sequence[str]) -> str:
    """Report that a pattern names nothing, with near names or the model's uppermost parts."""
    ends = sorted({".".join(name.split(".")[-count:]) for name in names for count in (1, 2)})
    near = difflib.get_close_matches(pattern, ends, n=3)
    if near:
        hint = f"Did you mean {' or '.join(map(repr, near))}?"
    else:
        upper = [name for name in names if name.count(".") <= 1][:_NUM_NAMES]
        hint = f"Some of them are {', '.join(upper)}."
    return f"train.freeze: no module of the model is named {pattern!r}. {hint}"


def _shared_outside(model: torch.nn.Module, frozen: Sequence[str], parameters: set[int]) -> list[str]:
    """Name modules that were not asked for but hold a frozen parameter, such as a head tied to the embedding."""
    inside = tuple(f"{name}." for name in frozen)
    found = []
    for name, module in model.named_modules():
        if name in frozen or name.startswith(inside):
            continue
        if any(id(parameter) in parameters for parameter in module.parameters(recurse=False)):
            found.append(name)
    return found
