"""How a tuned model and its base are measured, by the parameters, the device and how it was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_tuning.models.tuned import read_tuning
from lm_tuning.parameters.model import EnvironmentParameters, ModelParameters
from lm_tuning.parameters.results import EvaluateParameters
from lm_tuning.runtime.device import describe_device
from lm_tuning.runtime.precision import choose_precision


def measuring_settings(
    tuned_folder: Path, evaluate: EvaluateParameters, model: ModelParameters, environment: EnvironmentParameters
) -> dict[str, Any]:
    """Unpack the parameters into keywords of ``evaluate_models``, choosing device and dtypes.

    Args:
        tuned_folder: adapter or full weights with their ``tuning.json``.
        evaluate: the ``evaluate`` parameters.
        model: the ``model`` parameters.
        environment: the ``environment`` parameters.

    Raises:
        UserError: the tuned model cannot be read, or the device does not have the dtype of ``model.dtype``.
    """
    tuning = read_tuning(tuned_folder)
    device = describe_device()
    # Who trained in float32 is measured in float32; other dtypes are this device's choice, which may lack that one.
    exact = tuning.get("compute_dtype") == "float32" and model.dtype in ("auto", "float32")
    # Without gradients nobody needs float32 master weights, so full weights are loaded as LoRA's base is.
    precision = choose_precision(
        device,
        requested="float32" if exact else "auto",
        method="qlora" if tuning["method"] == "qlora" else "lora",
        weights_dtype=model.dtype,
    )
    return {
        **evaluate.model_dump(),
        "micro_batch_tokens": None if evaluate.micro_batch_tokens == "auto" else evaluate.micro_batch_tokens,
        "device": device.kind,
        "memory_bytes": device.memory_bytes or None,
        "weights_dtype": precision.weights,
        "compute_dtype": precision.compute,
        "tf32": environment.tf32,
        "attention": model.attention,
    }


def training_facts(tuned_folder: Path) -> dict[str, Any]:
    """Return what a report says of the tuned model beside its figures: where it lies, and how fast it was trained.

    Args:
        tuned_folder: adapter or full weights with their ``tuning.json``.
    """
    tuning = read_tuning(tuned_folder)
    speeds = {name: tuning.get(name) for name in ("tokens_per_second", "samples_per_second", "steps_per_second")}
    return {"tuned_folder": str(tuned_folder), **speeds}
