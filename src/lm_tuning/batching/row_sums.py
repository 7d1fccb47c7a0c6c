"""Sum a held-out loss row by row, so that scores of rows can be compared, drawn again, and added by group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lm_tuning.batching.batch import MicroBatch
from lm_tuning.text.store.table import Int64Array

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RowSums:
    """What each row adds to the sums of a loss.

    Attributes:
        rows: indices into the table, ``(rows,)``, in the order that they were asked for.
        nats: negative log-likelihood of what is supervised in each, ``(rows,)``.
        num_supervised: supervised tokens of each, 1 for a classifier, ``(rows,)``.
        num_right: of those, how many the model held for the likeliest, ``(rows,)``.
    """

    rows: Int64Array
    nats: Float64Array
    num_supervised: Int64Array
    num_right: Int64Array


class RowSummer:
    """Keep two numbers of each row on the device, and what belongs to a target only while its micro-batch lasts."""

    def __init__(self, num_rows: int, device: torch.device | str) -> None:
        """Make room.

        Args:
            num_rows: rows that come.
            device: where the model lies.
        """
        # Apple's devices have no doubles. (rows, 2): nats, and targets that were the likeliest
        self.dtype = torch.float32 if torch.device(device).type == "mps" else torch.float64
        self._sums = torch.zeros((num_rows, 2), dtype=self.dtype, device=device)

    def add(self, start: int, batch: MicroBatch, counts: Any, each: torch.Tensor) -> None:
        """Add up the targets of a micro-batch's rows.

        Args:
            start: rows that came before.
            batch: the micro-batch.
            counts: targets of each of its rows, ``(rows,)``.
            each: nats of each target, and whether it was the likeliest, ``(targets, 2)``; 0 where there is none.
        """
        if len(batch.targets) == batch.num_rows:
            # (rows * kept, 2) to (rows, kept, 2)
            sums = each.view(batch.num_rows, -1, 2).to(self.dtype).sum(dim=1)
        else:
            # Packed rows lie one after another, and of each the targets alone are kept. In a fixed order, unlike
            # index_add_ on a GPU, so that two evaluations agree to the last digit.
            lengths = torch.as_tensor(np.asarray(counts, dtype=np.int64), device=each.device)
            sums = torch.segment_reduce(each.to(self.dtype), "sum", lengths=lengths, unsafe=True, initial=0.0)
        self._sums[start : start + batch.num_rows] = sums

    def finish(self, rows: Int64Array, positions: Int64Array, num_supervised: Any) -> RowSums:
        """Return the sums in the order of the rows; waits for the device.

        Args:
            rows: the rows asked for.
            positions: where each of them came, ``(rows,)``.
            num_supervised: targets of each, ``(rows,)``.
        """
        sums = self._sums.cpu().double().numpy()[positions]
        return RowSums(rows, sums[:, 0], np.asarray(num_supervised, dtype=np.int64), sums[:, 1].astype(np.int64))


def positions_of(rows: Int64Array, groups: Sequence[Sequence[int]]) -> Int64Array:
    """Return where each row came, which went through the model in groups.

    Args:
        rows: as they were asked for; one that is asked for twice is found twice.
        groups: rows of each micro-batch.

    Returns:
        ``(rows,)``.
    """
    # (rows,): the rows in the order in which they went through the model
    came = np.array([row for group in groups for row in group], dtype=np.int64)
    by_row = np.argsort(came, kind="stable")
    found: Int64Array = by_row[np.searchsorted(came[by_row], rows)]
    return found
