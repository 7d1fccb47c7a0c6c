"""Choose the next token of each row from its logits: the likeliest, or one drawn at random."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        seed: of the random numbers; answers are the same again as long as the prompts and their number at once are.
        temperature: divides the logits; above 0.
        top_k: how many of the likeliest tokens are drawn from; ``None`` for all.
        top_p: the likeliest tokens whose probabilities first sum up to this are drawn from, above 0 and at most 1.
    """

    seed: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0


class TokenChooser:
    """Chooses tokens on the device, without waiting for it.

    Attributes:
        generator: of the random numbers; ``None`` where the likeliest token is taken.
    """

    def __init__(self, sampling: Sampling | None, device: torch.device) -> None:
        """Begin a row of random numbers.

        Args:
            sampling: how tokens are drawn; ``None`` takes the likeliest one.
            device: where the logits lie.
        """
        self._sampling = sampling
        self.generator: torch.Generator | None = None
        if sampling is not None:
            self.generator = torch.Generator(device).manual_seed(sampling.seed)

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a token for each row.

        Args:
            logits: of the next token, ``(rows, vocabulary)``.

        Returns:
            Token ids, ``(rows,)``.
        """
        if self._sampling is None:
            return logits.argmax(dim=-1)
        scores = logits.float() / self._sampling.temperature
        if self._sampling.top_k is not None:
            least = scores.topk(min(self._sampling.top_k, scores.shape[-1])).values[:, -1:]  # (rows, 1)
            scores = scores.masked_fill(scores < least, -torch.inf)
        probabilities = scores.softmax(dim=-1)
        if self._sampling.top_p < 1:
            ordered, tokens = probabilities.sort(dim=-1, descending=True)
            # What comes before a token, so that the likeliest one is always kept.
            before = ordered.cumsum(dim=-1) - ordered
            ordered = ordered.masked_fill(before >= self._sampling.top_p, 0.0)
            probabilities = torch.zeros_like(ordered).scatter(-1, tokens, ordered)
        # The largest of p / e, with e drawn from an exponential distribution, is token i with probability p[i]:
        # unlike torch.multinomial this never looks at the values from the host.
        waits = torch.empty_like(probabilities).exponential_(generator=self.generator)
        return (probabilities / waits).argmax(dim=-1)
