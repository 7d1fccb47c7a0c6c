"""Whole folders of checked rows: every row is in it or accounted for."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lm_tuning.data.check import account as refusals
from lm_tuning.data.check import checked as checked_rows
from lm_tuning.data.check import values
from lm_tuning.data.check.checked import (
    describe_checked,
    open_checked,
    read_checked_summary,
    read_findings,
)
from lm_tuning.data.store import ExampleTable
from lm_tuning.errors import UserError
from tests.support.raw_rows import check_rows, describe_raw

COMPOSED, DECOMPOSED = "\uac12", "\u1100\u1161\u11b9"


class Checked:
    """A written folder: its summary, its rows, and what is known of them."""

    def __init__(self, folder: Path, summary: dict[str, Any]) -> None:
        self.folder = folder
        self.summary = summary
        self.rows = ExampleTable(folder / "rows.arrow").head(10**9)
        self.facts = open_checked(folder)
        self.findings = read_findings(folder)

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows]


@pytest.fixture
def check(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checked]:
    """Check files with the settings given."""

    def make(train: Any, *, validation: Any = None, test: Any = None, weights: Any = None, **settings: Any) -> Checked:
        folder = tmp_path_factory.mktemp("rows")
        raw = describe_raw(train, validation=validation, test=test, weights=weights)
        return Checked(folder, check_rows(folder, raw, **settings))

    return make


def texts(*values: Any) -> list[dict[str, Any]]:
    return [{"text": value} for value in values]


MIXED = texts("hello", 42, None, ["a", "b"])


def test_values_of_other_types_are_refused_by_row(write_rows, check):
    path = write_rows(MIXED)
    result = check(path)
    assert result.summary["refused"] == [
        f"{path}, row 2: column 'text' holds a number (42), where text is wanted.",
        f"{path}, row 3: column 'text' holds null, where text is wanted.",
        f"{path}, row 4: column 'text' holds a list, where text is wanted.",
        "Fix these rows, or leave them out and have them counted with data.on_bad_row: skip.",
    ]
    assert result.summary["num_rows"] == {"read": 4, "kept": 1, "skipped": 3}
    assert result.findings["wrong_type"]["fate"] == "refused"


def test_values_of_other_types_can_be_skipped_and_are_counted(write_rows, check, caplog):
    path = write_rows(MIXED)
    result = check(path, on_bad_row="skip")
    assert result.rows == [{"row_id": 1, "text": "hello", "source": 0}]
    assert "3 rows skipped (3 wrong_type)" in caplog.text
    assert "row 4: column 'text' holds a list" in caplog.text
    assert result.summary["refused"] == []
    assert result.summary["files"] == [
        {
            "path": path.as_posix(),
            "split": "train",
            "source": 0,
            "first_row_id": 1,
            "rows_read": 4,
            "rows_kept": 1,
            "rows_skipped": {"wrong_type": 3},
        }
    ]
    assert result.findings == {
        "wrong_type": {
            "num_rows": 3,
            "meaning": "a value of another type than the column should hold",
            "fate": "skipped",
            "rows": [
                {"file": path.as_posix(), "row": row, "reason": f"column 'text' holds {found}, where text is wanted."}
                for row, found in ((2, "a number (42)"), (3, "null"), (4, "a list"))
            ],
            "row_numbers": {path.as_posix(): [2, 3, 4]},
        }
    }


def test_missing_labels_are_named_and_the_others_numbered_from_zero(tmp_path, check):
    path = tmp_path / "rows.csv"
    path.write_text("text,label\na,1\nb,2\nc,\nd,3\n")
    result = check(path, format="text_label")
    assert result.summary["refused"][0] == f"{path}, row 3: unlabelled: column 'label' is empty."
    kept = check(path, format="text_label", on_bad_row="skip")
    assert kept.summary["refused"] == []
    assert kept.summary["label_map"] == {"1": 0, "2": 1, "3": 2}
    assert kept.column("label") == ["1", "2", "3"]
    assert kept.column("row_id") == [1, 2, 4]
    assert kept.findings["unlabelled"]["row_numbers"] == {path.as_posix(): [3]}


def test_classes_of_held_out_files_alone_have_no_number(write_rows, check):
    train = write_rows([{"text": f"{label} {n}", "label": label} for n in range(2) for label in "bd"])
    test = write_rows([{"text": f"{label}?", "label": label} for label in "abc"], name="test.jsonl")
    result = check(train, test=test, task="sequence_classification")
    assert result.summary["label_map"] == {"b": 0, "d": 1}, "those of the training files are numbered without gaps"
    assert result.summary["classes"]["only_held_out"] == ["a", "c"]
    assert result.summary["refused"] == [], "the rows themselves are well"


@pytest.mark.parametrize("values", [[3, 1, 2], [True, False, True], ["01", "1", "x"]])
def test_labels_of_any_type_give_the_same_map_in_any_order_of_rows(tmp_path, check, values):
    import pyarrow as pa
    import pyarrow.parquet as pq

    maps = []
    for name, order in (("a.parquet", values), ("b.parquet", values[::-1])):
        pq.write_table(pa.table({"text": ["a", "b", "c"], "label": order}), tmp_path / name)
        result = check(tmp_path / name, task="sequence_classification")
        maps.append(result.summary["label_map"])
        assert [maps[0][label] for label in result.column("label")] == [
            maps[0][str(value).lower() if isinstance(value, bool) else str(value)] for value in order
        ]
    assert maps[0] == maps[1]
    assert sorted(maps[0].values()) == list(range(len(maps[0])))


def test_composed_and_decomposed_names_are_one_class(write_rows, check):
    path = write_rows([{"text": f"{label} {n}", "label": label} for n in range(2) for label in (COMPOSED, DECOMPOSED)])
    before = path.read_bytes()
    result = check(path, format="text_label")
    assert result.facts.names == {"label": [COMPOSED]}
    assert result.facts.values["label"].tolist() == [0, 0, 0, 0]
    assert result.summary["refused"] == [
        f"data.columns.label: column 'label' holds one class only in the training rows, '{COMPOSED}' (4 rows); "
        "classification needs at least 2 classes."
    ]
    assert result.column("text") == [f"{COMPOSED} {n}" for n in (0, 0, 1, 1)]
    untouched = check(path, format="text_label", normalize="none")
    assert untouched.summary["label_map"] == {DECOMPOSED: 0, COMPOSED: 1}
    assert untouched.column("text")[1] == f"{DECOMPOSED} 0"
    assert path.read_bytes() == before


def test_a_conversation_without_an_answer_is_told_by_row_number(write_rows, check):
    turns = [("user", "2+2?"), ("assistant", "4"), ("user", "thanks")]
    rows = [
        {"messages": [{"role": role, "content": content} for role, content in turns]},
        {"messages": [{"role": "user", "content": "thanks"}]},
    ]
    path = write_rows(rows)
    result = check(path)
    assert result.summary["refused"][0] == (
        f"{path}, row 2: no assistant turn is in it, so there is nothing to train on."
    )
    skipped = check(path, on_bad_row="skip")
    assert json.loads(skipped.rows[0]["messages"]) == rows[0]["messages"]
    assert len(skipped.rows) == 1
    assert skipped.findings["no_assistant_turn"]["row_numbers"] == {path.as_posix(): [2]}


def test_conversations_hold_only_keys_that_the_row_had_in_any_file_format(tmp_path, write_rows, check):
    import pyarrow as pa
    import pyarrow.parquet as pq

    def row(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return {
            "messages": [
                {"role": "user", "content": "go"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "3"},
                {"role": "assistant", "content": "done"},
            ]
        }

    rows = [row("weather", {"city": "Busan"}), row("add", {"n": 3})]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for path in (write_rows(rows), tmp_path / "rows.parquet"):
        stored = check(path).column("messages")
        assert [json.loads(text) for text in stored] == [one["messages"] for one in rows]
        assert not any("null" in text or "None" in text for text in stored)


def test_ids_go_on_from_file_to_file_and_sources_are_told_apart(tmp_path, write_rows, check):
    first, second = write_rows(texts("a", "b"), "a.jsonl"), write_rows(texts("c"), "b.jsonl")
    held_out = write_rows(texts("x", 1), "test.jsonl")
    result = check([first, second], test=held_out, weights=[1.0, 2.5], on_bad_row="skip")
    assert result.column("row_id") == [1, 2, 3, 4]
    assert result.column("source") == [0, 0, 1, -1]
    assert result.facts.files.tolist() == [0, 0, 1, 2]
    assert [file["split"] for file in result.facts.sources] == ["train", "train", "test"]
    assert [file["first_row_id"] for file in result.facts.sources] == [1, 3, 4]
    assert result.summary["mixing"] == [
        {"path": str(first), "weight": 1.0, "num_rows": 2, "rows_per_epoch": 2},
        {"path": str(second), "weight": 2.5, "num_rows": 1, "rows_per_epoch": 3},
    ]
    assert describe_checked(result.summary) == "5 read, 4 kept, 1 skipped; text; 3 files"


def test_columns_may_come_in_another_order_but_must_be_there(tmp_path, check):
    (tmp_path / "a.csv").write_text("prompt,response,book\na,b,x\n")
    (tmp_path / "b.csv").write_text("book,response,prompt\ny,d,c\n")
    (tmp_path / "c.csv").write_text("response,promt\nd,c\n")
    result = check([tmp_path / "a.csv", tmp_path / "b.csv"], group="book")
    assert [(row["prompt"], row["response"]) for row in result.rows] == [("a", "b"), ("c", "d")]
    assert result.facts.names == {"book": ["x", "y"]}
    with pytest.raises(UserError) as caught:
        check([tmp_path / "a.csv", tmp_path / "c.csv"], group="book", key="id")
    assert [problem.split(",")[0] for problem in caught.value.problems] == [
        "split.key names the column 'id'",
        f"data.columns.prompt (read off the column names of {tmp_path / 'a.csv'}) names the column 'prompt'",
        "split.group names the column 'book'",
        "split.key names the column 'id'",
    ]


def test_held_out_files_need_no_group_and_no_key(write_rows, check):
    train = write_rows([{"text": "a", "book": "x", "id": 1}, {"text": "b", "book": "y", "id": 2}])
    result = check(train, test=write_rows(texts("z"), "test.jsonl"), group="book", key="id")
    assert result.facts.values["book"].tolist() == [0, 1, -1]
    assert result.facts.keys is not None
    assert result.facts.keys[2].tolist() == [0, 0]
    assert len({tuple(key) for key in result.facts.keys.tolist()}) == 3


def test_a_repeated_key_is_a_bad_row(write_rows, check):
    rows = [{"text": text, "id": key, "book": book} for text, key, book in zip("abcde", "pqppr", "xyzxw", strict=True)]
    train, test = write_rows(rows), write_rows(rows[:1], "test.jsonl")
    result = check(train, test=test, key="id", group="book", on_bad_row="skip")
    assert result.column("row_id") == [1, 2, 5, 6]
    assert result.facts.names == {"book": ["x", "y", "w"]}
    assert result.facts.values["book"].tolist() == [0, 1, 2, 0]
    assert len(result.facts.files) == len(result.facts.contents) == 4
    assert result.summary["files"][0] | {"path": ""} == {
        "path": "",
        "split": "train",
        "source": 0,
        "first_row_id": 1,
        "rows_read": 5,
        "rows_kept": 3,
        "rows_skipped": {"repeated_key": 2},
    }
    assert result.findings["repeated_key"]["rows"][1] == {
        "file": train.as_posix(),
        "row": 4,
        "reason": f"column 'id' (split.key) holds the value that row 1 of {train.as_posix()} has.",
    }
    assert check(train, key="id").summary["refused"][0].startswith(f"{train}, row 3: column 'id' (split.key) holds")


def test_keys_do_not_depend_on_the_position_of_a_row(write_rows, check):
    rows = [{"text": str(number), "id": number} for number in range(20)]
    one = check(write_rows(rows), key="id")
    other = check(write_rows(rows[::-1], "turned.jsonl"), key="id")
    assert one.facts.keys is not None
    assert other.facts.keys is not None
    assert np.array_equal(one.facts.keys, other.facts.keys[::-1])


@pytest.mark.parametrize(
    ("num_bad", "fraction", "is_refused"),
    [(3, 0.01, False), (4, 0.05, False), (5, 0.05, False), (6, 0.05, True), (1, 0.0, True), (0, 0.0, False)],
)
def test_more_than_a_share_of_bad_rows_is_refused(write_rows, check, num_bad, fraction, is_refused):
    path = write_rows(texts(*(number if number < num_bad else str(number) for number in range(100))))
    refused = check(path, on_bad_row="skip", max_bad_fraction=fraction).summary["refused"]
    assert bool(refused) == is_refused
    if num_bad == 6:
        assert refused == [
            f"{path}: 6 of 100 rows (6.0%) cannot be used, and data.max_bad_fraction lets 5.0% pass. Most of them: "
            "6 wrong_type."
        ]


def test_the_share_counts_for_each_file_and_for_all_together(write_rows, check):
    good = write_rows(texts(*map(str, range(100))), "good.jsonl")
    bad = write_rows(texts(*range(8), "a", "b"), "bad.jsonl")
    (problem,) = check([good, bad], on_bad_row="skip").summary["refused"]
    assert problem.startswith(f"{bad}: 8 of 10 rows (80.0%)")
    few = [write_rows(texts(*range(3), *"ab"), f"{name}.jsonl") for name in "ab"]
    (problem,) = check(few, on_bad_row="skip").summary["refused"]
    assert problem.startswith("All files together: 6 of 10 rows (60.0%)")


def test_many_bad_rows_are_all_in_the_findings_and_the_first_twenty_in_the_message(write_rows, check, monkeypatch):
    paths = [write_rows(texts("fine", *range(1200)), f"{name}.jsonl") for name in "ab"]
    result = check(paths)
    refused = result.summary["refused"]
    assert len(refused) == 43
    assert refused[20] == f"{paths[0]}: 1,180 more bad rows."
    assert result.findings["wrong_type"]["num_rows"] == 2400
    assert len(result.findings["wrong_type"]["rows"]) == 1000
    assert result.findings["wrong_type"]["row_numbers"] == {path.as_posix(): list(range(2, 1202)) for path in paths}
    monkeypatch.setattr(refusals, "MAX_LINES", 25)
    refused = check(paths).summary["refused"]
    assert len(refused) == 27
    assert refused[-2] == "2,400 bad rows in all files."


def test_files_without_a_usable_row_are_refused(write_rows, check):
    path = write_rows(texts(1, 2))
    assert f"{path} has no rows that can be used." in check(path, on_bad_row="skip").summary["refused"]


def test_bad_lines_of_a_file_and_bad_values_are_counted_by_kind(tmp_path, check):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'{"text": "a"}\nnot json\n{"text": " "}\n[1]\n{"other": 1}\n{"text": "\\ud800"}\n{"text": "\xff"}\n'
    )
    result = check(path, on_bad_row="skip", max_bad_fraction=0.99)
    assert {kind: found["row_numbers"][path.as_posix()] for kind, found in result.findings.items()} == {
        "empty": [3],
        "lone_surrogate": [6],
        "missing_column": [5],
        "not_an_object": [4],
        "not_json": [2],
        "not_utf8": [7],
    }


def test_odd_characters_and_odd_conversations_are_kept_and_told(write_rows, check):
    rows = [
        {"prompt": "a\x00", "response": "b\x00\ufffd"},
        {"prompt": "a", "response": "b"},
    ]
    path = write_rows(rows)
    result = check(path)
    assert result.column("prompt") == ["a\x00", "a"]
    assert result.summary["refused"] == []
    assert result.findings["control_character"]["fate"] == "kept"
    assert result.findings["control_character"]["rows"] == [
        {"file": path.as_posix(), "row": 1, "reason": "prompt holds the control character U+0000 (NUL)."}
    ]
    assert result.findings["replacement_character"]["row_numbers"] == {path.as_posix(): [1]}
    turns = [("user", "a"), ("system", "b"), ("assistant", "c")]
    chat = write_rows([{"messages": [{"role": role, "content": text} for role, text in turns]}], "chat.jsonl")
    assert check(chat).findings["system_not_first"]["fate"] == "kept"


def test_a_file_that_breaks_off_names_its_bad_rows_too(tmp_path, check):
    path = tmp_path / "rows.csv"
    path.write_text('text,id\na,1\n,2\n"never closed,3\n')
    with pytest.raises(UserError) as caught:
        check(path)
    assert caught.value.problems == [
        f"{path}, row 2: column 'text' is empty.",
        f"{path}, row 3 (line 4): a quoted field begins here and never ends.",
    ]


def test_only_the_first_rows_are_read_when_asked(write_rows, check):
    paths = [write_rows(texts(*"abcdef"), f"{name}.jsonl") for name in "ab"]
    assert check(paths, max_rows=2).column("text") == ["a", "b", "a", "b"]


def test_a_label_column_that_is_stratified_by_is_numbered_once(write_rows, check):
    path = write_rows([{"text": str(number), "label": "ab"[number % 2]} for number in range(6)])
    result = check(path, format="text_label", stratify="label", group="text")
    assert list(result.facts.values) == ["text", "label"]
    assert result.facts.values["label"].tolist() == [0, 1] * 3


def test_numbers_go_on_over_the_batches_of_a_large_file(write_rows, check):
    path = write_rows([{"text": str(number), "book": f"b{number % 5000}"} for number in range(12000)])
    result = check(path, group="book")
    assert result.facts.values["book"].tolist() == [number % 5000 for number in range(12000)]
    assert result.facts.names["book"] == [f"b{number}" for number in range(5000)]
    assert sorted(path.name for path in result.folder.iterdir()) == [
        "facts.npz",
        "findings.json",
        "names_0.arrow",
        "preview.json",
        "rows.arrow",
        "summary.json",
    ]
    assert read_checked_summary(result.folder) == result.summary


def test_columns_that_appear_late_are_told(write_rows, check, caplog):
    rows = [{"text": str(number)} for number in range(1000)]
    result = check(write_rows([*rows, {"text": "a", "tools": 1}, {"text": "b", "more": 1}, {"text": "c", "tools": 1}]))
    assert result.summary["num_rows"]["kept"] == 1003
    assert "columns that first appear in row 1001 or later" in caplog.text
    assert "'more', 'tools'" in caplog.text


def test_very_many_names_stay_on_disk(write_rows, check, monkeypatch):
    monkeypatch.setattr(values, "_MAX_LISTED_NAMES", 2)
    path = write_rows([{"text": str(number), "book": f"b{number}"} for number in range(5)])
    names = check(path, group="book").facts.names["book"]
    assert isinstance(names, values.StoredNames)
    assert len(names) == 5
    assert (names[0], names[-1], names[1:3]) == ("b0", "b4", ["b1", "b2"])
    assert list(names) == ["b0", "b1", "b2", "b3", "b4"]


def test_too_many_files_are_refused(write_rows, check, monkeypatch):
    monkeypatch.setattr(checked_rows, "MAX_FILES", 1)
    with pytest.raises(UserError, match="2 files are more than the 1 that are read"):
        check([write_rows(texts("a"), "a.jsonl"), write_rows(texts("b"), "b.jsonl")])


def test_many_files_share_one_progress_bar(write_rows, check):
    calls: list[tuple[Any, ...]] = []
    paths = [write_rows(texts("a"), f"{name}.jsonl") for name in range(12)]
    check(paths, on_progress=lambda *call: calls.append(call))
    assert {call[0] for call in calls} == {"Reading 12 files"}
    assert (calls[0], calls[-1]) == (("Reading 12 files", 0, 12, "files"), ("Reading 12 files", 12, 12, "files"))


def test_a_damaged_folder_says_how_to_make_it_again(tmp_path):
    with pytest.raises(UserError, match="kedro run --pipelines=split"):
        open_checked(tmp_path)


VALUES = st.none() | st.integers() | st.text(st.characters(exclude_categories=["Cs"]), max_size=5) | st.booleans()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.lists(st.dictionaries(st.sampled_from(["text", "label"]), VALUES), min_size=1, max_size=30))
def test_every_row_is_kept_or_accounted_for(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("rows")
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": 0, **row}, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    if not any("text" in row for row in rows) or not any("label" in row for row in rows):
        return
    summary = check_rows(folder, describe_raw(path), format="text_label", on_bad_row="skip")
    kept = ExampleTable(folder / "rows.arrow").head(100)
    findings = read_findings(folder)
    bad = [
        number
        for found in findings.values()
        if found["fate"] != "kept"
        for numbers in found["row_numbers"].values()
        for number in numbers
    ]
    assert sorted([*bad, *(row["row_id"] for row in kept)]) == list(range(1, len(rows) + 1))
    assert summary["num_rows"] == {"read": len(rows), "kept": len(kept), "skipped": len(bad)}
    for row in kept:
        assert row["text"] == unicodedata.normalize("NFC", rows[row["row_id"] - 1]["text"])


def test_counts_of_the_real_sets_are_exact(real_data, check):
    gsm8k = check(real_data("gsm8k/train.jsonl"), test=real_data("gsm8k/test.jsonl"))
    assert gsm8k.summary["num_rows"] == {"read": 8792, "kept": 8792, "skipped": 0}
    assert gsm8k.summary["reading"] == "prompt from 'question', response from 'answer'"
    banking = check(
        real_data("banking77/train.csv"), test=real_data("banking77/test.csv"), task="sequence_classification"
    )
    assert banking.summary["columns"] == {"text": "text", "label": "category"}
    assert banking.summary["num_rows"]["kept"] == 13083
    assert len(banking.summary["label_map"]) == 77
    assert banking.summary["classes"]["only_held_out"] == []
    assert sum(banking.summary["classes"]["num_rows"].values()) == 10003
    dialog = check(
        real_data("mts_dialog/train.csv"),
        validation=real_data("mts_dialog/validation.csv"),
        columns={"response": "section_text"},
        template="Summarize:\n{dialogue}",
    )
    assert dialog.summary["num_rows"]["kept"] == 1301
    korean = check(real_data("chatbot_ko/ChatbotData.csv"), columns={"prompt": "Q", "response": "A"})
    assert korean.summary["num_rows"] == {"read": 11823, "kept": 11823, "skipped": 0}
    assert gsm8k.findings == banking.findings == dialog.findings == korean.findings == {}


@pytest.mark.parametrize(("max_rows", "expected"), [(2, 2), (200, 3)])
def test_progress_tells_the_rows_of_the_file_and_not_the_limit(tmp_path, write_rows, max_rows, expected):
    (tmp_path / "rows").mkdir()
    told: list[tuple[str, int, int | None, str]] = []
    files = describe_raw([write_rows(texts("a", "b", "c"))])
    check_rows(tmp_path / "rows", files, max_rows=max_rows, on_progress=lambda *step: told.append(step))
    assert told[-1] == ("Reading rows.jsonl", expected, expected, "rows")


def test_labels_are_counted_by_the_type_they_have_in_the_file(write_rows, check):
    labels = ["1", 1, 1, True, "true", "b", 2]
    rows = [{"text": f"t{index}", "label": label} for index, label in enumerate(labels)]
    made = check(write_rows(rows), format="text_label")
    assert made.summary["label_map"] == {"1": 0, "2": 1, "b": 2, "true": 3}
    assert made.summary["classes"]["types"] == {"text": 3, "integer": 3, "boolean": 1}
    assert made.summary["classes"]["joined"] == ["1", "true"]
