"""Change logits by what a row has already, on the device and without waiting for it.

The rules are those of transformers' ``RepetitionPenaltyLogitsProcessor`` and ``NoRepeatNGramLogitsProcessor``, which
keep the tokens of all rows in one tensor that grows; here they lie where a CUDA graph finds them again.
"""

from __future__ import annotations

import torch


def penalize_repetition(scores: torch.Tensor, has_come: torch.Tensor, penalty: float) -> torch.Tensor:
    """Make tokens that have come less likely.

    Args:
        scores: logits, ``(rows, vocabulary)``.
        has_come: whether a token is in the row's prompt or answer, ``(rows, vocabulary)``.
        penalty: divides positive logits and multiplies negative ones.

    Source:
        Keskar et al., CTRL, 2019, section 4.1.
    """
    penalized = torch.where(scores < 0, scores * penalty, scores / penalty)
    return torch.where(has_come, penalized, scores)


def forbid_repeated_ngrams(
    scores: torch.Tensor, tokens: torch.Tensor, num_tokens: torch.Tensor, size: int
) -> torch.Tensor:
    """Forbid each token that would complete a sequence of tokens which the row has already.

    Args:
        scores: logits, ``(rows, vocabulary)``.
        tokens: of each row from its first column on, prompt and answer, ``(rows, columns)``.
        num_tokens: how many of these the row has, ``(rows,)``.
        size: tokens of a sequence, 1 at least.

    Returns:
        The logits, minus infinity where a token is forbidden.
    """
    rows, columns = tokens.shape
    num_windows = columns - size + 1
    if num_windows < 1:
        return scores
    device = tokens.device
    # A window ends with the token that is forbidden if the tokens before it are the row's last ones.
    matches = torch.arange(size - 1, columns, device=device) < num_tokens[:, None]  # (rows, windows)
    for offset in range(size - 1):
        # Rows with fewer tokens than a sequence has no whole window, so what is read for them does not count.
        column = (num_tokens - (size - 1) + offset).clamp(min=0)
        last = tokens.gather(1, column[:, None])  # (rows, 1)
        matches &= tokens[:, offset : offset + num_windows] == last
    # What matches nothing is sent to a column behind the vocabulary, which is dropped.
    vocabulary = scores.shape[-1]
    completing = tokens[:, size - 1 :].masked_fill(~matches, vocabulary)
    is_forbidden = torch.zeros(rows, vocabulary + 1, dtype=torch.bool, device=device).scatter_(1, completing, True)
    return scores.masked_fill(is_forbidden[:, :vocabulary], -torch.inf)
