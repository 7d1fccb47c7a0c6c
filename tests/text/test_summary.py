"""The summary counts what was done, names the first rows, and shows what is learned."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lm_tuning.text.summary import (
    describe_tokens,
    draw_lengths,
    length_quantiles,
    mark_learned,
)
from lm_tuning.text.token_table import TokenTable, TokenTableWriter
from tests.support.tiny import ASSISTANT, END, USER, ids, make_tokenizer

IDS = [USER, *ids("a"), END, ASSISTANT, *ids("b"), END, USER, *ids("c"), END, ASSISTANT, *ids("d"), END]


def table(path: Path) -> TokenTable:
    with TokenTableWriter(path) as writer:
        writer.append(1, IDS, [(4, 6), (10, 12)])
        writer.append(2, IDS, [(0, 12)])
        writer.append(3, IDS, [(10, 11)])
    return TokenTable(path)


def test_quantiles_are_lengths_that_occur():
    quantiles = length_quantiles(np.arange(1, 101, dtype=np.int32))
    assert quantiles == {"min": 1, "p50": 51, "p90": 91, "p95": 96, "p99": 100, "max": 100, "mean": 50.5}
    assert length_quantiles(np.array([7, 9], dtype=np.int32)) == {
        **dict.fromkeys(("p50", "p90", "p95", "p99", "max"), 9),
        "min": 7,
        "mean": 8.0,
    }
    assert length_quantiles(np.empty(0, dtype=np.int32)) is None


def test_the_learned_parts_are_marked(tmp_path):
    rows = table(tmp_path / "train.arrow")
    tokenizer = make_tokenizer()
    assert mark_learned(tokenizer, rows[0]) == (
        "<|user|>a<|end|><|assistant|>⟦b<|end|>⟧<|user|>c<|end|><|assistant|>⟦d<|end|>⟧"
    )
    assert mark_learned(tokenizer, rows[1]).startswith("<|user|>⟦a<|end|>"), "position 0 is never learned"
    assert mark_learned(tokenizer, rows[2]).endswith("<|assistant|>⟦d⟧<|end|>")


def test_a_line_sums_up_what_was_made():
    def split(rows: int, **dropped: int) -> dict[str, object]:
        lengths = {"p50": 7, "max": 20}
        return {
            "num_rows": rows,
            "num_tokens": 24_000,
            "supervised_fraction": 0.256,
            "length_tokens": lengths,
            "dropped": dropped,
        }

    summary = {"splits": {"train": split(3000, too_long=2), "validation": split(5), "test": split(0, too_long=1)}}
    assert describe_tokens(summary) == (
        "3,000 train, 5 validation, 0 test rows; train 24,000 tokens, 26% of them learned, 7 a row at the median, 20 "
        "at most; 3 rows dropped"
    )


def test_lengths_are_drawn_with_the_limit_where_it_matters(tmp_path):
    table(tmp_path / "train.arrow")
    [axes] = draw_lengths(tmp_path, max_length_tokens=16).axes
    assert sum(patch.get_height() for patch in axes.containers[0]) == 3
    assert [line.get_xdata()[0] for line in axes.lines] == [16]
    [axes] = draw_lengths(tmp_path, max_length_tokens=512).axes
    assert list(axes.lines) == []
