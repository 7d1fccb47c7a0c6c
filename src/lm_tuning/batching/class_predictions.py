"""Keep what a classifier makes of each row, on the device and in the order in which the rows came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lm_tuning.text.store.table import Int64Array

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Predictions:
    """The class that a classifier chose for each row, and how the row's own class fared.

    Attributes:
        rows: indices into the table, ``(rows,)``, in the order that they were asked for.
        classes: the likeliest class of each, ``(rows,)``.
        probabilities: what the model gave that class, ``(rows,)``, 0 to 1.
        nats: negative log-probability of the row's own class, ``(rows,)``.
        ranks: classes that the model found likelier than the row's own, ``(rows,)``: 0 where it is right.
    """

    rows: Int64Array
    classes: Int64Array
    probabilities: Float32Array
    nats: Float32Array
    ranks: Int64Array


class ClassLog:
    """What was predicted so far, in tensors of all rows that are filled in place: no copy to the host on the way."""

    def __init__(self, num_rows: int, device: torch.device | str) -> None:
        """Make room.

        Args:
            num_rows: rows that will come.
            device: where the model lies.
        """
        self._classes, self._ranks = (torch.zeros(num_rows, dtype=torch.int64, device=device) for _ in range(2))
        self._probabilities, self._nats = (torch.zeros(num_rows, dtype=torch.float32, device=device) for _ in range(2))
        self._num_rows = 0

    def add(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Note some rows.

        Args:
            logits: ``(rows, classes)``.
            targets: the class of each row, ``(rows,)``.
        """
        part = slice(self._num_rows, self._num_rows + len(targets))
        log_probabilities = torch.log_softmax(logits.float(), dim=-1)  # (rows, classes)
        chosen = log_probabilities.max(dim=-1)
        own = log_probabilities.gather(1, targets[:, None])  # (rows, 1)
        self._classes[part] = chosen.indices
        self._probabilities[part] = chosen.values.exp()
        self._nats[part] = -own[:, 0]
        # Of equal ones the row's own class comes last unless it was chosen, and of NaN it is the last: no hit by luck.
        as_likely = (~(log_probabilities < own)).sum(dim=-1) - 1
        self._ranks[part] = torch.where(chosen.indices == targets, 0, as_likely)
        self._num_rows += len(targets)

    def in_order(self, scored: Int64Array, came: Sequence[int]) -> Predictions:
        """Order the rows like those that were asked for.

        Args:
            scored: the rows that were asked for, ``(rows,)``.
            came: the same rows in the order in which they went through the model.
        """
        by_row = np.argsort(came, kind="stable")
        # Where each asked row came; a row that is asked for twice is found twice.
        positions = by_row[np.searchsorted(np.asarray(came, dtype=np.int64)[by_row], scored)]
        of_rows = (self._classes, self._probabilities, self._nats, self._ranks)
        return Predictions(scored, *(values.cpu().numpy()[positions] for values in of_rows))
