"""The gradient that the first step must have: its norm by an ordinary backward pass, compared with what step 1 logs.

A loss that is right may still be sent backward scaled: by what wraps the backward pass, adds gradients up or averages
them over ranks. The norm that is clipped and logged then is off by a factor that the loss does not show.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lm_tuning.training import lora_forward
from lm_tuning.training.health import Finding
from lm_tuning.training.losses import LossShape
from lm_tuning.training.out_of_memory import is_out_of_memory
from lm_tuning.training.tasks import TrainingTask

if TYPE_CHECKING:
    from lm_tuning.text.token_table import TokenRow

logger = logging.getLogger(__name__)

MOST_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Tokens of rows that are measured; of a larger step a part is, with wider bounds."""

MOST_TOKENS_OF_ROW = {"cpu": 2048, "cuda": 4096}
"""A longer row would need all of its logits at once, which the training itself never makes."""

FACTOR = 4.0
"""A norm this many times the measured one, or a part of it as small, is no rounding and no dropout."""

FP16_SCALE = 1024.0
"""Small gradients vanish in float16 unless the loss is scaled up."""


@dataclass(frozen=True)
class GradientDue:
    """The gradient norm of the first step's rows.

    Attributes:
        norm: of the mean loss over the measured rows.
        num_rows: rows that were measured.
        num_rows_of_step: rows of the step.
        is_random: whether training draws random zeros or noise, so that its gradient is another one.
    """

    norm: float
    num_rows: int
    num_rows_of_step: int
    is_random: bool

    def bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest norm of the whole step that are no finding.

        Rows whose gradients have nothing in common add up like noise, so the norm of the whole step may be smaller
        than that of a part of it, by the root of how much larger it is; it is hardly larger.
        """
        factor = FACTOR * (2 if self.is_random or self.num_rows < self.num_rows_of_step else 1)
        noise = math.sqrt(self.num_rows / self.num_rows_of_step)
        return self.norm * noise / factor, self.norm * factor


def measure_gradient(
    task: TrainingTask,
    model: Any,
    rows: Sequence[TokenRow],
    *,
    shape: LossShape,
    device: str,
    compute_dtype: str,
    is_random: bool,
) -> GradientDue | None:
    """Measure the gradient norm of rows, with nothing of the training path; the gradients are thrown away.

    Args:
        task: which logits carry loss.
        model: as it will be trained; its adapters take the library's forward pass meanwhile.
        rows: of the first step.
        shape: label smoothing and class weights.
        device: ``cpu`` or ``cuda``.
        compute_dtype: type of the forward pass.
        is_random: whether training draws random zeros or noise.

    Returns:
        ``None`` where it cannot be told: no row is short enough, the memory does not suffice, or it is not a number.
    """
    chosen = _choose(rows, device)
    if not chosen:
        return None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    was_training = model.training
    model.eval()
    lean = lora_forward.remove(model)
    scale = FP16_SCALE if compute_dtype == "float16" else 1.0
    count = 0
    try:
        for row in chosen:
            logits, targets = task.logits_of_alike(model, [row], device=device)
            (scale * shape.sum_nats(logits, targets)).backward()
            count += len(targets)
        norms = [torch.linalg.vector_norm(each.grad.float()) for each in trained if each.grad is not None]
        norm = float(torch.linalg.vector_norm(torch.stack(norms))) / (scale * max(count, 1)) if norms else math.nan
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        logger.info("The gradient before step 1 is not measured: it does not fit into the memory beside the model.")
        norm = math.nan
    finally:
        for parameter in trained:
            parameter.grad = None
        model.train(was_training)
        if lean:
            lora_forward.install(model)
    if device == "cuda":
        torch.cuda.empty_cache()
    if not math.isfinite(norm):
        return None
    return GradientDue(norm, len(chosen), len(rows), is_random)


def _choose(rows: Sequence[TokenRow], device: str) -> list[TokenRow]:
    """Return all rows of a small step, or evenly spread ones of a large one, without the longest."""
    most, most_of_row = (table.get(device, table["cpu"]) for table in (MOST_TOKENS, MOST_TOKENS_OF_ROW))
    usable = [row for row in rows if row.num_supervised and len(row.input_ids) <= most_of_row]
    total = sum(len(row.input_ids) for row in usable)
    return usable[:: max(-(-total // most), 1)]


def check_first_gradient(due: GradientDue, logged: float, *, num_micro_batches: int) -> Finding | None:
    """Compare the gradient norm of step 1 with the measured one.

    Args:
        due: what was measured before the step.
        logged: the step's norm, before clipping.
        num_micro_batches: micro-batches of the step.
    """
    low, high = due.bounds()
    if not math.isfinite(logged) or due.norm <= 0 or low <= logged <= high:
        return None  # NaN and infinity are another check's
    ratio = logged / due.norm
    rows = f"{due.num_rows} of its {due.num_rows_of_step} rows" if due.num_rows < due.num_rows_of_step else "its rows"
    cause = "The gradient is scaled on its way back, although the loss is right: by what wraps the backward pass, adds"
    cause += " gradients up or averages them."
    if num_micro_batches > 1 and math.isclose(ratio, num_micro_batches, rel_tol=0.05):
        cause += f" The factor equals the {num_micro_batches} micro-batches of the step."
    return Finding(
        code="first-gradient-off",
        measured=f"step 1 has a gradient norm of {logged:.4g}, {ratio:.3g} times that of {rows}",
        expected=f"about {due.norm:.4g} (between {low:.3g} and {high:.3g}), by a backward pass over {rows} before it",
        cause=cause,
        change="Look at what changes the backward pass; the learning rate and train.trainer.max_grad_norm would only "
        "hide it.",
    )
