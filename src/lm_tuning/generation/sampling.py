"""Draw tokens at random, by random numbers of each row's own.

What a row gets depends on the seed, on the row and on how many tokens it has, and not on which other rows are answered
beside it, in which order, or whether memory ran out in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from lm_tuning.parameters.generation import GenerationParameters

# Rounding must not lift a number to the sum of all probabilities, which lies behind the last token.
_BELOW_ONE = 1 - 2.0**-20


def uniforms_of(seed: int, row_id: int, num_tokens: int) -> npt.NDArray[np.float32]:
    """Return the random numbers of a row, one for each token of its answer.

    Args:
        seed: of the run or of the generation.
        row_id: of the row; equal ones draw equal numbers.
        num_tokens: how many; those of fewer are the first of these.

    Returns:
        Numbers from 0 to less than 1, ``(tokens,)``.
    """
    # A generator whose numbers are a function of its key, so that neighbouring rows have nothing in common.
    key = np.array([seed, row_id & (2**64 - 1)], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(num_tokens, dtype=np.float32)


@contextmanager
def allowing_scans() -> Iterator[None]:
    """Let running sums be used where torch is told to be deterministic, and refuses them on a GPU whatever their shape.

    Over the last dimension of a matrix each row is summed up in an order of its own, which is always the same.
    """
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warns)


def draw_tokens(scores: torch.Tensor, uniforms: torch.Tensor, generation: GenerationParameters) -> torch.Tensor:
    """Draw a token for each row.

    Args:
        scores: logits after penalties, float32, ``(rows, vocabulary)``.
        uniforms: a random number from 0 to 1 for each row, ``(rows,)``.
        generation: its temperature, ``top_k`` and ``top_p``, in this order as transformers has them.

    Returns:
        Token ids, ``(rows,)``.
    """
    with allowing_scans():
        reached = probabilities_of(scores, generation).cumsum(dim=-1)  # (rows, vocabulary)
    wanted = uniforms[:, None] * _BELOW_ONE * reached[:, -1:]
    # The first token whose share is reached; those without probability add nothing, so they never are the first.
    return torch.searchsorted(reached, wanted, right=True).squeeze(1).clamp_(max=scores.shape[-1] - 1)


def probabilities_of(scores: torch.Tensor, generation: GenerationParameters) -> torch.Tensor:
    """Return what tokens are drawn by, ``(rows, vocabulary)``; the rows' sums may be below 1.

    Args:
        scores: see :func:`draw_tokens`.
        generation: see :func:`draw_tokens`.
    """
    if generation.temperature is not None:
        scores = scores / generation.temperature
    if generation.top_k is not None:
        least = scores.topk(min(generation.top_k, scores.shape[-1])).values[:, -1:]  # (rows, 1)
        scores = scores.masked_fill(scores < least, -torch.inf)
    probabilities = scores.softmax(dim=-1)
    if generation.top_p is None or generation.top_p == 1:
        return probabilities
    ordered, tokens = probabilities.sort(dim=-1, descending=True)
    # What comes before a token, so that the likeliest one is always kept.
    before = ordered.cumsum(dim=-1) - ordered
    ordered = ordered.masked_fill(before >= generation.top_p, 0.0)
    return torch.zeros_like(ordered).scatter(-1, tokens, ordered)
