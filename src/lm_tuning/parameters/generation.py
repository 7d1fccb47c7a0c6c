"""How answers are made: the names and meanings of transformers' ``GenerationConfig``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from lm_tuning.parameters.base import (
    Count,
    CountOrZero,
    ParameterGroup,
    PositiveNumber,
    Text,
    read_scientific,
    write_value,
)

QuantizationName = Literal["none", "int8", "nf4"]
"""How weights are held while answering: as they are, or in 8 or 4 bits by bitsandbytes."""

PositiveFraction = Annotated[float, Field(gt=0, le=1), BeforeValidator(read_scientific)]
FiniteNumber = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(read_scientific)]


class GenerationParameters(ParameterGroup):
    """How answers are made, by the names of transformers' GenerationConfig."""

    max_new_tokens: Count = 32
    """Longest answer, in tokens."""

    num_beams: Count = 1
    """Number of beams, in beam search; 1 takes the likeliest token each time."""

    do_sample: bool = False
    """Draw each token at random by its probability, in place of taking the likeliest one."""

    temperature: PositiveNumber | None = None
    """Divides the logits before a token is drawn: below 1 likely tokens gain, above 1 unlikely ones; null is 1."""

    top_p: PositiveFraction | None = None
    """Draw from the likeliest tokens whose probabilities first sum up to this; null is 1, all of them."""

    top_k: Count | None = None
    """Draw from so many of the likeliest tokens; null is all of them."""

    repetition_penalty: PositiveNumber = 1.0
    """Above 1, tokens of the prompt and of the answer so far lose probability; 1 changes nothing."""

    length_penalty: FiniteNumber | None = None
    """Exponent of the length that a beam's log-probability is divided by: above 0 long answers gain; null is 1."""

    no_repeat_ngram_size: CountOrZero = 0
    """No sequence of so many tokens comes twice in prompt and answer; 0 allows all."""

    stop_strings: list[Text] = Field(default=[])
    """Texts at which an answer ends; neither they nor what follows belong to it."""

    seed: Annotated[CountOrZero, Field(lt=2**32)] | None = None
    """Start of the random numbers that tokens are drawn by; null takes the seed of the run."""


def find_generation_problems(generation: GenerationParameters, group: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Find settings of generation that are fine alone and wrong together.

    Args:
        generation: settings that are valid one by one.
        group: where they stand, such as ``evaluate.generation``.

    Yields:
        The keys that take part, and the sentence for the user.
    """
    sampling, beams = f"{group}.do_sample", f"{group}.num_beams"
    for name in ("temperature", "top_p", "top_k"):
        key, value = f"{group}.{name}", getattr(generation, name)
        if value is not None and not generation.do_sample:
            yield (
                (key, sampling),
                f"{key} = {write_value(value)} has no effect, since {sampling} = false draws nothing: set {sampling} = "
                f"true, or {key} = null.",
            )
    if generation.do_sample and generation.num_beams > 1:
        yield (
            (sampling, beams),
            f"{sampling} = true draws one answer at a time, but {beams} = {generation.num_beams}: set {beams} = 1, or "
            f"{sampling} = false.",
        )
    key = f"{group}.length_penalty"
    if generation.length_penalty is not None and generation.num_beams == 1:
        yield (
            (key, beams),
            f"{key} = {write_value(generation.length_penalty)} has no effect, since it chooses among beams and {beams} "
            f"= 1: set {beams} to 2 or more, or {key} = null.",
        )
