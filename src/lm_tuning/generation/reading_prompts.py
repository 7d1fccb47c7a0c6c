"""Send prompts through a model, which leaves their keys and values in the lanes of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import pad_sequence

from lm_tuning.generation.lanes import Destination, LaneCache


def pad_prompts(
    prompts: Sequence[Sequence[int]], *, pad_id: int, side: Literal["left", "right"]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay prompts one under another.

    Args:
        prompts: token ids of each prompt.
        pad_id: fills shorter prompts.
        side: where; ``left`` makes all prompts end in the last column.

    Returns:
        ``input_ids`` and ``attention_mask``, both ``(batch, sequence)``; the mask comes from lengths, so a prompt
        may hold the pad id itself.
    """
    rows = [torch.tensor(prompt, dtype=torch.long) for prompt in prompts]
    input_ids = pad_sequence(rows, batch_first=True, padding_value=pad_id, padding_side=side)
    attention_mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)
    return input_ids, attention_mask


def read_packed(
    model: Any, cache: LaneCache, lanes: Sequence[int], prompts: Sequence[Sequence[int]], *, device: torch.device
) -> torch.Tensor:
    """Read prompts that lie one after another, without padding.

    Args:
        model: one that attends to packed rows, in evaluation mode.
        cache: keeps their keys and values.
        lanes: where, one for each prompt.
        prompts: token ids of each.
        device: where the model lies.

    Returns:
        The logits behind each prompt, ``(rows, vocabulary)``.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ends = lengths.cumsum(0)
    of_tokens, columns, last, bounds, input_ids = (
        part.to(device)
        for part in (
            torch.tensor(lanes).repeat_interleave(lengths),  # (tokens,)
            torch.cat([torch.arange(length) for length in lengths.tolist()]),  # (tokens,)
            ends - 1,  # (rows,)
            torch.cat([ends.new_zeros(1), ends]).int(),  # (rows + 1,)
            torch.tensor([token for prompt in prompts for token in prompt]),  # (tokens,)
        )
    )
    cache.destination = Destination(of_tokens, columns)
    output = model(
        input_ids=input_ids[None],  # (1, tokens)
        position_ids=columns[None],
        cu_seq_lens_q=bounds,
        max_length_q=int(lengths.max()),
        cache=cache,
        use_cache=True,
        logits_to_keep=last,
    )
    logits: torch.Tensor = output.logits[0]
    return logits


def read_padded(
    model: Any,
    cache: LaneCache,
    lanes: Sequence[int],
    prompts: Sequence[Sequence[int]],
    *,
    pad_id: int,
    device: torch.device,
) -> torch.Tensor:
    """Read prompts that lie one under another, with padding before shorter ones.

    Args:
        model: in evaluation mode.
        cache: keeps their keys and values, not those of padding.
        lanes: where, one for each prompt.
        prompts: token ids of each.
        pad_id: fills shorter prompts.
        device: where the model lies.

    Returns:
        The logits behind each prompt, ``(rows, vocabulary)``.
    """
    input_ids, attention_mask = pad_prompts(prompts, pad_id=pad_id, side="left")
    # Padding has position 0, as in generate; nothing attends to it.
    positions = (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)
    source = attention_mask.flatten().nonzero().squeeze(1)  # (tokens,)
    of_tokens = torch.tensor(lanes).repeat_interleave(attention_mask.sum(dim=-1))  # (tokens,)
    cache.destination = Destination(
        of_tokens.to(device), positions.flatten()[source].to(device), source=source.to(device)
    )
    output = model(
        input_ids=input_ids.to(device),  # (rows, columns)
        attention_mask=attention_mask.to(device),
        position_ids=positions.to(device),
        cache=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: torch.Tensor = output.logits[:, -1]
    return logits
