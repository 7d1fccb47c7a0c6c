"""The loss that the first step must have: measured before it by a plain forward pass, compared when it is made."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from lm_tuning.batching.batch import StepBatch
from lm_tuning.batching.held_out_loss import evaluating
from lm_tuning.batching.losses import PLAIN, LossShape
from lm_tuning.batching.step_loader import StepDataset
from lm_tuning.batching.tasks.base import TrainingTask
from lm_tuning.models.structure import classification_head
from lm_tuning.reporting.text import write_percent
from lm_tuning.training.health.first_gradient import ExpectedGradient, GradientMeasure, check_first_gradient, norm_of
from lm_tuning.training.health.movement import Movement, measuring
from lm_tuning.training.health.report import (
    DROPOUT_TOLERANCE,
    ROUNDING_NATS,
    HealthReport,
    check_first_step,
    check_layout,
    stop_if_needed,
)

if TYPE_CHECKING:
    from lm_tuning.text.records import TokenRow
    from lm_tuning.training.settings import TrainingSettings

logger = logging.getLogger(__name__)

# Tokens of rows of one length that go through the model side by side: a GPU is hardly busy with one row.
ALIKE_TOKENS = {"cpu": 512, "cuda": 2048}

# Largest standard deviation of a fresh head's logits: above it the first loss lies visibly over log(classes).
FRESH_HEAD_SPREAD = 0.1


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


def scale_fresh_head(task: TrainingTask, model: Any, batch: StepBatch, *, device: torch.device | str) -> float | None:
    """Scale a fresh classification head so that its logits hardly differ, and the first loss is log(classes).

    A head with the usual random weights starts at log(classes) plus half the variance of its logits, which differs
    from model to model and hides a loss that is off for another reason.

    Args:
        task: the classification.
        model: with a head of random weights, on ``device``.
        batch: a whole step to measure the logits on, so that the scale does not depend on how it is split.
        device: where the model is.

    Returns:
        The standard deviation of the logits before scaling; ``None`` when it was small enough.
    """
    # Without dropout, whose zeros would be measured as a part of the spread.
    with evaluating(model):
        logits = [task.logits(model, micro_batch.to(device)).float() for micro_batch in batch.micro_batches]
        # (rows, classes) of the whole step; over all of them at once, since a class may be offset from the others.
        spread = float(torch.cat(logits).std())
        if spread > FRESH_HEAD_SPREAD:
            for parameter in _head_parameters(model):
                parameter.mul_(FRESH_HEAD_SPREAD / spread)
    return spread if spread > FRESH_HEAD_SPREAD else None


def fresh_head_spread(model: Any) -> float:
    """Return the standard deviation of a classification head's weights.

    Args:
        model: a classifier, with adapters or without.
    """
    return float(torch.cat([parameter.detach().float().flatten() for parameter in _head_parameters(model)]).std())


def _head_parameters(model: Any) -> list[torch.nn.Parameter]:
    """Return what is trained of a head: an adapter library keeps the original beside that copy."""
    head = classification_head(model)
    return [parameter for name, parameter in head.named_parameters() if "original" not in name]


@dataclass(frozen=True)
class PlainLoss:
    """The loss of rows, each run alone or beside others of its length.

    Attributes:
        nats: per supervised token, or per row for a classifier, all rows together.
        logits: ``mean``, ``variance_over_classes`` (of one target, mean over them), ``min`` and ``max``.
        shortest_row: the shortest of the rows.
        shortest_nats: its own loss without smoothing and class weights, per supervised token, or of the row.
        count: supervised tokens of all rows, or rows of a classifier.
        class_logits: ``(rows, classes)`` on the CPU, of a classifier; ``None`` for other tasks.
        labels: class of each of these rows, ``(rows,)``.
    """

    nats: float
    logits: dict[str, float]
    shortest_row: TokenRow
    shortest_nats: float
    count: int = 0
    class_logits: torch.Tensor | None = None
    labels: torch.Tensor | None = None


def measure_plain_loss(
    task: TrainingTask,
    model: Any,
    rows: Sequence[TokenRow],
    *,
    shape: LossShape,
    device: torch.device | str,
    gradient: GradientMeasure | None = None,
) -> PlainLoss:
    """Measure the loss of rows with an ordinary forward pass, one by one or with others of the same length.

    Nothing of the training path is used: no micro-batch, no packing, no padding, no selected positions, no gradient. So
    it tells what the first step's loss must be.

    Args:
        task: which logits carry loss.
        model: a model of that task; its mode is put back afterwards.
        rows: tokenized rows.
        shape: label smoothing and class weights.
        device: where the model is.
        gradient: receives the loss of each of them, to be sent backward; ``None`` for no gradient.
    """
    nats, count = 0.0, 0
    statistics, weights, class_logits, labels = [], [], [], []
    shortest, shortest_nats = rows[0], math.nan
    with evaluating(model):
        for alike in _group_alike(task, rows, torch.device(device).type):
            # Once a row is too long, none goes backward any more: a part of the gradient could be compared with
            # nothing.
            goes_back = gradient is not None and gradient.takes(sum(len(row.input_ids) for row in alike))
            with torch.set_grad_enabled(goes_back):
                logits, targets = task.logits_of_alike(model, alike, device=device)  # (targets, classes), (targets,)
                if not len(targets):
                    continue  # rows without anything supervised
                summed = shape.sum_nats(logits, targets)
                if goes_back and gradient is not None:
                    gradient.add(summed)
            # float() here, group by group, waits for the device; before step 1 nothing else could run meanwhile.
            nats += float(summed)
            count += len(targets)
            # (targets, classes), still on the device: copying logits of a vocabulary to the host would take longer.
            values = logits.detach().float()
            statistics.append(
                torch.stack([values.mean(), values.var(dim=-1, correction=0).mean(), values.amin(), values.amax()])
            )
            weights.append(len(targets))
            if math.isnan(shortest_nats) or len(alike[0].input_ids) < len(shortest.input_ids):
                # Rows of one shape may have different numbers of targets; those of the first row come first.
                shortest, first = alike[0], slice(alike[0].num_supervised)
                shortest_nats = float(PLAIN.sum_nats(values[first], targets[first])) / max(len(targets[first]), 1)
            if task.unit == "row":
                class_logits.append(values.cpu())
                labels.append(targets.cpu())
    table = torch.stack(statistics).cpu()
    # (groups, 2) weighted by targets: groups of different sizes must not count alike.
    mean, variance = (table[:, :2] * torch.tensor(weights)[:, None]).sum(dim=0) / count
    described = {
        "mean": float(mean),
        "variance_over_classes": float(variance),
        "min": float(table[:, 2].min()),
        "max": float(table[:, 3].max()),
    }
    plain = PlainLoss(nats / count, described, shortest, shortest_nats, count=count)
    if not class_logits:
        return plain
    return replace(plain, class_logits=torch.cat(class_logits), labels=torch.cat(labels))


def _group_alike(task: TrainingTask, rows: Sequence[TokenRow], device: str) -> Iterator[list[TokenRow]]:
    """Group rows of the same shape, as many as a long row alone would take."""
    most = ALIKE_TOKENS.get(device, ALIKE_TOKENS["cpu"])
    # Without padding, which is one of the things that the comparison is to find out about.
    by_shape: dict[tuple[int, ...], list[TokenRow]] = {}
    for row in rows:
        by_shape.setdefault(task.shape_of(row), []).append(row)
    for alike in by_shape.values():
        num_rows = max(most // max(len(alike[0].input_ids), 1), 1)
        for start in range(0, len(alike), num_rows):
            yield alike[start : start + num_rows]


def measure_training_path(
    task: TrainingTask, model: Any, batch: StepBatch, *, shape: LossShape, device: torch.device | str
) -> float:
    """Measure the loss of the same rows through the micro-batches that training uses, without gradient.

    Returns:
        Nats per supervised token of the step, or per row.
    """
    with evaluating(model):
        nats = sum(float(task.sum_nats(model, micro.to(device), shape)) for micro in batch.micro_batches)
    return nats / batch.num_supervised
