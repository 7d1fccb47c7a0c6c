"""Whole folders of splits, from files to Arrow and summary."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pyarrow as pa
import pytest

from lm_tuning.data.settings import find_staleness
from lm_tuning.data.sources.describe import describe_files
from lm_tuning.data.split.folder import describe_splits, read_copies
from lm_tuning.data.splits_report import build_splits_section
from lm_tuning.data.store import ExampleTable, open_examples
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import DataParameters

SENTENCES = [
    "The committee will meet again on Thursday to decide whether the bridge can be repaired before winter sets in.",
    "Nobody had expected the small bakery on the corner to outlive every other shop in the long and windy street.",
    "When the tide goes out, children run across the wet sand to look for crabs, shells and pieces of green glass.",
    "Our neighbour repairs old radios in his garage, and on warm evenings you can hear distant stations whispering.",
]
COPIES = ["a", "b", "same", "c", "d", "e", "f", "g", "same", "same "]


def texts(*values):
    return [{"text": value} for value in values]


def test_values_of_other_types_are_reported_by_row(write_rows, split):
    path = write_rows(texts("hello", 42, None, ["a", "b"]))
    with pytest.raises(UserError) as caught:
        split(path)
    assert caught.value.problems[:3] == [
        f"{path}, row 2: column 'text' holds a number (42), where text is wanted.",
        f"{path}, row 3: column 'text' holds null, where text is wanted.",
        f"{path}, row 4: column 'text' holds a list, where text is wanted.",
    ]
    assert "data.on_bad_row: skip" in caught.value.problems[3]


def test_many_bad_rows_are_counted_behind_the_first_twenty(write_rows, split):
    with pytest.raises(UserError) as caught:
        split(write_rows(texts("fine", *range(50))))
    assert len(caught.value.problems) == 22
    assert caught.value.problems[20].endswith("30 more bad rows.")


def test_a_file_of_bad_rows_only_is_an_error_even_when_they_are_skipped(write_rows, split):
    with pytest.raises(UserError, match="no rows that can be used"):
        split(write_rows(texts(1, 2)), on_bad_row="skip")


@pytest.mark.parametrize(
    ("num_rows", "settings", "expected"),
    [
        (1, {"validation": 0.1}, ["1 row ", "0.1"]),
        (2, {"validation": 0.1, "test": 0.1}, ["2 rows", "0.1"]),
    ],
)
def test_a_set_that_is_too_small_names_rows_and_fractions(write_rows, split, num_rows, settings, expected):
    with pytest.raises(UserError) as caught:
        split(write_rows(texts(*map(str, range(num_rows)))), **settings)
    assert all(part in str(caught.value) for part in expected)


def test_three_rows_are_enough_for_three_splits_and_ten_for_one(write_rows, split):
    three = split(write_rows(texts("a", "b", "c")), validation=0.1, test=0.1)
    assert three.summary["rows"] == {"train": 1, "validation": 1, "test": 1}
    ten = split(write_rows(texts(*"abcdefghij")), validation=0)
    assert ten.summary["rows"] == {"train": 10, "validation": 0, "test": 0}
    assert ten.ids("train") == list(range(1, 11))
    assert len(open_examples(ten.folder, "test")) == 0


@pytest.mark.parametrize("handling", ["keep_together", "drop"])
def test_copies_never_stand_on_both_sides(write_rows, split, handling):
    path = write_rows(texts(*COPIES))
    for seed in range(20):
        result = split(path, validation=0.3, seed=seed, duplicates=handling)
        stripped = {name: {row["text"].strip() for row in rows} for name, rows in result.rows.items()}
        assert not stripped["train"] & stripped["validation"]
        assert "; 2 duplicates " in describe_splits(result.summary)
        expected = {"keep_together": (7, 3), "drop": (6, 2)}[handling]  # 0.3 of 10 rows, and of the 8 that are left
        assert (len(result.rows["train"]), len(result.rows["validation"])) == expected


def test_dropped_copies_leave_the_first_and_are_counted(write_rows, split):
    result = split(write_rows(texts(*COPIES)), duplicates="drop")
    assert result.ids("train") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert result.summary["duplicates"]["num_dropped"] == 2


def test_ignored_copies_that_end_on_both_sides_are_reported(write_rows, split, caplog):
    result = split(write_rows(texts("a", "a", "a", "a", "b")), validation=2, duplicates="ignore", seed=1)
    assert result.summary["overlap"]["train_validation"] == 1
    assert "train and validation share 1 text (2 rows of train, 2 rows of validation), so" in caplog.text
    assert (
        "Fix: set split.duplicates: keep_together, which puts copies on one side, or drop, which keeps one of them."
        in (caplog.text)
    )


def test_a_copy_with_another_label_is_kept_together_and_never_dropped(write_rows, split, caplog):
    rows = [{"text": "same", "label": "a"}, {"text": "same", "label": "b"}, {"text": "same", "label": "a"}]
    rows += [{"text": str(number), "label": "a"} for number in range(5)]
    path = write_rows(rows)
    for seed in range(10):
        result = split(path, format="text_label", duplicates="drop", validation=2, seed=seed)
        side = [name for name, rows in result.rows.items() for row in rows if row["text"] == "same"]
        assert side in (["train"] * 2, ["validation"] * 2)
    assert "Texts with more than one label: 1, in 3 rows (" in caplog.text


def test_groups_stay_whole_together_with_copies_that_link_them(write_rows, split):
    rows = [{"text": f"{group}{number}", "book": group} for group in range(8) for number in range(5)]
    rows += [{"text": "00", "book": 7}]
    path = write_rows(rows)
    for seed in range(10):
        result = split(path, validation=0.25, test=0.25, group="book", seed=seed)
        books = [{rows[row_id - 1]["book"] for row_id in result.ids(name)} for name in result.rows]
        assert not (books[0] & books[1]) | (books[0] & books[2]) | (books[1] & books[2])
        assert any({0, 7} <= side for side in books)
        assert result.summary["groups"]["num_groups"] == 8
        assert result.summary["groups"]["largest"] == {"value": "7", "num_rows": 6}


def test_too_few_groups_are_named(write_rows, split):
    path = write_rows([{"text": str(number), "book": "one"} for number in range(9)])
    with pytest.raises(UserError, match="1 group of 'book' cannot be divided into 2 splits"):
        split(path, validation=0.2, group="book")


def test_sizes_that_groups_do_not_allow_are_reported(write_rows, split, caplog):
    rows = [{"text": str(number), "book": number // 50} for number in range(100)]
    result = split(write_rows(rows), validation=0.1, group="book")
    assert result.summary["wanted_rows"]["validation"] == 10
    assert result.summary["rows"] == {"train": 50, "validation": 50, "test": 0}
    assert "validation 50 rows instead of 10" in caplog.text


def test_a_class_of_one_stays_in_train_and_is_named(write_rows, split, caplog):
    rows = [{"text": str(number), "label": "A"} for number in range(9)] + [{"text": "x", "label": "B"}]
    path = write_rows(rows)
    for seed in range(10):
        result = split(path, test=0.2, stratify="label", seed=seed)
        assert 10 in result.ids("train")
        assert result.summary["rows"] == {"train": 8, "validation": 0, "test": 2}
        assert result.summary["classes"]["only_in_train"] == {"B": 1}
    assert "only in train: 'B' (1 row)" in caplog.text


def test_group_and_strata_columns_are_checked_together(write_rows, split):
    with pytest.raises(UserError) as caught:
        split(write_rows(texts("a")), group="book", stratify="kind")
    assert [problem.split()[0] for problem in caught.value.problems] == ["split.group", "split.stratify"]


def test_an_empty_group_is_a_bad_row(write_rows, split):
    with pytest.raises(UserError, match="row 2: column 'book' is empty"):
        split(write_rows([{"text": "a", "book": "x"}, {"text": "b", "book": ""}]), group="book")


def test_unlabelled_rows_are_named(tmp_path, split):
    path = tmp_path / "rows.csv"
    path.write_text("text,label\na,1\nb,2\nc,\nd,3\n")
    with pytest.raises(UserError, match="row 3: unlabelled: column 'label' is empty"):
        split(path, format="text_label")
    result = split(path, format="text_label", on_bad_row="skip")
    assert result.column("label") == ["1", "2", "3"]
    assert result.column("row_id") == [1, 2, 4]


def test_own_files_are_splits_by_themselves_and_ids_go_on_from_file_to_file(write_rows, split):
    train = write_rows(texts(*"abcdefghij"), "train.jsonl")
    held_out = write_rows(texts("x", "y"), "validation.jsonl")
    last = write_rows(texts("z"), "test.jsonl")
    result = split(train, validation_path=held_out, test_path=last, validation=0.5, test=0.5)
    assert result.ids("train") == list(range(1, 11))
    assert result.rows["validation"] == [
        {"row_id": 11, "text": "x", "source": -1},
        {"row_id": 12, "text": "y", "source": -1},
    ]
    assert result.rows["test"] == [{"row_id": 13, "text": "z", "source": -1}]
    assert [file["first_row_id"] for file in result.summary["files"]] == [1, 11, 13]
    only_test = split(train, test_path=last, validation=0.2, test=0.5)
    assert only_test.summary["rows"] == {"train": 8, "validation": 2, "test": 1}


def test_row_ids_do_not_move_when_rows_are_skipped(write_rows, split):
    train = write_rows(texts("a", None, "c", None), "train.jsonl")
    result = split(train, test_path=write_rows(texts("z"), "test.jsonl"), on_bad_row="skip")
    assert (result.ids("train"), result.ids("test")) == ([1, 3], [5])


def test_rows_shared_with_an_own_file_are_reported_or_dropped_from_train(write_rows, split, caplog):
    train = write_rows(texts("a", "b", "shared", "shared"), "train.jsonl")
    held_out = write_rows(texts("shared ", "z"), "test.jsonl")
    kept = split(train, test_path=held_out)
    assert kept.summary["overlap"]["train_test"] == 1
    assert "train and test share 1 text (2 rows of train, 1 row of test), so" in caplog.text
    dropped = split(train, test_path=held_out, duplicates="drop")
    assert dropped.summary["overlap"]["train_test"] == 0
    assert (dropped.ids("train"), dropped.ids("test")) == ([1, 2], [5, 6])


def test_an_own_file_needs_the_same_columns(write_rows, split):
    with pytest.raises(
        UserError,
        match=r"data.columns.text \(read off the column names of .*rows.jsonl\) names the column 'text', which "
        r".*other.jsonl does not have",
    ):
        split(write_rows(texts("a")), test_path=write_rows([{"body": "b"}], "other.jsonl"))


def test_problems_of_all_files_come_together(write_rows, split):
    train, held_out = write_rows(texts("a", 1)), write_rows(texts("b", 2), "test.jsonl")
    with pytest.raises(UserError) as caught:
        split(train, test_path=held_out)
    assert [f"{train}, row 2" in str(caught.value), f"{held_out}, row 2" in str(caught.value)] == [True, True]


def test_files_of_any_format_give_the_same_rows(tmp_path, write_rows, split):
    import pyarrow.parquet as pq

    rows = [{"q": f'질문 {number}\nfoo, "bar"', "a": f"답 {number}"} for number in range(5000)]
    lines = write_rows(rows)
    array = tmp_path / "rows.json"
    array.write_text(json.dumps(rows))
    table = tmp_path / "rows.csv"
    table.write_text(
        "q,a\n" + "".join('"{}",{}\n'.format(row["q"].replace('"', '""'), row["a"]) for row in rows), encoding="utf-8"
    )
    columns = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), columns)
    settings = {"columns": {"prompt": "q", "response": "a"}, "validation": 0.1, "test": 77}
    results = [split(path, **settings) for path in (lines, array, table, columns)]
    assert results[0].summary["rows"] == {"train": 4423, "validation": 500, "test": 77}
    assert results[0].column("prompt") == [row["q"] for row in rows]
    assert all(result.rows == results[0].rows for result in results)


def test_the_division_is_the_same_in_another_process(write_rows, split, tmp_path):
    rows = [{"text": f"{number % 45}", "kind": f"k{number % 3}", "book": f"b{number % 9}"} for number in range(90)]
    rows += [
        {"text": f"{SENTENCES[number % 4]} {number // 4}", "kind": "k3", "book": f"c{number}"} for number in range(20)
    ]
    settings = {"stratify": "kind", "group": "book", "validation": 0.2, "test": 0.2, "near_duplicates": "keep_together"}
    here = split(write_rows(rows), **settings)
    code = (
        "import json, sys; from pathlib import Path; from lm_tuning.data.split.folder import write_splits;"
        "from lm_tuning.parameters.data import SplitParameters;"
        "from lm_tuning.data.store import open_examples; folder = Path(sys.argv[2]);"
        "write_splits(folder, Path(sys.argv[1]), SplitParameters(**json.loads(sys.argv[3])));"
        "print(*[row['row_id'] for row in open_examples(folder, 'train').head(99)])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code, str(here.checked), str(tmp_path), json.dumps(settings)],
        env={**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1", "RENSA_FORCE_KERNEL": "scalar"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert here.summary["near_duplicates"]["num_near_copies"] == 16
    assert [int(row_id) for row_id in output.split()] == here.ids("train")


def test_the_folder_holds_splits_copies_summary_and_preview_and_nothing_else(write_rows, split):
    result = split(write_rows(texts(*(f"{number} " * 200 for number in range(20)))), validation=2)
    assert sorted(path.name for path in result.folder.iterdir()) == [
        "copies.npz",
        "preview.json",
        "summary.json",
        "test.arrow",
        "train.arrow",
        "validation.arrow",
    ]
    assert json.loads((result.folder / "summary.json").read_text()) == result.summary
    preview = json.loads((result.folder / "preview.json").read_text())
    assert preview["columns"] == ["split", "row_id", "text", "source"]
    assert [row[0] for row in preview["data"]] == ["train"] * 5 + ["validation"] * 2
    assert len(preview["data"][0][2]) == 301


def test_progress_is_told_from_zero_to_the_end(write_rows, split):
    calls = []
    split(write_rows(texts("a", "b")), on_progress=lambda *call: calls.append(call))
    assert calls[0] == ("Writing splits", 0, 2, "rows")
    assert calls[1][1] == calls[1][2]
    assert calls[-1] == ("Writing splits", 2, 2, "rows")


def test_rows_stay_in_batches_that_can_be_mapped(write_rows, split):
    result = split(write_rows(texts(*map(str, range(10_000)))), validation=0.5)
    table = open_examples(result.folder, "validation")
    assert table.format == "text"
    sizes = [batch.num_rows for batch in table.batches()]
    assert sum(sizes) == len(table) == 5000
    assert len(sizes) == 2


def test_a_damaged_split_says_how_to_make_it_again(tmp_path):
    (tmp_path / "train.arrow").write_bytes(b"")
    with pytest.raises(UserError, match="kedro run --pipelines=split"):
        ExampleTable(tmp_path / "train.arrow")


def test_counts_of_the_real_sets_are_exact(real_data, split, caplog):
    caplog.set_level(logging.WARNING)
    gsm8k = split(
        real_data("gsm8k/train.jsonl"),
        test_path=real_data("gsm8k/test.jsonl"),
        validation=500,
        duplicates="keep_together",
    )
    assert gsm8k.summary["rows"] == {"train": 6973, "validation": 500, "test": 1319}
    assert gsm8k.column("row_id") == list(range(1, 7473 + 1319 + 1))

    banking = split(
        real_data("banking77/train.csv"),
        columns={"text": "text", "label": "category"},
        stratify="category",
        validation=0.1,
        test=0.1,
    )
    assert banking.summary["rows"] == {"train": 8003, "validation": 1000, "test": 1000}
    assert banking.summary["classes"]["num_classes"] == 77
    for counts in banking.summary["classes"]["rows_by_split"].values():
        total = sum(counts.values())
        assert abs(counts["validation"] - total / 10) < 2
        assert abs(counts["test"] - total / 10) < 2

    dialog = split(
        real_data("mts_dialog/train.csv"),
        validation_path=real_data("mts_dialog/validation.csv"),
        columns={"response": "section_text"},
        template="Summarize:\n{dialogue}",
    )
    assert dialog.summary["rows"] == {"train": 1201, "validation": 100, "test": 0}
    assert dialog.rows["train"][0]["prompt"].startswith("Summarize:\nDoctor: ")
    assert "\nPatient: " in dialog.rows["train"][0]["prompt"]

    korean = split(
        real_data("chatbot_ko/ChatbotData.csv"),
        columns={"prompt": "Q", "response": "A"},
        validation=1000,
        duplicates="drop",
    )
    copies = korean.summary["duplicates"]["num_copies"]
    assert copies == korean.summary["duplicates"]["num_dropped"] > 0
    assert korean.summary["rows"] == {"train": 11823 - copies - 1000, "validation": 1000, "test": 0}


def test_overlap_between_own_files_names_rows_on_both_sides(write_rows, split, caplog):
    train = write_rows(texts("a", "b", "shared", "shared", "c"), "train.jsonl")
    held_out = write_rows(texts("shared ", "z"), "validation.jsonl")
    last = write_rows(texts("z", "a", "z"), "test.jsonl")
    result = split(train, validation_path=held_out, test_path=last)
    assert result.summary["overlap"] == {"train_validation": 1, "train_test": 1, "validation_test": 1}
    assert result.summary["overlap_rows"] == {
        "train_validation": {
            "train": {"num_rows": 2, "first_row_ids": [3, 4]},
            "validation": {"num_rows": 1, "first_row_ids": [6]},
        },
        "train_test": {
            "train": {"num_rows": 1, "first_row_ids": [1]},
            "test": {"num_rows": 1, "first_row_ids": [9]},
        },
        "validation_test": {
            "validation": {"num_rows": 1, "first_row_ids": [7]},
            "test": {"num_rows": 2, "first_row_ids": [8, 10]},
        },
    }
    leakage = result.summary["leakage"]
    assert (leakage["num_rows"], leakage["fraction"]) == (2, 0.4)
    assert leakage["validation"]["exact"] == {"num_rows": 1, "first_row_ids": [6]}
    assert leakage["test"] == {
        "num_rows": 1,
        "fraction": 1 / 3,
        "exact": {"num_rows": 1, "first_row_ids": [9]},
        "near": None,
    }
    assert "train and validation share 1 text (2 rows of train, 1 row of validation)" in caplog.text
    assert describe_splits(result.summary).endswith("2 held-out rows stand in train too")


@pytest.mark.parametrize("handling", ["keep_together", "drop", "report"])
def test_near_duplicates_of_one_file(write_rows, split, handling):
    rows = [f"{SENTENCES[number % 4]} {number // 4}" for number in range(20)] + [
        f"row {number}" for number in range(20)
    ]
    path = write_rows(texts(*rows))
    units = []
    for seed in range(10):
        result = split(path, validation=10, near_duplicates=handling, seed=seed)
        near = result.summary["near_duplicates"]
        assert (near["handling"], near["num_compared"], near["num_near_copies"], near["num_units"]) == (
            handling,
            40,
            16,
            4,
        )
        assert near["largest"] == {"num_rows": 5, "first_row_ids": [1, 5, 9, 13, 17]}
        assert near["num_dropped"] == (16 if handling == "drop" else 0)
        assert [path.name for path in result.folder.glob("signatures*")] == []
        sides = [{number % 4 for number in range(20) if number + 1 in result.ids(name)} for name in result.rows]
        units.append(len(sides[0] & sides[1]))
        leaking = result.summary["leakage"]["validation"]["near"]["num_rows"]
        assert leaking == sum(
            number < 20 and number % 4 in sides[0] for number in (i - 1 for i in result.ids("validation"))
        )
        kept = sorted(result.ids("train") + result.ids("validation"))
        assert kept == ([1, 2, 3, 4, *range(21, 41)] if handling == "drop" else list(range(1, 41)))
        assert len(result.rows["validation"]) == 10
    assert (sum(units) == 0) == (handling != "report")


def test_near_duplicates_of_held_out_files_are_reported_and_dropped_from_train_only(write_rows, split, caplog):
    train = write_rows(texts(*SENTENCES, "other"), "train.jsonl")
    held_out = write_rows(texts(SENTENCES[1] + "!", SENTENCES[1] + "!!", SENTENCES[3], "new"), "test.jsonl")
    for handling in ("report", "keep_together"):
        result = split(train, test_path=held_out, near_duplicates=handling)
        assert result.summary["rows"] == {"train": 5, "validation": 0, "test": 4}
        assert result.summary["leakage"]["test"] == {
            "num_rows": 3,
            "fraction": 0.75,
            "exact": {"num_rows": 1, "first_row_ids": [8]},
            "near": {"num_rows": 2, "first_row_ids": [6, 7]},
        }
    assert "Rows of test with a near duplicate in train: 2" in caplog.text
    dropped = split(train, test_path=held_out, near_duplicates="drop")
    assert (dropped.ids("train"), dropped.ids("test")) == ([1, 3, 5], [6, 7, 8, 9])
    assert dropped.summary["leakage"]["num_rows"] == 0


def test_a_near_duplicate_with_another_label_is_not_dropped(write_rows, split):
    rows = [
        {"text": SENTENCES[0] + mark, "label": label}
        for mark, label in (("", "a"), ("!", "b"), ("?", "a"), ("..", "b"))
    ]
    rows += [{"text": sentence, "label": "a"} for sentence in SENTENCES[1:]]
    for seed in range(10):
        result = split(write_rows(rows), format="text_label", near_duplicates="drop", validation=2, seed=seed)
        assert result.column("row_id") == [1, 2, 5, 6, 7]
        assert {1, 2} <= set(result.ids("train")) or {1, 2} == set(result.ids("validation"))


def test_conversations_are_compared_by_what_is_said(write_rows, split):
    def talk(question, answer):
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return {"messages": turns}

    rows = [talk("Hi", "Hello"), talk("Bye", "See you"), talk(SENTENCES[0], "Yes."), talk(SENTENCES[0] + "?", "yes.")]
    result = split(write_rows(rows), near_duplicates="report")
    assert result.summary["near_duplicates"]["largest"] == {"num_rows": 2, "first_row_ids": [3, 4]}
    assert result.summary["near_duplicates"]["num_near_copies"] == 1


def shuffled(rows, seed):
    order = sorted(range(len(rows)), key=lambda index: (index * 7919 + seed * 104729) % 1009)
    return [rows[index] for index in order]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"stratify": "kind"},
        {"group": "book", "duplicates": "ignore"},
        {"stratify": "kind", "group": "book", "duplicates": "drop"},
        {"stratify": "kind", "duplicates": "drop", "near_duplicates": "drop"},
        {"stratify": "kind", "near_duplicates": "keep_together", "num_folds": 3, "fold": 1},
    ],
)
def test_with_a_key_the_order_of_the_rows_decides_nothing(write_rows, split, settings):
    rows = [
        {
            "id": f"row-{number}",
            "text": f"{SENTENCES[number % 4]} {number // 8}" if number < 40 else f"text {number % 45}",
            "kind": f"k{(number * number) % 7}",
            "book": f"b{number % 23}",
        }
        for number in range(120)
    ]
    found = []
    for seed in range(4):
        listed = shuffled(rows, seed) if seed else rows
        result = split(write_rows(listed), key="id", validation=0.2, test=0.1, seed=5, **settings)
        found.append({name: sorted(listed[row_id - 1]["id"] for row_id in result.ids(name)) for name in result.rows})
        counts = {name: value for name, value in result.summary.items() if name in ("rows", "wanted_rows", "folds")}
        found[-1]["counts"] = counts
    assert found[0]["validation"]
    assert all(other == found[0] for other in found[1:])


def test_with_a_key_new_rows_move_few_of_the_others(write_rows, split):
    rows = [{"id": f"row-{number}", "text": f"text {number}"} for number in range(1000)]
    before = split(write_rows(rows), key="id", validation=0.1)
    more = [{"id": f"new-{number}", "text": f"new text {number}"} for number in range(100)]
    after = split(write_rows(more + rows), key="id", validation=0.1)
    kept = {rows[row_id - 1]["id"] for row_id in before.ids("validation")}
    now = {(more + rows)[row_id - 1]["id"] for row_id in after.ids("validation")}
    assert len(kept - now) <= 25


def test_folds_cut_all_rows_outside_test_and_are_the_same_whatever_the_fold(write_rows, split):
    rows = [{"text": f"text {number % 90}", "kind": "ab"[number % 3 == 0]} for number in range(100)]
    results = [
        split(write_rows(rows), stratify="kind", test=10, num_folds=4, fold=fold, validation=0.5) for fold in range(4)
    ]
    assert all(result.ids("test") == results[0].ids("test") for result in results)
    assert [result.summary["rows"]["validation"] for result in results] == results[0].summary["folds"][
        "num_rows_by_fold"
    ]
    assert sorted(results[0].summary["folds"]["num_rows_by_fold"]) == [22, 22, 23, 23]
    held_out = [row_id for result in results for row_id in result.ids("validation")]
    assert sorted(held_out + results[0].ids("test")) == list(range(1, 101))
    for result in results:
        assert sorted(result.ids("train") + result.ids("validation") + result.ids("test")) == list(range(1, 101))
        assert result.summary["leakage"]["num_rows"] == 0
        assert result.summary["warnings"] == []
    assert "validation is fold 3 of 0 to 3" in describe_splits(results[3].summary)


def test_settings_of_folds_that_do_not_fit_are_named_together(write_rows, split):
    path = write_rows(texts("a", "b", "c"))
    with pytest.raises(UserError) as caught:
        split(path, validation_path=write_rows(texts("x"), "other.jsonl"), num_folds=3, fold=3)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["split.fold", "split.num_folds"]
    with pytest.raises(UserError, match=r"3 different rows cannot be divided into 4 folds \(split.num_folds\)"):
        split(path, num_folds=4)


def test_a_class_with_fewer_rows_than_folds_is_always_in_train(write_rows, split, caplog):
    rows = [{"text": str(number), "kind": "A" if number < 20 else "B"} for number in range(23)]
    for fold in range(5):
        result = split(write_rows(rows), stratify="kind", num_folds=5, fold=fold)
        assert {21, 22, 23} <= set(result.ids("train"))
        assert result.summary["rows"] == {"train": 19, "validation": 4, "test": 0}
        assert result.summary["folds"]["num_rows_always_in_train"] == 3
    assert "Too few rows to be in every fold, so only in train: 'B' (3 rows)." in caplog.text


def test_a_column_without_classes_cannot_stratify(write_rows, split):
    path = write_rows([{"text": str(number), "kind": number} for number in range(30)])
    with pytest.raises(UserError) as caught:
        split(path, stratify="kind", validation=0.1, test=0.1)
    assert str(caught.value).startswith("split.stratify: 'kind' leaves no row for validation and test, since a class")
    assert "classes of that kind: 30." in str(caught.value)


def test_groups_classes_and_copies_together(write_rows, split):
    rows = [
        {"text": f"text {number % 150}", "kind": f"k{number % 4}", "book": f"b{number % 40}"} for number in range(200)
    ]
    for seed in range(5):
        result = split(write_rows(rows), stratify="kind", group="book", validation=0.2, test=0.2, seed=seed)
        columns = {name: [rows[row_id - 1] for row_id in result.ids(name)] for name in result.rows}
        for column in ("text", "book"):
            sides = [{row[column] for row in part} for part in columns.values()]
            assert not (sides[0] & sides[1]) | (sides[0] & sides[2]) | (sides[1] & sides[2])
        assert sum(map(len, columns.values())) == 200
        for kind in ("k0", "k1", "k2", "k3"):
            assert sum(row["kind"] == kind for row in columns["validation"]) == 10


def test_rows_of_train_are_counted_by_source(write_rows, split):
    first, second = write_rows(texts(*"abcdef"), "one.jsonl"), write_rows(texts("x", "y", "z", "a"), "two.jsonl")
    result = split([{"path": str(first)}, {"path": str(second), "weight": 2.5}], duplicates="drop", validation=2)
    table = {row["row_id"]: row["source"] for rows in result.rows.values() for row in rows}
    assert table == {1: 0, 2: 0, 3: 0, 4: 0, 5: 0, 6: 0, 7: 1, 8: 1, 9: 1}
    counts = [sum(row["source"] == source for row in result.rows["train"]) for source in (0, 1)]
    assert result.summary["sources"] == [
        {"path": str(first), "weight": 1.0, "num_rows": counts[0]},
        {"path": str(second), "weight": 2.5, "num_rows": counts[1]},
    ]
    assert sum(counts) == 7


def test_differences_of_settings_and_files_make_splits_stale(write_rows):
    path = write_rows(texts("a", "b"))
    files = describe_files(train=str(path), validation=None, test=None)
    facts = {"settings": {"seed": 1, "key": None}, "files": files}
    data = DataParameters(path=str(path))
    settings = {"seed": 1, "key": None}
    assert find_staleness(facts, data, settings, digest_cache=None) == []
    assert find_staleness(facts, data, {"seed": 2, "key": None, "fold": 1}, digest_cache=None) == [
        "seed: the stored splits were made with 1, the parameters say 2",
        "fold: the stored splits were made with None, the parameters say 1",
    ]
    path.write_text('{"text": "c"}\n')
    (changed,) = find_staleness(facts, data, settings, digest_cache=None)
    assert str(path) in changed


@pytest.mark.parametrize(
    ("settings", "start", "parts"),
    [
        (
            {"validation": 0.1, "test": 0.1},
            "1 different row cannot be divided into 3 splits, since split.validation: 0.1 and split.test: 0.1 ask for "
            "them and rows of the same content stay together (split.duplicates: keep_together). Remedy: add rows",
            ["set split.duplicates: ignore", "split.validation: 0 or split.test: 0", "data.validation_path"],
        ),
        ({"test": 2}, "1 different row cannot be divided into 2 splits, since split.test: 2 asks for them", []),
        (
            {"validation": 1, "near_duplicates": "keep_together"},
            "1 different row cannot be divided into 2 splits",
            ["split.near_duplicates: keep_together", "set split.near_duplicates: report"],
        ),
        (
            {"validation": 1, "group": "book"},
            "1 group of 'book' cannot be divided into 2 splits",
            ["rows of a group stay together (split.group: book)", "set split.group: null"],
        ),
        ({"num_folds": 2}, "1 different row cannot be divided into 2 folds (split.num_folds)", ["cut fewer folds"]),
        (
            {"validation": 1, "duplicates": "drop"},
            "1 row cannot be divided as asked (split.validation: 1, split.test: 0)",
            ["\nCopies that were left out before: 11 (split.duplicates: drop)."],
        ),
    ],
)
def test_rows_of_one_text_name_the_keys_and_the_remedy(write_rows, split, settings, start, parts):
    path = write_rows([{"text": "the same", "book": "one"}] * 12)
    with pytest.raises(UserError) as caught:
        split(path, **settings)
    message = str(caught.value)
    assert message.startswith(start)
    assert all(part in message for part in parts), message


def test_rare_classes_that_were_held_out_are_told_with_strata_as_the_remedy(write_rows, split, caplog):
    rows = [{"text": f"t{index}", "label": f"c{index}" if index < 10 else "many"} for index in range(20)]
    path = write_rows(rows)
    made = split(path, task="sequence_classification", validation=5, test=5)
    [warning] = made.summary["warnings"]
    assert warning in caplog.messages
    assert warning.endswith(
        "Remedy: set split.stratify: label, which keeps a class of few rows in train, or give these classes more rows."
    )
    remedied = split(path, task="sequence_classification", validation=2, test=2, stratify="label")
    assert remedied.summary["untrained_classes"] is None


def test_classes_whose_rows_were_all_held_out_are_told(write_rows, split, caplog):
    path = write_rows([{"text": f"t{index}", "label": f"c{index}"} for index in range(20)])
    made = split(path, task="sequence_classification", validation=3, test=2)
    untrained = made.summary["untrained_classes"]
    assert (untrained["column"], untrained["num_classes"], untrained["num_rows"]) == ("label", 5, 5)
    held_out = sorted([*made.ids("validation"), *made.ids("test")])
    assert untrained["first_row_ids"] == held_out
    assert untrained["num_rows_by_class"] == {f"c{row_id - 1}": 1 for row_id in held_out}
    [warning] = made.summary["warnings"]
    assert warning.startswith("Held-out rows of classes that no training row has: 5, of 5 classes in column 'label' (")
    # No class has a row for every split, so strata would leave nothing to hold out.
    assert warning.endswith("Remedy: give these classes more rows, 3 or more, and set split.stratify: label.")
    assert warning in caplog.messages
    text = build_splits_section(made.summary, read_copies(made.folder))["markdown"]
    assert "### Classes without a training row: label\n\nThe division held out all rows of 5 classes (" in text
    assert f"| c{held_out[0] - 1} | 1 |" in text


def test_classes_that_train_has_or_that_only_a_held_out_file_has_are_refused(write_rows, split):
    path = write_rows([{"text": f"t{index}", "label": f"c{index}"} for index in range(20)])
    made = split(
        path,
        task="sequence_classification",
        stratify="label",
        test_path=write_rows([{"text": "x", "label": "c0"}], "test.jsonl"),
    )
    assert made.summary["untrained_classes"] is None
    assert not made.summary["warnings"]
    with pytest.raises(UserError, match=r"has the class 'new' of 1 row of test, at .*more.jsonl, row 2"):
        split(
            path,
            task="sequence_classification",
            test_path=write_rows([{"text": "x", "label": "c0"}, {"text": "y", "label": "new"}], "more.jsonl"),
        )


def test_groups_that_hold_a_class_out_in_spite_of_strata_are_told_with_a_remedy(write_rows, split):
    rows = [{"text": f"t{index}", "label": "ab"[index % 2], "book": index // 4} for index in range(40)]
    rows.append({"text": "lonely", "label": "c", "book": 0})
    path = write_rows(rows)
    settings = {"task": "sequence_classification", "stratify": "label", "group": "book", "test": 10}
    results = (split(path, **settings, seed=seed) for seed in range(50))
    made = next(found for found in results if 41 in found.ids("test"))
    [warning] = [one for one in made.summary["warnings"] if one.startswith("Held-out rows of classes")]
    assert "1, of 1 class in column 'label' ('c')" in warning
    assert warning.endswith("Remedy: give these classes more rows.")
