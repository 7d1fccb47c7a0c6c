"""Decide whether a training's frozen layers run in 8 bits: by what is known before, and by a try on the first step."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from lm_tuning.models.structure import inner_model
from lm_tuning.training.health.plain_loss import measure_training_path, measuring
from lm_tuning.training.health.records import Finding
from lm_tuning.training.health.report import HealthReport, stop_if_needed
from lm_tuning.training.kernels.compiled_layers import find_layers
from lm_tuning.training.kernels.fp8 import Fp8Layers, find_fp8_layers
from lm_tuning.wording import count_of

if TYPE_CHECKING:
    from lm_tuning.batching.batch import StepBatch
    from lm_tuning.batching.losses import LossShape
    from lm_tuning.batching.tasks.base import TrainingTask
    from lm_tuning.training.settings import TrainingSettings

logger = logging.getLogger(__name__)

LOSS_BOUND = 0.01
"""Relative difference of the first step's loss in 8 bits from that in bfloat16, on the same rows, up to which training
goes on in 8 bits. The mean loss over the steps is not to be further off than that, and the adapter cannot make up for
it at the start."""
LOSS_BOUND_NATS = 0.01
"""The same in nats, which counts where a loss is near 0."""

_CODE = "fp8-not-used"
_GIB = 2**30


def choose_fp8(model: Any, settings: TrainingSettings, *, compiles: bool) -> tuple[Fp8Layers, str]:
    """Return the layers that may run in 8 bits, and in words what speaks for or against it.

    Args:
        model: with adapters.
        settings: of the training, with ``train.fp8``.
        compiles: whether the decoder layers will be compiled.

    Raises:
        UserError: the model has no layer that fits.
    """
    layers = find_fp8_layers(model, find_layers(inner_model(model)))
    # Uncompiled, quantizing is several passes over each activation, which takes longer than the product gains.
    if not compiles and settings.train.compile == "auto" and settings.device == "cuda":
        layers.why_not = "the run is too short for compiled layers, without which products in 8 bits are slower"
        return layers, f"no, since {layers.why_not}"
    return layers, f"to be tried at step 1 in {_count(layers)}, as train.fp8 says"


def begin_fp8(
    layers: Fp8Layers,
    model: Any,
    batch: StepBatch,
    *,
    task: TrainingTask,
    shape: LossShape,
    settings: TrainingSettings,
    health: HealthReport,
) -> None:
    """Let layers run in 8 bits if the step's rows have nearly the same loss then; leave them as they are otherwise.

    The weights stay as they are, and so does the run's random state.

    Args:
        layers: of the model.
        model: as it is trained, not compiled yet.
        batch: the first step of this process.
        task: which logits carry loss.
        shape: label smoothing and class weights.
        settings: of the training.
        health: receives both losses, and a finding where training goes on in 16 bits.

    Raises:
        UserError: the user wants that finding to end the run.
    """
    # What an earlier process of the run has found holds for this one: a run should not change in its middle.
    why_not = "it was so before the resume" if health.has(_CODE) else layers.why_not
    if why_not is None:
        why_not = _try(layers, model, batch, task=task, shape=shape, settings=settings, health=health)
    if why_not is None:
        said = f"yes: {_count(layers)}, {_describe_memory(layers)}"
    else:
        layers.switch_off()
        said = f"no, since {why_not}"
        health.add_new([_describe(why_not)])
    facts: Any = health.facts.get("fast_path", {})
    health.facts["fast_path"] = {**facts, "fp8": said}
    logger.info("Products in 8 bits: %s.", said)
    stop_if_needed(health)


def _try(
    layers: Fp8Layers,
    model: Any,
    batch: StepBatch,
    *,
    task: TrainingTask,
    shape: LossShape,
    settings: TrainingSettings,
    health: HealthReport,
) -> str | None:
    """Switch the layers on and compare the loss of a step; return what speaks against it."""

    def measure() -> float:
        with measuring(settings):
            return measure_training_path(task, model, batch, shape=shape, device=settings.device)

    plain = measure()
    try:
        layers.switch_on()
        # Before the passes, which then tell whether something reads these weights by another way.
        layers.release_weights()
        found = measure()
    # Whatever a kernel that this card, driver or library lacks raises, for lack of memory too.
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return f"a try failed ({type(error).__name__}: {lines[0]})"
    difference = abs(found - plain) / plain if plain else math.inf
    health.facts["fp8_first_step"] = {
        f"bfloat16_nats_per_{task.unit}": plain,
        f"fp8_nats_per_{task.unit}": found,
        "relative_difference": difference,
        "bound": LOSS_BOUND,
    }
    # Not >, but not <=: a loss that is not a number must not pass, unless it was none before.
    if math.isfinite(plain) and not abs(found - plain) <= max(LOSS_BOUND * plain, LOSS_BOUND_NATS):
        return (
            f"the first step's rows have a loss of {found:.4f} nats per {task.unit} in 8 bits and {plain:.4f} in "
            f"bfloat16, which is further off than {LOSS_BOUND:.0%}"
        )
    return None


def _describe(why_not: str) -> Finding:
    return Finding(
        code=_CODE,
        measured=f"training goes on in bfloat16, since {why_not}",
        expected="products of the frozen layers in 8 bits, as train.fp8 = true asks for",
        cause="Small models, and weights or activations of very different sizes, lose too much by the rounding; some "
        "cards and versions of PyTorch lack the products.",
        change="Set train.fp8=false, which computes the same without the try.",
    )


def _count(layers: Fp8Layers) -> str:
    said = count_of(len(layers.layers), "frozen layer")
    if layers.num_others:
        said += f" ({layers.num_others} more stay in 16 bits, since their sides are no multiples of 16)"
    return said


def _describe_memory(layers: Fp8Layers) -> str:
    size = f"{layers.num_bytes / _GIB:.2f} GiB in two layouts"
    if layers.wait_on_host:
        return f"{size} in the place of those in 16 bits, which wait in the host's memory"
    return f"{size} beside those in 16 bits"
