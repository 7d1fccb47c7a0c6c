"""A key names one training row."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lm_tuning.data.arrays import find_repeats


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans())))
def test_repeats_point_to_the_first_row_of_their_key(rows):
    digests = np.array([row[:2] for row in rows], dtype=np.uint64).reshape(-1, 2)
    first: dict[tuple[int, int], int] = {}
    expected = []
    for index, (high, low, is_train) in enumerate(rows):
        if is_train:
            original = first.setdefault((high, low), index)
            if original != index:
                expected.append((index, original))
    repeats, originals = find_repeats(digests, np.array([row[2] for row in rows], dtype=bool))
    assert list(zip(repeats.tolist(), originals.tolist(), strict=True)) == expected
