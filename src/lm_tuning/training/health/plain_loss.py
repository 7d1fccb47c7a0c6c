"""The plain loss of rows: measured before the first step, and again after some to see whether training changes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from lm_tuning.batching.batch import StepBatch
from lm_tuning.batching.held_out_loss import evaluating
from lm_tuning.batching.losses import PLAIN, LossShape
from lm_tuning.batching.tasks.base import TrainingTask
from lm_tuning.runtime.precision import autocast
from lm_tuning.training.health.first_gradient import GradientMeasure
from lm_tuning.training.health.records import Finding, listing
from lm_tuning.training.health.report import HealthReport

if TYPE_CHECKING:
    from lm_tuning.text.records import TokenRow
    from lm_tuning.training.settings import TrainingSettings

# Steps at the full learning rate, or as many more at a lower one, after which the loss is measured again.
FULL_STEPS = 20.0

# Relative change of the loss below which nothing was learned; twenty steps at 1e-7 change it a hundred times more.
UNMOVED = 1e-5

# Below this loss there is nothing left to learn, and it need not move.
NOTHING_LEFT_NATS = 1e-3

# Findings that say already why nothing moves.
_EXPLAINED_BY = ("learning-rate-tiny", "loss-not-finite", "gradient-not-finite", "fp16-overflows", "gradient-zero")

# Standard deviation of a position's logits; language models have 1 to 5.
LARGEST_SPREAD = 30.0

# In 16 bits, numbers above it are rounded by half a nat or more.
LARGEST_LOGIT = {"float32": 1e4, "bfloat16": 1e3, "float16": 1e3}

# Positions that go through the model side by side: a GPU is hardly busy with one row.
ALIKE_TOKENS = {"cpu": 512, "cuda": 2048}

_FILLING_DEVICES = ("cuda",)
# Relative difference of a row's loss alone and before others' filling, from which on the model is taken to see it.
_SAME_NATS = 0.01


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
    """Measure the loss of rows with an ordinary forward pass, one by one or side by side.

    Nothing of the training path is used: no micro-batch, no packing, no mask, no selected positions, no gradient. So it
    tells what the first step's loss must be. On a GPU shorter rows are filled up at their ends, which no position of
    them sees in a model that looks back alone; that is tried first, and elsewhere rows of one length go side by side.

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
        for alike in _group_rows(task, model, rows, torch.device(device), shape):
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


def _group_rows(
    task: TrainingTask, model: Any, rows: Sequence[TokenRow], device: torch.device, shape: LossShape
) -> list[list[TokenRow]]:
    """Group rows that go through the model side by side; filled up where that was seen to change nothing."""
    alike = [*_group_alike(task, rows, device.type)]
    if device.type not in _FILLING_DEVICES or not task.looks_back:
        return alike
    # Shortest first; those without anything supervised have no loss.
    supervised = [row for row in rows if task.unit == "row" or row.num_supervised]
    supervised.sort(key=lambda row: len(row.input_ids))
    filled = _group_filled(supervised, device.type)
    if len(supervised) < 2 or len(filled) >= len(alike):
        return alike
    shortest, longest = supervised[0], supervised[-1]
    return filled if _sees_no_filling(task, model, shortest, longest, device=device, shape=shape) else alike


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


def _group_filled(rows: list[TokenRow], device: str) -> list[list[TokenRow]]:
    """Group neighbours of rows that are ordered by their lengths, each to be filled up to the last of its group."""
    most = ALIKE_TOKENS.get(device, ALIKE_TOKENS["cpu"])
    groups: list[list[TokenRow]] = []
    for row in rows:
        if groups and len(row.input_ids) * (len(groups[-1]) + 1) <= most:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _sees_no_filling(
    task: TrainingTask, model: Any, row: TokenRow, longer: TokenRow, *, device: torch.device, shape: LossShape
) -> bool:
    """Return whether a row has the same loss alone and filled up to a longer one."""
    nats = []
    for beside in ([], [longer]):
        logits, targets = task.logits_of_alike(model, [row, *beside], device=device)
        own = slice(1 if task.unit == "row" else row.num_supervised)  # its targets come first
        nats.append(float(shape.sum_nats(logits[own], targets[own])))
    # A loss that is not a number is told by the measurement itself.
    return not abs(nats[0] - nats[1]) > _SAME_NATS * abs(nats[0]) + _SAME_NATS


@listing
def check_logits(
    logits: Mapping[str, float], *, dtype: str = "float32", has_fresh_head: bool = False
) -> Iterator[Finding]:
    """Compare the logits before step 1 with what sound models have.

    Args:
        logits: ``mean``, ``variance_over_classes`` (of one position, mean over positions), ``min`` and ``max``.
        dtype: they were computed in.
        has_fresh_head: whether the head is new, which may start with equal logits.
    """
    spread = math.sqrt(max(logits["variance_over_classes"], 0.0))
    summary = f"logits have a mean of {logits['mean']:.4g}, a spread of {spread:.4g} and lie between "
    summary += f"{logits['min']:.4g} and {logits['max']:.4g} ({dtype})"
    limit = LARGEST_LOGIT.get(dtype, 1e4)
    # A model may rule tokens out with minus infinity, so only finite values are measured.
    largest = max((abs(value) for value in (logits["min"], logits["max"]) if math.isfinite(value)), default=0.0)
    if math.isnan(logits["mean"]) or logits["max"] == math.inf:
        yield Finding(
            code="logits-not-finite",
            measured=summary,
            expected="numbers",
            cause="The weights hold NaN, or the forward pass overflows.",
            change="Look at model.name_or_path, and set train.precision=bfloat16 or float32.",
        )
    elif largest > limit or (math.isfinite(spread) and spread > LARGEST_SPREAD):
        yield Finding(
            code="logits-out-of-range",
            measured=summary,
            expected=f"a spread of at most {LARGEST_SPREAD:g} and values within ±{limit:g}",
            cause="The weights are broken or were scaled, or the head does not belong to the backbone.",
            change="Look at model.name_or_path, and set train.precision=float32 to tell rounding from weights.",
        )
    elif spread == 0 and not has_fresh_head:
        yield Finding(
            code="logits-flat",
            measured=summary,
            expected="logits that differ",
            cause="The head's weights are all zero, as when a checkpoint's head was not loaded.",
            change="Look at model.name_or_path.",
        )


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


@contextmanager
def measuring(settings: TrainingSettings) -> Iterator[None]:
    """Compute as training does, and leave the run's random numbers as they were.

    Args:
        settings: of the training: device and compute dtype.
    """
    # Without a list, the states of all visible GPUs are copied, and each of them gets a context for it.
    on_gpu = [torch.cuda.current_device()] if settings.device == "cuda" else []
    with torch.random.fork_rng(devices=on_gpu), autocast(settings.device, settings.compute_dtype):
        yield


def measure_nats(task: TrainingTask, model: Any, row: TokenRow, settings: TrainingSettings) -> float:
    """Measure the plain loss of a row, without the run's random numbers.

    Returns:
        Nats per supervised token, or of the row.
    """
    with evaluating(model), measuring(settings):
        logits, targets = task.logits_of_alike(model, [row], device=settings.device)  # (targets, classes), (targets,)
        return float(PLAIN.sum_nats(logits, targets)) / max(len(targets), 1)


@dataclass
class Movement:
    """The loss of a row of the first step, to be measured again.

    Attributes:
        task: which logits carry loss.
        row: of the first step, the shortest.
        nats: its loss before step 1, per supervised token, or of the row.
        settings: of the training.
        summed_rates: of the steps so far.
        num_steps: steps so far.
        is_done: whether it was measured again; once per run.
    """

    task: TrainingTask
    row: TokenRow
    nats: float
    settings: TrainingSettings
    summed_rates: float = 0.0
    num_steps: int = 0
    is_done: bool = False

    def count(self, learning_rate: float, *, is_last: bool = False) -> bool:
        """Add the rate of a step, and say whether it is time to measure.

        Args:
            learning_rate: of the step.
            is_last: whether it is the run's last; a run that decays early is measured there, unless it is very short.
        """
        self.num_steps += 1
        self.summed_rates += learning_rate
        # In units of the peak, so that a warm-up or a decay counts as the part of a full step that it is.
        peak = self.settings.train.learning_rate
        is_time = self.summed_rates >= FULL_STEPS * peak or (is_last and self.num_steps >= FULL_STEPS)
        return is_time and not self.is_done

    def check(self, health: HealthReport, model: Any) -> None:
        """Measure again, and add a finding if the loss is where it was.

        Args:
            health: receives the fact and the finding.
            model: as trained by now.
        """
        self.is_done = True
        after = measure_nats(self.task, model, self.row, self.settings)
        unit = self.task.unit
        health.facts["shortest_row_before_and_after"] = {
            "step": self.num_steps,
            f"before_nats_per_{unit}": self.nats,
            f"after_nats_per_{unit}": after,
        }
        # Relative to the loss: the same kernels measured the same row before, so rounding changes next to nothing.
        has_moved = not math.isfinite(after) or abs(after - self.nats) > UNMOVED * self.nats
        # One cause, one finding: these say already why the weights stay.
        if has_moved or any(map(health.has, _EXPLAINED_BY)):
            return
        health.add(
            Finding(
                code="loss-does-not-move",
                measured=f"after {self.num_steps} steps row {self.row.row_id} of the first step has {after:.6f} nats "
                f"per {unit}, and had {self.nats:.6f} before",
                expected="another loss: the row was trained on",
                cause="The updates do not reach the weights that are used, or are too small for their dtype.",
                change="Raise train.learning_rate; with 16-bit weights set model.dtype=float32 or train.method=lora; "
                "look at what the optimizer was given.",
            )
        )


def begin_movement(
    task: TrainingTask, model: Any, row: TokenRow, nats: float, settings: TrainingSettings
) -> Movement | None:
    """Keep a row and its loss; ``None`` where its loss says nothing.

    Args:
        task: which logits carry loss.
        model: before step 1.
        row: of the first step.
        nats: its loss, measured perhaps beside others of its length.
        settings: of the training.
    """
    if settings.device != "cpu" and math.isfinite(nats):
        # Kernels round otherwise for one row than for several, and it is alone when it is measured again.
        nats = measure_nats(task, model, row, settings)
    if not math.isfinite(nats) or nats < NOTHING_LEFT_NATS:
        return None
    return Movement(task, row, nats, settings)
