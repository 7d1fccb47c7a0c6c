"""What a training is told: plain values that can be sent to another process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lm_tuning.batching.step_plan import StepPlan
from lm_tuning.batching.tasks.base import TaskName
from lm_tuning.text.store.table import TokenTable


@dataclass(frozen=True)
class TrainingPaths:
    """Where a training reads and writes.

    Attributes:
        tokens: folder with ``train.arrow`` and ``validation.arrow`` of token columns.
        checkpoints: folder under which every run gets a folder of its own.
        plans: folder of batch plans, shared by all runs; ``None`` keeps them beside the checkpoints.
    """

    tokens: Path
    checkpoints: Path
    plans: Path | None = None


@dataclass(frozen=True)
class TrainingSettings:
    """Everything that decides a training; plain values, so that it can be sent to another process.

    Attributes:
        base: what the base model is: ``name_or_path``, ``revision``, ``digest``, ``trust_remote_code``.
        tokens_key: key of the token set.
        sources: ``path`` and ``weight`` of each training source, in the order that the token table counts them; empty
            for rows that all come up once per epoch.
        task: ``causal_lm``, ``sequence_classification`` or ``seq2seq_lm``.
        label_map: id of each class by its name, kept with the tuned model; ``None`` without classes.
        rendering: how the chat template was called for the rows (``template_arguments``, ``system_turn``), kept with
            the tuned model; empty where no template wrote them.
        weights_dtype: type of the base weights: ``float32``, ``bfloat16`` or ``float16``.
        compute_dtype: type of the forward pass (autocast where it differs from the weights).
        device: ``cpu`` or ``cuda``.
        attention: ``auto``, ``sdpa``, ``eager`` or ``flash_attention_2``.
        method: ``full``, ``lora`` or ``qlora``.
        lora: arguments of :func:`lm_tuning.training.setup.adapters.add_lora`.
        qlora: ``bits``, ``quant_type`` and ``double_quant`` of the frozen weights.
        freeze: patterns of module names whose weights stay as they are, with the method ``full``.
        neftune_noise_alpha: strength of the noise on embeddings; ``None`` for none.
        label_smoothing: share of each target's probability spread over all classes.
        class_weights: ``balanced``, a weight by class name, or ``None`` for equal ones.
        seed: order of rows, adapter initialisation and dropout.
        learning_rate: the schedule's peak.
        effective_batch_rows: rows of a step; this or ``effective_batch_tokens``.
        effective_batch_tokens: most tokens of a step.
        num_epochs: passes over the rows; ``None`` means as many as ``max_steps`` needs.
        max_steps: cap on optimizer steps; ``None`` means none.
        micro_batch_tokens: most positions of a micro-batch; ``None`` chooses by device.
        batching: ``packed``, ``padded`` or ``auto``.
        compile: run the decoder layers compiled; ``None`` decides by device and length of the run.
        activation_checkpointing: recompute activations to save memory; ``None`` lets the planner decide, and is no on a
            CPU.
        memory_fraction: share of a GPU's memory that the planner may fill.
        num_loader_workers: processes that build batches; ``None`` chooses by device.
        save_every_steps: steps between checkpoints; ``None`` writes one only when interrupted.
        keep_checkpoints: how many of the run's checkpoints stay.
        eval_every_steps: steps between held-out evaluations; ``None`` for none.
        eval_max_rows: rows of such an evaluation; ``None`` means all.
        best_metric: ``loss``, ``accuracy`` or ``macro_f1``: what the best checkpoint has the best of.
        early_stopping_evals: evaluations without a better one after which training ends; ``None`` for never.
        load_best: end with the weights of the best checkpoint.
        resume: go on from the last complete checkpoint.
        probe_first_step: measure the first step's loss beforehand and compare.
        first_loss_tolerance: allowed relative difference.
        first_loss_severity: ``warn`` or ``stop``.
        severities: severity of a health finding by its code, where it is not the usual one.
        trainer: further arguments of transformers' ``TrainingArguments``.
        num_beams: number of beams that the tuned model is evaluated with; stored with it.
        run_id: tracking run to write into checkpoints; ``None`` without tracking.
    """

    base: dict[str, Any]
    tokens_key: str
    weights_dtype: str
    compute_dtype: str
    device: str
    method: Literal["full", "lora", "qlora"]
    seed: int
    learning_rate: float
    sources: list[dict[str, Any]] = field(default_factory=list)
    task: TaskName = "causal_lm"
    label_map: dict[str, int] | None = None
    rendering: dict[str, Any] = field(default_factory=dict)
    attention: str = "auto"
    lora: dict[str, Any] = field(default_factory=dict)
    qlora: dict[str, Any] = field(default_factory=dict)
    freeze: list[str] | None = None
    neftune_noise_alpha: float | None = None
    label_smoothing: float = 0.0
    class_weights: Literal["balanced"] | dict[str, float] | None = None
    effective_batch_rows: int | None = None
    effective_batch_tokens: int | None = None
    num_epochs: int | None = None
    max_steps: int | None = None
    micro_batch_tokens: int | None = None
    batching: Literal["auto", "packed", "padded"] = "auto"
    compile: bool | None = None
    activation_checkpointing: bool | None = False
    memory_fraction: float = 0.88
    num_loader_workers: int | None = None
    save_every_steps: int | None = None
    keep_checkpoints: int = 2
    eval_every_steps: int | None = None
    eval_max_rows: int | None = None
    best_metric: Literal["loss", "accuracy", "macro_f1"] = "loss"
    early_stopping_evals: int | None = None
    load_best: bool = False
    resume: bool = False
    probe_first_step: bool = True
    first_loss_tolerance: float = 0.05
    first_loss_severity: Literal["warn", "stop"] = "stop"
    severities: dict[str, str] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    num_beams: int = 1
    run_id: str | None = None


def step_plan_of(settings: TrainingSettings, rows: TokenTable) -> StepPlan:
    """Lay out the steps of a training.

    Args:
        settings: of the training.
        rows: that are trained on.

    Raises:
        UserError: there are no rows, or the run has no end or no effective batch.
    """
    return StepPlan(
        rows.lengths,
        seed=settings.seed,
        effective_batch_rows=settings.effective_batch_rows,
        effective_batch_tokens=settings.effective_batch_tokens,
        num_epochs=settings.num_epochs,
        max_steps=settings.max_steps,
        sources=rows.sources,
        weights=[float(source["weight"]) for source in settings.sources] or None,
    )
