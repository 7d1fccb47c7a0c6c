"""What a run is, so that only a run like it goes on from its checkpoints; and what no run may be."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lm_tuning.errors import UserError
from lm_tuning.training.checkpoints import format as checkpoints
from lm_tuning.training.checkpoints.integrity import check_best, list_passed_over, require_latest
from lm_tuning.wording import count_of

if TYPE_CHECKING:
    from lm_tuning.batching.step_plan import StepPlan
    from lm_tuning.text.store.table import TokenTable
    from lm_tuning.training.settings import TrainingPaths, TrainingSettings

logger = logging.getLogger(__name__)


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
    checkpoints.check_resumable(checkpoint, identity, settings.train.freeze)
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
