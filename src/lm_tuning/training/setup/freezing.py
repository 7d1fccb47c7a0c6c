"""Leave parts of a model as they are while the rest is trained."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from lm_tuning.errors import UserError
from lm_tuning.models.structure import HEAD
from lm_tuning.wording import count_of

logger = logging.getLogger(__name__)

_NUM_NAMES = 12


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
