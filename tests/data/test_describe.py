"""The files that parameters name are checked before anything is read, and their changes are noticed later."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.data.settings import find_changed_sources
from lm_tuning.data.sources.describe import describe_files
from lm_tuning.errors import UserError

ROW = '{"text": "a"}\n'


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(*names: str, content: str = ROW) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content)


def problems_of(**named: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        describe_files(**named)
    return caught.value.problems


def test_a_file_is_described_by_format_size_and_digest():
    make("Rows.CSV", content="text\none\n")
    digest = hashlib.sha256(b"text\none\n").hexdigest()
    file = {"path": "Rows.CSV", "format": "csv", "compression": None, "num_bytes": 9, "digest": digest}
    named = {"path": "Rows.CSV", "weight": 1.0, "config": None, "split": None, "revision": None, "num_files": 1}
    assert describe_files(train="Rows.CSV", validation=["Rows.CSV"]) == {
        "train": [{**file, "source": 0}],
        "validation": [{**file, "source": -1}],
        "test": None,
        "sources": [{"path": "Rows.CSV", "weight": 1.0, "num_files": 1}],
        "named": {"train": [named], "validation": [named], "test": None},
    }


def test_several_sources_are_counted_in_order():
    make("many/b.jsonl", "many/a.jsonl", "one.csv", "last.tsv")
    described = describe_files(
        train=["many", {"path": "one.csv", "weight": 2}, {"path": "last.*", "weight": 0.5, "split": None}],
        test={"path": "many/a.jsonl", "weight": 1},
    )
    assert [(file["path"], file["source"], file["format"]) for file in described["train"]] == [
        ("many/a.jsonl", 0, "jsonl"),
        ("many/b.jsonl", 0, "jsonl"),
        ("one.csv", 1, "csv"),
        ("last.tsv", 2, "tsv"),
    ]
    assert described["sources"] == [
        {"path": "many", "weight": 1.0, "num_files": 2},
        {"path": "one.csv", "weight": 2.0, "num_files": 1},
        {"path": "last.*", "weight": 0.5, "num_files": 1},
    ]
    assert [(file["path"], file["source"]) for file in described["test"]] == [("many/a.jsonl", -1)]
    assert json.loads(json.dumps(described)) == described


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("absent.jsonl", None, "does not exist"),
        ("empty.jsonl", "", "is empty"),
        ("rows.txt", "text", "end in .jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow, .feather; behind the first"),
        ("rows", "text", "whose suffix tells no format"),
        ("rows.gz", "text", "whose suffix tells no format"),
    ],
)
def test_a_file_that_cannot_be_read_names_parameter_and_path(name, content, expected):
    if content is not None:
        make(name, content=content)
    (problem,) = problems_of(train=name)
    assert problem.startswith("data.path names ")
    assert f"'{name}'" in problem
    assert expected in problem


def test_everything_that_is_wrong_with_the_sources_is_said_together():
    make("a.jsonl", "rows/b.jsonl")
    problems = problems_of(
        train=["gone.jsonl", "a.jsonl", {"path": "a.jsonl", "weight": 2.0}, {"path": "rows", "revision": "v1"}],
        validation=[{"path": "a.jsonl", "weight": 0.5}],
        test=[],
    )
    assert problems == [
        f"data.path[0] names the file 'gone.jsonl', which does not exist (looked in '{Path.cwd()}').",
        "data.path[2] reads a.jsonl a second time. Name a file once; a weight lets its rows come up more often.",
        "data.path[3].revision = 'v1': 'rows' is no data set on the hub, so this has no use. Leave it out.",
        "data.validation_path[0].weight = 0.5: a weight says how often training rows come up, and rows of validation "
        "come up once. Leave it out.",
        "data.test_path is an empty list; name at least one source of rows.",
    ]


def test_a_file_in_two_overlapping_sources_is_refused():
    make("rows/a.jsonl", "rows/b.jsonl")
    (problem,) = problems_of(train=["rows/b.jsonl", "rows/*.jsonl"])
    assert problem.startswith("data.path[1] reads rows/b.jsonl a second time")


def test_files_of_a_folder_that_look_held_out_are_pointed_out(caplog):
    caplog.set_level(logging.INFO)
    make("rows/train.jsonl", "rows/test-00.jsonl", "rows/contest.jsonl", "rows/notes.md")
    describe_files(train="rows")
    assert "data.path: rows stands for 3 files, 1 of other formats left out" in caplog.text
    assert "files named like held-out rows will be trained on (1 of 3): rows/test-00.jsonl" in caplog.text
    caplog.clear()
    describe_files(train="rows/train.jsonl", test="rows/test*.jsonl")
    assert "held-out" not in caplog.text


def test_a_saved_split_is_chosen_by_the_source():
    make("saved/dataset_dict.json", "saved/all/a.arrow")
    make("saved/all/state.json", content='{"_data_files": [{"filename": "a.arrow"}]}')
    described = describe_files(train={"path": "saved", "split": "all"})
    assert described["train"][0]["path"] == "saved/all/a.arrow"
    (problem,) = problems_of(train={"path": "saved", "split": "all", "config": "x"})
    assert problem.startswith("data.path.config = 'x'")


def changes(stored: dict[str, Any], **named: Any) -> list[str]:
    return find_changed_sources(json.loads(json.dumps(stored)), **named)


def test_nothing_has_changed_while_names_and_files_are_the_same():
    make("rows/a.jsonl", "rows/b.jsonl", "c.csv")
    named: dict[str, Any] = {"train": ["rows", {"path": "c.csv", "weight": 2.0}], "validation": "c.csv"}
    stored = describe_files(**named)
    assert changes(stored, **named, digest_cache=Path("digests.json")) == []
    assert changes(stored, train=["./rows", {"path": r".\c.csv", "weight": 2.0}], validation=["c.csv"]) == []
    make("rows/.hidden.jsonl", "rows/notes.md", "other.jsonl")
    assert changes(stored, **named) == []


def test_another_way_to_name_the_rows_is_told():
    make("a.jsonl", "b.jsonl")
    stored = describe_files(train={"path": "a.jsonl", "weight": 2.0}, validation="b.jsonl")
    made = "the stored splits were made from"
    assert changes(stored, train="b.jsonl") == [
        f"rows of train: {made} a.jsonl (weight 2.0), the parameters say b.jsonl",
        f"rows of validation: {made} b.jsonl, the parameters say None",
    ]
    assert changes(stored, train=["a.jsonl", "b.jsonl"], validation="b.jsonl", test="b.jsonl") == [
        f"rows of train: {made} a.jsonl (weight 2.0), the parameters say a.jsonl, b.jsonl",
        f"rows of test: {made} None, the parameters say b.jsonl",
    ]


def test_files_that_changed_came_or_went_are_told():
    make("rows/a.jsonl", "rows/b.jsonl", "held.jsonl")
    named = {"train": "rows/*.jsonl", "test": "held.jsonl"}
    stored = describe_files(**named)
    make("rows/a.jsonl", "held.jsonl", content=ROW * 2)
    make("rows/c.jsonl")
    Path("rows/b.jsonl").unlink()
    assert changes(stored, **named) == [
        "rows of train: rows/a.jsonl has changed since the stored splits were made from it",
        "rows of train: rows/c.jsonl of rows/*.jsonl is new since the stored splits were made",
        "rows of train: rows/b.jsonl of rows/*.jsonl is gone since the stored splits were made",
        "rows of test: held.jsonl has changed since the stored splits were made from it",
    ]


def test_sources_that_are_gone_altogether_cannot_have_changed():
    make("a.jsonl", "rows/b.jsonl", "more/c.jsonl", "plain")
    named: dict[str, Any] = {"train": ["a.jsonl", "rows", "more/*.jsonl"]}
    stored = describe_files(**named)
    for name in ("a.jsonl", "rows/b.jsonl", "more/c.jsonl"):
        Path(name).unlink()
    Path("rows").rmdir()
    assert changes(stored, **named) == []


def test_a_description_of_an_earlier_version_counts_as_changed():
    (change,) = find_changed_sources({"train": {"path": "a.jsonl"}}, train="a.jsonl")
    assert "earlier version" in change
