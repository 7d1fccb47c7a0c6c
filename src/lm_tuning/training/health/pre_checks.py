"""Checks of rows, tokenizer and trained parts that come before any row goes through the model.

Trained parts are compared with what was asked for: layers frozen by mistake, adapters that miss layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lm_tuning.batching.step_plan import StepPlan
from lm_tuning.errors import UserError
from lm_tuning.models.record import location_of
from lm_tuning.text.store.table import TokenTable, open_split, split_path
from lm_tuning.training.health.first_gradient import layer_lists
from lm_tuning.training.health.records import SHOWN_NAMES, Finding, listing
from lm_tuning.training.health.report import HealthReport, stop_if_needed
from lm_tuning.training.health.table_checks import (
    check_held_out_rows,
    check_step_supervision,
    check_table,
    check_tokenizer,
)
from lm_tuning.training.settings import TrainingSettings
from lm_tuning.training.setup.model import ReadyModel, build_skeleton_of, find_frozen_parameters
from lm_tuning.wording import name_first, noun_for


def check_rows_before_planning(
    health: HealthReport, settings: TrainingSettings, tokens: Path, train_rows: TokenTable
) -> None:
    """Check the rows against the model's shapes before the batch planner sends rows through it on a GPU.

    The weights are not read for it. What the shapes cannot tell is checked again with the loaded model, and a model
    whose shapes cannot be told without weights is left to that check.

    Args:
        health: receives the findings.
        settings: of the training.
        tokens: folder of the tokenized splits.
        train_rows: its training rows.

    Raises:
        UserError: a finding says stop.
    """
    from lm_tuning.models.loading import load_tokenizer

    with health.timing():
        try:
            # Shapes and names without weights, so that a fault is told before gigabytes are read.
            model = build_skeleton_of(settings)
        except UserError:
            return
        tokenizer = load_tokenizer(**location_of(settings.base))
        _, found = check_table(train_rows, model, tokenizer, task=settings.task)
        found += [*_check_held_out(tokens, model, tokenizer, settings.task), *check_freeze(model, settings)]
        # The others are said once the model is there.
        health.add_new(finding for finding in found if finding.severity == "stop")
    stop_if_needed(health)


def check_before_any_row(
    health: HealthReport,
    ready: ReadyModel,
    settings: TrainingSettings,
    *,
    rows: TokenTable,
    plan: StepPlan,
    tokens: Path,
) -> None:
    """Check rows, tokenizer and what is trained, before kernels are tried and rows measured.

    Args:
        health: receives facts and findings.
        ready: the model as it will be trained.
        settings: of the training.
        rows: that are trained on.
        plan: which of them form each step.
        tokens: folder of all splits.

    Raises:
        UserError: a finding says stop.
    """
    model, tokenizer, task = ready.model, ready.tokenizer, settings.task
    with health.timing():
        facts, found = check_table(rows, model, tokenizer, task=task)
        health.facts.update(facts)
        if plan.total_steps:
            found += check_step_supervision(rows, plan.rows_of_step(0))
        found += _check_held_out(tokens, model, tokenizer, task)
        about_tokenizer = check_tokenizer(tokenizer, model)
        # Rows that hold the added tokens show the same fault, and name them.
        if any(finding.code == "id-beyond-vocabulary" for finding in found):
            about_tokenizer = [known for known in about_tokenizer if known.code != "more-tokens-than-embeddings"]
        health.add_new([*about_tokenizer, *found, *check_trained_parts(model, settings)])
    stop_if_needed(health)


def _check_held_out(tokens: Path, model: Any, tokenizer: Any, task: str) -> Iterator[Finding]:
    """Check the rows that are measured on while training and after it, as far as there are any."""
    for split in ("validation", "test"):
        if split_path(tokens, split).exists():
            yield from check_held_out_rows(open_split(tokens, split), model, tokenizer, task=task, split=split)


@listing
def check_trained_parts(model: Any, settings: TrainingSettings) -> Iterator[Finding]:
    """Check that all that should be trained asks for a gradient.

    Args:
        model: as it will be trained.
        settings: of the training: method, ``train.freeze``, adapter targets.
    """
    # Asked of the model as it is, not of what was done to it: hooks and custom classes change it unseen.
    trained = sum(1 for parameter in model.parameters() if parameter.requires_grad)
    if not trained:
        other = "Look at what changes the model after it is loaded, or while it is."
        yield from check_freeze(model, settings) or [_describe_nothing_trained(model, "Everything is frozen.", other)]
    elif frozen := _unasked_frozen(model, settings):
        # Ids, since the same parameter may stand under two names.
        where = _describe_layers(model, {id(parameter) for _, parameter in frozen})
        names = [name for name, _ in frozen]
        yield Finding(
            code="layers-frozen",
            measured=f"{len(frozen)} of {trained + len(frozen)} parameters that should be trained "
            f"{'is' if len(frozen) == 1 else 'are'} frozen{where}: {name_first(names, SHOWN_NAMES)}",
            expected="all of them trained: train.freeze does not name them"
            if settings.train.method == "full"
            else "every adapter trained",
            cause="Something froze them after the model was loaded, or while it was.",
            change="Freeze through train.freeze alone, which also tells the planner; look at code that sets "
            "requires_grad.",
        )
    elif settings.train.method != "full":
        yield from _check_reach(model, settings.train.lora.target_modules)


@listing
def check_freeze(model: Any, settings: TrainingSettings) -> Iterator[Finding]:
    """Check that ``train.freeze`` leaves something to train.

    Args:
        model: with or without weights.
        settings: of the training: method and ``train.freeze``.
    """
    if settings.train.method != "full" or not settings.train.freeze:
        return
    asked = find_frozen_parameters(model, settings.train.freeze)
    if all(id(parameter) in asked for parameter in model.parameters()):
        cause = f"train.freeze = {list(settings.train.freeze)} freezes the whole model."
        yield _describe_nothing_trained(model, cause, "Name fewer modules in train.freeze.")


def _describe_nothing_trained(model: Any, cause: str, change: str) -> Finding:
    return Finding(
        code="nothing-has-gradient",
        measured=f"none of the model's {sum(1 for _ in model.parameters())} parameters is trained",
        expected="some, as train.method says",
        cause=cause,
        change=change,
        is_fatal=True,
    )


def _unasked_frozen(model: Any, settings: TrainingSettings) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters that are frozen although nobody asked for it."""
    still = [(name, parameter) for name, parameter in model.named_parameters() if not parameter.requires_grad]
    if settings.train.method != "full":
        # MiCA trains the first matrix of each pair alone.
        kinds = (".lora_", ".modules_to_save.") if settings.train.lora.init != "mica" else (".lora_A.",)
        return [(name, parameter) for name, parameter in still if any(kind in name for kind in kinds)]
    asked = find_frozen_parameters(model, settings.train.freeze or ())
    still = [(name, parameter) for name, parameter in still if id(parameter) not in asked]
    if not still:
        return []
    try:
        skeleton = build_skeleton_of(settings)
    except UserError:
        return []  # a class that cannot be built without weights does not say which of them it never trains
    # Parameters that the model's class never trains, such as positions that are computed once.
    by_design = {name for name, parameter in skeleton.named_parameters() if not parameter.requires_grad}
    return [(name, parameter) for name, parameter in still if name not in by_design]


def _check_reach(model: Any, targets: Any) -> Iterator[Finding]:
    """Find layers that have no adapter where others of the same list have one."""
    if isinstance(targets, list) and any(re.search(r"(^|\.)\d+\.", target) for target in targets):
        return  # targets that name layers by their numbers are meant so
    for name, layers in layer_lists(model):
        reached = [any(parameter.requires_grad for parameter in layer.parameters()) for layer in layers]
        missing = [str(index) for index, is_reached in enumerate(reached) if not is_reached]
        # All or none is a choice; some is what targets with one architecture's names do to layers of two kinds.
        if missing and len(missing) < len(layers):
            yield Finding(
                code="layers-frozen",
                severity="warn",
                measured=f"{len(missing)} of the {len(layers)} layers of {name} "
                f"{'has' if len(missing) == 1 else 'have'} no adapter: {name_first(missing, SHOWN_NAMES)}",
                expected="an adapter in every layer, or targets that name layers by their numbers",
                cause="The layers are not alike, and these have no module with the names in train.lora.target_modules.",
                change="Set train.lora.target_modules: all-linear, or add the names that these layers use.",
            )
            return


def _describe_layers(model: Any, frozen: set[int]) -> str:
    """Describe which layers are frozen as a whole, as the end of a clause; empty where none is."""
    for name, layers in layer_lists(model):
        # As a whole: none is trained, and one at least is among those that should be.
        whole = [
            str(index)
            for index, layer in enumerate(layers)
            if not any(parameter.requires_grad for parameter in layer.parameters())
            and any(id(parameter) in frozen for parameter in layer.parameters())
        ]
        if whole and len(layers) > 1:
            shown = f"{noun_for(len(whole), 'layer')} {name_first(whole, SHOWN_NAMES)}"
            return f", among them {shown} of {name} ({len(whole)} of {len(layers)})"
    return ""
