"""Parameters of answering: which prompts, which model, and how its answers are made."""

from __future__ import annotations

from typing import Literal

from lm_tuning.parameters.base import AutoOrCount, Count, ParameterGroup, Text
from lm_tuning.parameters.data import ColumnParameters, Rows
from lm_tuning.parameters.generation import GenerationParameters, QuantizationName


class GenerateParameters(ParameterGroup):
    """Which prompts a model answers, and how."""

    prompts: Rows | None = None
    """Where the prompts are: file, folder, glob pattern, address or hub name, or a list of them; null names none, and
    the generate pipeline needs one."""

    columns: ColumnParameters = ColumnParameters()
    """Which column of the prompts plays which role; all null reads them by data.columns and data.template."""

    template: Text | None = None
    """Prompt made of columns named in braces; null reads the prompts by data.columns and data.template."""

    max_rows: Count | None = None
    """Prompts read of each file, from its beginning; null reads all."""

    model: Literal["tuned", "base"] = "tuned"
    """Who answers: the tuned model, or the base that it was tuned from, asked in the same wording."""

    generation: GenerationParameters = GenerationParameters(max_new_tokens=256)
    """How answers are made."""

    quantization: QuantizationName = "none"
    """Bits of the weights while answering: int8, nf4, or none for the weights as they were trained."""

    batch_rows: AutoOrCount = "auto"
    """Prompts answered at once; auto takes 16 on a CPU, and on a GPU as many as its memory holds, up to 256."""
