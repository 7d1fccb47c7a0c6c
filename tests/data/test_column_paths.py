"""Columns inside nested rows: by path, by position, and one row of every element of a list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_tuning.data.check.checked import open_checked, read_findings
from lm_tuning.data.format.nested import format_path, parse_path
from lm_tuning.data.sources.describe import describe_files
from lm_tuning.data.store import ExampleTable
from lm_tuning.errors import UserError
from tests.support.raw_rows import check_rows

PAIRS = {"train": [["hi", "a"], ["yo", "b"]], "val": [["hm", "a"]], "notes": {"deep": [{"q": "x"}]}}
NESTED = [
    {"id": 1, "story": "s1", "instances": [{"input": "i1", "output": "o1"}, {"input": "i2", "output": "o2"}]},
    {"id": 2, "story": "s2", "instances": [{"input": "i3", "output": "o3"}]},
]


class Checked:
    def __init__(self, folder: Path, summary: dict[str, Any]) -> None:
        self.folder = folder
        self.summary = summary
        self.rows = ExampleTable(folder / "rows.arrow").head(10**6)

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows]


@pytest.fixture
def check(tmp_path):
    """Write content as a file and check it."""

    def make(name: str, content: Any, **settings: Any) -> Checked:
        path = tmp_path / name
        if isinstance(content, pa.Table):
            if path.suffix == ".parquet":
                pq.write_table(content, path)
            else:
                with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, content.schema) as writer:
                    writer.write_table(content)
        elif path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in content))
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        named = {"train": settings.pop("path", str(path)), "validation": settings.pop("validation", None)}
        folder = tmp_path / f"rows-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return Checked(folder, check_rows(folder, describe_files(**named), **settings))

    return make


def problem_of(check: Any, *arguments: Any, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        check(*arguments, **settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("a", ("a",)),
        ("a.b", ("a", "b")),
        ("instances[0].output", ("instances", 0, "output")),
        ("a[-1]", ("a", -1)),
        ("a.0", ("a", "0")),
        ('meta["a.b"].c', ("meta", "a.b", "c")),
        ("meta['x[0]']", ("meta", "x[0]")),
        ('["a.b"].c', ("a.b", "c")),
        ("[0]", (0,)),
        ("a..b", None),
        (".a", None),
        ("a[", None),
        ("a[x]", None),
        ("a]b", None),
        ("a[0]b", None),
    ],
)
def test_a_path_is_keys_with_dots_and_indices_in_brackets(text, steps):
    assert parse_path(text) == steps


@given(
    st.lists(
        st.text(min_size=1).filter(lambda key: '"' not in key or "'" not in key) | st.integers(-99, 99), min_size=1
    )
)
def test_a_path_that_is_written_is_read_back(steps):
    assert parse_path(format_path(steps)) == tuple(steps)


@pytest.mark.parametrize("indent", [None, 2])
def test_a_field_of_an_object_holds_the_rows_and_pairs_have_columns_by_position(check, indent):
    made = check("c.json", json.dumps(PAIRS, indent=indent), field="train", columns={"text": "0", "label": "1"})
    assert made.column("text") == ["hi", "yo"]
    assert made.column("label") == ["a", "b"]
    assert check("c.json", PAIRS, field="notes.deep", columns={"text": "q"}).column("text") == ["x"]


@pytest.mark.parametrize("chunk", [1, 2, 7, 1 << 20])
def test_a_field_is_found_wherever_chunks_begin(check, monkeypatch, chunk):
    monkeypatch.setattr("lm_tuning.data.readers.json_values._CHUNK_CHARACTERS", chunk)
    content = (
        '{"a\\"": [1, "]}\\\\", {"x": "\\"["}], "n": -1.5e3, "t": true, "train": [{"text": "on\\u0065"}], "z": null}'
    )
    assert check("c.json", content, field="train").column("text") == ["one"]


def test_a_source_may_name_a_field_of_its_own(check, tmp_path):
    path = str(tmp_path / "c.json")
    made = check(
        "c.json",
        PAIRS,
        path=[{"path": path, "field": "train"}],
        validation={"path": path, "field": "val"},
        columns={"text": "0", "label": "1"},
    )
    assert made.column("text") == ["hi", "yo", "hm"]
    assert [(file["path"], file["rows_kept"]) for file in made.summary["files"]] == [
        (f"{path}, field 'train'", 2),
        (f"{path}, field 'val'", 1),
    ]


@pytest.mark.parametrize(
    ("content", "field", "expected"),
    [
        (
            PAIRS,
            None,
            "Its lists are 'train', 'val', 'notes.deep': name the one that holds the rows, such as data.field: train.",
        ),
        (json.dumps(PAIRS, indent=1), None, "Its lists are 'train', 'val', 'notes.deep'"),
        (PAIRS, "tran", "the file has no key 'tran' (its keys: 'train', 'val', 'notes'). Its lists are 'train', 'val'"),
        (PAIRS, "notes", "'notes' holds an object, where a list of rows is wanted. It has the list 'notes.deep'"),
        (PAIRS, "train.x", "'train' holds a list, where an object is wanted"),
        (PAIRS, "train[7]", "'train' has 2 elements and none at index 7"),
        (PAIRS, "a[", "is no path to a list"),
        (json.dumps(PAIRS)[:-4], "train", "field 'train': "),
        ('{"train": [["a", "b"]], "train": [["c", "d"]]}', "train", "names 'train' twice"),
        ('{"train": 5}', "train", "'train' holds a number, where a list of rows is wanted"),
        ('{"train": [["a", "b"]]} x', "train", "'x' stands behind the object, where the file should end"),
    ],
)
def test_a_field_that_is_not_there_is_told_with_the_lists_that_are(check, content, field, expected):
    settings = {"columns": {"text": "0", "label": "1"}} if field else {}
    message = problem_of(check, "c.json", content, field=field, **settings)
    assert expected in message
    assert "c.json" in message or "data.field" in message


def test_a_field_has_no_use_in_other_files(check, tmp_path):
    assert "c.jsonl is no .json file" in problem_of(check, "c.jsonl", NESTED, field="train")
    path = str(tmp_path / "c.jsonl")
    assert "data.path.field = 'x'" in problem_of(check, "c.jsonl", NESTED, path={"path": path, "field": "x"})


def arrow_of(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows)


@pytest.mark.parametrize("name", ["n.jsonl", "n.json", "n.parquet", "n.arrow"])
def test_columns_by_path_read_the_same_from_every_format(check, name):
    content = arrow_of(NESTED) if name.endswith(("parquet", "arrow")) else NESTED
    made = check(name, content, columns={"response": "instances[0].output"}, template="{story}: {instances[0].input}")
    assert made.column("prompt") == ["s1: i1", "s2: i3"]
    assert made.column("response") == ["o1", "o3"]
    assert made.summary["not_used"] == ["id"]


@pytest.mark.parametrize("name", ["n.jsonl", "n.json", "n.parquet", "n.arrow"])
def test_every_element_of_a_list_makes_a_row(check, name):
    content = arrow_of(NESTED) if name.endswith(("parquet", "arrow")) else NESTED
    made = check(
        name,
        content,
        explode="instances",
        columns={"response": "instances.output"},
        template="{story}: {instances.input}",
        group="id",
    )
    assert made.column("prompt") == ["s1: i1", "s1: i2", "s2: i3"]
    assert made.column("response") == ["o1", "o2", "o3"]
    assert open_checked(made.folder).values["id"].tolist() == [0, 0, 1]
    assert made.summary["files"][0]["exploded"] == {
        "lists": ["instances"],
        "rows_in_file": 2,
        "rows_with_empty_lists": 0,
        "first_rows_with_empty_lists": [],
    }


def test_lists_in_lists_are_exploded_from_the_outermost(check):
    qas = [{"question": "q1", "answers": [{"text": "a1"}]}, {"question": "q2", "answers": []}]
    squad = {"data": [{"title": "t", "paragraphs": [{"context": "c1", "qas": qas}, {"context": "c2", "qas": []}]}]}
    made = check(
        "s.json",
        squad,
        field="data",
        explode=["paragraphs", "paragraphs.qas"],
        template="{paragraphs.context} {paragraphs.qas.question}",
        columns={"response": "paragraphs.qas.answers[0].text"},
        on_bad_row="skip",
    )
    assert made.column("prompt") == ["c1 q1"]
    assert made.summary["files"][0]["exploded"]["first_rows_with_empty_lists"] == [1]
    (found,) = read_findings(made.folder)["missing_column"]["rows"]
    assert found["reason"].endswith("has 0 elements and none at index 0. (In the file: row 1, element 1.2.)")


def test_what_cannot_be_exploded_is_a_bad_row_and_an_empty_list_is_accounted_for(check):
    rows = [
        NESTED[0],
        {"instances": []},
        {"instances": "x"},
        {"instances": None},
        {"id": 5},
        {"instances": [{"input": "i"}]},
    ]
    made = check(
        "n.jsonl", rows, explode="instances", columns={"prompt": "instances.input", "response": "instances.output"}
    )
    lines = [line.partition("n.jsonl, ")[2] for line in made.summary["refused"][:-1]]
    assert lines == [
        "row 3: column 'instances' (data.explode) holds text, where a list is wanted.",
        "row 4: column 'instances' (data.explode) holds null, where a list is wanted.",
        "row 5: has no list at 'instances' (data.explode): the row has no key 'instances' (its keys: 'id').",
        "row 6, element 1: has no column 'instances.output': 'instances' has no key 'output' (its keys: 'input').",
    ]
    assert made.summary["num_rows"] == {"read": 6, "kept": 2, "skipped": 4}
    told = made.summary["files"][0]["exploded"]
    assert (told["rows_in_file"], told["rows_with_empty_lists"], told["first_rows_with_empty_lists"]) == (6, 1, [2])


def test_what_stands_in_the_way_of_a_path_is_told_by_row(check):
    rows = [
        {"translation": {"en": "a", "ko": "b"}},
        {"translation": {"en": "a"}},
        {"translation": None},
        {"translation": "text"},
        {"translation": {"en": 5, "ko": "b"}},
    ]
    made = check("t.jsonl", rows, columns={"prompt": "translation.en", "response": "translation.ko"})
    assert [line.partition("t.jsonl, ")[2] for line in made.summary["refused"][:-1]] == [
        "row 2: has no column 'translation.ko': 'translation' has no key 'ko' (its keys: 'en').",
        "row 3: has no column 'translation.en': 'translation' is null.",
        "row 4: column 'translation.en': 'translation' holds text, where an object is wanted.",
        "row 5: column 'translation.en' holds a number (5), where text is wanted.",
    ]


def test_a_column_that_bears_the_name_of_a_path_is_that_column(check):
    rows = [{"a.b": "flat", "a": {"b": "deep", "c.d": "dotted"}}]
    assert check("t.jsonl", rows, columns={"text": "a.b"}).column("text") == ["flat"]
    assert check("t.jsonl", rows, columns={"text": 'a["b"]'}).column("text") == ["deep"]
    assert check("t.jsonl", rows, columns={"text": 'a["c.d"]'}).column("text") == ["dotted"]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"response": "output"}, "Did you mean 'instances[0].output'?"),
        ({"response": "instances[0].outptu"}, "'instances[0]' has no key 'outptu' (its keys: 'input', 'output')."),
        ({"response": "instances[9].output"}, "'instances' has 2 elements and none at index 9"),
        ({"response": "instances.output"}, "'instances' holds a list, where an object is wanted"),
        ({}, "Values inside columns are named by path, such as 'instances[0].input', 'instances[0].output'."),
    ],
)
def test_a_path_that_no_row_has_is_told_with_what_is_there(check, columns, expected):
    given = {"prompt": "story", **columns} if columns else {}
    assert expected in problem_of(check, "n.jsonl", NESTED, columns=given)


def test_group_class_and_key_may_be_named_by_path(check):
    rows = [{"text": f"t{n}", "meta": {"label": "ab"[n % 2], "id": n, "author": ["x", f"y{n // 2}"]}} for n in range(4)]
    settings = {"columns": {"text": "text", "label": "meta.label"}, "key": "meta.id", "group": "meta.author[1]"}
    made = check("m.jsonl", rows, stratify="meta.label", **settings)
    facts = open_checked(made.folder)
    assert facts.values["meta.author[1]"].tolist() == [0, 0, 1, 1]
    assert made.summary["label_map"] == {"a": 0, "b": 1}
    assert len(set(map(tuple, facts.keys.tolist()))) == 4


def test_rows_that_are_lists_must_all_be_lists(check):
    made = check("p.jsonl", [["a", "b"], {"0": "c"}, ["d"], ["e", "f"]], columns={"text": "0", "label": "1"})
    assert [line.partition("p.jsonl, ")[2] for line in made.summary["refused"][:-1]] == [
        "row 2: holds an object, where a list, as in the first row, is wanted.",
        "row 3: unlabelled: has no column '1'.",
    ]
    message = problem_of(check, "p.jsonl", [["a", "b"]])
    assert 'their columns are positions in quotes, such as data.columns.text: "0"' in message


def test_a_limit_counts_rows_of_the_file(check):
    made = check("n.jsonl", NESTED, explode="instances", max_rows=1, columns={"text": "instances.output"})
    assert made.column("text") == ["o1", "o2"]


def test_an_exploded_list_must_be_there(check):
    message = problem_of(check, "n.jsonl", NESTED, explode="instance", columns={"text": "story"})
    assert "data.explode names the column 'instance'" in message
    assert "Did you mean 'instances'?" in message
    assert "is no path to a list" in problem_of(check, "n.jsonl", NESTED, explode="a..b", columns={"text": "story"})
