"""Rows of every task go the whole way: from a file of any kind to tokens."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.data.records import SPLITS
from lm_tuning.data.store import open_examples
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import TokenizeParameters
from lm_tuning.text.store.table import open_split
from lm_tuning.text.tokenize import write_tokens
from tests.support.tiny import EOS, ids, make_tokenizer

CLASSIFY, TRANSLATE = "sequence_classification", "seq2seq_lm"


def write_as(path: Path, rows: list[dict[str, str]]) -> Path:
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tokenize(splits: Any, folder: Path, task: str, **options: Any) -> dict[str, Any]:
    folder.mkdir()
    tokenizer = make_tokenizer(chat_template=None, eos_token="<eos>")
    return write_tokens(
        folder, splits.folder, tokenizer, TokenizeParameters(**{"max_length_tokens": 500, **options}), task=task
    )


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_labelled_rows_become_tokens_and_classes(tmp_path, split, suffix):
    rows = [{"text": f"row {n}", "intent": f"class {n % 3}"} for n in range(12)]
    made = split(write_as(tmp_path / f"rows{suffix}", rows), task=CLASSIFY, stratify="intent", test=3, validation=3)
    summary = tokenize(made, tmp_path / "tokens", CLASSIFY)
    assert made.summary["label_map"] == summary["label_map"] == {"class 0": 0, "class 1": 1, "class 2": 2}
    for name in SPLITS:
        table = open_split(tmp_path / "tokens", name)
        assert [row.row_id for row in table] == made.ids(name)
        for row in table:
            n = row.row_id - 1
            assert (row.input_ids.tolist(), row.label) == (ids(f"row {n}"), n % 3)
        assert summary["splits"][name]["num_classes"] == 3
    assert summary["splits"]["train"]["rows_by_class"] == {"class 0": 2, "class 1": 2, "class 2": 2}


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_pairs_become_sources_and_targets(tmp_path, split, suffix):
    rows = [{"document": f"text {n}", "summary": f"sum {n}"} for n in range(6)]
    made = split(write_as(tmp_path / f"rows{suffix}", rows), task=TRANSLATE, test=2)
    summary = tokenize(made, tmp_path / "tokens", TRANSLATE)
    assert summary["label_map"] is None
    for name in ("train", "test"):
        table = open_split(tmp_path / "tokens", name)
        assert [row.row_id for row in table] == made.ids(name)
        for row in table:
            n, edge = row.row_id - 1, row.spans[0][0]
            assert row.input_ids[:edge].tolist() == [*ids(f"text {n}"), EOS]
            assert row.input_ids[edge:].tolist() == [*ids(f"sum {n}"), EOS]


def test_a_row_without_a_class_is_named_and_the_others_are_numbered_from_zero(tmp_path, split):
    path = tmp_path / "rows.csv"
    path.write_text("text,label\na,1\nb,2\nc,\nd,3\n")
    with pytest.raises(UserError) as caught:
        split(path, task=CLASSIFY)
    assert caught.value.problems[0] == f"{path}, row 3: unlabelled: column 'label' is empty."
    made = split(path, task=CLASSIFY, on_bad_row="skip")
    summary = tokenize(made, tmp_path / "tokens", CLASSIFY)
    assert summary["label_map"] == {"1": 0, "2": 1, "3": 2}
    assert [(row.row_id, row.label) for row in open_split(tmp_path / "tokens", "train")] == [(1, 0), (2, 1), (4, 2)]


def test_a_held_out_file_with_a_class_of_its_own_is_refused_by_row(tmp_path, split):
    train = write_as(tmp_path / "train.jsonl", [{"text": f"t {n}", "label": "ab"[n % 2]} for n in range(4)])
    test = write_as(tmp_path / "test.csv", [{"text": "x", "label": "a"}, {"text": "y", "label": "c"}])
    with pytest.raises(UserError) as caught:
        split(train, test_path=test, task=CLASSIFY)
    assert caught.value.problems[0] == f"No training row has the class 'c' of 1 row of test, at {test}, row 2."
    assert not any("max_rows" in problem for problem in caught.value.problems)
    # Tokenizing looks again, since stored splits may be of an earlier version.
    made = split(train, test_path=test, task="causal_lm", format="text_label")
    with pytest.raises(UserError) as again:
        tokenize(made, tmp_path / "tokens", CLASSIFY)
    assert again.value.problems == caught.value.problems


def test_a_class_that_only_a_held_out_row_of_the_same_file_has_keeps_its_number(tmp_path, split):
    rows = [{"text": f"t {n}", "label": "ab"[n % 2]} for n in range(8)] + [{"text": "lonely", "label": "c"}]
    path = write_as(tmp_path / "rows.jsonl", rows)
    made = next(
        found for seed in range(50) if 9 in (found := split(path, task=CLASSIFY, test=2, seed=seed)).ids("test")
    )
    summary = tokenize(made, tmp_path / "tokens", CLASSIFY)
    assert summary["label_map"] == {"a": 0, "b": 1, "c": 2}
    assert summary["splits"]["train"]["rows_by_class"]["c"] == 0
    assert summary["splits"]["test"]["rows_by_class"]["c"] == 1


def test_a_template_renders_the_text_of_a_class_and_the_source_of_a_target(tmp_path, split):
    path = write_as(
        tmp_path / "rows.jsonl", [{"a": f"x{n}", "label": f"{n % 2}", "response": f"r{n}"} for n in range(4)]
    )
    made = split(path, task=CLASSIFY, template="Kind of {a}?")
    tokenize(made, tmp_path / "classes", CLASSIFY)
    assert open_split(tmp_path / "classes", "train")[1].input_ids.tolist() == ids("Kind of x1?")
    made = split(path, task=TRANSLATE, template="Sum {a}:")
    tokenize(made, tmp_path / "pairs", TRANSLATE)
    assert open_split(tmp_path / "pairs", "train")[1].input_ids.tolist() == [*ids("Sum x1:"), EOS, *ids("r1"), EOS]


def test_the_77_intents_of_banking_become_classes(tmp_path, split, real_data):
    made = split(
        real_data("banking77/train.csv"),
        test_path=real_data("banking77/test.csv"),
        task=CLASSIFY,
        stratify="category",
        validation=0.1,
    )
    summary = tokenize(made, tmp_path / "tokens", CLASSIFY)
    assert len(summary["label_map"]) == 77
    names = {index: name for name, index in summary["label_map"].items()}
    for split_name in SPLITS:
        facts = summary["splits"][split_name]
        assert facts["num_classes"] == 77
        assert facts["num_rows"] == made.summary["rows"][split_name] == sum(facts["rows_by_class"].values())
        stored = {row["row_id"]: row for row in open_examples(made.folder, split_name).head(10**9)}
        for row in list(open_split(tmp_path / "tokens", split_name))[::50]:
            assert names[row.label] == stored[row.row_id]["label"]
            assert row.input_ids.tolist() == ids(stored[row.row_id]["text"])[:500]
    assert summary["splits"]["test"]["majority_fraction"] == 40 / 3080


def test_classes_that_max_rows_left_out_are_told_as_such(tmp_path, split):
    rows = [{"text": f"t {n}", "label": "abc"[n // 4]} for n in range(12)]
    train, test = write_as(tmp_path / "train.jsonl", rows), write_as(tmp_path / "test.csv", rows[:5])
    made = split(train, test_path=test, task=CLASSIFY, max_rows=5, duplicates="ignore")
    tokenize(made, tmp_path / "whole", CLASSIFY)
    test = write_as(tmp_path / "test.csv", rows[::-1])
    with pytest.raises(UserError) as caught:
        split(train, test_path=test, task=CLASSIFY, max_rows=5, duplicates="ignore")
    first, hint, _ = caught.value.problems
    assert first == f"No training row has the class 'c' of 4 rows of test, the first at {test}, row 1."
    assert hint.startswith(
        "data.max_rows: 5 took only the first 5 rows of each file, and files that are sorted by class"
    )
    assert "train.max_steps alone" in hint
