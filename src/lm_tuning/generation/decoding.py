"""Give every row its next token, on a GPU from a CUDA graph.

A step of a small model is a thousand small operations, which a GPU does faster than they can be launched one by one.
Nothing of a row is looked at from the host: how far it is, whether it has ended and what it goes on with lie in tensors
that stay where they are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from lm_tuning.generation.choosing import BeginningRow, TokenChooser
from lm_tuning.generation.lanes import Destination, LaneCache
from lm_tuning.runtime.cuda_graphs import recording_into
from lm_tuning.runtime.memory_errors import is_out_of_memory

logger = logging.getLogger(__name__)

NO_TOKEN = -1
"""Stands for the token of a row that has ended."""


class Decoder:
    """Rows that are answered together, and the step that gives each of them a token.

    Attributes:
        cache: keys and values of the rows' tokens; a lane for each row.
        reads_part: whether attention is told how many columns of a lane count; otherwise columns are masked.
    """

    def __init__(
        self,
        model: Any,
        cache: LaneCache,
        *,
        chooser: TokenChooser,
        stop_ids: torch.Tensor,
        steps: int,
        reads_part: bool,
    ) -> None:
        """Begin with rows that have all ended.

        Args:
            model: in evaluation mode, on its device.
            cache: with its lanes.
            chooser: chooses tokens.
            stop_ids: EOS tokens of an answer, ``(stop tokens,)``, on the model's device.
            steps: most tokens of a row between two looks.
            reads_part: see the attribute.
        """
        self.cache = cache
        self.reads_part = reads_part
        self._model = model
        self._chooser = chooser
        self._stop_ids = stop_ids
        self._steps = steps
        self._device = stop_ids.device
        self._failure: str | None = None
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._warm: set[int] = set()
        chooser.resize(cache.num_lanes, cache.num_columns, torch.tensor([], dtype=torch.long, device=self._device))
        self._set_up_rows()

    def _set_up_rows(self) -> None:
        rows, device = self.cache.num_lanes, self._device
        # All (rows,): the token that a row goes on with, its tokens in the cache, tokens that its answer may still get.
        self._following = torch.zeros(rows, dtype=torch.long, device=device)
        self._lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self._left = torch.zeros(rows, dtype=torch.long, device=device)
        self._has_ended = torch.ones(rows, dtype=torch.bool, device=device)
        self._lanes = torch.arange(rows, device=device)
        # The tokens since the last look with the logarithms of their probabilities, both (steps, rows), and how many
        # steps that was, (1,).
        self._history = torch.full((self._steps, rows), NO_TOKEN, dtype=torch.long, device=device)
        self._log_probs = torch.zeros(self._steps, rows, device=device)
        self._cursor = torch.zeros(1, dtype=torch.long, device=device)
        bounds = torch.arange(rows + 1, dtype=torch.int32, device=device)  # (rows + 1,)
        self._bounds = (bounds, bounds * self.cache.num_columns)
        # They read and write other buffers.
        self._graphs.clear()
        self._warm.clear()

    def begin(
        self, lanes: list[int], rows: Sequence[BeginningRow], logits: torch.Tensor
    ) -> tuple[list[int], list[float]]:
        """Let rows begin whose tokens are in the cache.

        Args:
            lanes: of the rows.
            rows: the rows.
            logits: of their next tokens, ``(rows, vocabulary)``.

        Returns:
            The next token of each row, and the logarithm of its probability.
        """
        where = torch.tensor(lanes, device=self._device)
        first, log_probs = self._chooser.begin(where, rows, logits)  # both (rows,)
        room = torch.tensor([row.num_left for row in rows], device=self._device) - 1
        self._following[where] = first
        self._lengths[where] = torch.tensor([len(row.ids) for row in rows], device=self._device)
        self._left[where] = room
        self._has_ended[where] = torch.isin(first, self._stop_ids) | (room <= 0)
        return first.tolist(), log_probs.tolist()

    def end(self, lanes: list[int]) -> None:
        """End rows for a reason that is not seen here.

        Args:
            lanes: of the rows.
        """
        if lanes:
            self._has_ended[torch.tensor(lanes, device=self._device)] = True

    def advance(self, steps: int, *, width: int) -> tuple[list[list[int]], list[list[float]]]:
        """Give each row some tokens, and look at them.

        Args:
            steps: tokens of each row.
            width: columns that hold every row's tokens when the steps are done.

        Returns:
            The tokens, and the logarithms of their probabilities, both ``(steps, rows)``; :data:`NO_TOKEN` behind the
            end of an answer.
        """
        for _ in range(steps):
            self._run(width)
        # The one wait for the device: the second of them finds everything done.
        tokens: list[list[int]] = self._history[:steps].tolist()
        log_probs: list[list[float]] = self._log_probs[:steps].tolist()
        self._cursor.zero_()
        return tokens, log_probs

    def resize(self, *, num_lanes: int, num_columns: int, kept: list[int], width: int) -> None:
        """Go on with more or fewer rows.

        Args:
            num_lanes: rows that have room.
            num_columns: tokens that have room in each.
            kept: rows that go on, in the order of their new lanes.
            width: columns of these that hold something.
        """
        rows = torch.tensor(kept, dtype=torch.long, device=self._device)
        before = (self._following, self._lengths, self._left, self._has_ended)
        # Their memory is asked for again in other sizes.
        self._graphs.clear()
        self.cache.resize(num_lanes=num_lanes, num_columns=num_columns, kept=rows, width=width)
        self._chooser.resize(num_lanes, num_columns, rows)
        self._set_up_rows()
        after = (self._following, self._lengths, self._left, self._has_ended)
        for old, new in zip(before, after, strict=True):
            new[: len(kept)] = old[rows]

    def _run(self, width: int) -> None:
        """Run a step; from the second one of a width on a GPU from its graph."""
        graph = self._graphs.get(width)
        # The first step of a width runs as it is, which also makes ready what cannot be made ready while recording.
        if graph is None and self._device.type == "cuda" and self._failure is None and width in self._warm:
            graph = self._record(width)
        if graph is None:
            self._warm.add(width)
            self._step(width)
        else:
            graph.replay()

    def _record(self, width: int) -> torch.cuda.CUDAGraph | None:
        """Record a step without running it; ``None`` where that fails, which is said once."""
        graph = torch.cuda.CUDAGraph()
        try:
            with recording_into(graph), _without_cast_cache(self._device):
                self._step(width)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self._failure = next(iter(str(error).strip().splitlines()), type(error).__name__)
            logger.info("Answers are made without a CUDA graph, so slower: %s", self._failure)
            return None
        self._graphs[width] = graph
        return graph

    def _step(self, width: int) -> None:
        """Give every row its next token, by operations on the device alone."""
        self.cache.destination = Destination(self._lanes, self._lengths, width=width)
        num_keys = self._lengths + 1  # (rows,), the token itself included
        inputs: dict[str, Any] = {}
        if self.reads_part:
            query_bounds, key_bounds = self._bounds
            inputs = {"num_keys": num_keys.int(), "cu_seq_lens_q": query_bounds, "cu_seq_lens_k": key_bounds}
        else:
            columns = torch.arange(width, device=self._device)
            inputs["attention_mask"] = (columns < num_keys[:, None]).long()  # (rows, width)
        output = self._model(
            input_ids=self._following[:, None],
            position_ids=self._lengths[:, None],
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1,
            **inputs,
        )
        # num_keys counts the tokens of a row too: the one that it goes on with is the last of them.
        tokens, log_probs = self._chooser.choose(output.logits[:, -1], num_known=num_keys, num_left=self._left)
        self._log_probs.index_copy_(0, self._cursor, log_probs[None])
        self._history.index_copy_(0, self._cursor, tokens.masked_fill(self._has_ended, NO_TOKEN)[None])
        self._cursor += 1
        self._left -= 1
        self._has_ended |= torch.isin(tokens, self._stop_ids) | (self._left <= 0)
        self._following.copy_(tokens)
        # A row that has ended goes on writing over its last column, until its lane is given away.
        self._lengths += (~self._has_ended).long()


def _without_cast_cache(device: torch.device) -> torch.autocast:
    """Return the present autocast without its cache of weights, which a graph would share with what runs outside."""
    return torch.autocast(
        device.type,
        dtype=torch.get_autocast_dtype(device.type),
        enabled=torch.is_autocast_enabled(device.type),
        cache_enabled=False,
    )
