"""What a run is, so that only a run like it goes on from its checkpoints; and what no run may be."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lm_tuning.errors import UserError
from lm_tuning.parameters.train import QloraParameters
from lm_tuning.parameters.written import write_value
from lm_tuning.training.checkpoints import format as checkpoints
from lm_tuning.training.checkpoints.integrity import check_best, list_passed_over, require_latest
from lm_tuning.wording import count_of

if TYPE_CHECKING:
    from lm_tuning.batching.step_plan import StepPlan
    from lm_tuning.text.store.table import TokenTable
    from lm_tuning.training.settings import TrainingPaths, TrainingSettings

logger = logging.getLogger(__name__)

# In this order, so that the digest of the plan is looked at last: whatever else differs changes the order of rows too.
_EXPLANATIONS = {
    "tokens_key": "another token set (other rows, seed, tokenizer, data, split or tokenize parameters)",
    "base_digest": "another base model",
    "effective_batch": "another effective batch",
    "method": "another method or adapter",
    "weights": "other weights of data.path",
    "plan_digest": "another order of rows (seed or data)",
}


def identify_run(settings: TrainingSettings, plan: StepPlan) -> checkpoints.RunIdentity:
    """Describe what a checkpoint must belong to for a resume: data, base model, steps, method.

    Args:
        settings: of the training.
        plan: which rows form each step.
    """
    train = settings.train
    rows, tokens = train.effective_batch_rows, train.effective_batch_tokens
    details = train.lora.model_dump() if train.method != "full" else {}
    if train.method == "qlora":
        details |= train.qlora.model_dump()
    # Sorted by name, so that the order of keys in YAML is no difference.
    shape = ", ".join(f"{key}={details[key]}" for key in sorted(details))
    return checkpoints.RunIdentity(
        tokens_key=settings.tokens_key,
        base_digest=settings.base["digest"],
        plan_digest=plan.digest(),
        effective_batch=f"{rows} rows" if rows is not None else f"at most {tokens} tokens",
        method=f"{train.method} {shape}".strip(),
        **({} if plan.mix.is_plain else {"weights": ", ".join(f"{source['weight']:g}" for source in settings.sources)}),
    )


def find_checkpoint(
    paths: TrainingPaths, settings: TrainingSettings, identity: checkpoints.RunIdentity, plan: StepPlan
) -> checkpoints.Checkpoint | None:
    """Return the checkpoint to go on from, or ``None`` for a run that starts from the beginning.

    Raises:
        UserError: there is none, it is damaged, it belongs to another run, or it lies beyond the end of this one.
    """
    if not settings.train.resume:
        return None
    checkpoint = require_latest(paths.checkpoints)
    check_resumable(checkpoint, identity, settings.train.freeze)
    if settings.train.load_best:
        check_best(checkpoint, settings.train.best_metric)
    if checkpoint.step > plan.total_steps:
        raise UserError(
            f"train.resume: {checkpoint.path} is at step {checkpoint.step}, beyond the end of this run "
            f"(step {plan.total_steps}). Raise train.max_steps or train.num_epochs."
        )
    for folder in list_passed_over(checkpoint):
        logger.warning(
            "%s is half written or half deleted: it has no %s, and is passed over.", folder, checkpoints.MARKER
        )
    return checkpoint


def check_resumable(
    checkpoint: checkpoints.Checkpoint, identity: checkpoints.RunIdentity, freeze: list[str] | None
) -> None:
    """Refuse to go on from a checkpoint of other data, model, steps or trained parts.

    Args:
        checkpoint: to go on from.
        identity: of this run.
        freeze: ``train.freeze`` of this run.

    Raises:
        UserError: naming every difference with both values.
    """
    differences = _name_differences(identity, checkpoint.facts["identity"])
    before = checkpoint.facts.get("freeze", freeze)
    # The optimizer's state goes by position: with as many other weights it would be taken for theirs.
    if sorted(before or []) != sorted(freeze or []):
        differences.append(f"other frozen parts: train.freeze: {write_value(before)} -> {write_value(freeze)}")
    if differences:
        raise UserError(
            [
                f"train.resume: {checkpoint.path} does not belong to this run.",
                *(f"  - {difference}" for difference in differences),
                "Set these back to go on from it, or train.resume=false to start a new run (nothing is deleted). Which "
                "parameters have changed since stands in the run's parameters in MLflow.",
            ]
        )


def _name_differences(identity: checkpoints.RunIdentity, stored: checkpoints.IdentityRecord) -> list[str]:
    """Name every part in which a stored identity differs, with the parameters behind it and both values."""
    found: list[str] = []
    for name, meaning in _EXPLANATIONS.items():
        old, new = stored.get(name, getattr(checkpoints.RunIdentity, name, None)), getattr(identity, name)
        if old != new and not (name == "plan_digest" and found):
            changes = ", ".join(_name_changes(_parameters_in(str(old)), _parameters_in(new)))
            found.append(f"{meaning}: {changes or f'the checkpoint has {old!r}, this run {new!r}'}")
    return found


def _parameters_in(part: str) -> dict[str, str]:
    """Return the parameters that an effective batch or a method was written from, by key; none of anything else."""
    size = re.fullmatch(r"(?:at most )?(\d+) (rows|tokens)", part)
    if size:
        return {f"train.effective_batch_{size[2]}": size[1]}
    shape = re.fullmatch(r"(full|lora|qlora)(?: (\w+=.+))?", part)
    if shape is None:
        return {}
    values = {"train.method": shape[1]}
    # Lists hold commas too, but no name and equals sign behind them.
    for detail in re.split(r", (?=\w+=)", shape[2]) if shape[2] else ():
        key, _, value = detail.partition("=")
        group = "qlora" if key in QloraParameters.model_fields else "lora"
        values[f"train.{group}.{key}"] = {"True": "true", "False": "false"}.get(value, value)
    return values


def _name_changes(old: dict[str, str], new: dict[str, str]) -> Iterator[str]:
    """Name the parameters that differ, as ``key: old -> new``; nothing where one side has none to compare."""
    if not old or not new:
        return
    # Another method reads other groups, so what only one of them reads has not changed.
    is_same = old.get("train.method") == new.get("train.method")
    for key in old | new:
        before, now = old.get(key, "null"), new.get(key, "null")
        if before != now and (is_same or (key in old and key in new)):
            yield f"{key}: {before} -> {now}"


def check_schedule(settings: TrainingSettings, plan: StepPlan, validation_rows: TokenTable) -> None:
    """Refuse settings that only show as useless once the number of steps is known."""
    problems = []
    warmup_steps = settings.train.count_warmup_steps(plan.total_steps)
    if warmup_steps and warmup_steps >= plan.total_steps:
        problems.append(
            f"train.trainer.warmup_steps={settings.train.trainer['warmup_steps']} means "
            f"{count_of(warmup_steps, 'warm-up step')}, but "
            f"the run has {count_of(plan.total_steps, 'step')} in total: the learning rate would never reach its peak."
        )
    if settings.train.load_best and len(validation_rows) == 0:
        problems.append("train.load_best needs validation rows, but the validation split is empty (split.validation).")
    if problems:
        raise UserError(problems)
