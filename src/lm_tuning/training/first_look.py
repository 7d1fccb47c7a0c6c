"""Look at the first step before it is made: what loss is due, what is trained, what the model will see."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from lm_tuning.training.batches import StepBatch, StepDataset
from lm_tuning.training.health import (
    DROPOUT_TOLERANCE,
    Finding,
    HealthReport,
    Severity,
    check_first_step,
    check_layout,
    has_dropout,
    mark_supervised,
    measure_plain_loss,
    measure_training_path,
    stop_if_needed,
)
from lm_tuning.training.losses import keeps_logits
from lm_tuning.training.precision_context import autocast

logger = logging.getLogger(__name__)

WORSE_FACTOR = 1.1
"""A base model is suspicious when its loss is this many times that of an untrained head."""


@dataclass(frozen=True)
class FirstLossDue:
    """What the first step's loss must be, and what is said if it is something else.

    Attributes:
        nats_per_token: measured before the step by a plain forward pass, in nats per supervised token.
        tolerance: allowed relative difference.
        severity: of a difference whose cause is not the layout of the micro-batches.
        batching: how the micro-batches are laid out.
        select_logits: see :func:`lm_tuning.training.losses.sum_nats`.
        device: ``cpu`` or ``cuda``.
        compute_dtype: type of the forward pass.
        weights_dtype: type of the weights.
    """

    nats_per_token: float
    tolerance: float
    severity: Severity
    batching: str
    select_logits: bool
    device: str
    compute_dtype: str
    weights_dtype: str

    def measure_layout(self, health: HealthReport, model: Any, batch: StepBatch) -> bool:
        """Measure the step again, through its micro-batches but without dropout; add a finding if they change it.

        Returns:
            Whether rows alone and rows in micro-batches agree.
        """
        on_gpu = [torch.cuda.current_device()] if self.device == "cuda" else []
        with torch.random.fork_rng(devices=on_gpu), autocast(self.device, self.compute_dtype, self.weights_dtype):
            path = measure_training_path(model, batch, device=self.device, select_logits=self.select_logits)
        health.facts["first_step_through_micro_batches_nats_per_token"] = path
        tolerance = max(self.tolerance, 0.02)
        finding = check_layout(self.nats_per_token, path, tolerance=tolerance, batching=self.batching)
        if finding is not None:
            health.add(finding)
        return finding is None

    def check(self, health: HealthReport, model: Any, batch: StepBatch, logged: float) -> None:
        """Compare what step 1 logs with what is due, after its backward pass and before the weights change.

        Args:
            health: receives the finding.
            model: with the weights that ``logged`` was computed with.
            batch: the first step.
            logged: its loss, in nats per supervised token.

        Raises:
            UserError: they differ, and the finding says stop.
        """
        began = time.perf_counter()
        health.facts["first_step_logged_nats_per_token"] = logged
        finding = check_first_step(
            self.nats_per_token,
            logged,
            tolerance=self.tolerance,
            num_micro_batches=len(batch.micro_batches),
            severity=self.severity,
        )
        if finding is None:
            logger.info("Step 1 logged %.4f nats per token, as measured before it (%.4f).", logged, self.nats_per_token)
        elif self.measure_layout(health, model, batch):
            health.add(finding)
        health.seconds += time.perf_counter() - began
        stop_if_needed(health)


def look_before_training(
    health: HealthReport,
    model: Any,
    tokenizer: Any,
    steps: StepDataset,
    *,
    device: str,
    compute_dtype: str,
    weights_dtype: str,
    tolerance: float,
    severity: Severity,
) -> FirstLossDue:
    """Fill the health report and say what is due, without touching the run's random state.

    Args:
        health: receives facts and findings.
        model: on its device, as it will be trained.
        tokenizer: the model's.
        steps: the run's steps.
        device: ``cpu`` or ``cuda``.
        compute_dtype: type of the forward pass.
        weights_dtype: type of the weights.
        tolerance: allowed relative difference of losses.
        severity: of a first loss that is off.

    Returns:
        The first step's loss by a plain forward pass, to compare the first step with.

    Raises:
        UserError: the micro-batches change the loss, so training would be wrong.
    """
    began = time.perf_counter()
    batch = steps[0]
    rows = [steps.table[int(row)] for row in steps.plan.rows_of_step(0)]
    on_gpu = [torch.cuda.current_device()] if device == "cuda" else []
    model.to(device)
    with torch.random.fork_rng(devices=on_gpu), autocast(device, compute_dtype, weights_dtype):
        plain = measure_plain_loss(model, rows, device=device)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    dropout = has_dropout(model)
    due = FirstLossDue(
        nats_per_token=plain,
        tolerance=max(tolerance, DROPOUT_TOLERANCE) if dropout else tolerance,
        severity=severity,
        batching=steps.batching,
        select_logits=keeps_logits(model),
        device=device,
        compute_dtype=compute_dtype,
        weights_dtype=weights_dtype,
    )
    pad_is_eos = tokenizer.pad_token_id == tokenizer.eos_token_id
    ends = sum(1 for row in rows if row.spans and _ends_a_turn(tokenizer, row))
    health.facts.update(
        {
            "untrained_head_nats_per_token": math.log(vocabulary),
            "first_step_measured_nats_per_token": plain,
            "first_loss_tolerance": due.tolerance,
            "first_step_rows": len(rows),
            "first_step_tokens": batch.num_tokens,
            "first_step_supervised_tokens": batch.num_supervised,
            "first_step_supervised_fraction": batch.num_supervised / batch.num_tokens,
            "first_step_padding_fraction": 1 - batch.num_tokens / batch.num_slots,
            "first_step_micro_batches": len(batch.micro_batches),
            "pad_token": tokenizer.pad_token,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token": tokenizer.eos_token,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token": tokenizer.bos_token,
            "pad_is_eos": pad_is_eos,
            "rows_that_teach_the_end": ends,
            "attention": _attention_path(model, steps),
            "first_example": mark_supervised(tokenizer, rows[0]),
        }
    )
    if steps.plan.num_rows and ends == 0:
        health.add(
            Finding(
                code="end-not-taught",
                severity="warn",
                measured=f"none of the first {len(rows)} rows has a supervised end token",
                expected="every answer ends with one",
                cause="The model will not learn to stop.",
                change="Look at tokenize.truncation and at the chat template.",
            )
        )
    # Dropout makes the step itself a vague witness of its layout; without it, the step says as much as this would.
    if (not dropout or due.measure_layout(health, model, batch)) and plain > WORSE_FACTOR * math.log(vocabulary):
        health.add(
            Finding(
                code="worse-than-untrained",
                severity="warn",
                measured=f"the base model has {plain:.3f} nats per token on the first rows",
                expected=f"less than the {math.log(vocabulary):.3f} of an untrained head (log of {vocabulary} tokens)",
                cause="The text is not what the model was trained on, or tokenizer and model do not belong together.",
                change="Look at model.name_or_path and at the first example in the health report.",
            )
        )
    health.seconds += time.perf_counter() - began
    _say(health)
    stop_if_needed(health)
    return due


def _ends_a_turn(tokenizer: Any, row: Any) -> bool:
    """Say whether the last supervised token is a special one (or the newline after it), as an end of turn is."""
    start, end = row.spans[-1]
    tail = row.input_ids[max(start, end - 2) : end].tolist()
    special = set(tokenizer.all_special_ids) | {
        index for index, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    return any(token in special for token in tail)


def _attention_path(model: Any, steps: StepDataset) -> str:
    implementation = getattr(model.config, "_attn_implementation", "unknown")
    if steps.batching == "packed":
        return f"{implementation}, packed rows kept apart by an explicit mask (no flash kernel)"
    return f"{implementation}, right-padded without a mask (flash kernel possible)"


def _say(health: HealthReport) -> None:
    facts = health.facts
    logger.info(
        "Before step 1: measured loss %.4f nats/token (an untrained head would have %.2f); %d rows, %d tokens, "
        "%d supervised (%.1f %%), padding %.1f %%, %d micro-batches; PAD %r (%s EOS %r); attention: %s",
        facts["first_step_measured_nats_per_token"],
        facts["untrained_head_nats_per_token"],
        facts["first_step_rows"],
        facts["first_step_tokens"],
        facts["first_step_supervised_tokens"],
        100 * facts["first_step_supervised_fraction"],
        100 * facts["first_step_padding_fraction"],
        facts["first_step_micro_batches"],
        facts["pad_token"],
        "equals" if facts["pad_is_eos"] else "differs from",
        facts["eos_token"],
        facts["attention"],
    )
    logger.info("First example, supervised part between ⟦ and ⟧:\n%s", facts["first_example"])
