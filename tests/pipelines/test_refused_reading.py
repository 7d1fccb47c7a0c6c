"""Odd files through the command line: what can be read is read, what cannot is refused with a report that says so."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.shell import Finished, Shell

ROOT = Path(__file__).resolve().parents[2]


class Project:
    """A copy of this project's configuration, and one process for its commands."""

    def __init__(self, folder: Path, shell: Shell) -> None:
        self.folder = folder
        self.shell = shell

    def split(self, name: str, **data: Any) -> Finished:
        """Run the split pipeline with an overlay of that name, whose results bear it as well."""
        conf = self.folder / "conf" / name
        conf.mkdir(exist_ok=True)
        (conf / "globals.yml").write_text(f"output: {name}\n")
        split = data.pop("split", {"validation": 0, "test": 0})
        (conf / "parameters.yml").write_text(yaml.safe_dump({"data": data, "split": split}, allow_unicode=True))
        return self.shell.kedro(self.folder, "run", "--env", name, "--pipelines", "split")

    def write(self, name: str, content: bytes | str) -> str:
        (self.folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return name

    def report(self, name: str) -> tuple[str, Any]:
        """Return text and facts of the data report."""
        folder = self.folder / "data/08_reporting" / name
        stored = json.loads((folder / "data_report.json").read_text())
        assert list(stored) == ["rows"] or "splits" in stored
        return (folder / "data_report.md").read_text(), stored["rows"]["facts"]

    def summary(self, name: str) -> Any:
        return json.loads((self.folder / "data/08_reporting" / name / "split_summary.json").read_text())


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    folder = tmp_path_factory.mktemp("reading") / "project"
    folder.mkdir()
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(ROOT / "conf", folder / "conf")
    (folder / "conf/local").mkdir(exist_ok=True)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    with Shell(folder.parent, {**kept, "COLUMNS": "400"}) as shell:
        yield Project(folder, shell)


GOOD = "".join(json.dumps({"prompt": f"p{n}", "response": f"r{n}" * (n + 1)}) + "\n" for n in range(20))


def problems_of(done: Finished) -> list[str]:
    """What was printed for the user, without the line on the traceback and what MLflow says of a new database."""
    assert done.code == 2, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    return [line for line in lines if not line.startswith("(traceback") and " INFO mlflow.store.db" not in line]


def test_a_file_without_a_row_tells_how_many_and_leaves_a_report(project):
    path = project.write("a.json", f"[{GOOD.replace(chr(10), ',')[:-1]}]")
    assert project.split("counts", path=path).code == 0
    text, facts = project.report("counts")
    assert (facts["is_unread"], facts["num_rows"]["kept"]) == (False, 20)
    project.write("a.json", json.dumps([1] * 15_000))
    problems = problems_of(project.split("counts", path=path))
    assert sum(", row " in problem for problem in problems) == 20
    assert "a.json: 14,980 more bad rows." in problems
    text, facts = project.report("counts")
    assert facts["is_unread"]
    assert "could not be read to the end" in text
    assert "a.json: 14,980 more bad rows." in facts["refused"]
    assert "## Splits" not in text
    again = problems_of(project.split("counts", path=path))
    assert again == problems  # read again: the refusal is not a stored result
    project.write("a.json", f"[{GOOD.replace(chr(10), ',')[:-1]}]")
    assert project.split("counts", path=path).code == 0
    assert not project.report("counts")[1]["is_unread"]


@pytest.mark.parametrize("num_bad", [1, 20, 21, 22, 150])
def test_bad_rows_in_messages_are_as_many_as_in_the_file(project, num_bad):
    path = project.write("bad.jsonl", GOOD + '{"prompt": 5, "response": "x"}\n' * num_bad)
    problems = problems_of(project.split("bad", path=path))
    named = sum(", row " in problem for problem in problems)
    rest = [problem for problem in problems if "more bad row" in problem]
    if num_bad <= 20:
        assert (named, rest) == (num_bad, [])
    else:
        noun = "row" if num_bad == 21 else "rows"
        assert (named, rest) == (20, [f"bad.jsonl: {num_bad - 20:,} more bad {noun}."])
    text, facts = project.report("bad")
    assert facts["num_rows"] == {"read": 20 + num_bad, "kept": 20, "skipped": num_bad}
    assert "The run stopped here" in text


def test_a_file_that_breaks_off_is_reported_up_to_there(project):
    packed = gzip.compress((GOOD + "no json\n" + GOOD * 2000).encode())
    path = project.write("broken.jsonl.gz", packed[: len(packed) // 2])
    problems = problems_of(project.split("broken", path=path))
    assert problems[0].startswith("broken.jsonl.gz, row 21: is not JSON")
    assert "the gzip data breaks off before its end" in problems[1]
    text, facts = project.report("broken")
    (file,) = facts["files"]
    assert file["broke_off"]
    assert file["rows_read"] == file["rows_kept"] + 1 > 21
    assert facts["findings"]["not_json"]["row_numbers"] == {"broken.jsonl.gz": [21]}
    assert "could not be read to the end" in text


def test_a_run_that_ends_before_it_reads_leaves_no_report_that_looks_like_its_own(project):
    path = project.write("here.jsonl", GOOD)
    assert project.split("ended", path=path).code == 0
    first = project.report("ended")[0]
    for _ in range(2):
        assert "does not exist" in problems_of(project.split("ended", path="gone.jsonl"))[0]
        marked = project.report("ended")[0]
        assert marked.startswith("> **This is the report of an earlier run.**")
        assert marked.endswith(first)
    assert project.split("ended", path=path).code == 0
    assert project.report("ended")[0] == first


def test_columns_that_are_not_there_leave_a_report_too(project):
    path = project.write("good.jsonl", GOOD)
    problems = problems_of(project.split("columns", path=path, columns={"text": "txet"}))
    assert "data.columns.text names the column 'txet'" in problems[0]
    text, facts = project.report("columns")
    assert facts["refused"][0] == problems[0]
    assert "| good.jsonl | train | - | - | - | - |" in text


def test_a_long_row_of_a_packed_file_is_named_with_its_size(project):
    row = json.dumps({"prompt": "p", "response": "x" * 3_000_000}) + "\n"
    path = project.write("long.jsonl.gz", gzip.compress((row + GOOD).encode()))
    problems = problems_of(project.split("long", path=path, max_row_bytes=1_000_000))
    assert problems[0].startswith(
        f"long.jsonl.gz, row 1: is {len(row) - 1:,} bytes long, and data.max_row_bytes lets 1,000,000 pass."
    )
    assert project.split("long", path=path, max_row_bytes=1_000_000, on_bad_row="skip").code == 0
    assert project.report("long")[1]["findings"]["too_long"]["num_rows"] == 1
    assert project.split("long", path=path).code == 0
    assert project.report("long")[1]["num_rows"]["kept"] == 21


def test_nested_rows_run_with_field_explode_and_paths(project):
    rows = [
        {"id": n, "story": f"s{n}", "qas": [{"q": f"q{n}{k}", "a": {"text": f"a{n}{k}"}} for k in range(n % 3)]}
        for n in range(12)
    ]
    path = project.write("nested.json", json.dumps({"data": {"train": rows}, "version": 1}, indent=1))
    nested = {
        "path": path,
        "field": "data.train",
        "explode": "qas",
        "columns": {"response": "qas.a.text"},
        "template": "{story}\n{qas.q}",
    }
    done = project.split("nested", **nested, split={"validation": 0.25, "test": 0, "group": "id"})
    assert done.code == 0, done.stderr
    text, facts = project.report("nested")
    assert facts["num_rows"] == {"read": 12, "kept": 12, "skipped": 0}
    assert "12 rows of the file became 12 rows by `data.explode` (`qas`)" in text
    assert "is in 4 rows of the file: 1, 4, 7, 10." in text
    assert project.summary("nested")["groups"]["num_groups"] == 8
    del nested["field"]
    problems = problems_of(project.split("nested", **nested))
    assert "Its lists are" in problems[0] or "It has the list 'data.train'" in problems[0]
    assert "data.field: data.train" in problems[0]


def test_a_table_with_semicolons_runs_and_lengths_are_told(project):
    rows = "".join(f'"question; {n}";"{"x" * n}"\n' for n in range(1, 102))
    path = project.write("semicolons.csv", f'"prompt";"response"\n{rows}')
    done = project.split("semicolons", path=path)
    assert done.code == 0, done.stderr
    lengths = project.summary("semicolons")["text_lengths"]["response"]
    assert lengths == {"num_rows": 101, "mean": 51.0, "p50": 51, "p90": 91, "p99": 100, "longest": 101}
    text, facts = project.report("semicolons")
    assert "| `response` | 101 | 51.0 | 51 | 91 | 100 | 101 |" in text
    assert facts["text_lengths"]["response"] == lengths


def test_parameters_that_make_no_sense_are_refused_before_any_node(project):
    done = project.split("parameters", path=project.write("good.jsonl", GOOD), delimiter=";;", max_row_bytes=0)
    assert done.code == 2
    printed = done.stdout + done.stderr
    assert "data.delimiter" in printed
    assert "data.max_row_bytes" in printed
