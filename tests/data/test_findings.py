"""No finding is lost, however many there are."""

from __future__ import annotations

from lm_tuning.data.check.findings import MAX_REASONS, Findings, RowPositions

SOURCES = [
    {"path": "a.jsonl", "split": "train", "first_row_id": 1},
    {"path": "empty.jsonl", "split": "train", "first_row_id": 11},
    {"path": "b.jsonl", "split": "train", "first_row_id": 11},
    {"path": "a.jsonl", "split": "test", "first_row_id": 5001},
]


def test_row_ids_become_file_and_number():
    indices = RowPositions(SOURCES)
    assert [indices.find(row_id) for row_id in (1, 10, 11, 5000, 5002)] == [
        ("a.jsonl (train)", 1),
        ("a.jsonl (train)", 10),
        ("b.jsonl", 1),
        ("b.jsonl", 4990),
        ("a.jsonl (test)", 2),
    ]


def test_all_row_numbers_are_kept_and_the_first_thousand_reasons():
    findings = Findings()
    for row_id in range(11, 4011):
        findings.add(row_id, "empty", f"reason {row_id}", is_bad=True)
    findings.add(5001, "empty", "late", is_bad=True)
    findings.add(7, "control_character", "odd", is_bad=False)
    findings.add(3, "of_its_own", "new", is_bad=True)
    described = findings.describe(SOURCES, bad_outcome="skipped")
    assert list(described) == ["empty", "of_its_own", "control_character"]
    empty = described["empty"]
    assert empty["num_rows"] == 4001
    assert empty["fate"] == "skipped"
    assert len(empty["rows"]) == MAX_REASONS
    assert empty["rows"][0] == {"file": "b.jsonl", "row": 1, "reason": "reason 11"}
    assert empty["row_numbers"] == {"b.jsonl": list(range(1, 4001)), "a.jsonl (test)": [1]}
    assert described["control_character"] == {
        "num_rows": 1,
        "meaning": "control characters that no text needs, such as NUL",
        "fate": "kept",
        "rows": [{"file": "a.jsonl (train)", "row": 7, "reason": "odd"}],
        "row_numbers": {"a.jsonl (train)": [7]},
    }
    assert described["of_its_own"]["meaning"] == "of its own"
    assert findings.counts() == {"empty": 4001, "control_character": 1, "of_its_own": 1}


def test_files_of_one_name_keep_rows_of_their_own():
    sources = [{"path": "org/set", "split": "train", "first_row_id": first} for first in (1, 11)]
    assert dict(RowPositions(sources).by_file([2, 11, 12])) == {"org/set (train)": [2], "org/set (train) #2": [1, 2]}
