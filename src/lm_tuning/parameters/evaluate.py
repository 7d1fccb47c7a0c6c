"""How much is measured on held-out rows, and how answers are made there."""

from __future__ import annotations

from typing import Literal

from lm_tuning.parameters.base import AutoOrCount, Count, CountOrZero, ParameterGroup
from lm_tuning.parameters.generation import GenerationParameters, QuantizationName

HeldOutChoice = Literal["auto", "validation", "test"]


class EvaluateParameters(ParameterGroup):
    """How much is measured on held-out rows, for the base model and for the tuned one."""

    split: HeldOutChoice = "auto"
    """Which held-out rows: auto takes test, and validation where test has none; validation is for choosing by it."""

    # The defaults of this group keep an evaluation on a CPU to minutes; recipes for a GPU raise them.
    max_loss_rows: Count | None = 128
    """Held-out rows for loss and perplexity, or for a classifier's accuracy and macro-F1; null takes all."""

    num_generate_rows: CountOrZero = 64
    """Held-out rows answered by both models for ROUGE-L; 0 skips generation, the slow part."""

    generation: GenerationParameters = GenerationParameters()
    """How both models answer; the settings that came with them are set aside."""

    quantization: QuantizationName = "none"
    """Bits of the tuned model's weights in a second measurement, beside the one as trained: int8, nf4 or none."""

    micro_batch_tokens: AutoOrCount = "auto"
    """Tokens of one forward pass, padding included; auto fits the memory."""

    generate_batch_rows: AutoOrCount = "auto"
    """Rows answered at once; auto takes 16 on a CPU, and on a GPU as many as its memory holds, up to 256."""

    num_samples: CountOrZero = 5
    """Rows shown in the report, each with both models' answers or with its class."""
