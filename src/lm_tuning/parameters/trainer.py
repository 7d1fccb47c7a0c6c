"""Settings passed on to the Hugging Face Trainer under its own names, and where those live that are ours."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic refuses typing's own before Python 3.12

from lm_tuning.parameters.base import CountOrZero, Fraction, NonNegativeNumber, PositiveNumber, ScheduleValue, Text

Schedule = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
]
# Those that need nothing beyond what this project installs.
Optimizer = Literal[
    "adamw_torch",
    "adamw_torch_fused",
    "adafactor",
    "sgd",
    "adagrad",
    "rmsprop",
    "adamw_8bit",
    "adamw_bnb_8bit",
    "paged_adamw_32bit",
    "paged_adamw_8bit",
    "lion_32bit",
    "lion_8bit",
    "paged_lion_32bit",
    "paged_lion_8bit",
]


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


# TrainingArguments (past and present) that this project sets itself -> what to use instead. Looked up for keys under
# train as well, where people who know the Trainer write them first.
OWNED_BY_US: dict[str, str] = {
    "output_dir": "use output",
    "per_device_train_batch_size": "use train.effective_batch_rows; train.micro_batch_tokens says how a step is split",
    "per_device_eval_batch_size": "use evaluate.micro_batch_tokens",
    "gradient_accumulation_steps": "not needed: set train.effective_batch_rows, and a step is split to fit the memory",
    "average_tokens_across_devices": "not needed: losses are always divided by the global count of supervised tokens",
    "auto_find_batch_size": "use train.micro_batch_tokens: auto",
    "num_train_epochs": "use train.num_epochs",
    "max_steps": "use train.max_steps",
    "learning_rate": "use train.learning_rate",
    "warmup_ratio": "use train.trainer.warmup_steps, which takes a fraction below 1 too",
    "bf16": "use train.precision: bfloat16",
    "fp16": "use train.precision: float16",
    "bf16_full_eval": "use train.precision",
    "fp16_full_eval": "use train.precision",
    "tf32": "use environment.tf32",
    "gradient_checkpointing": "use train.gradient_checkpointing",
    "gradient_checkpointing_kwargs": "use train.gradient_checkpointing",
    "activation_checkpointing": "use train.gradient_checkpointing",
    "activation_checkpointing_kwargs": "use train.gradient_checkpointing",
    "eval_strategy": "use train.eval_every_steps",
    "evaluation_strategy": "use train.eval_every_steps",
    "eval_steps": "use train.eval_every_steps",
    "eval_on_start": "not needed: the health report measures the first loss",
    "save_strategy": "use train.save_every_steps",
    "save_steps": "use train.save_every_steps",
    "save_total_limit": "use train.keep_checkpoints",
    "save_only_model": "not offered: a checkpoint that cannot be resumed from is not one",
    "load_best_model_at_end": "use train.load_best",
    "metric_for_best_model": "use train.best_metric",
    "greater_is_better": "not needed: train.best_metric knows which way is better",
    "early_stopping_patience": "use train.early_stopping_evals",
    "early_stopping_threshold": "not offered: any better value counts; see train.early_stopping_evals",
    "resume_from_checkpoint": "use train.resume",
    "ignore_data_skip": "not needed: the step plan starts at the right step by itself",
    "seed": "use seed",
    "data_seed": "use seed",
    "full_determinism": "use environment.reproducibility: deterministic",
    "use_cpu": "not needed: the device is chosen by what is there; hide a GPU with CUDA_VISIBLE_DEVICES",
    "dataloader_num_workers": "use train.num_loader_workers",
    "dataloader_pin_memory": "not needed: on where it helps",
    "dataloader_persistent_workers": "not needed: on where it helps",
    "dataloader_prefetch_factor": "not needed: on where it helps",
    "dataloader_drop_last": "not offered: every row is used, and steps are weighted by their tokens",
    "group_by_length": "use train.batching",
    "train_sampling_strategy": "use train.batching",
    "length_column_name": "not needed: lengths are stored with the tokens",
    "remove_unused_columns": "not needed: batches hold only what the model takes",
    "label_names": "not needed: labels come from the stored spans",
    "report_to": "not needed: MLflow gets every step; see tracking",
    "run_name": "use tracking.run_name",
    "logging_steps": "not needed: every step is logged",
    "logging_strategy": "not needed: every step is logged",
    "logging_first_step": "not needed: every step is logged",
    "logging_nan_inf_filter": "not offered: it hides NaN",
    "logging_dir": "use output",
    "disable_tqdm": "not needed: progress is shown by this project",
    "use_cache": "not needed: off while training, on while generating",
    "torch_empty_cache_steps": "not offered: emptying the cache on the way costs more than it frees",
    "overwrite_output_dir": "use output: results of another output name are never touched",
    "label_smoothing_factor": "use train.label_smoothing",
    "neftune_noise_alpha": "use train.neftune_noise_alpha",
    "freeze_layers": "use train.freeze",
    "freeze_modules": "use train.freeze",
    "freeze_trainable_layers": "use train.freeze, which names what stays as it is",
    "load_in_4bit": "use train.method: qlora, with train.qlora.bits: 4",
    "load_in_8bit": "use train.method: qlora, with train.qlora.bits: 8",
    "bnb_4bit_quant_type": "use train.qlora.quant_type",
    "bnb_4bit_use_double_quant": "use train.qlora.double_quant",
    "bnb_4bit_compute_dtype": "use train.precision",
    "torch_compile": "not offered yet",
    "use_liger_kernel": "not offered yet",
    "fsdp": "not offered yet",
    "deepspeed": "not offered yet",
    "ddp_backend": "not offered yet",
    "push_to_hub": "not offered: upload data/06_models/<output>/tuned_model yourself",
}
