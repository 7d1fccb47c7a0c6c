"""The report on rows names every file and every finding, whatever stands in the rows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lm_tuning.data.check.checked import read_findings
from lm_tuning.data.rows_report import build_rows_section
from lm_tuning.reporting.markdown import write_inline
from tests.support.raw_rows import check_rows, describe_raw


@pytest.fixture
def section(tmp_path_factory):
    """Check rows and build the section."""

    def make(*paths: Any, test: Any = None, weights: Any = None, **settings: Any) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("rows")
        summary = check_rows(folder, describe_raw(list(paths), test=test, weights=weights), **settings)
        made = build_rows_section(summary, read_findings(folder))
        assert build_rows_section(summary, read_findings(folder)) == made
        assert json.loads(json.dumps(made)) == made
        return made

    return make


def rows(*values: Any) -> list[dict[str, Any]]:
    return [{"text": value, "label": f"c{position % 2}"} for position, value in enumerate(values)]


def test_counts_are_facts_and_metrics(write_rows, section):
    made = section(
        write_rows([*rows("a", 1, "b\x00", " "), {"text": "c", "label": None}]),
        format="text_label",
        on_bad_row="skip",
    )
    assert made["metrics"] == {
        "data_rows_read": 5,
        "data_rows_kept": 2,
        "data_rows_skipped": 3,
        "data_bad_fraction": 0.6,
        "data_finding_empty": 1,
        "data_finding_unlabelled": 1,
        "data_finding_wrong_type": 1,
        "data_finding_control_character": 1,
    }
    assert made["facts"]["num_rows"] == {"read": 5, "kept": 2, "skipped": 3}
    assert made["facts"]["findings"]["empty"]["fate"] == "refused"  # both good rows are of one class
    assert made["facts"]["label_map"] == {"c0": 0}
    assert "needs at least 2 classes" in made["markdown"]


def test_clean_rows_are_a_short_report(tmp_path, section):
    path = tmp_path / "rows.csv"
    path.write_text("text,label,more\na,x,1\nb,x,2\nc,y,3\nd,x,4\n")
    markdown = section(path, format="text_label")["markdown"]
    shown = "…/" + "/".join(write_inline(part) for part in path.parts[-3:])
    assert markdown == (
        "## Rows\n\n"
        "Rows read from 1 file: **4**. Good ones: **4**. None is bad.\n\n"
        "Read as `text_label`: text from 'text', label from 'label'.\n\n"
        "Columns that nothing reads: 'more'.\n\n"
        "### Files\n\n"
        "| File | Split | Rows read | Good | Bad | First row id |\n"
        "| --- | --- | ---: | ---: | ---: | ---: |\n"
        f"| {shown} | train | 4 | 4 | 0 | 1 |\n\n"
        "### Lengths of texts, in characters\n\n"
        "| Field | Rows | Mean | Median | 90 % up to | 99 % up to | Longest |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| `text` | 4 | 1.0 | 1 | 1 | 1 | 1 |\n"
        "| `label` | 4 | 1.0 | 1 | 1 | 1 | 1 |\n\n"
        "### Classes\n\n"
        "2 classes in column 'label'; always guessing the largest would be right for 75.0% of the training rows.\n\n"
        "| Class | Id | Rows | Share |\n"
        "| --- | ---: | ---: | ---: |\n"
        "| x | 0 | 3 | 75.00% |\n"
        "| y | 1 | 1 | 25.00% |\n\n"
        "### Findings\n\n"
        "None: nothing is unusual about any row."
    )


def test_bad_rows_are_listed_up_to_twenty_and_the_rest_is_counted(write_rows, section):
    markdown = section(write_rows(rows("a", *range(25))), format="text")["markdown"]
    assert "Good ones: **1**. Bad ones: **25** (96.15%); `data.on_bad_row: error` lets none pass." in markdown
    assert "**The run stopped here**, for this reason:" in markdown
    finding = markdown[markdown.index("#### `wrong_type`: 25 rows refused") :]
    assert finding.count("where text is wanted") == 20
    assert "rows.jsonl, row 21: column 'text' holds a number (19), where text is wanted." in finding
    assert finding.endswith("- and 5 more, all by row number in the JSON file beside this one")
    assert "| `wrong_type` | 25 | refused | a value of another type than the column should hold |" in markdown


def test_skipped_rows_tell_the_limit(write_rows, section):
    markdown = section(write_rows(rows("a", "b", 1)), on_bad_row="skip")["markdown"]
    assert (
        "Bad ones, left out: **1** (33.33%); `data.max_bad_fraction` lets 5.00% pass, and up to 3 rows of a file "
        "whatever their share." in markdown
    )
    assert "#### `wrong_type`: 1 row left out" in markdown


@pytest.mark.parametrize(
    ("max_rows", "said"),
    [
        (None, None),
        (6, None),
        (3, "ends the reading of a file after 3 rows. 1 of 2 files reached it; rows after that are in no count."),
        (1, "ends the reading of a file after 1 row. 2 of 2 files reached it; rows after that are in no count."),
    ],
)
def test_a_limit_that_cut_files_is_told(write_rows, section, max_rows, said):
    paths = write_rows(rows("a", "b", "c", "d", "e"), "long.jsonl"), write_rows(rows("f", "g"), "short.jsonl")
    markdown = section(*paths, format="text_label", max_rows=max_rows)["markdown"]
    if said is None:
        assert "data.max_rows" not in markdown
    else:
        assert f"`data.max_rows: {max_rows}` {said}" in markdown


@pytest.mark.parametrize(
    ("lists", "max_rows", "is_told"),
    [
        ([["a", "b", "c"], ["d"]], 3, False),  # four rows made of two: the file ends before the limit
        ([["a"], [], ["b"]], 2, True),  # one row made of the two that were read
    ],
)
def test_a_limit_counts_rows_of_the_file_and_not_what_became_of_them(write_rows, section, lists, max_rows, is_told):
    path = write_rows([{"items": [{"text": text} for text in texts]} for texts in lists])
    columns = {"text": "items.text"}
    markdown = section(path, explode="items", columns=columns, format="text", max_rows=max_rows)["markdown"]
    assert ("data.max_rows" in markdown) is is_told


def test_what_stands_in_rows_cannot_break_the_page(tmp_path, write_rows, section):
    hostile = "<script>|`*_[x](y)\n# head"
    path = tmp_path / "a|b.jsonl"
    lines = [json.dumps({"text": "a", "label": hostile}), json.dumps({"text": "b", "label": "B"}), f"{hostile}"]
    path.write_text("\n".join(lines) + "\n")
    markdown = section(path, format="text_label", on_bad_row="skip", max_bad_fraction=0.99)["markdown"]
    assert "<script>" not in markdown.replace("\\<script\\>", "")
    assert "a\\|b.jsonl" in markdown
    assert "\n# head" not in markdown
    assert "| \\<script\\>\\|\\`\\*\\_\\[x\\](y) ↵ \\# head | 0 | 1 | 50.00% |" in markdown


def test_sources_and_classes_out_of_balance_are_told(write_rows, section):
    first, second = write_rows(rows("a", "b", "c"), "a.jsonl"), write_rows(rows("d", "e"), "b.jsonl")
    held_out = write_rows([{"text": "x", "label": "new"}, {"text": "y", "label": "C0"}], "t.jsonl")
    markdown = section(first, second, test=held_out, weights=[1.0, 2.5], format="text_label")["markdown"]
    assert "### Sources" in markdown
    assert "| 2.5 | 2 | 5 |" in markdown
    assert "No training row has these classes, so no answer to their rows can be right: 'C0', 'new'." in markdown
    assert "differ in upper and lower case only, and are different classes: 'C0', 'c0'." in markdown


def test_more_classes_than_are_named_are_told(write_rows, section):
    names = [f"{word}{number:02}" for number in range(21) for word in ("new", "New")]
    held_out = write_rows([{"text": name, "label": name} for name in names], "t.jsonl")
    markdown = section(write_rows(rows("a", "b"), "a.jsonl"), test=held_out, format="text_label")["markdown"]
    assert "can be right: 'New00', 'New01'" in markdown and "'New19' and more." in markdown
    assert "are different classes: 'New00', 'new00'; " in markdown and "'New19', 'new19' and more." in markdown


def test_many_classes_and_files_are_cut(write_rows, section):
    values = [{"text": str(number), "label": f"class {number // 2:02}"} for number in range(79)]
    paths = [write_rows(values, "a.jsonl"), *(write_rows(rows("a", "b"), f"f{number}.jsonl") for number in range(55))]
    markdown = section(*paths, format="text_label")["markdown"]
    assert "and 12 smaller ones; the smallest is class 39." in markdown
    assert "and 6 more files." in markdown


def test_a_template_is_shown_as_it_is(tmp_path, section):
    path = tmp_path / "rows.csv"
    path.write_text("a,b\nx,y\n")
    markdown = section(path, columns={"response": "b"}, template="```\n{a}\n```")["markdown"]
    assert "The template:\n\n````text\n```\n{a}\n```\n````" in markdown


def test_labels_of_several_types_are_noted_and_those_of_one_are_not(write_rows, section):
    mixed = [{"text": f"t{position}", "label": label} for position, label in enumerate(["1", 1, 2, True])]
    made = section(write_rows(mixed), format="text_label")
    note = made["markdown"].split("### Findings\n\n")[1].replace("\\_", "_")
    assert note.startswith(
        "Note: labels in column 'label' are of different types (integer: 2 rows, text: 1 row, boolean: 1 row)."
    )
    assert note.endswith("Classes with labels of several types: '1'.")
    assert not made["facts"]["refused"]
    plain = section(
        write_rows([{"text": f"t{position}", "label": position % 2} for position in range(4)], "plain.jsonl"),
        format="text_label",
    )
    assert "different types" not in plain["markdown"]
