"""The section of the report says in words and numbers what became of the rows."""

from __future__ import annotations

from lm_tuning.data.split.folder import read_copies
from lm_tuning.data.splits_report import build_splits_section
from lm_tuning.wording import shorten

SENTENCE = (
    "The committee will meet again on Thursday to decide whether the bridge can be repaired before winter sets in."
)


def test_numbers_and_words_of_a_division(write_rows, split):
    rows = [{"text": f"text {number % 18}", "kind": "a|b" if number < 15 else "<c>"} for number in range(20)]
    train = write_rows([*rows, {"text": SENTENCE, "kind": "a|b"}], "train.jsonl")
    held_out = write_rows([{"text": "text 3", "kind": "<c>"}, {"text": SENTENCE + "!", "kind": "<c>"}], "test.jsonl")
    result = split(
        [{"path": str(train), "weight": 2.5}],
        test_path=held_out,
        stratify="kind",
        validation=5,
        near_duplicates="report",
    )
    section = build_splits_section(result.summary, read_copies(result.folder))
    assert set(section) == {"facts", "metrics", "markdown"}
    assert section["metrics"] == {
        "data_train_rows": 16,
        "data_validation_rows": 5,
        "data_test_rows": 2,
        "data_duplicate_rows": 3,
        "data_near_duplicate_rows": 1,
        "data_leakage_rows": 2,
        "data_leakage_fraction": 2 / 7,
    }
    assert section["facts"]["leakage"] == result.summary["leakage"]
    # Training files are read first, so the row of the test file is the one that repeats, and so is its near twin.
    assert section["facts"]["copies"] == {
        "exact": {str(train): [19, 20], str(held_out): [1]},
        "left_out": {},
        "near": {str(held_out): [2]},
    }
    text = section["markdown"]
    assert text.startswith("## Splits\n\nDivided by seed 42.\n\n| split | rows | share |\n| --- | ---: | ---: |\n")
    assert "| train | 16 | 69.57% |" in text
    assert "another one, after trimming and NFC: 3. Left out: 0 (`split.duplicates: keep_together`). Copies in" in text
    assert (
        "another text before them (similarity 0.8 or more): 1 of 20 different texts, in 1 unit; they are reported only"
        in text
    )
    assert "Held-out rows that stand in train too, as copies or near duplicates: 2 of 7 (28.57%)." in text
    assert f"- test: rows with a copy in train: 1 (50.00%): {held_out}, row 1" in text.replace("\\_", "_")
    assert f"- test: rows with a near duplicate in train: 1 (50.00%): {held_out}, row 2" in text.replace("\\_", "_")
    assert "| class | train | validation | test |" in text
    assert "| a\\|b | " in text
    assert "| \\<c\\> | " in text
    shown = shorten(str(train), 80)
    assert f"| {shown} | 2.5 | 16 | 40 |" in text.replace("\\_", "_")
    assert "### Warnings" in text
    assert "- Rows of test with a near duplicate in train: 1, so" in text


def test_what_was_not_asked_for_is_not_told(write_rows, split):
    result = split(write_rows([{"text": str(number)} for number in range(5)]))
    section = build_splits_section(result.summary, read_copies(result.folder))
    assert section["metrics"]["data_leakage_fraction"] == 0
    assert "data_near_duplicate_rows" not in section["metrics"]
    assert "Nobody looked for near duplicates (`split.near_duplicates: ignore`)." in section["markdown"]
    assert [line for line in section["markdown"].splitlines() if line.startswith("#")] == [
        "## Splits",
        "### Duplicates",
        "### Leakage",
    ]


def test_groups_keys_folds_and_many_classes(write_rows, split):
    rows = [
        {"id": number, "text": str(number), "kind": f"k{number // 2 % 35}", "book": number // 2}
        for number in range(350)
    ]
    result = split(write_rows(rows), key="id", group="book", stratify="kind", num_folds=3, fold=2, test=30)
    text = build_splits_section(result.summary, read_copies(result.folder))["markdown"]
    counts = ", ".join(map(str, result.summary["folds"]["num_rows_by_fold"]))
    assert "Divided by the key 'id' and seed 42." in text
    assert (
        f"Validation is fold 2 of 3 (counted from 0; rows by fold: {counts}). Rows in no fold, always in train: 0."
        in text
    )
    assert "### Groups: book" in text
    assert "175 groups, each kept whole" in text
    assert text.count("| k") == 30
    assert "Smaller classes that are not shown: 5." in text
