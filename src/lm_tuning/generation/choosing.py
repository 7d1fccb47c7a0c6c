"""Choose the next token of each row from its logits, by the likeliest or by chance, with penalties.

Everything that a row's choice depends on lies on the device, in tensors that stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch

from lm_tuning.generation.penalties import forbid_repeated_ngrams, penalize_repetition
from lm_tuning.generation.sampling import draw_tokens
from lm_tuning.parameters.generation import GenerationParameters


@dataclass(frozen=True)
class BeginningRow:
    """A row whose tokens are in the cache, and whose answer begins or goes on.

    Attributes:
        ids: its tokens so far, ``(tokens,)``.
        num_left: tokens that its answer may still get.
        uniforms: a random number for each token of the longest answer, ``(tokens,)``; ``None`` where none is drawn.
    """

    ids: Sequence[int]
    num_left: int
    uniforms: npt.NDArray[np.float32] | None = None


@dataclass
class _RowState:
    """What the choices of rows depend on beside logits; ``None`` where nothing asks for it.

    Attributes:
        has_come: whether a token is in the row, ``(rows, vocabulary)``.
        tokens: of the row, ``(rows, columns)``.
        uniforms: its random numbers, ``(rows, tokens)``.
    """

    has_come: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    uniforms: torch.Tensor | None = None

    def put(self, lanes: torch.Tensor, rows: _RowState) -> None:
        """Copy rows into lanes, whose tensors may be wider."""
        for mine, given in self._pairs(rows):
            mine[lanes, : given.shape[1]] = given

    def spread(self, num_lanes: int, num_columns: int, kept: torch.Tensor) -> _RowState:
        """Return as many lanes as are wanted, the first of them with the rows of some of these."""
        made = _RowState()
        for field in fields(self):
            before = getattr(self, field.name)
            if before is not None:
                width = num_columns if field.name == "tokens" else before.shape[1]
                after = before.new_zeros(num_lanes, width)
                common = min(width, before.shape[1])
                after[: len(kept), :common] = before[kept, :common]
                setattr(made, field.name, after)
        return made

    def _pairs(self, other: _RowState) -> list[tuple[torch.Tensor, torch.Tensor]]:
        both = [(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        return [(mine, given) for mine, given in both if mine is not None]


class TokenChooser:
    """Chooses tokens on the device, without waiting for it."""

    def __init__(self, generation: GenerationParameters, device: torch.device) -> None:
        """Begin without rows.

        Args:
            generation: how tokens are chosen. Beams are not for it.
            device: where the logits lie.
        """
        self._generation = generation
        self._device = device
        self._has_plain_scores = generation.repetition_penalty == 1 and not generation.no_repeat_ngram_size
        self._lanes: _RowState | None = None
        self._size = (0, 0)

    def resize(self, num_lanes: int, num_columns: int, kept: torch.Tensor) -> None:
        """Make room for other numbers of rows and tokens.

        Args:
            num_lanes: rows.
            num_columns: tokens of the longest row.
            kept: lanes that become the first ones, ``(rows,)``.
        """
        # One column more: a row that has ended goes on writing behind its last token.
        self._size = (num_lanes, num_columns + 1)
        if self._lanes is not None:
            self._lanes = self._lanes.spread(*self._size, kept)

    def begin(
        self, lanes: torch.Tensor, rows: Sequence[BeginningRow], logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the next token of rows that begin.

        Args:
            lanes: of the rows, ``(rows,)``.
            rows: the rows.
            logits: of their next tokens, ``(rows, vocabulary)``.

        Returns:
            Token ids and the logarithms of their probabilities under the model, both ``(rows,)``.
        """
        state = self._state_of(rows, logits.shape[-1])
        num_known = torch.tensor([len(row.ids) for row in rows], device=self._device)
        num_left = torch.tensor([row.num_left for row in rows], device=self._device)
        chosen = self._choose(state, logits, num_known, num_left)
        if self._lanes is None:
            nobody = lanes[:0]
            self._lanes = state.spread(*self._size, nobody)
        self._lanes.put(lanes, state)
        return chosen

    def choose(
        self, logits: torch.Tensor, *, num_known: torch.Tensor, num_left: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the next token of every lane.

        Args:
            logits: of the next tokens, ``(lanes, vocabulary)``.
            num_known: tokens that each row has, ``(lanes,)``.
            num_left: tokens that its answer may still get, ``(lanes,)``.

        Returns:
            Token ids and the logarithms of their probabilities under the model, both ``(lanes,)``.
        """
        assert self._lanes is not None, "a row has begun"
        return self._choose(self._lanes, logits, num_known, num_left)

    def _state_of(self, rows: Sequence[BeginningRow], vocabulary: int) -> _RowState:
        """Return what the choices of rows depend on that begin."""
        state = _RowState()
        if not self._has_plain_scores:
            longest = max(len(row.ids) for row in rows)
            # Behind a row's tokens comes 0, which counts for nothing; one column more for the token that is chosen.
            ids = [[*row.ids, *[0] * (longest + 1 - len(row.ids))] for row in rows]
            tokens = torch.tensor(ids, device=self._device)  # (rows, columns)
            if self._generation.no_repeat_ngram_size:
                state.tokens = tokens
            if self._generation.repetition_penalty != 1:
                # A row's own first token in place of the padding.
                num_known = torch.tensor([len(row.ids) for row in rows], device=self._device)
                is_padding = torch.arange(longest + 1, device=self._device) >= num_known[:, None]
                state.has_come = torch.zeros(len(rows), vocabulary, dtype=torch.bool, device=self._device)
                state.has_come.scatter_(1, torch.where(is_padding, tokens[:, :1], tokens), True)
        if self._generation.do_sample:
            uniforms = [row.uniforms for row in rows if row.uniforms is not None]
            assert len(uniforms) == len(rows), "every row brings its random numbers along"
            state.uniforms = torch.from_numpy(np.stack(uniforms)).to(self._device)
        return state

    def _choose(
        self, state: _RowState, logits: torch.Tensor, num_known: torch.Tensor, num_left: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose a token for each row, and note it in the state."""
        generation = self._generation
        # As transformers: penalties first, then what tokens are drawn by.
        exact = logits.float()  # (rows, vocabulary)
        scores = exact
        if state.has_come is not None:
            scores = penalize_repetition(scores, state.has_come, generation.repetition_penalty)
        if state.tokens is not None:
            scores = forbid_repeated_ngrams(scores, state.tokens, num_known, generation.no_repeat_ngram_size)
        if state.uniforms is None:
            tokens = scores.argmax(dim=-1)  # (rows,)
        else:
            # Of a row that has ended, fewer than none may be left.
            column = (generation.max_new_tokens - num_left).clamp(0, generation.max_new_tokens - 1)
            tokens = draw_tokens(scores, state.uniforms.gather(1, column[:, None])[:, 0], generation)
        if state.has_come is not None:
            state.has_come.scatter_(1, tokens[:, None], True)
        if state.tokens is not None:
            column = num_known.clamp(max=state.tokens.shape[1] - 1)
            state.tokens.scatter_(1, column[:, None], tokens[:, None])
        return tokens, exact.gather(1, tokens[:, None])[:, 0] - exact.logsumexp(dim=-1)
