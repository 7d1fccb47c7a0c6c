from __future__ import annotations

from typing import Any

import pytest

from lm_tuning.preflight.figures import account_for_rows


def summaries(**changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    split = {
        "files": [
            {"rows_read": 60, "rows_skipped": {"wrong_type": 2, "empty": 1}},
            {"rows_read": 40, "rows_skipped": {"empty": 4}},
        ],
        "duplicates": {"num_dropped": 5},
        "near_duplicates": {"num_dropped": 3},
        "rows": {"train": 70, "validation": 10, "test": 5},
        **changes,
    }
    tokens = {
        "train": {"num_rows_read": 70, "num_rows": 66, "dropped": {"too_long": 3, "no_answer_left": 1}},
        "validation": {"num_rows_read": 10, "num_rows": 9, "dropped": {"too_long": 1}},
        "test": {"num_rows_read": 5, "num_rows": 5, "dropped": {}},
    }
    return split, {"splits": tokens}


def test_every_row_has_one_outcomes():
    assert account_for_rows(*summaries()) == {
        "num_rows_read": 100,
        "fates": [
            {"stage": "skipped", "reason": "empty", "num_rows": 5},
            {"stage": "skipped", "reason": "wrong type", "num_rows": 2},
            {"stage": "left out of the splits", "reason": "copy of another row", "num_rows": 5},
            {"stage": "left out of the splits", "reason": "almost a copy of another row", "num_rows": 3},
            {
                "stage": "dropped in tokenizing (train)",
                "reason": "longer than tokenize.max_length_tokens",
                "num_rows": 3,
            },
            {
                "stage": "dropped in tokenizing (train)",
                "reason": "no supervised token within tokenize.max_length_tokens",
                "num_rows": 1,
            },
            {
                "stage": "dropped in tokenizing (validation)",
                "reason": "longer than tokenize.max_length_tokens",
                "num_rows": 1,
            },
            {"stage": "used", "reason": "trained on", "num_rows": 66},
            {"stage": "used", "reason": "validation", "num_rows": 9},
            {"stage": "used", "reason": "test", "num_rows": 5},
        ],
    }


def test_figures_that_do_not_add_up_are_a_fault_of_ours():
    with pytest.raises(AssertionError, match="100 rows were read, but their outcomes add up to 97"):
        account_for_rows(*summaries(near_duplicates=None))
    with pytest.raises(AssertionError, match="train: 71 rows were split off, 70 were tokenized"):
        account_for_rows(*summaries(rows={"train": 71, "validation": 10, "test": 5}))
