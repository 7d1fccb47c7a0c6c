"""Find training rows whose key another one has already."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]


def find_repeats(digests: npt.NDArray[np.uint64], is_train: npt.NDArray[np.bool_]) -> tuple[Places, Places]:
    """Find the training rows that repeat the key of an earlier one.

    Args:
        digests: ``(rows, 2)``: 16 bytes a row, equal for equal keys.
        is_train: ``(rows,)``: rows that are compared.

    Returns:
        Places of the rows that repeat, ascending, and beside each the place of the first row with that key.
    """
    places = np.flatnonzero(is_train)
    keys = digests[places]
    order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: equal keys stay in the order of the rows
    keys = keys[order]
    is_repeat = np.zeros(len(order), dtype=bool)
    is_repeat[1:] = (keys[1:] == keys[:-1]).all(axis=1)
    # The first of a run stands where the last row that repeats nothing stands.
    starts = np.maximum.accumulate(np.where(is_repeat, 0, np.arange(len(order)))) if len(order) else order
    repeats, originals = places[order[is_repeat]], places[order[starts[is_repeat]]]
    ascending = np.argsort(repeats)
    return repeats[ascending], originals[ascending]
