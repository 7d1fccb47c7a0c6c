"""Every row that is changed or left out is counted, and can be named by its file and number."""

from __future__ import annotations

import numpy as np

from lm_tuning.data.check.findings import RowPositions
from lm_tuning.text.tokenizers.counts import CHANGED, DROPPED, KeptRows, SplitCounts

PLACES = RowPositions(
    [
        {"path": "a.jsonl", "split": "train", "first_row_id": 1},
        {"path": "b.jsonl", "split": "train", "first_row_id": 6},
    ]
)


def test_counts_name_the_first_rows_and_what_was_said():
    counts = SplitCounts()
    for row in (7, 1, 2, 3, 4, 5, 6):
        counts.add("refused_by_template", row, f"said of {row}")
    counts.add_rows("too_long", np.array([9]))
    assert counts.describe("refused_by_template", PLACES) == (
        "7 (refused by the chat template; a.jsonl, rows 1, 2, 3, 4, 5, ...): said of 1"
    )
    assert counts.describe("refused_by_template", PLACES, num_named=20) == (
        "7 (refused by the chat template; a.jsonl, rows 1, 2, 3, 4, 5; b.jsonl, rows 1, 2): said of 1"
    )
    assert counts.describe("too_long", PLACES) == "1 (longer than tokenize.max_length_tokens; b.jsonl, row 4)"
    assert counts.rows("refused_by_template").tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert counts.detail("refused_by_template", 7) == "said of 7"


def test_every_count_that_is_not_zero_is_logged(caplog):
    counts = SplitCounts()
    for row, reason in enumerate([*DROPPED, *CHANGED], 1):
        counts.add(reason, row)
    counts.warn("validation", PLACES)
    assert len(caplog.records) == len(DROPPED) + len(CHANGED)
    assert "validation rows dropped: 1 (no assistant turn that is supervised; a.jsonl, row 1)" in caplog.text


def test_what_a_higher_limit_would_cut_is_counted_in_powers_of_two():
    counts = SplitCounts()
    nothing = {"num_rows": 0, "max_length_tokens": None, "tokens_over_limit": 0, "rows_over": {}, "tokens_over": {}}
    assert counts.long_rows.describe() == counts.long_targets.describe() == nothing
    counts.long_rows.add(np.array([101, 128, 129]), limit=100)
    counts.long_rows.add(np.array([300]), limit=100)
    assert counts.long_rows.describe() == {
        "num_rows": 4,
        "max_length_tokens": 300,
        "tokens_over_limit": 1 + 28 + 29 + 200,
        "rows_over": {"128": 2, "256": 1},
        "tokens_over": {"128": 1 + 172, "256": 44},
    }
    assert counts.long_targets.describe() == nothing


def test_notes_count_for_rows_that_are_kept():
    counts = SplitCounts()
    notes = [["end_cut"], [], ["end_cut", "control_token_kept"]]
    KeptRows(np.array([5, 6, 7]), counts, np.array([False, True, True])).note_each(notes)
    assert counts.counts == {"end_cut": 1, "control_token_kept": 1}
    assert counts.rows("end_cut").tolist() == [7]
