"""The loss that the first step must have: measured before it by a plain forward pass, compared when it is made."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lm_tuning.batching.batch import StepBatch
from lm_tuning.batching.losses import LossShape
from lm_tuning.batching.step_loader import StepDataset
from lm_tuning.findings import Severity
from lm_tuning.reporting.text import write_percent
from lm_tuning.training.health.first_gradient import ExpectedGradient, check_first_gradient, norm_of
from lm_tuning.training.health.plain_loss import Movement, measure_training_path, measuring
from lm_tuning.training.health.records import Finding
from lm_tuning.training.health.report import HealthReport, stop_if_needed

if TYPE_CHECKING:
    from lm_tuning.training.settings import TrainingSettings

logger = logging.getLogger(__name__)

# Difference of two losses in 16 bits that says nothing, in nats per token; it matters where the loss is near 0.
ROUNDING_NATS = 0.01

# Names in a config for dropout that models apply without a module of its own.
FUNCTIONAL_DROPOUT = ("attention_dropout", "attn_pdrop", "dropout", "activation_dropout", "hidden_dropout")

# Allowed relative difference of the first loss when dropout draws random zeros in training.
DROPOUT_TOLERANCE = 0.25


@dataclass(frozen=True)
class ExpectedFirstLoss:
    """What the first step's loss must be, and what is said if it is something else.

    Attributes:
        steps: of the run; their task says which logits carry loss.
        settings: of the training; they say how grave a difference is that the micro-batches do not explain.
        shape: label smoothing and class weights.
        nats: measured before the step by a plain forward pass, in nats per supervised token, or per row.
        tolerance: allowed relative difference.
        fresh_head_classes: classes of a new classification head; ``None`` for other models.
        noise: what draws at random in training and not in the measurement, such as dropout; empty for nothing.
        gradient: the gradient norm that is expected; ``None`` where it was not measured.
        movement: rows whose loss is measured again later; ``None`` for none.
    """

    steps: StepDataset
    settings: TrainingSettings
    shape: LossShape
    nats: float
    tolerance: float
    fresh_head_classes: int | None
    noise: tuple[str, ...] = ()
    gradient: ExpectedGradient | None = None
    movement: Movement | None = None

    def check_gradient(self, health: HealthReport, batch: StepBatch, *, scale: float) -> None:
        """Compare the gradient of step 1 with what is expected, after its backward pass and before the weights change.

        Args:
            health: receives the finding.
            batch: the first step.
            scale: by which float16's scaler has multiplied the gradients.

        Raises:
            UserError: they differ, and the finding says stop.
        """
        if self.gradient is None or health.has("first-loss-off"):
            return  # what scales a loss scales its gradient too
        with health.timing():
            norm = health.facts["last_layer_gradient_norm"] = norm_of(self.gradient.parameters) / scale
            finding = check_first_gradient(self.gradient, norm, num_micro_batches=len(batch.micro_batches))
        if finding is not None:
            health.add(finding)
            stop_if_needed(health)

    def measure_layout(self, health: HealthReport, model: Any, batch: StepBatch) -> bool:
        """Measure the step again, through its micro-batches but without dropout; add a finding if they change it.

        Returns:
            Whether rows alone and rows in micro-batches agree.
        """
        task = self.steps.task
        with measuring(self.settings):
            path = measure_training_path(task, model, batch, shape=self.shape, device=self.settings.device)
        health.facts[f"first_step_through_micro_batches_nats_per_{task.unit}"] = path
        if not math.isfinite(path):
            return True  # that is no matter of how rows lie beside each other
        # At 2 % at least: packed rows run through other kernels than rows alone, in 16 bits.
        finding = check_layout(self.nats, path, tolerance=max(self.tolerance, 0.02), batching=self.steps.batching)
        if finding is not None:
            health.add(finding)
        return finding is None

    def check(self, health: HealthReport, model: Any, batch: StepBatch, logged: float) -> None:
        """Compare what step 1 logs with what is expected, after its backward pass and before the weights change.

        Args:
            health: receives the finding.
            model: with the weights that ``logged`` was computed with.
            batch: the first step.
            logged: its loss, in nats per supervised token, or per row.

        Raises:
            UserError: they differ, and the finding says stop.
        """
        unit = self.steps.task.unit
        health.facts[f"first_step_logged_nats_per_{unit}"] = logged
        if not math.isfinite(self.nats):
            return  # said before the step
        with health.timing():
            finding = check_first_step(
                self.nats,
                logged,
                tolerance=self.tolerance,
                num_micro_batches=len(batch.micro_batches),
                severity=self.settings.train.health.on_mismatch,
                unit=unit,
                fresh_head_classes=self.fresh_head_classes,
            )
            if finding is None:
                logger.info("%s", self.describe_agreement(logged))
            elif self.measure_layout(health, model, batch):
                health.add(finding)
        stop_if_needed(health)

    def describe_agreement(self, logged: float) -> str:
        """Describe that step 1 logged what is expected, and of two different numbers why they count as equal.

        Args:
            logged: loss of step 1 that passed the check, in nats per supervised token, or per row.
        """
        said = f"Step 1 logged {logged:.4f} nats per {self.steps.task.unit}"
        if f"{logged:.4f}" == f"{self.nats:.4f}":
            return f"{said}, as measured before it ({self.nats:.4f})."
        difference = abs(logged - self.nats)
        # A user's own tolerance holds beside noise too, where it is the larger one.
        if self.noise and self.tolerance <= DROPOUT_TOLERANCE:
            allowed = f"the {100 * self.tolerance:.3g}% allowed for {' and '.join(self.noise)}"
        else:
            allowed = f"train.health.tolerance_fraction = {self.tolerance:g}"
        if difference > self.tolerance * self.nats:
            allowed += f" and {ROUNDING_NATS:g} nats for rounding"
        share = f" ({write_percent(difference / self.nats)})" if self.nats > 0 else ""
        return f"{said}, {self.nats:.4f} was measured before it. The difference{share} is within {allowed}."


def has_dropout(model: torch.nn.Module) -> bool:
    """Return whether training draws random zeros, so that its loss differs from a plain forward pass."""
    modules = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
    config = getattr(model, "config", None)
    shares = [getattr(config, name, None) for name in FUNCTIONAL_DROPOUT]
    return modules or any(isinstance(share, float) and share > 0 for share in shares)


def check_layout(plain: float, through_batches: float, *, tolerance: float, batching: str) -> Finding | None:
    """Compare rows alone with the same rows in micro-batches; they must agree."""
    if math.isclose(plain, through_batches, rel_tol=tolerance, abs_tol=ROUNDING_NATS):
        return None
    packed = batching == "packed"
    return Finding(
        code="layout-changes-loss",
        measured=f"the first step's rows have {through_batches:.4f} nats per token in {batching} micro-batches",
        expected=f"{plain:.4f}, as measured row by row",
        cause="Packed rows see each other with this model or attention."
        if packed
        else "The model does not ignore padding on the right.",
        change="Set train.batching=padded." if packed else "Set model.attention=sdpa or eager.",
    )


def check_first_step(
    measured: float,
    logged: float,
    *,
    tolerance: float,
    num_micro_batches: int,
    num_ranks: int = 1,
    severity: Severity = "stop",
    unit: str = "token",
    fresh_head_classes: int | None = None,
) -> Finding | None:
    """Compare the logged loss of step 1 with the loss measured before it, and name the cause if they differ.

    Args:
        measured: nats per supervised token (per row for a classifier) by a plain forward pass.
        logged: what the first step reported.
        tolerance: allowed relative difference.
        num_micro_batches: micro-batches of the step.
        num_ranks: processes that train together.
        severity: of the finding.
        unit: what a loss is divided by, ``token`` or ``row``.
        fresh_head_classes: classes of a head that is new, whose loss must be near their logarithm; else ``None``.
    """
    if math.isfinite(logged) and abs(logged - measured) <= tolerance * measured + ROUNDING_NATS:
        return None
    ratio = logged / measured if measured else math.inf
    if not math.isfinite(logged):
        cause = "The loss is not a number: an overflow in the forward pass or in the loss."
        change = "Set train.precision=bfloat16 or float32."
    elif (explained := _explain_factor(ratio, num_micro_batches, num_ranks, max(tolerance, 0.02), unit)) is not None:
        cause = f"The loss is off by a factor of {ratio:.3g}, equal to {explained}"
        change = f"Whatever changed the loss or the training step must divide by the step's {unit} count."
    else:
        cause = "The cause is not one of the known ones."
        change = "Compare train.batching=padded and train.precision=float32."
    chance = (
        ""
        if fresh_head_classes is None
        else f", and log({fresh_head_classes}) = {math.log(fresh_head_classes):.2f} of a new head"
    )
    return Finding(
        code="first-loss-off",
        severity=severity,
        measured=f"step 1 logged {logged:.4f} nats per {unit} ({ratio:.3g} times the measured loss)",
        expected=f"{measured:.4f} ± {tolerance:.0%}, from a plain forward pass over the same rows{chance}",
        cause=cause,
        change=change,
    )


def _explain_factor(ratio: float, num_micro_batches: int, num_ranks: int, tolerance: float, unit: str) -> str | None:
    """Describe which count a ratio of losses equals, the nearest one; ``None`` when there is none."""
    if ratio <= 0:
        return None
    added = (
        f"a model or custom loss that returns a mean over its micro-batch must not be added up, as if it were divided "
        f"by the {unit}s of the whole step already."
    )
    factors: dict[float, str] = {
        num_micro_batches * num_ranks: f"the {num_micro_batches} micro-batches of a step times {num_ranks} ranks: "
        f"{added}",
        num_micro_batches: f"the {num_micro_batches} micro-batches of a step: {added}",
        num_ranks: f"the {num_ranks} ranks: the loss is multiplied by them, although gradients are averaged over them.",
        1 / max(num_micro_batches, 1): f"1 / {num_micro_batches} micro-batches: the loss is divided twice.",
    }
    factors.pop(1, None)
    # By ratio, not by difference: half and twice are equally far off.
    nearest = min(factors, key=lambda factor: abs(math.log(ratio / factor)), default=None)
    if nearest is None or not math.isclose(ratio, nearest, rel_tol=tolerance):
        return None
    return factors[nearest]
