"""Which rows form each optimizer step: a pure function of seed, epoch, lengths and effective batch.

Everything that makes a run faster (packing, token budgets, ranks, activation checkpointing) only changes
how a step is cut into micro-batches. What the step computes is fixed here, so resuming is "start at step n".
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lm_tuning.errors import UserError

IntArray = npt.NDArray[np.int64]


class StepPlan:
    """Assign every training row to exactly one optimizer step of every epoch.

    Each epoch has the same number of steps and uses each row once. With ``effective_batch_rows`` a step
    has that many rows and the last one of the epoch what is left. With ``effective_batch_tokens`` a step
    has at most that many tokens, unless one row alone is longer.

    Attributes:
        num_rows: rows in the training split.
        steps_per_epoch: optimizer steps in one pass over the rows.
        total_steps: optimizer steps of the whole run.
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        *,
        seed: int,
        effective_batch_rows: int | None = None,
        effective_batch_tokens: int | None = None,
        num_epochs: int | None = None,
        max_steps: int | None = None,
    ) -> None:
        """Lay the plan out; the order of an epoch is drawn when it is first asked for.

        Args:
            lengths: tokens of each row, shape ``(rows,)``.
            seed: decides the order of every epoch.
            effective_batch_rows: rows of one optimizer step; give this or ``effective_batch_tokens``.
            effective_batch_tokens: most tokens of one optimizer step.
            num_epochs: passes over the rows; ``None`` means as many as ``max_steps`` needs.
            max_steps: cap on the optimizer steps; ``None`` means none.

        Raises:
            UserError: no rows, not exactly one effective batch, or neither a number of epochs nor of steps.
        """
        self._lengths: IntArray = np.asarray(lengths, dtype=np.int64)
        self.num_rows = len(self._lengths)
        self.seed = seed
        self.effective_batch_rows = effective_batch_rows
        self.effective_batch_tokens = effective_batch_tokens
        problems = []
        if self.num_rows == 0:
            problems.append("The training split has no rows: nothing can be trained.")
        if (effective_batch_rows is None) == (effective_batch_tokens is None):
            problems.append(
                "Set exactly one of train.effective_batch_rows and train.effective_batch_tokens "
                f"(now {effective_batch_rows} and {effective_batch_tokens})."
            )
        if num_epochs is None and max_steps is None:
            problems.append("Set train.num_epochs or train.max_steps, or both: the run needs an end.")
        if problems:
            raise UserError(problems)
        self.steps_per_epoch = self._count_steps()
        steps = self.steps_per_epoch * num_epochs if num_epochs is not None else max_steps
        assert steps is not None
        self.total_steps = min(steps, max_steps) if max_steps is not None else steps
        # The cache belongs to the instance, so that a plan can be collected and copied to workers.
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)

    def __getstate__(self) -> dict[str, object]:
        """Leave the drawn epochs behind: loader workers draw their own."""
        state = dict(self.__dict__)
        del state["_epoch"]
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        """Restore the plan with an empty cache."""
        self.__dict__.update(state)
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)

    def rows_of_step(self, step: int) -> IntArray:
        """Return the indices of the rows that form an optimizer step.

        Args:
            step: 0-based over the whole run.

        Returns:
            Row indices, shape ``(rows in the step,)``, in the order of the epoch's draw.
        """
        epoch, position = divmod(step, self.steps_per_epoch)
        order, bounds = self._epoch(epoch)
        return order[bounds[position] : bounds[position + 1]]

    def epoch_at(self, num_steps: int) -> float:
        """Return the passes over the data made after a number of steps."""
        return num_steps / self.steps_per_epoch

    def digest(self) -> str:
        """Identify what the steps compute; runs with equal digests have the same rows in every step.

        The number of steps is left out, so that a finished run can be made longer.
        """
        content = hashlib.sha256(self._lengths.tobytes())
        content.update(f"plan-1|{self.seed}|{self.effective_batch_rows}|{self.effective_batch_tokens}".encode())
        return content.hexdigest()[:16]

    def _shuffled(self, epoch: int) -> IntArray:
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)

    def _count_steps(self) -> int:
        if self.effective_batch_rows is not None:
            return -(-self.num_rows // self.effective_batch_rows)
        return len(self._cut_by_tokens(self._shuffled(0))) - 1

    def _draw_epoch(self, epoch: int) -> tuple[IntArray, IntArray]:
        """Return the order of the rows, shape ``(rows,)``, and the steps' bounds, ``(steps_per_epoch + 1,)``."""
        order = self._shuffled(epoch)
        if self.effective_batch_rows is not None:
            bounds = np.minimum(np.arange(self.steps_per_epoch + 1) * self.effective_batch_rows, self.num_rows)
            return order, bounds.astype(np.int64)
        bounds = self._cut_by_tokens(order)
        # Another order fits the rows into more or fewer steps. Epochs must have equal numbers of steps, so
        # redraw while there are too many, and cut the fullest steps in two while there are too few.
        attempt = 0
        while len(bounds) - 1 > self.steps_per_epoch:
            attempt += 1
            order = np.random.default_rng([self.seed, epoch, attempt]).permutation(self.num_rows)
            bounds = self._cut_by_tokens(order)
            if attempt == _REDRAWS:
                order, bounds = self._reshuffle_first_epoch(epoch)
        while len(bounds) - 1 < self.steps_per_epoch:
            bounds = _split_largest(bounds)
        return order, bounds

    def _reshuffle_first_epoch(self, epoch: int) -> tuple[IntArray, IntArray]:
        """Keep the steps of epoch 0 and shuffle their order and the rows inside: always the right number."""
        order = self._shuffled(0)
        bounds = self._cut_by_tokens(order)
        random = np.random.default_rng([self.seed, epoch, _REDRAWS, 1])
        steps = [random.permutation(order[a:b]) for a, b in pairwise(bounds)]
        steps = [steps[index] for index in random.permutation(len(steps))]
        sizes = np.array([0, *(len(rows) for rows in steps)], dtype=np.int64)
        return np.concatenate(steps), np.cumsum(sizes)

    def _cut_by_tokens(self, order: IntArray) -> IntArray:
        """Fill steps in order, each up to the token limit; return their bounds."""
        assert self.effective_batch_tokens is not None
        ends = np.cumsum(self._lengths[order])
        bounds = [0]
        while bounds[-1] < self.num_rows:
            start = bounds[-1]
            limit = (ends[start - 1] if start else 0) + self.effective_batch_tokens
            bounds.append(max(int(np.searchsorted(ends, limit, side="right")), start + 1))
        return np.array(bounds, dtype=np.int64)


_REDRAWS = 8


def _split_largest(bounds: IntArray) -> IntArray:
    """Cut the step with the most rows in two."""
    sizes = np.diff(bounds)
    largest = int(np.argmax(sizes))
    assert sizes[largest] > 1, "more steps than rows"
    return np.insert(bounds, largest + 1, bounds[largest] + sizes[largest] // 2)
