from __future__ import annotations

from tests.preflight.conftest import Look, questions


def labelled(**counts: int) -> list[dict[str, str]]:
    return [{"text": f"{name} {index}", "label": name} for name, count in counts.items() for index in range(count)]


def test_labelled_rows_are_counted_by_class_and_split(look: Look):
    facts = look(
        labelled(no=6, yes=12, maybe=2),
        checking={"format": "text_label", "stratify": "label"},
        splitting={"test": 5, "stratify": "label"},
    )["labels"]
    assert facts["column"] == "label"
    assert facts["classes"][0] == {"name": "yes", "train": 9, "validation": 0, "test": 3}
    assert [one["train"] + one["test"] for one in facts["classes"]] == [12, 6, 2]
    assert (facts["num_classes"], facts["largest"], facts["smallest"]) == (3, "yes", "maybe")
    assert facts["majority_fraction"] == 9 / 15
    assert facts["not_in_train"] == []


def test_strata_count_as_classes_where_rows_have_no_label(look: Look):
    rows = [{**row, "kind": "odd" if index % 4 == 1 else "even"} for index, row in enumerate(questions(20))]
    facts = look(rows, checking={"stratify": "kind"}, splitting={"test": 4, "stratify": "kind"})["labels"]
    assert facts["column"] == "kind"
    assert facts["classes"] == [
        {"name": "even", "train": 12, "validation": 0, "test": 3},
        {"name": "odd", "train": 4, "validation": 0, "test": 1},
    ]
    assert facts["num_held_out_missing"] == 0


def test_rows_without_classes_have_none(look: Look):
    assert look(questions(4))["labels"] is None
