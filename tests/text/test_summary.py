"""The summary counts what was done, names the first rows, and shows what is supervised."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lm_tuning.text.decoding import mark_supervised_text
from lm_tuning.text.store.table import TokenTable, TokenTableWriter
from lm_tuning.text.summary import describe_tokens, draw_lengths, length_quantiles, summarize_split
from lm_tuning.text.tokenizers.counts import SplitCounts
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


def test_the_supervised_parts_are_marked(tmp_path):
    rows = table(tmp_path / "train.arrow")
    tokenizer = make_tokenizer()
    assert mark_supervised_text(tokenizer, rows[0]) == (
        "<|user|>a<|end|><|assistant|>⟦b<|end|>⟧<|user|>c<|end|><|assistant|>⟦d<|end|>⟧"
    )
    assert mark_supervised_text(tokenizer, rows[1]).startswith("<|user|>⟦a<|end|>"), "position 0 is never learned"
    assert mark_supervised_text(tokenizer, rows[2]).endswith("<|assistant|>⟦d⟧<|end|>")


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

    splits = {"train": split(3000, too_long=2), "validation": split(5), "test": split(0, too_long=1)}
    summary = {"task": "causal_lm", "splits": splits}
    assert describe_tokens(summary) == (
        "3,000 train, 5 validation, 0 test rows; train 24,000 tokens, 26% of them supervised, 7 per row at the median, "
        "20 at most; 3 rows dropped"
    )


def labelled_table(path: Path) -> TokenTable:
    with TokenTableWriter(path) as writer:
        for row_id, (text, label) in enumerate([("ab", 2), ("a", 0), ("abc", 2)], 1):
            writer.append(row_id, ids(text), [], label=label)
    return TokenTable(path)


def test_rows_with_classes_are_summed_up_by_class(tmp_path):
    table = labelled_table(tmp_path / "train.arrow")
    labels = {"no": 0, "maybe": 1, "yes": 2}
    facts = summarize_split(table, SplitCounts(), task="sequence_classification", label_map=labels)
    assert facts["rows_by_class"] == {"no": 1, "maybe": 0, "yes": 2}
    assert (facts["num_classes"], facts["majority_fraction"], facts["num_tokens"]) == (2, 2 / 3, 6)
    assert not {"num_supervised_tokens", "supervised_fraction"} & facts.keys(), "no token is supervised"
    splits = {"train": facts, "validation": {"num_rows": 1, "dropped": {}}, "test": {"num_rows": 0, "dropped": {}}}
    assert describe_tokens({"task": "sequence_classification", "splits": splits}) == (
        "3 train, 1 validation, 0 test rows; train 6 tokens, 2 per row at the median, 3 at most; 2 classes, the "
        "largest has 66.7% of the training rows"
    )


def test_a_split_without_rows_has_no_largest_class(tmp_path):
    with TokenTableWriter(tmp_path / "test.arrow"):
        pass
    facts = summarize_split(
        TokenTable(tmp_path / "test.arrow"), SplitCounts(), task="sequence_classification", label_map={"a": 0, "b": 1}
    )
    assert (facts["num_classes"], facts["rows_by_class"], facts["majority_fraction"]) == (0, {"a": 0, "b": 0}, None)


def test_sources_and_targets_are_measured_apart(tmp_path):
    table(tmp_path / "train.arrow")
    with TokenTableWriter(tmp_path / "pairs.arrow") as writer:
        writer.append(1, ids("abcdefg"), [(5, 7)])
        writer.append(2, ids("abcd"), [(1, 4)])
    facts = summarize_split(TokenTable(tmp_path / "pairs.arrow"), SplitCounts(), task="seq2seq_lm")
    assert (facts["source_tokens"]["min"], facts["source_tokens"]["max"]) == (1, 5)
    assert (facts["target_tokens"]["min"], facts["target_tokens"]["max"]) == (2, 3)
    assert (facts["num_supervised_tokens"], facts["supervised_fraction"]) == (5, 5 / 11)
    splits = {"train": facts, "validation": {"num_rows": 0, "dropped": {"target_too_long": 1}}}
    assert describe_tokens({"task": "seq2seq_lm", "splits": splits}) == (
        "2 train, 0 validation rows; train 11 tokens; sources of 5 at the median, 5 at most; targets of 3 at the "
        "median, 3 at most; 1 row dropped"
    )


def test_a_picture_shows_the_parts_that_rows_of_the_task_have(tmp_path):
    labelled_table(tmp_path / "train.arrow")
    [axes] = draw_lengths(tmp_path, max_length_tokens=512, max_target_tokens=512, task="sequence_classification").axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["whole row"]
    table(tmp_path / "train.arrow")
    [axes] = draw_lengths(tmp_path, max_length_tokens=12, max_target_tokens=14, task="seq2seq_lm").axes
    shown = [text.get_text() for text in axes.get_legend().get_texts()]
    assert shown == ["source", "target", "max_length_tokens", "max_target_tokens"]
    assert [line.get_xdata()[0] for line in axes.lines] == [12, 14]


def test_lengths_are_drawn_with_the_limit_where_it_matters(tmp_path):
    table(tmp_path / "train.arrow")
    [axes] = draw_lengths(tmp_path, max_length_tokens=16).axes
    assert sum(patch.get_height() for patch in axes.containers[0]) == 3
    assert [line.get_xdata()[0] for line in axes.lines] == [16]
    [axes] = draw_lengths(tmp_path, max_length_tokens=512).axes
    assert list(axes.lines) == []
