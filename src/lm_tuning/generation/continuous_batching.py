"""Answer prompts greedily by continuous batching: a row whose answer has ended makes room for the next prompt.

``generate`` of transformers runs a batch until its longest answer ends, so that much of what it computes is for rows
which have ended. Here the batch stays full as long as prompts wait. Every row ends in the last column of the cache;
what lies left of its first token is masked out, and columns that no row needs any more are dropped.
"""

from __future__ import annotations

import inspect
import logging
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from lm_tuning.models.structure import has_encoder, inner_model
from lm_tuning.runtime.memory_errors import is_out_of_memory
from lm_tuning.wording import count_of

logger = logging.getLogger(__name__)

MOST_ROWS = 256
"""Rows that are answered at once where nobody says how many and memory has room for more."""

_CPU_ROWS = 16
_FIRST_ROWS = 16
"""Rows of the first prefill on a GPU, from which the bytes of a position are read off."""
_PREFILL_TOKENS = 16_384
"""Positions of prompts that go through the model at once, padding included; a single prompt may have more."""
_MEMORY_FRACTION = 0.4
"""Share of the free memory for keys and values: while rows join, old and new ones lie side by side."""
_REFILL_FRACTION = 0.25
"""Share of rows that must have ended before others take their place, which copies all keys and values."""
_GPU_STEPS = 8
"""Tokens between two looks at which rows have ended, each of which waits for the GPU; elsewhere it is one."""
_ARGUMENTS = {"attention_mask", "cache", "logits_to_keep", "position_ids"}


def takes_continuous_batches(model: Any) -> bool:
    """Return whether a model's prompts can be answered by :class:`ContinuousBatcher`.

    Rows are moved about in the cache, so each layer must keep keys and values of all positions and nothing else: no
    sliding windows, no recurrent states. Encoder-decoders, models of several modalities and code from outside
    transformers are not for it either.

    Args:
        model: a language model, wrapped or not.
    """
    inner = inner_model(model)
    config = inner.config
    if has_encoder(config) or config.get_text_config() is not config:
        return False
    if not type(inner).__module__.startswith("transformers."):
        return False
    if not set(inspect.signature(inner.forward).parameters) >= _ARGUMENTS:
        return False
    layers = DynamicCache(config=config).layers
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


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


class _GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # of its __init_subclass__
    """Keys and values of one layer in buffers with room for the tokens to come, so that a step copies none of them."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, *, width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Each (rows, heads, columns, head size); columns from ``width`` on are free.
        self._buffers = (keys, values)
        self._width = width
        self.keys, self.values = keys[:, :, :width], values[:, :, :width]
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states of new tokens, ``(rows, heads, new tokens, head size)``, and return those of all tokens."""
        keys, values = self._buffers
        start, end = self._width, self._width + key_states.shape[2]
        keys[:, :, start:end], values[:, :, start:end] = key_states, value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        self._width = end
        return self.keys, self.values


def _states_of(cache: Cache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return keys and values of each layer, all ``(rows, heads, columns, head size)``."""
    layers: Any = cache.layers  # typed as layers of any kind, of which these have both
    return [(layer.keys, layer.values) for layer in layers]


@dataclass
class _Batch:
    """Rows that are answered together.

    Attributes:
        prompts: index of each row's prompt.
        cache: keys and values of all tokens but ``following``; every row ends in the last column.
        lengths: tokens of each row in the cache, ``(rows,)``.
        following: the token that each row goes on with, ``(rows,)``.
    """

    prompts: list[int]
    cache: Cache
    lengths: torch.Tensor
    following: torch.Tensor


class ContinuousBatcher:
    """Answers prompts, several at a time, with the likeliest token each time.

    Attributes:
        answers: tokens of each prompt's answer so far, without the stop token.
        most_rows: prompts answered at once; ``None`` until memory has been looked at.
    """

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        most_rows: int | None,
        stop_ids: Sequence[int],
        pad_id: int,
        device: torch.device | str,
        steps_between_looks: int | None = None,
    ) -> None:
        """Order prompts, the longest first.

        Args:
            model: one for which :func:`takes_continuous_batches` holds, in evaluation mode.
            prompts: token ids of each; every one leaves room for an answer in the model's context.
            max_new_tokens: longest answer.
            most_rows: prompts answered at once; ``None`` for 16 on a CPU, and on a GPU what fits into its memory.
            stop_ids: EOS tokens of an answer.
            pad_id: fills shorter prompts.
            device: where the model lies.
            steps_between_looks: tokens between two looks at which rows have ended; ``None`` for the device's usual.
        """
        self.answers: list[list[int]] = [[] for _ in prompts]
        self._device = torch.device(device)
        self._on_gpu = self._device.type == "cuda"
        self.most_rows = most_rows if most_rows is not None or self._on_gpu else _CPU_ROWS
        self._model = inner_model(model)
        self._prompts = prompts
        self._max_new_tokens = max_new_tokens
        self._stop_ids = frozenset(stop_ids)
        self._pad_id = pad_id
        self._steps = steps_between_looks or (_GPU_STEPS if self._on_gpu else 1)
        self._has_halved = False
        self._running: set[int] = set()
        self._waiting: deque[int] = deque()
        self._wait_for(range(len(prompts)))

    @property
    def num_tokens(self) -> int:
        """Tokens of the answers so far."""
        return sum(map(len, self.answers))

    @property
    def most_tokens(self) -> int:
        """Tokens in the end if no answer ends early from here on."""
        return self.num_tokens + sum(map(self._num_left, [*self._waiting, *self._running]))

    def run(self, on_tokens: Callable[[], object]) -> list[list[int]]:
        """Answer all prompts.

        Args:
            on_tokens: called when there are new tokens.

        Returns:
            The answers, in the order of the prompts.

        Raises:
            RuntimeError, MemoryError: there is no memory for a single row.
        """
        batch: _Batch | None = None
        # Not inference_mode, whose tensors a rotary embedding that grows would keep, and no training could use again.
        with torch.no_grad():
            while self._waiting or self._running:
                failed = False
                try:
                    batch = self._refill(batch, on_tokens)
                    if batch is not None:
                        self._add(self._forward(batch), batch.prompts)
                        on_tokens()
                except (RuntimeError, MemoryError) as error:
                    if self.most_rows == 1 or not is_out_of_memory(error):
                        raise
                    traceback.clear_frames(error.__traceback__)
                    failed = True
                # Behind the block: inside of it the error still holds the tensors of the step that failed.
                if failed:
                    batch = None
                    self._halve()
        return self.answers

    def _refill(self, batch: _Batch | None, on_tokens: Callable[[], object]) -> _Batch | None:
        """Fill rows that have ended with waiting prompts; ``None`` when every answer has ended."""
        parts: list[tuple[_Batch, list[int]]] = []
        if batch is not None and (rows := self._rows_running(batch)):
            num_ended = len(batch.prompts) - len(rows)
            if num_ended == 0 or num_ended < _REFILL_FRACTION * len(batch.prompts):
                return batch
            parts.append((batch, rows))
        while self._waiting and (room := (self.most_rows or _FIRST_ROWS) - len(self._running)) > 0:
            part = self._prefill(room)
            on_tokens()
            # An answer may end with its first token.
            if rows := self._rows_running(part):
                parts.append((part, rows))
        return self._join(parts) if parts else None

    def _rows_running(self, batch: _Batch) -> list[int]:
        return [row for row, index in enumerate(batch.prompts) if index in self._running]

    def _num_left(self, index: int) -> int:
        return self._max_new_tokens - len(self.answers[index])

    def _prefill(self, most_rows: int) -> _Batch:
        """Send waiting prompts through the model, and add the first token of their answers."""
        chosen: list[int] = []
        given: list[list[int]] = []
        while self._waiting and len(chosen) < most_rows:
            index = self._waiting[0]
            # With what there is of the answer already, where memory ran out in the middle of it.
            ids = [*self._prompts[index], *self.answers[index]]
            if chosen and max(len(ids), *map(len, given)) * (len(given) + 1) > _PREFILL_TOKENS:
                break
            chosen.append(self._waiting.popleft())
            given.append(ids)
        self._running.update(chosen)
        input_ids, attention_mask = (
            ids.to(self._device) for ids in pad_prompts(given, pad_id=self._pad_id, side="left")
        )
        cache = DynamicCache(config=self._model.config)
        # Padding has position 0, as in generate; nothing attends to it.
        positions = (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)
        following = self._next_tokens(input_ids, attention_mask, positions, cache)
        if self.most_rows is None:
            self.most_rows = self._rows_that_fit(cache)
        self._add([following.tolist()], chosen)
        return _Batch(chosen, cache, attention_mask.sum(dim=-1), following)

    def _forward(self, batch: _Batch) -> list[list[int]]:
        """Return the next tokens of all rows, ``(steps, rows)``: no more than the row nearest to its end can take."""
        num_left = min(self._num_left(index) for index in batch.prompts if index in self._running)
        steps = []
        for _ in range(min(num_left, self._steps)):
            batch.lengths += 1
            width = batch.cache.get_seq_length() + 1
            columns = torch.arange(width, device=self._device)
            attention_mask = (columns >= width - batch.lengths[:, None]).long()  # (rows, width)
            batch.following = self._next_tokens(
                batch.following[:, None], attention_mask, batch.lengths[:, None] - 1, batch.cache
            )
            steps.append(batch.following)
        return torch.stack(steps).tolist()

    def _next_tokens(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor, cache: Cache
    ) -> torch.Tensor:
        """Return the likeliest token after each row, ``(rows,)``; keys and values are added to the cache."""
        output = self._model(
            input_ids=input_ids,  # (rows, new tokens)
            attention_mask=attention_mask,  # (rows, tokens in the cache + new tokens)
            position_ids=position_ids,  # (rows, new tokens)
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        following: torch.Tensor = output.logits[:, -1].argmax(dim=-1)
        return following

    def _add(self, steps: list[list[int]], prompts: list[int]) -> None:
        """Add tokens, ``(steps, rows)``, to the answers that have not ended, and see which of them end with one."""
        for tokens in steps:
            for index, token in zip(prompts, tokens, strict=True):
                if index not in self._running:
                    continue
                if token not in self._stop_ids:
                    self.answers[index].append(token)
                if token in self._stop_ids or self._num_left(index) == 0:
                    self._running.remove(index)

    def _join(self, parts: list[tuple[_Batch, list[int]]]) -> _Batch:
        """Copy chosen rows of several batches into one with room for what is left of their answers."""
        prompts = [batch.prompts[row] for batch, rows in parts for row in rows]
        picked = [(batch, torch.tensor(rows, device=self._device)) for batch, rows in parts]
        lengths = torch.cat([batch.lengths[rows] for batch, rows in picked])  # (rows,)
        width = int(lengths.max())
        room = max(self._num_left(index) for index in prompts)

        def copy(states: list[torch.Tensor]) -> torch.Tensor:
            # Each (rows of its batch, heads, columns of its batch, head size). Masked columns must be finite.
            _, heads, _, size = states[0].shape
            buffer = states[0].new_zeros(len(prompts), heads, width + room, size)
            first = 0
            for (_, rows), part in zip(picked, states, strict=True):
                columns = min(width, part.shape[2])
                buffer[first : first + len(rows), :, width - columns : width] = part[rows, :, part.shape[2] - columns :]
                first += len(rows)
            return buffer

        layers: list[Any] = []
        for same_layer in zip(*(_states_of(batch.cache) for batch, _ in parts), strict=True):
            keys, values = (copy(list(states)) for states in zip(*same_layer, strict=True))
            layers.append(_GrowingLayer(keys, values, width=width))
        following = torch.cat([batch.following[rows] for batch, rows in picked])
        return _Batch(prompts, Cache(layers=layers), lengths, following)

    def _rows_that_fit(self, cache: Cache) -> int:
        """Return how many rows of the longest kind have room beside what lies in the GPU's memory."""
        states = _states_of(cache)
        num_bytes = sum(keys.nbytes + values.nbytes for keys, values in states)
        num_rows, _, width, _ = states[0][0].shape
        bytes_per_row = num_bytes / num_rows * (1 + self._max_new_tokens / width)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        free = torch.cuda.mem_get_info(self._device)[0] + cached + num_bytes
        rows = max(1, min(MOST_ROWS, int(_MEMORY_FRACTION * free / bytes_per_row)))
        logger.info("Answering up to %s at once.", count_of(rows, "prompt"))
        return rows

    def _halve(self) -> None:
        """Go on with half as many rows; what there is of their answers is kept."""
        before = self.most_rows or _FIRST_ROWS
        self.most_rows = max(1, min(before, max(len(self._running), 1)) // 2)
        self._wait_for([*self._running, *self._waiting])
        self._running.clear()
        if self._on_gpu:
            torch.cuda.empty_cache()
        if not self._has_halved:
            logger.warning(
                "Out of memory with %s answered at once: going on with %d, and with fewer where that is too many. "
                "evaluate.generate_batch_rows sets the number.",
                count_of(before, "prompt"),
                self.most_rows,
            )
        self._has_halved = True

    def _wait_for(self, prompts: Sequence[int]) -> None:
        # Longest first: neighbours need little padding, and what does not fit into memory fails at once.
        lengths = {index: len(self._prompts[index]) + len(self.answers[index]) for index in prompts}
        self._waiting = deque(sorted(prompts, key=lambda index: -lengths[index]))
