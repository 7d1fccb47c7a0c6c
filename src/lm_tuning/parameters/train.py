"""Parameters of training, among them those that go to the Hugging Face Trainer under its own names."""

from __future__ import annotations

import math
from difflib import get_close_matches
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Discriminator, Field, Tag, with_config
from typing_extensions import TypedDict  # pydantic refuses typing's own before Python 3.12

from lm_tuning.findings import Severity
from lm_tuning.parameters.base import (
    AutoOrCount,
    Count,
    CountOrZero,
    Dtype,
    Fraction,
    NonNegativeNumber,
    ParameterGroup,
    PositiveNumber,
    ScheduleValue,
    Text,
)
from lm_tuning.parameters.health_codes import CODES


def _read_names(value: object) -> object:
    """Read ``q_proj,v_proj`` as two names."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    return value


def _read_targets(value: object) -> object:
    """Read names as a list, and ``[all-linear]`` as ``all-linear``."""
    return "all-linear" if value in ("all-linear", ["all-linear"]) else _read_names(value)


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


def _refuse_unwritten_classes(value: object) -> object:
    """Refuse class names that YAML took for something else: the class ``01`` would be looked for as ``1``."""
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str):
                raise ValueError(f'class names are text, and YAML does not read {name!r} as text: write "{name}"')
    return value


def _refuse_unknown_codes(severity: dict[str, WantedSeverity]) -> dict[str, WantedSeverity]:
    """Refuse codes that no finding has."""
    unknown = [code for code in severity if code not in CODES]
    if unknown:
        hints = [near for code in unknown for near in get_close_matches(code, CODES, n=1)]
        hint = f"; did you mean {', '.join(hints)}?" if hints else f"; there are {', '.join(sorted(CODES))}"
        raise ValueError(f"no finding has the code {', '.join(unknown)}{hint}")
    return severity


NamePatterns = Annotated[list[Text], Field(min_length=1), BeforeValidator(_read_names)]
WantedSeverity = Literal[Severity, "off"]
SeverityByCode = Annotated[dict[str, WantedSeverity], AfterValidator(_refuse_unknown_codes)]
WeightsByClass = Annotated[
    Annotated[Literal["balanced"], Tag("#word")] | Annotated[dict[str, PositiveNumber], Tag("#by_class")],
    Discriminator(lambda value: "#by_class" if isinstance(value, dict) else "#word"),
    BeforeValidator(_refuse_unwritten_classes),
]
# Those that need no pass over data before training.
AdapterInit = Literal["default", "gaussian", "orthogonal", "pissa", "pissa_niter_4", "pissa_niter_16", "olora", "mica"]


_ToZero = Literal["linear", "cosine", "cosine_with_restarts", "polynomial"]
_WithoutEnd = Literal["constant", "constant_with_warmup", "inverse_sqrt"]
_ToLowestRate = Literal["cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay"]
Schedule = Literal[_ToZero, _WithoutEnd, _ToLowestRate]
# Those that need nothing beyond what this project installs.
_OfTorch = Literal["adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"]
_AdamOfBitsandbytes = Literal["adamw_8bit", "adamw_bnb_8bit", "paged_adamw_32bit", "paged_adamw_8bit"]
_LionOfBitsandbytes = Literal["lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit"]
Optimizer = Literal[_OfTorch, _AdamOfBitsandbytes, _LionOfBitsandbytes]


@with_config(ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, hide_input_in_errors=True))
class TrainerSettings(TypedDict, total=False):
    """Settings of transformers' TrainingArguments; a key that is left out keeps the Trainer's default."""

    lr_scheduler_type: Schedule
    """How the learning rate moves over the steps."""

    lr_scheduler_kwargs: dict[str, ScheduleValue]
    """More arguments of that schedule, such as num_cycles or min_lr; which ones there are depends on it."""

    warmup_steps: CountOrZero | Fraction
    """Steps over which the learning rate rises from 0: a number of steps, or a fraction of all steps."""

    weight_decay: NonNegativeNumber
    """Share of each weight that is taken away per unit of learning rate."""

    adam_beta1: Fraction
    """Memory of the first moment."""

    adam_beta2: Fraction
    """Memory of the second moment."""

    adam_epsilon: PositiveNumber
    """Guard against division by zero."""

    max_grad_norm: NonNegativeNumber
    """Gradient norm above which gradients are scaled down; 0 leaves them as they are."""

    optim: Optimizer
    """Optimizer: adamw_torch_fused is the fast one; 8-bit ones hold their state in a quarter of the memory, paged ones
    move it to the CPU's when a GPU runs out, and adafactor keeps one number for each row and column."""

    optim_args: Text
    """More arguments of the optimizer, as key=value,key=value: sgd reads momentum, dampening and nesterov, adagrad
    lr_decay and eps, rmsprop momentum, alpha, eps and centered; the others read none."""


class LoraParameters(ParameterGroup):
    """Size and target modules of the low-rank adapter."""

    r: Count = 16
    """Rank of the update; the adapter's size grows in proportion."""

    alpha: Count = 32
    """Scale of the update, which is multiplied by alpha / r."""

    dropout: Fraction = 0.0
    """Share of the adapter's input that is dropped while training."""

    target_modules: TargetModules = "all-linear"
    """Layers that get an adapter: all-linear, or a list of module names such as [q_proj, v_proj]."""

    use_dora: bool = False
    """Learn the size of each output's weights apart from their direction (DoRA): often better at low rank, slower."""

    use_rslora: bool = False
    """Multiply the update by alpha / sqrt(r) in place of alpha / r, which keeps high ranks from learning less."""

    init: AdapterInit = "default"
    """First weights of the adapter: random (default, gaussian, orthogonal), or taken from a decomposition of the frozen
    weights (pissa, olora, mica; pissa_niter_16 approximates it in seconds)."""


class QloraParameters(ParameterGroup):
    """How the frozen weights are held in fewer bits; read when method is qlora."""

    bits: Literal[4, 8] = 4
    """Bits of a frozen weight: 4 takes about a quarter of the memory of 16, 8 about half and loses less."""

    quant_type: Literal["nf4", "fp4"] = "nf4"
    """The 16 values that 4 bits stand for: nf4 is spread like trained weights are, fp4 evenly on a log scale."""

    double_quant: bool = True
    """Hold the scales of 4-bit blocks in 8 bits too: 0.4 bits a weight less, for a little time."""


class HealthParameters(ParameterGroup):
    """The check of the first loss against what it should be, and what findings of all checks do."""

    probe: bool = True
    """Measure loss and gradient of the first step's rows by a plain pass before training: about half a step, once."""

    tolerance_fraction: PositiveNumber = 0.05
    """Difference between logged and measured first loss that still counts as equal, as a fraction of the latter."""

    on_mismatch: Literal["warn", "stop"] = "stop"
    """What a larger difference does: a warning with the likely cause, or an end before the weights change."""

    severity: SeverityByCode = Field(default={})
    """What a finding does, by its code, where it should be another thing than usual: note, warn, stop, or off."""


class TrainParameters(ParameterGroup):
    """What is trained, for how long, in which steps. A step is an optimizer step."""

    method: Literal["full", "lora", "qlora"] = "lora"
    """Train all weights, or a low-rank adapter beside frozen ones, which qlora holds in 4 or 8 bits."""

    lora: LoraParameters = LoraParameters()
    """Size and target modules of the adapter; read when method is lora or qlora."""

    qlora: QloraParameters = QloraParameters()
    """How the frozen weights are held; read when method is qlora."""

    freeze: NamePatterns | None = None
    """Parts that stay as they are when method is full: names of modules or their ends, with * for anything, such as
    [embed_tokens, layers.0]; null trains everything."""

    effective_batch_rows: Count | None = None
    """Rows of one step over all devices; exactly one of this and effective_batch_tokens is set, the other is null."""

    effective_batch_tokens: Count | None = None
    """Tokens of one step over all devices, at most; exactly one of this and effective_batch_rows is set."""

    micro_batch_tokens: AutoOrCount = "auto"
    """Tokens that pass through the model at once, padding included; it decides memory and speed, never the result. A
    longer row passes alone. auto measures what is fastest on a GPU, and takes 512 on a CPU."""

    batching: Literal["auto", "packed", "padded"] = "auto"
    """How rows share a micro-batch: packed puts them end to end without padding, padded sorts them by length."""

    compile: Literal["auto"] | bool = "auto"
    """Compile the decoder layers, which makes a GPU faster and takes up to a minute; auto does where a run is long
    enough to pay for it."""

    cuda_graphs: Literal["auto"] | bool = "auto"
    """Record small steps in CUDA graphs and replay them, where a GPU waits for the host to launch them; auto keeps that
    where a try is at least 1.3 times as fast, true wherever it computes the same."""

    fp8: bool = False
    """Make the products of frozen layers in 8-bit floats beside a LoRA adapter in 16 bits, on cards from compute
    capability 8.9: faster for models of billions of weights, with a rounding that is checked before the first step."""

    num_epochs: Count | None = None
    """Passes over the training rows; null leaves the length to max_steps."""

    max_steps: Count | None = None
    """Steps after which training ends, whatever num_epochs says; null leaves the length to num_epochs."""

    learning_rate: PositiveNumber = 2e-4
    """Peak learning rate: about 1e-4 to 1e-3 for LoRA, 1e-5 to 5e-5 for all weights."""

    neftune_noise_alpha: PositiveNumber | None = None
    """Size of random noise on the embeddings while training (NEFTune), 5 to 15 as a rule; null adds none. It shrinks
    with the positions of a micro-batch, so it is the one setting whose effect micro_batch_tokens changes."""

    label_smoothing: Fraction = 0.0
    """Share of the target that is spread over all tokens or classes instead of the right one."""

    class_weights: WeightsByClass | None = None
    """Weight of each class in the loss of sequence_classification: balanced makes all classes count alike, a mapping
    sets it by name, null weighs rows alike."""

    precision: Dtype = "auto"
    """Dtype of the arithmetic; auto chooses by device and says what it chose."""

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
    """Store the checkpoint that is best by best_metric instead of the last one."""

    best_metric: Literal["loss", "accuracy", "macro_f1"] = "loss"
    """What makes a checkpoint the best, on validation rows: the lowest loss, or the highest accuracy or macro F1 of
    sequence_classification."""

    early_stopping_evals: Count | None = None
    """Evaluations in a row without a better best_metric after which training ends; null trains to the end."""

    num_loader_workers: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    """Processes that prepare batches; auto takes none where tokens are ready faster than a step needs them."""

    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.88
    """Share of a GPU's memory that a planned training may fill; close to the end of it steps take several times as
    long."""

    gradient_checkpointing: Literal["auto"] | bool = "auto"
    """Compute activations again in the backward pass: about a third slower, a fraction of the memory. auto does where
    a GPU's memory asks for it."""

    health: HealthParameters = HealthParameters()
    """The check of the first loss, and what findings do."""

    trainer: TrainerSettings = Field(default=TrainerSettings())
    """Further settings of transformers' TrainingArguments, under its names."""

    def count_warmup_steps(self, total_steps: int) -> int:
        """Return the steps of the warm-up.

        Args:
            total_steps: of the run.
        """
        warmup = self.trainer.get("warmup_steps", 0)
        # As the Trainer reads it: below 1 it is a share of all steps, rounded up.
        return math.ceil(warmup * total_steps) if warmup < 1 else int(warmup)
