"""How a tuned model and its base are measured, by the parameters, the device and how it was trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lm_tuning.batching.held_out_loss import choose_micro_batch_tokens
from lm_tuning.evaluation.records import TrainingFacts
from lm_tuning.models.record import LoadingOptions
from lm_tuning.models.tuned import read_tuning
from lm_tuning.parameters.evaluate import EvaluateParameters
from lm_tuning.parameters.groups import EnvironmentParameters, ModelParameters
from lm_tuning.runtime.device import describe_device
from lm_tuning.runtime.precision import choose_precision

if TYPE_CHECKING:
    from lm_tuning.text.store.table import TokenTable


@dataclass(frozen=True)
class EvaluationSettings:
    """Everything that decides an evaluation, apart from the models and the rows.

    Attributes:
        seed: decides which rows are taken.
        device: ``cpu``, ``cuda`` or ``mps``.
        weights_dtype: dtype that both models are loaded in.
        compute_dtype: dtype of the matrix products.
        evaluate: the ``evaluate`` parameters. A classifier reads those on answers as little as it answers.
        tf32: whether float32 matrices are multiplied in TF32, which the measured loss depends on.
        attention: attention implementation, or ``auto``.
        memory_bytes: memory of the device; ``None`` when unknown.
    """

    seed: int
    device: str
    weights_dtype: str
    compute_dtype: str
    evaluate: EvaluateParameters = field(default_factory=EvaluateParameters)
    tf32: bool = True
    attention: str = "auto"
    memory_bytes: int | None = None

    @property
    def loading(self) -> LoadingOptions:
        """How both models are loaded."""
        return LoadingOptions(dtype=self.weights_dtype, attention=self.attention, device=self.device)

    def micro_batch_tokens(self, table: TokenTable, *, num_classes: int) -> int:
        """Return the most positions of a forward pass, chosen by memory where the parameter leaves it open.

        Args:
            table: the evaluated rows.
            num_classes: logits of one position.
        """
        if self.evaluate.micro_batch_tokens != "auto":
            return self.evaluate.micro_batch_tokens
        return choose_micro_batch_tokens(
            table, num_classes=num_classes, on_gpu=self.device != "cpu", memory_bytes=self.memory_bytes
        )


def choose_settings(
    tuned_folder: Path,
    evaluate: EvaluateParameters,
    model: ModelParameters,
    environment: EnvironmentParameters,
    *,
    seed: int,
) -> EvaluationSettings:
    """Choose device and dtypes, and put the parameters beside them.

    Args:
        tuned_folder: adapter or full weights with their ``tuning.json``.
        evaluate: the ``evaluate`` parameters.
        model: the ``model`` parameters.
        environment: the ``environment`` parameters.
        seed: decides which rows are taken.

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
    return EvaluationSettings(
        seed=seed,
        device=device.kind,
        weights_dtype=precision.weights,
        compute_dtype=precision.compute,
        evaluate=evaluate,
        tf32=environment.tf32,
        attention=model.attention,
        # Of a device, 0 stands for unknown.
        memory_bytes=device.memory_bytes or None,
    )


def training_facts(tuned_folder: Path) -> TrainingFacts:
    """Return what a report says of the tuned model beside its figures: where it lies, and how fast it was trained.

    Args:
        tuned_folder: adapter or full weights with their ``tuning.json``.
    """
    tuning = read_tuning(tuned_folder)
    return TrainingFacts(
        tuned_folder=str(tuned_folder),
        tokens_per_second=tuning.get("tokens_per_second"),
        samples_per_second=tuning.get("samples_per_second"),
        steps_per_second=tuning.get("steps_per_second"),
    )
