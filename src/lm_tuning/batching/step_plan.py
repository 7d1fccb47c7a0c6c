"""Which rows form each optimizer step: a pure function of seed, epoch, lengths, source weights and effective batch.

Everything that makes a run faster (packing, token budgets, ranks, gradient checkpointing) only changes
how a step is split into micro-batches. What the step computes is fixed here, so resuming is "start at step n".
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lm_tuning.data.check.account import rows_per_epoch
from lm_tuning.data.records import MixedSource
from lm_tuning.data.split.records import DividedSource
from lm_tuning.errors import UserError
from lm_tuning.parameters.train import TrainParameters
from lm_tuning.text.store.table import TokenTable

IntArray = npt.NDArray[np.int64]


class TrainedSource(MixedSource):
    """The same with the rows in the steps of a run, a repeated row counted each time."""

    num_rows_trained: int


class SourceMix:
    """Repeat the rows of each source by its weight.

    A source of ``n`` rows and weight ``w`` gives ``w * n`` rows to every epoch, rounded (halves up): each row
    ``floor(w)`` times, and the rest of the rows, drawn again for each epoch, once more.

    Attributes:
        is_plain: every row comes up exactly once, as without any weights.
        num_rows: rows of each source, ``(sources,)``.
        rows_per_epoch: rows that each source gives to an epoch, ``(sources,)``.
    """

    def __init__(self, sources: npt.ArrayLike, weights: Sequence[float] | None = None) -> None:
        """Count the rows.

        Args:
            sources: index of each row's source in ``weights``, ``(rows,)``.
            weights: one per source, at least 0; ``None`` is 1 for each source that there is.
        """
        self._sources: npt.NDArray[np.int16] = np.asarray(sources, dtype=np.int16)
        if weights is None:
            weights = [1.0] * (int(self._sources.max(initial=0)) + 1)
        # As typed: 2.3 means 23/10, not the nearest binary fraction, whose excess over 2 is a little less than 3/10.
        self._weights = [Fraction(str(weight)) for weight in weights]
        assert all(weight >= 0 for weight in self._weights), weights
        num_rows = self.num_rows = self._count(self._sources)
        assert len(num_rows) == len(self._weights), f"rows of source {len(num_rows) - 1}, {len(self._weights)} weights"
        self.is_plain = all(weight == 1 for weight in self._weights)
        self.rows_per_epoch: IntArray = np.array(
            [rows_per_epoch(weight, int(rows)) for weight, rows in zip(self._weights, num_rows, strict=True)],
            dtype=np.int64,
        )

    def draw_rows(self, random: np.random.Generator) -> IntArray:
        """Draw the rows of an epoch.

        Args:
            random: decides which rows come up once more than the others of their source.

        Returns:
            Row indices, ``(rows_per_epoch.sum(),)``, each as often as it comes up; source by source.
        """
        parts = []
        for source, weight in enumerate(self._weights):
            # (rows of the source,), ascending
            rows = np.flatnonzero(self._sources == source)
            repeats = math.floor(weight)
            num_more = int(self.rows_per_epoch[source]) - repeats * len(rows)
            # Not shuffled here: the step plan draws the order of all sources together.
            parts += [np.tile(rows, repeats), random.choice(rows, num_more, replace=False, shuffle=False)]
        return np.concatenate(parts)

    def count(self, rows: IntArray) -> IntArray:
        """Count rows by source.

        Args:
            rows: row indices, ``(any,)``.

        Returns:
            Rows of each source, ``(sources,)``.
        """
        return self._count(self._sources[rows])

    def describe(self, sources: Sequence[DividedSource], num_rows_trained: IntArray) -> list[TrainedSource]:
        """Return the counts beside the names of the sources, for reports.

        Args:
            sources: ``path`` and ``weight`` of each.
            num_rows_trained: rows of each source in the steps of a run, ``(sources,)``.
        """
        counts = zip(self.num_rows.tolist(), self.rows_per_epoch.tolist(), num_rows_trained.tolist(), strict=True)
        return [
            {
                "path": source["path"],
                "weight": source["weight"],
                "num_rows": num_rows,
                "rows_per_epoch": rows_per_epoch,
                "num_rows_trained": trained,
            }
            for source, (num_rows, rows_per_epoch, trained) in zip(sources, counts, strict=True)
        ]

    def identity(self) -> bytes:
        """Return what tells two mixtures apart; nothing at all for one that changes nothing."""
        if self.is_plain:
            return b""
        # The digest of a plan must not change for runs that use no weights, whatever is added to this.
        return b"|mix-1|" + ",".join(map(str, self._weights)).encode() + b"|" + self._sources.tobytes()

    def _count(self, sources: npt.NDArray[np.int16]) -> IntArray:
        # (rows,) to (sources,), a source without rows included
        return np.bincount(sources, minlength=len(self._weights)).astype(np.int64)


# Orders that are tried for an epoch before the steps of epoch 0 are used again.
_REDRAWS = 8
# Epochs of a mixture whose steps are counted, to tell how many an epoch needs.
_SAMPLED_EPOCHS = 2
# Doublings of the reach with which the chain of steps is followed: 2^4 = 16 steps per jump.
_DOUBLINGS = 4


class StepPlan:
    """Assign the training rows to the optimizer steps of every epoch.

    Each epoch has the same number of steps and uses each row once, or as often as the weight of its source says.
    With ``effective_batch_rows`` a step has that many rows and the last one of the epoch what is left. With
    ``effective_batch_tokens`` a step has at most that many tokens, unless one row alone is longer.

    Attributes:
        num_rows: rows in the training split.
        mix: how often the rows of each source come up.
        rows_per_epoch: rows that an epoch's steps hold together, repeated rows counted each time.
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
        sources: npt.ArrayLike | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        """Lay the plan out; the order of an epoch is drawn when it is first asked for.

        Args:
            lengths: tokens of each row, shape ``(rows,)``.
            seed: decides the order of every epoch.
            effective_batch_rows: rows of one optimizer step; give this or ``effective_batch_tokens``.
            effective_batch_tokens: most tokens of one optimizer step.
            num_epochs: passes over the rows; ``None`` means as many as ``max_steps`` needs.
            max_steps: cap on the optimizer steps; ``None`` means none.
            sources: index of each row's source in ``weights``, shape ``(rows,)``; ``None`` is one source.
            weights: times that the rows of each source come up per epoch; ``None``, and 1 for all, is once each.

        Raises:
            UserError: no rows, not exactly one effective batch, or neither a number of epochs nor of steps.
        """
        self._lengths: IntArray = np.asarray(lengths, dtype=np.int64)
        self.num_rows = len(self._lengths)
        self.seed = seed
        self.effective_batch_rows = effective_batch_rows
        self.effective_batch_tokens = effective_batch_tokens
        self.mix = SourceMix(np.zeros(self.num_rows) if sources is None else sources, weights)
        self.rows_per_epoch = int(self.mix.rows_per_epoch.sum())
        problems = []
        if self.num_rows == 0:
            problems.append("The training split has no rows: nothing can be trained.")
        elif self.rows_per_epoch == 0:
            problems.append(
                f"The weights of data.path ({', '.join(map(str, weights or []))}) leave none of the {self.num_rows} "
                "training rows in an epoch: raise one of them."
            )
        if (effective_batch_rows is None) == (effective_batch_tokens is None):
            problems.append(
                "Set exactly one of train.effective_batch_rows and train.effective_batch_tokens "
                f"(now {effective_batch_rows} and {effective_batch_tokens})."
            )
        if num_epochs is None and max_steps is None:
            problems.append("Set train.num_epochs or train.max_steps, or both: the run needs an end.")
        if problems:
            raise UserError(problems)
        self._keep_draws()
        self.steps_per_epoch = self._count_steps()
        steps = self.steps_per_epoch * num_epochs if num_epochs is not None else max_steps
        assert steps is not None
        self.total_steps = min(steps, max_steps) if max_steps is not None else steps

    def __getstate__(self) -> dict[str, object]:
        """Leave the drawn epochs behind: loader workers draw their own."""
        return {name: value for name, value in self.__dict__.items() if name not in {"_epoch", "_attempt"}}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Restore the plan with empty caches."""
        self.__dict__.update(state)
        self._keep_draws()

    def rows_of_step(self, step: int) -> IntArray:
        """Return the indices of the rows that form an optimizer step.

        Args:
            step: 0-based over the whole run.

        Returns:
            Row indices, shape ``(rows in the step,)``, in the order of the epoch's draw.
        """
        epoch, position = divmod(step, self.steps_per_epoch)
        # (rows_per_epoch,) and (steps_per_epoch + 1,)
        order, bounds = self._epoch(epoch)
        return order[bounds[position] : bounds[position + 1]]

    def epoch_at(self, num_steps: int) -> float:
        """Return the passes over the data made after a number of steps."""
        return num_steps / self.steps_per_epoch

    def rows_by_source(self, num_steps: int) -> IntArray:
        """Count the rows that the first steps of the run train on, ``(sources,)``; a repeated row counts each time."""
        epochs, rest = divmod(num_steps, self.steps_per_epoch)
        counts = epochs * self.mix.rows_per_epoch
        if rest:
            order, bounds = self._epoch(epochs)
            counts = counts + self.mix.count(order[: bounds[rest]])
        return counts

    def digest(self) -> str:
        """Identify what the steps compute; runs with equal digests have the same rows in every step.

        The number of steps is left out, so that a finished run can be made longer.
        """
        # Lengths stand for the rows: tokens that were made again with the same lengths have another key, which is
        # compared too.
        content = hashlib.sha256(self._lengths.tobytes())
        content.update(f"plan-1|{self.seed}|{self.effective_batch_rows}|{self.effective_batch_tokens}".encode())
        content.update(self.mix.identity())
        return content.hexdigest()[:16]

    def _keep_draws(self) -> None:
        """Remember the last draws. The caches belong to the instance, so that a plan can be collected and copied."""
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)
        self._attempt = lru_cache(maxsize=1)(self._draw_attempt)

    def _shuffled(self, *seeds: int) -> IntArray:
        """Draw an order of an epoch's rows, ``(rows_per_epoch,)``."""
        # A sequence of seeds, not their sum: seed 1 at epoch 2 and seed 2 at epoch 1 must differ.
        random = np.random.default_rng([self.seed, *seeds])
        return random.permutation(self.num_rows if self.mix.is_plain else self.mix.draw_rows(random))

    def _draw_attempt(self, *seeds: int) -> tuple[IntArray, IntArray]:
        """Draw an order and cut it by tokens."""
        assert self.effective_batch_tokens is not None
        order = self._shuffled(*seeds)
        return order, cut_at_limit(np.cumsum(self._lengths[order]), self.effective_batch_tokens)

    def _count_steps(self) -> int:
        if self.effective_batch_rows is not None:
            return -(-self.rows_per_epoch // self.effective_batch_rows)
        if self.mix.is_plain:
            return len(self._attempt(0)[1]) - 1
        # Epochs of a mixture hold other rows each time, so their tokens differ and with them the steps that they need.
        # Room for more than two of them show makes it practically certain that every epoch finds rows that fit.
        counts = [len(self._attempt(epoch)[1]) - 1 for epoch in reversed(range(_SAMPLED_EPOCHS))]
        return min(2 * max(counts) - min(counts), self.rows_per_epoch)

    def _draw_epoch(self, epoch: int) -> tuple[IntArray, IntArray]:
        """Return the order of the rows, ``(rows_per_epoch,)``, and the steps' bounds, ``(steps_per_epoch + 1,)``."""
        if self.effective_batch_rows is not None:
            bounds = np.minimum(np.arange(self.steps_per_epoch + 1) * self.effective_batch_rows, self.rows_per_epoch)
            return self._shuffled(epoch), bounds.astype(np.int64)
        order, bounds = self._attempt(epoch)
        # Another order fits the rows into more or fewer steps. Epochs must have equal numbers of steps, so
        # redraw while there are too many, and cut the fullest steps in two while there are too few.
        attempt = 0
        while len(bounds) - 1 > self.steps_per_epoch:
            attempt += 1
            order, bounds = self._attempt(epoch, attempt) if attempt < _REDRAWS else self._reshuffle_first_epoch(epoch)
        return order, split_fullest(bounds, self.steps_per_epoch)

    def _reshuffle_first_epoch(self, epoch: int) -> tuple[IntArray, IntArray]:
        """Keep the steps of epoch 0 and shuffle their order and the rows inside: never too many."""
        order, bounds = self._attempt(0)
        random = np.random.default_rng([self.seed, epoch, _REDRAWS, 1])
        # Only the order inside and between the steps changes, so none of them can pass the limit.
        steps = [random.permutation(order[a:b]) for a, b in pairwise(bounds)]
        steps = [steps[index] for index in random.permutation(len(steps))]
        sizes = np.array([0, *(len(rows) for rows in steps)], dtype=np.int64)
        return np.concatenate(steps), np.cumsum(sizes)


def cut_at_limit(ends: IntArray, limit: int) -> IntArray:
    """Fill steps in order, each up to a limit; a row that is longer stands alone.

    Where a step ends when it starts at a row is looked up for all rows at once. Then the chain of steps is followed, 16
    steps per jump, since a loop over single steps would take seconds for a million of them.

    Args:
        ends: running total of tokens, ``(rows,)``, at least one row.
        limit: most tokens of a step.

    Returns:
        The steps' bounds, ``(steps + 1,)``, from 0 to the number of rows.
    """
    num_rows = len(ends)
    # (rows,): the running total that a step which starts at a row must not pass
    limits = np.concatenate([[0], ends[:-1]]) + limit
    following = np.full(num_rows + 1, num_rows, dtype=np.int64)
    # (rows + 1,): where the next step starts; at least one row further, so a row beyond the limit stands alone
    following[:-1] = np.maximum(np.searchsorted(ends, limits, side="right"), np.arange(1, num_rows + 1))
    jumps = [following]
    for _ in range(_DOUBLINGS):
        # Composing a map with itself doubles its reach: 1, 2, 4, 8 and 16 steps.
        jumps.append(jumps[-1][jumps[-1]])
    jump, at, stops = jumps[-1].data, 0, []
    while at < num_rows:
        stops.append(at)
        at = jump[at]
    bounds = np.array(stops, dtype=np.int64)
    # Between two stops lies, half way, what the next smaller jump reaches from the first.
    for smaller in reversed(jumps[:-1]):
        bounds = np.stack([bounds, smaller[bounds]], axis=1).ravel()
    # Jumps beyond the end stay at the end; those repetitions are cut off.
    return np.append(bounds[: np.searchsorted(bounds, num_rows)], num_rows)


def split_fullest(bounds: IntArray, num_steps: int) -> IntArray:
    """Split the step with the most rows in two, the first of equals, until there are as many steps as wanted."""
    missing = num_steps - (len(bounds) - 1)
    sizes = np.diff(bounds)
    # At most `missing` steps are split, so only the largest `missing` can be.
    largest = np.argsort(-sizes, kind="stable")[:missing]
    heap = sorted((-int(sizes[step]), int(bounds[step])) for step in largest)
    cuts = []
    for _ in range(missing):
        size, start = heapq.heappop(heap)
        assert size < -1, "more steps than rows"
        # Halves: the sizes of a split step stay as close as they can be.
        left = -size // 2
        cuts.append(start + left)
        heapq.heappush(heap, (-left, start))
        heapq.heappush(heap, (size + left, start + left))
    return np.sort(np.concatenate([bounds, np.array(cuts, dtype=np.int64)]))


def plan_steps(rows: TokenTable, *, sources: Sequence[DividedSource], seed: int, train: TrainParameters) -> StepPlan:
    """Lay out the steps of a training.

    Args:
        rows: tokenized training rows.
        sources: of the rows, numbered as ``rows.sources`` says; none where they have no weights.
        seed: see :class:`StepPlan`.
        train: the ``train`` parameters.

    Raises:
        UserError: there are no rows, or the run has no end or no effective batch.
    """
    return StepPlan(
        rows.lengths,
        seed=seed,
        effective_batch_rows=train.effective_batch_rows,
        effective_batch_tokens=train.effective_batch_tokens,
        num_epochs=train.num_epochs,
        max_steps=train.max_steps,
        sources=rows.sources,
        weights=[float(source["weight"]) for source in sources] or None,
    )
