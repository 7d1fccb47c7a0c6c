"""Parameters of training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from lm_tuning.parameters.base import (
    AutoOrCount,
    Count,
    Dtype,
    Fraction,
    ParameterGroup,
    PositiveNumber,
    Text,
)
from lm_tuning.parameters.trainer import TrainerSettings


def _read_targets(value: object) -> object:
    """Read ``q_proj,v_proj`` as two names, and ``[all-linear]`` as ``all-linear``."""
    if isinstance(value, str) and value != "all-linear":
        return [name.strip() for name in value.split(",") if name.strip()]
    if value == ["all-linear"]:
        return "all-linear"
    return value


def _refuse_mixed_targets(value: Literal["all-linear"] | list[str]) -> Literal["all-linear"] | list[str]:
    """Keep ``all-linear`` from being taken for one module's name among others."""
    if value != "all-linear" and "all-linear" in value:
        raise ValueError("all-linear already means every linear layer; leave the other names out, or leave it out")
    return value


TargetModules = Annotated[
    Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)],
    BeforeValidator(_read_targets),
    AfterValidator(_refuse_mixed_targets),
]


class LoraParameters(ParameterGroup):
    """Size and place of the low-rank adapter."""

    r: Count = 16
    """Rank of the update; the adapter's size grows in proportion."""

    alpha: Count = 32
    """Scale of the update, which is multiplied by alpha / r."""

    dropout: Fraction = 0.0
    """Share of the adapter's input that is dropped while training."""

    target_modules: TargetModules = "all-linear"
    """Layers that get an adapter: all-linear, or a list of module names such as [q_proj, v_proj]."""


class HealthParameters(ParameterGroup):
    """The check of the first loss against what it should be."""

    probe: bool = True
    """Measure the first step's rows by a plain forward pass before training; it costs about a third of a step."""

    tolerance_fraction: PositiveNumber = 0.05
    """Difference between logged and measured first loss that still counts as equal, as a fraction of the latter."""

    on_mismatch: Literal["warn", "stop"] = "stop"
    """What a larger difference does: a warning with the likely cause, or the end of the run before step 2."""


class TrainParameters(ParameterGroup):
    """What is trained, for how long, in which steps. A step is an optimizer step."""

    method: Literal["full", "lora"] = "lora"
    """Train all weights, or a low-rank adapter beside frozen ones."""

    lora: LoraParameters = LoraParameters()
    """Size and place of the adapter; read when method is lora."""

    effective_batch_rows: Count | None = None
    """Rows of one step over all devices; exactly one of this and effective_batch_tokens is set, the other is null."""

    effective_batch_tokens: Count | None = None
    """Tokens of one step over all devices, at most; exactly one of this and effective_batch_rows is set."""

    micro_batch_tokens: AutoOrCount = "auto"
    """Tokens that pass through the model at once, padding included; it decides memory and speed, never the result."""

    batching: Literal["auto", "packed", "padded"] = "auto"
    """How rows share a micro-batch: packed puts them end to end without padding, padded sorts them by length."""

    num_epochs: Count | None = None
    """Passes over the training rows; null leaves the length to max_steps."""

    max_steps: Count | None = None
    """Steps after which training ends, whatever num_epochs says; null leaves the length to num_epochs."""

    learning_rate: PositiveNumber = 2e-4
    """Peak learning rate: about 1e-4 to 1e-3 for LoRA, 1e-5 to 5e-5 for all weights."""

    precision: Dtype = "auto"
    """Number format of the arithmetic; auto chooses by device and says what it chose."""

    resume: bool = False
    """Go on from the last complete checkpoint of this output instead of starting again."""

    eval_every_steps: Count | None = None
    """Steps between two measurements of the validation loss, the first one before step 1; null measures none."""

    eval_max_rows: Count | None = 64
    """Validation rows of such a measurement, spread over the split; null takes all."""

    save_every_steps: Count | None = None
    """Steps between two checkpoints; null writes one only when training is interrupted."""

    keep_checkpoints: Count = 2
    """Checkpoints of this output that are kept, the newest ones."""

    load_best: bool = False
    """Store the checkpoint with the lowest validation loss instead of the last one."""

    num_loader_workers: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    """Processes that prepare batches; auto takes none where tokens are ready faster than a step needs them."""

    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: about a third slower, a fraction of the memory."""

    health: HealthParameters = HealthParameters()
    """The check of the first loss."""

    trainer: TrainerSettings = Field(default=TrainerSettings())
    """Further settings of transformers' TrainingArguments, under its names."""
