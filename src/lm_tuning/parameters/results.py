"""Parameters of preflight, of evaluation and of run tracking."""

from __future__ import annotations

from typing import Literal

from lm_tuning.parameters.base import AutoOrCount, Count, CountOrZero, ParameterGroup, Text


class PreflightParameters(ParameterGroup):
    """What preflight shows."""

    num_examples: Count = 3
    """Rows shown as the model will see them, with the supervised part marked."""


class EvaluateParameters(ParameterGroup):
    """How much is measured on held-out rows, for the base model and for the tuned one."""

    # The defaults of this group keep an evaluation on a CPU to minutes; recipes for a GPU raise them.
    max_loss_rows: Count | None = 128
    """Held-out rows for loss and perplexity, or for a classifier's accuracy and macro-F1; null takes all."""

    num_generate_rows: CountOrZero = 64
    """Held-out rows answered by both models for ROUGE-L; 0 skips generation, the slow part."""

    max_new_tokens: Count = 32
    """Longest answer, in tokens."""

    num_beams: Count = 1
    """Number of beams, in beam search; 1 takes the likeliest token each time."""

    micro_batch_tokens: AutoOrCount = "auto"
    """Tokens of one forward pass, padding included; auto fits the memory."""

    generate_batch_rows: AutoOrCount = "auto"
    """Rows answered at once; auto takes 16 on a CPU, and on a GPU as many as its memory holds, up to 256."""

    num_samples: CountOrZero = 5
    """Rows shown in the report, each with both models' answers or with its class."""


# None of these decides a result, so a resumed run may have others.
class TrackingParameters(ParameterGroup):
    """What MLflow keeps of a run."""

    experiment: Text = "lm-tuning"
    """Name of the MLflow experiment."""

    run_name: Text | None = None
    """Name of the run; null makes one of the output name and the pipelines."""

    log_model: Literal["adapter", "always", "never"] = "adapter"
    """Whether the tuned weights are copied into MLflow: an adapter only, full weights too, or neither."""

    on_unreachable: Literal["continue", "stop"] = "continue"
    """When the tracking store does not answer at the start: go on and send later, or refuse to start."""
