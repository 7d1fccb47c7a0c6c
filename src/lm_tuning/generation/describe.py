"""Describe in words how answers are made."""

from __future__ import annotations

from lm_tuning.parameters.base import write_value
from lm_tuning.parameters.generation import GenerationParameters

_APART = ("max_new_tokens", "num_beams", "do_sample", "seed")


def describe_generation(generation: GenerationParameters, *, seed: int) -> str:
    """Return how tokens are chosen in one line, such as ``greedy, repetition_penalty 1.2``.

    Args:
        generation: the parameters.
        seed: of the run, which counts where tokens are drawn and ``generation`` names none.
    """
    if generation.do_sample:
        start = f"sampling with seed {seed if generation.seed is None else generation.seed}"
    elif generation.num_beams > 1:
        start = f"beam search with {generation.num_beams} beams"
    else:
        start = "greedy"
    changed = generation.model_dump(exclude_defaults=True)
    return ", ".join([start, *(f"{name} {write_value(changed[name])}" for name in changed if name not in _APART)])
