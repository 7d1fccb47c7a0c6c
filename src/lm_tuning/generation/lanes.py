"""Keeps keys and values of the rows that are answered, each row in a lane that stays where it is.

A row's tokens lie from the lane's first column on, so that rows of any length stand side by side, a lane is given to
the next prompt without moving the others, and a CUDA graph finds everything where it was.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, DynamicLayer


@dataclass(frozen=True)
class Destination:
    """Where the tokens of a forward pass go in the cache.

    Attributes:
        lanes: of each token that is kept, ``(tokens,)``.
        columns: of each such token in its lane, ``(tokens,)``.
        source: which tokens of the pass those are, counted row by row, ``(tokens,)``; ``None`` for all of them.
        width: columns of all lanes that the new tokens are to see; ``None`` where they see the tokens of their own pass
            alone, as prompts do.
    """

    lanes: torch.Tensor
    columns: torch.Tensor
    source: torch.Tensor | None = None
    width: int | None = None


class _LaneLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # of its __init_subclass__
    """Keys and values of one layer, ``(lanes, columns, heads, head size)`` each once the first tokens have come."""

    def __init__(self, owner: LaneCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner
        self.buffers: list[torch.Tensor] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the states of new tokens, ``(rows, heads, tokens, head size)``, and return those that they see."""
        destination = self._owner.destination
        states = (key_states, value_states)
        if not self.buffers:
            shape = (self._owner.num_lanes, self._owner.num_columns)
            # Zeros, since what is masked out must still be finite.
            self.buffers = [
                part.new_zeros(*shape, part.shape[1], part.shape[3], dtype=self._owner.dtype or part.dtype)
                for part in states
            ]
            self.is_initialized = True
        for buffer, part in zip(self.buffers, states, strict=True):
            tokens = part.transpose(1, 2).flatten(0, 1)  # (rows * tokens, heads, head size)
            taken = tokens if destination.source is None else tokens[destination.source]
            buffer[destination.lanes, destination.columns] = taken.to(buffer.dtype)
        if destination.width is None:
            return key_states, value_states
        keys, values = (buffer[:, : destination.width].transpose(1, 2) for buffer in self.buffers)
        return keys, values

    def get_seq_length(self) -> int:
        """Return the columns that come before the new tokens."""
        return 0 if self._owner.destination.width is None else self._owner.destination.width - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many columns the new tokens see, and the first of them."""
        return self._owner.destination.width or query_length, 0

    def resize(self, kept: torch.Tensor, width: int) -> None:
        """Make new buffers of the owner's size with the first columns of some lanes."""
        for index, buffer in enumerate(self.buffers):
            new = buffer.new_zeros(self._owner.num_lanes, self._owner.num_columns, *buffer.shape[2:])
            new[: len(kept), :width] = buffer[kept, :width]
            # One by one, so that no more than one lies in memory twice.
            self.buffers[index] = new


class LaneCache(Cache):
    """A cache of transformers whose rows lie in lanes.

    Attributes:
        num_lanes: rows that have room.
        num_columns: tokens that have room in each lane.
        dtype: of keys and values; ``None`` keeps that of the model.
        destination: where the tokens of the next forward pass go; set it before each pass.
    """

    destination: Destination

    def __init__(self, num_layers: int, *, num_lanes: int, num_columns: int, dtype: torch.dtype | None = None) -> None:
        """Note the sizes: memory is taken when the first tokens come, which show what a layer keeps."""
        self.num_lanes, self.num_columns, self.dtype = num_lanes, num_columns, dtype
        super().__init__(layers=[_LaneLayer(self) for _ in range(num_layers)])

    @property
    def _lane_layers(self) -> list[_LaneLayer]:
        return self.layers  # type: ignore[return-value]  # typed as layers of any kind

    @property
    def bytes_per_token(self) -> float:
        """Bytes that all layers keep of a token; 0 before the first ones have come."""
        num_bytes = sum(buffer.nbytes for layer in self._lane_layers for buffer in layer.buffers)
        return num_bytes / (self.num_lanes * self.num_columns)

    def resize(self, *, num_lanes: int, num_columns: int, kept: torch.Tensor, width: int) -> None:
        """Go on with more or fewer lanes and columns.

        Args:
            num_lanes: rows that have room from now on.
            num_columns: tokens that have room in each.
            kept: lanes that become the first ones, in this order.
            width: columns of these that hold something.
        """
        self.num_lanes, self.num_columns = num_lanes, num_columns
        for layer in self._lane_layers:
            layer.resize(kept, width)
