"""Answer prompts by continuous batching: a row whose answer has ended makes room for the next prompt.

``generate`` of transformers runs a batch until its longest answer ends, so that much of what it computes is for rows
which have ended. Here the batch stays full as long as prompts wait, and once none does, rows that have ended are left
out. Prompts are read one after another without padding where a kernel for packed rows can be had.
"""

from __future__ import annotations

import inspect
import logging
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from lm_tuning.batching import packed_attention
from lm_tuning.batching.fused_norms import fused_norms
from lm_tuning.generation.answers import Answer, GrowingAnswers, OnAnswer, ignore_answer
from lm_tuning.generation.choosing import BeginningRow, TokenChooser
from lm_tuning.generation.decoding import Decoder
from lm_tuning.generation.lanes import LaneCache
from lm_tuning.generation.reading_prompts import read_packed, read_padded
from lm_tuning.generation.sampling import uniforms_of
from lm_tuning.generation.stop_strings import StopStrings
from lm_tuning.models.structure import has_encoder, inner_model
from lm_tuning.parameters.generation import GenerationParameters
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
_MEMORY_FRACTION = 0.5
"""Share of the free memory for keys and values."""
_REFILL_FRACTION = 0.25
"""Share of lanes that must be free before prompts are read, and on a CPU before free lanes are given up."""
_GPU_SPARE_FRACTION = 0.5
"""The same for giving lanes up on a GPU, where a step takes nearly as long for fewer rows and is recorded again."""
_GPU_COLUMNS = 128
"""Columns on a GPU come in multiples of this; each other number of them is recorded again."""
_GPU_STEPS = 8
"""Tokens between two looks at which rows have ended, each of which waits for the GPU; elsewhere it is one."""
_ARGUMENTS = {"attention_mask", "cache", "logits_to_keep", "position_ids"}


def takes_continuous_batches(model: Any) -> bool:
    """Return whether a model's prompts can be answered by :class:`ContinuousBatcher`.

    Rows lie in lanes of the cache, so each layer must keep keys and values of all positions and nothing else: no
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


def warn_of_memory(before: int, now: int, *, key: str) -> None:
    """Warn that fewer prompts are answered at once.

    Args:
        before: prompts for which there was no memory.
        now: prompts from here on.
        key: the parameter that sets the number.
    """
    logger.warning(
        "Out of memory with %s answered at once: going on with %d, and with fewer where that is too many. "
        "%s sets the number.",
        count_of(before, "prompt"),
        now,
        key,
    )


class ContinuousBatcher:
    """Answers prompts, several at a time.

    Attributes:
        answers: the answer to each prompt, and its tokens so far.
        most_rows: prompts answered at once; ``None`` until memory has been looked at.
    """

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        *,
        generation: GenerationParameters,
        most_rows: int | None,
        stop_ids: Sequence[int],
        pad_id: int,
        device: torch.device | str,
        seed: int = 0,
        row_ids: Sequence[int] | None = None,
        stop_strings: StopStrings | None = None,
        batch_rows_key: str = "evaluate.generate_batch_rows",
        on_answer: OnAnswer = ignore_answer,
        steps_between_looks: int | None = None,
        packs: bool | None = None,
    ) -> None:
        """Order prompts, the longest first.

        Args:
            model: one for which :func:`takes_continuous_batches` holds, in evaluation mode.
            prompts: token ids of each; every one leaves room for an answer in the model's context.
            generation: how tokens are chosen, and the longest answer.
            most_rows: prompts answered at once; ``None`` for 16 on a CPU, and on a GPU what fits into its memory.
            stop_ids: EOS tokens of an answer.
            pad_id: fills shorter prompts.
            device: where the model lies.
            seed: of the random numbers, where tokens are drawn.
            row_ids: name each prompt's random numbers; ``None`` for their indices.
            stop_strings: strings that end an answer; ``None`` without any.
            batch_rows_key: the parameter that a warning names.
            on_answer: told of each answer as soon as it has ended.
            steps_between_looks: tokens between two looks at which rows have ended; ``None`` for the device's usual.
            packs: whether prompts are packed and attention reads a part of each lane; ``None`` where a kernel can.
        """
        self.answers = GrowingAnswers(
            len(prompts),
            max_new_tokens=generation.max_new_tokens,
            stop_ids=stop_ids,
            stop_strings=stop_strings,
            on_answer=on_answer,
        )
        self._device = torch.device(device)
        self._on_gpu = self._device.type == "cuda"
        self.most_rows = most_rows if most_rows is not None or self._on_gpu else _CPU_ROWS
        self._model = inner_model(model)
        self._prompts = prompts
        self._generation = generation
        self._seed = seed
        self._row_ids = range(len(prompts)) if row_ids is None else row_ids
        self._stop_ids = frozenset(stop_ids)
        self._pad_id = pad_id
        self._batch_rows_key = batch_rows_key
        self._steps = steps_between_looks or (_GPU_STEPS if self._on_gpu else 1)
        self._has_halved = False
        self._packs = self._can_pack() if packs is None else packs
        self._chooser = TokenChooser(generation, self._device)
        self._decoder: Decoder | None = None
        self._cache_bytes: float | None = None
        # The prompt in each lane whose answer has not ended.
        self._running: dict[int, int] = {}
        self._waiting: deque[int] = deque()
        self._wait_for(range(len(prompts)))

    @property
    def num_tokens(self) -> int:
        """Tokens of the answers so far."""
        return self.answers.num_tokens

    @property
    def most_tokens(self) -> int:
        """Tokens in the end if no answer ends early from here on."""
        return self.num_tokens + sum(map(self.answers.num_left, [*self._waiting, *self._running.values()]))

    def run(self, on_tokens: Callable[[], object]) -> list[Answer]:
        """Answer all prompts.

        Args:
            on_tokens: called when there are new tokens.

        Returns:
            The answers, in the order of the prompts.

        Raises:
            RuntimeError, MemoryError: there is no memory for a single row.
        """
        # Not inference_mode, whose tensors a rotary embedding that grows would keep, and no training could use again.
        with torch.no_grad(), self._prepared():
            while self._waiting or self._running:
                failed = False
                try:
                    self._admit(on_tokens)
                    if self._running:
                        self._advance()
                        on_tokens()
                except (RuntimeError, MemoryError) as error:
                    if self._rows_at_once() == 1 or not is_out_of_memory(error):
                        raise
                    traceback.clear_frames(error.__traceback__)
                    failed = True
                # Behind the block: inside of it the error still holds the tensors of the step that failed.
                if failed:
                    self._halve()
        return [answer for answer in self.answers.ended if answer is not None]

    def _compute_dtype(self) -> torch.dtype:
        if torch.is_autocast_enabled(self._device.type):
            return torch.get_autocast_dtype(self._device.type)
        dtype: torch.dtype = self._model.dtype
        return dtype

    def _can_pack(self) -> bool:
        longest = max(map(len, self._prompts), default=0) + self._generation.max_new_tokens
        return packed_attention.runs_in_kernel(
            self._model, device=self._device.type, dtype=self._compute_dtype(), longest_row_tokens=longest
        )

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """Make the model's steps fast: attention to packed prompts and to a part of each lane, norms in one launch."""
        attention = packed_attention.attending_to_packed(self._model) if self._packs else nullcontext()
        norms = fused_norms(self._model) if self._on_gpu else nullcontext()
        with attention, norms:
            yield

    def _admit(self, on_tokens: Callable[[], object]) -> None:
        """Give free lanes to waiting prompts; without any, let go of lanes that nobody needs."""
        rows = self._decoder.cache.num_lanes if self._decoder is not None else 0
        num_free = rows - len(self._running)
        if not self._waiting:
            if self._running and num_free > (_GPU_SPARE_FRACTION if self._on_gpu else _REFILL_FRACTION) * rows:
                self._resize(len(self._running))
            return
        if self._decoder is None:
            self._decoder = self._make_decoder()
        elif self._running and num_free < _REFILL_FRACTION * rows:
            return
        # The longest prompts came first, so that lanes that are far too wide make room for more of them.
        elif self._columns_needed() <= self._decoder.cache.num_columns // 2:
            self._resize(self._rows_wanted())
        while self._waiting and len(self._running) < self._decoder.cache.num_lanes:
            self._prefill(self._decoder)
            on_tokens()
            if self.most_rows is None:
                self._look_at_memory(self._decoder.cache)
                if self._waiting:
                    self._resize(self._rows_wanted())

    def _rows_wanted(self) -> int:
        return max(len(self._running), min(self._most_rows(), len(self._waiting) + len(self._running)))

    def _most_rows(self) -> int:
        """Return how many rows may be answered at once: more than at first once the longest prompts are done."""
        if self._cache_bytes is None or self._decoder is None:
            return self.most_rows or _FIRST_ROWS
        bytes_per_row = self._decoder.cache.bytes_per_token * self._columns_needed()
        return max(1, min(MOST_ROWS, int(self._cache_bytes / bytes_per_row)))

    def _rows_at_once(self) -> int:
        """Return the rows that have lanes, or will have them first."""
        # Not ``most_rows``: once the longest prompts are done there may be more.
        return self._rows_wanted() if self._decoder is None else self._decoder.cache.num_lanes

    def _columns_needed(self) -> int:
        """Return the tokens of the longest row in the end, rounded up."""
        longest = max(
            self._length(index) + self.answers.num_left(index) for index in (*self._waiting, *self._running.values())
        )
        return _round_up(longest, _GPU_COLUMNS) if self._on_gpu else longest

    def _length(self, index: int) -> int:
        return len(self._prompts[index]) + len(self.answers.tokens(index))

    def _beginning(self, index: int) -> BeginningRow:
        """Return a row with what there is of its answer: something, where memory ran out in the middle of it."""
        uniforms = None
        if self._generation.do_sample:
            uniforms = uniforms_of(self._seed, self._row_ids[index], self._generation.max_new_tokens)
        ids = [*self._prompts[index], *self.answers.tokens(index)]
        return BeginningRow(ids, self.answers.num_left(index), uniforms)

    def _make_decoder(self) -> Decoder:
        cache = LaneCache(
            len(DynamicCache(config=self._model.config).layers),
            num_lanes=self._rows_wanted(),
            num_columns=self._columns_needed(),
            dtype=self._compute_dtype() if self._packs else None,
        )
        return Decoder(
            self._model,
            cache,
            chooser=self._chooser,
            stop_ids=torch.tensor(sorted(self._stop_ids), dtype=torch.long, device=self._device),
            steps=self._steps,
            reads_part=self._packs,
        )

    def _resize(self, num_rows: int) -> None:
        """Go on with another number of lanes, as wide as the rows that run or wait need them."""
        assert self._decoder is not None
        kept = sorted(self._running)
        width = max((self._length(index) for index in self._running.values()), default=0)
        self._decoder.resize(num_lanes=num_rows, num_columns=self._columns_needed(), kept=kept, width=width)
        self._running = {lane: self._running[before] for lane, before in enumerate(kept)}

    def _prefill(self, decoder: Decoder) -> None:
        """Send waiting prompts through the model, and add the first token of their answers."""
        free = [lane for lane in range(decoder.cache.num_lanes) if lane not in self._running]
        chosen: list[int] = []
        rows: list[BeginningRow] = []
        positions = 0
        while self._waiting and len(chosen) < len(free):
            row = self._beginning(self._waiting[0])
            positions = positions + len(row.ids) if self._packs else max(positions, len(row.ids))
            if chosen and (positions if self._packs else positions * (len(rows) + 1)) > _PREFILL_TOKENS:
                break
            chosen.append(self._waiting.popleft())
            rows.append(row)
        lanes = free[: len(chosen)]
        # Noted before anything can fail, so that none of them is lost.
        self._running.update(zip(lanes, chosen, strict=True))
        given = [row.ids for row in rows]
        if self._packs:
            logits = read_packed(self._model, decoder.cache, lanes, given, device=self._device)
        else:
            logits = read_padded(self._model, decoder.cache, lanes, given, pad_id=self._pad_id, device=self._device)
        tokens, log_probs = decoder.begin(lanes, rows, logits)
        self._add(decoder, [tokens], [log_probs], lanes)

    def _advance(self) -> None:
        """Give every row some tokens: no more than the row farthest from its end can take."""
        assert self._decoder is not None
        cache = self._decoder.cache
        steps = min(self._steps, max(map(self.answers.num_left, self._running.values())))
        if self._packs:
            width = cache.num_columns
        else:
            width = max(map(self._length, self._running.values())) + steps
            width = min(_round_up(width, _GPU_COLUMNS) if self._on_gpu else width, cache.num_columns)
        tokens, log_probs = self._decoder.advance(steps, width=width)
        self._add(self._decoder, tokens, log_probs, range(cache.num_lanes))

    def _add(
        self, decoder: Decoder, tokens: list[list[int]], log_probs: list[list[float]], lanes: Sequence[int]
    ) -> None:
        """Add tokens, ``(steps, rows)``, to the answers that have not ended, and see which of them end with one."""
        for tokens_of_step, log_probs_of_step in zip(tokens, log_probs, strict=True):
            for lane, token, log_prob in zip(lanes, tokens_of_step, log_probs_of_step, strict=True):
                index = self._running.get(lane)
                if index is not None and self.answers.add(index, token, log_prob):
                    del self._running[lane]
        running = [(lane, self._running[lane]) for lane in lanes if lane in self._running]
        came = [lane for lane, index in running if self.answers.look_for_string(index, num_new=len(tokens))]
        for lane in came:
            del self._running[lane]
        decoder.end(came)

    def _look_at_memory(self, cache: LaneCache) -> None:
        """Choose how many rows of the longest kind are answered at once beside what lies in the GPU's memory."""
        taken = cache.bytes_per_token * cache.num_columns * cache.num_lanes
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        self._cache_bytes = _MEMORY_FRACTION * (torch.cuda.mem_get_info(self._device)[0] + cached + taken)
        self.most_rows = self._most_rows()
        logger.info("Answering up to %s at once.", count_of(self.most_rows, "prompt"))

    def _halve(self) -> None:
        """Go on with half as many rows; what there is of their answers is kept."""
        before = self._rows_at_once()
        self._decoder = self._cache_bytes = None
        self.most_rows = max(1, min(before, len(self._running) or before) // 2)
        self._wait_for([*self._running.values(), *self._waiting])
        self._running.clear()
        if self._on_gpu:
            torch.cuda.empty_cache()
        if not self._has_halved:
            warn_of_memory(before, self.most_rows, key=self._batch_rows_key)
        self._has_halved = True

    def _wait_for(self, prompts: Sequence[int]) -> None:
        # Longest first: neighbours need little padding, and what does not fit into memory fails at once.
        self._waiting = deque(sorted(prompts, key=lambda index: -self._length(index)))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
