"""Go on from a checkpoint: find it, refuse another run's, and restore all of it or say which file does not give it."""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from lm_tuning.errors import UserError
from lm_tuning.parameters.base import write_value
from lm_tuning.parameters.train import QloraParameters
from lm_tuning.runtime.memory_errors import is_out_of_memory
from lm_tuning.training.checkpoints import format as checkpoints
from lm_tuning.training.checkpoints.integrity import (
    ADAPTER_WEIGHTS,
    TRAINER_STATE,
    WEIGHTS,
    check_best,
    list_passed_over,
    require_latest,
)
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

# What PyTorch, safetensors, peft and transformers raise for a file whose content is not what they wrote.
_DAMAGE = (
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    SafetensorError,
    pickle.UnpicklingError,
)

# Entries of an optimizer's groups that are set and not learned: a resume takes them from its parameters. All others
# stay as stored: some optimizers count their steps there.
_SETTINGS = frozenset(
    {"alpha", "beta1", "betas", "centered", "clip_threshold", "dampening", "decay_rate", "eps", "foreach", "fused"}
    | {"lr_decay", "momentum", "nesterov", "weight_decay"}
)

_FIX = (
    "Copy its files again if they are kept elsewhere, or move that folder out of its run's folder and give the same "
    "command with train.resume=true, which goes on from the checkpoint before it, if there is one. train.resume=false "
    "starts a new run (nothing is deleted)."
)


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


@contextmanager
def naming_file(folder: str | Path, name: str) -> Iterator[None]:
    """Turn whatever a library says of a file that it cannot use into a message with the file's name.

    Args:
        folder: of the checkpoint.
        name: of the file that the block reads.

    Raises:
        UserError: the block fails, and not for lack of memory.
    """
    try:
        yield
    except UserError:
        raise
    except _DAMAGE as error:
        if is_out_of_memory(error):
            raise
        # Libraries write pages; their first line says what the file lacks.
        said = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise _refuse(folder, name, f"cannot be used ({said:.200})") from error


def _refuse(folder: str | Path, name: str, problem: str, fix: str = _FIX) -> UserError:
    return UserError([f"The checkpoint {folder} cannot be used.", f"  - {name} {problem}.", fix])


def _set_back(key: str) -> str:
    return f"Set {key} back to what the run began with, or train.resume=false to start a new run (nothing is deleted)."


class RestoresState:
    """Reading of checkpoints by a transformers Trainer; stands before ``Trainer`` among the bases.

    The Trainer only warns of weights that a file lacks and takes whatever state an optimizer file holds.
    """

    args: Any
    accelerator: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    _restored_from: str | Path = ""

    def check_trainer_state(self, checkpoint: Path) -> None:
        """Read the Trainer's own notes, which :meth:`train` reads without a word on where.

        Raises:
            UserError: this version of transformers does not know them.
        """
        from transformers import TrainerState

        with naming_file(checkpoint, TRAINER_STATE):
            TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the trained weights, all of them."""
        name = ADAPTER_WEIGHTS if hasattr(self.model, "peft_config") else WEIGHTS
        with naming_file(resume_from_checkpoint, name):
            if hasattr(self.model, "peft_config"):
                _check_adapter_names(self.model, Path(resume_from_checkpoint))
            self._restored_from = resume_from_checkpoint
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Refuse weights of another model, where the Trainer warns and trains on with what it has."""
        held, never_saved = self.model.state_dict(), set(self.model._keys_to_ignore_on_save or ())
        missing = set(load_result.missing_keys)
        if missing and missing == never_saved:
            self.model.tie_weights()  # as the Trainer does
        missing -= never_saved
        loaded = {held[name].data_ptr() for name in held.keys() - missing}
        missing = {name for name in missing if held[name].data_ptr() not in loaded}  # tied ones are stored once
        if missing:
            raise _refuse(
                self._restored_from, WEIGHTS, f"lacks {count_of(len(missing), 'tensor')}, first {min(missing)}"
            )
        if load_result.unexpected_keys:
            others = load_result.unexpected_keys
            problem = f"has {count_of(len(others), 'tensor')} of another model, first {min(others)}"
            raise _refuse(self._restored_from, WEIGHTS, problem)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore both, then let the present learning rate, number of steps and settings of the optimizer hold.

        The stored scheduler would bring back the old peak rate, and the rate of a finished schedule is 0. The stored
        optimizer would bring back its weight decay and the like.
        """
        if checkpoint is None:
            return
        # The Trainer reads both files in one call; read alone first, each is named by what it is.
        with naming_file(checkpoint, "scheduler.pt"):
            torch.load(Path(checkpoint) / "scheduler.pt", map_location="cpu", weights_only=True)
        names = set(self.optimizer.param_groups[0]) - {"initial_lr"}  # which the schedule notes there
        present = [{name: group[name] for name in _SETTINGS & group.keys()} for group in self.optimizer.param_groups]
        with naming_file(checkpoint, "optimizer.pt"):
            try:
                super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            except ValueError as error:
                if "parameter group" not in str(error):
                    raise
                # Only checkpoints of earlier versions come here: later ones say what they leave frozen.
                problem = "is the state of other weights than are trained now"
                raise _refuse(checkpoint, "optimizer.pt", problem, _set_back("train.freeze")) from error
        stored = set(self.optimizer.param_groups[0])
        lacking, foreign = sorted(names - stored), sorted((stored - names) & _SETTINGS)
        if lacking or foreign:
            difference = f"without {', '.join(lacking)}" if lacking else f"with {', '.join(foreign)}"
            problem = f"is the state of another optimizer, {difference}"
            raise _refuse(checkpoint, "optimizer.pt", problem, _set_back("train.trainer.optim"))
        for group, settings in zip(self.optimizer.param_groups, present, strict=True):
            self._take_settings(checkpoint, group, settings)
        scheduler = self.lr_scheduler
        if not isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
            return
        # LambdaLR alone keeps a base rate beside its factors, so that a new peak can be put under an old position.
        scheduler.base_lrs = [self.args.learning_rate for _ in scheduler.base_lrs]
        rates = [
            base * factor(scheduler.last_epoch)
            for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"], group["initial_lr"] = rate, self.args.learning_rate
        # What the schedule reports as the rate of now, until it makes its next step.
        scheduler._last_lr = rates

    def _take_settings(self, checkpoint: str, group: dict[str, Any], settings: dict[str, Any]) -> None:
        """Let the present settings hold in a group of the restored optimizer."""
        for name, state in (("momentum", "momentum"), ("centered", "mean of the gradients")):
            # SGD begins a missing momentum with the next gradient; RMSprop, which alone has both, looks its state up.
            if "alpha" in group and settings.get(name) and not group[name]:
                problem = f"has no {state}, and train.trainer.optim_args asks for {name}={settings[name]} now"
                raise _refuse(checkpoint, "optimizer.pt", problem, _set_back("train.trainer.optim_args"))
        if group.get("fused") != settings.get("fused"):
            # A fused kernel counts its steps beside each parameter, the others on the host.
            for parameter in group["params"]:
                state_of = self.optimizer.state.get(parameter, {})
                if isinstance(state_of.get("step"), torch.Tensor):
                    state_of["step"] = state_of["step"].to(parameter.device if settings.get("fused") else "cpu")
        group.update(settings)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Restore float16's gradient scaler, where this run and the checkpoint both have one: precision may change."""
        if checkpoint is None or self.accelerator.scaler is None:
            return
        if not (Path(checkpoint) / "scaler.pt").is_file():
            logger.warning(
                "%s has no scaler.pt, which only float16 writes: the scale of the gradients starts again.", checkpoint
            )
            return
        with naming_file(checkpoint, "scaler.pt"):
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random states."""
        if checkpoint is not None:
            with naming_file(checkpoint, "rng_state.pth"):
                super()._load_rng_state(checkpoint)  # type: ignore[misc]


def _check_adapter_names(model: Any, folder: Path) -> None:
    """Refuse an adapter that lacks a part of the present one; peft would leave that part fresh."""
    from peft import get_peft_model_state_dict

    # Names as they are stored, without that of the adapter.
    expected = get_peft_model_state_dict(model, save_embedding_layers=False).keys()
    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as opened:
        lacking = sorted(expected - set(opened.keys()))
    if lacking:
        raise _refuse(folder, ADAPTER_WEIGHTS, f"lacks {count_of(len(lacking), 'tensor')}, first {lacking[0]}")
