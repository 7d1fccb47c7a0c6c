"""The split pipeline stores splits by key, and makes them again only when something they depend on has changed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.data import example
from lm_tuning.data.rows import open_examples
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import DataParameters, SplitParameters
from lm_tuning.pipelines.example_data.nodes import prepare_raw_examples
from lm_tuning.pipelines.split.nodes import split_examples
from lm_tuning.storage.folders import FolderStore, read_manifest


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in, with a file of rows."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{number}?", "answer": f"{number}.", "topic": f"t{number % 9}"} for number in range(90)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def run(
    *, seed: int = 1, data: dict[str, Any] | None = None, split: dict[str, Any] | None = None
) -> tuple[Path, dict[str, Any], bool]:
    """Run both nodes and publish; say whether the stored folder was reused."""
    parameters = DataParameters(**{"path": "rows.jsonl", **(data or {})})
    store = FolderStore(Path("splits"), keep=10)
    made, summary = split_examples(
        prepare_raw_examples(parameters),
        split_cache=store,
        data=parameters,
        split=SplitParameters(**(split or {})),
        seed=seed,
        task="causal_lm",
    )
    return store.publish(made), summary, isinstance(made, Path)


def test_splits_are_published_with_a_summary_and_reused(project, caplog):
    caplog.set_level(logging.INFO)
    folder, summary, reused = run()
    assert not reused
    assert summary["rows"] == {"train": 81, "validation": 5, "test": 4}
    assert "Splits made: 81 train, 5 validation, 4 test; no duplicates, in " in caplog.text
    assert len(open_examples(folder, "train")) == 81
    assert read_manifest(folder)["facts"]["files"]["train"]["path"] == "rows.jsonl"
    again, same, reused = run()
    assert reused
    assert (again, same) == (folder, summary)
    assert "Splits reused: 81 train" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"split": {"validation": 0.2}},
        {"split": {"group": "topic", "validation": 0.3}},
        {"split": {"stratify": "topic"}},
        {"split": {"duplicates": "drop"}},
        {"data": {"columns": {"prompt": "topic", "response": "answer"}}},
        {"data": {"columns": {"response": "answer"}, "template": "Answer: {question}"}},
        {"data": {"normalize": "none"}},
        {"data": {"test_path": "rows.jsonl"}},
    ],
)
def test_whatever_the_splits_depend_on_makes_them_anew(project, change):
    folder, _, _ = run()
    other, _, reused = run(**change)
    assert not reused
    assert other != folder
    assert run()[2]


def test_new_content_under_the_same_name_makes_them_anew(project):
    folder, _, _ = run()
    with Path("rows.jsonl").open("a") as file:
        file.write('{"question": "new", "answer": "row", "topic": "t0"}\n')
    other, summary, reused = run()
    assert not reused
    assert other != folder
    assert sum(summary["rows"].values()) == 91


def test_bad_rows_leave_nothing_behind(project):
    run()
    before = sorted(Path("splits").rglob("*"))
    with Path("rows.jsonl").open("a") as file:
        file.write("not json\n")
    with pytest.raises(UserError, match=r"rows\.jsonl, row 91: is not JSON"):
        run()
    assert sorted(Path("splits").rglob("*")) == before


def test_the_example_needs_no_columns_and_keeps_modules_whole(project):
    Path(example.EXAMPLE_PATH).parent.mkdir(parents=True)
    rows = [
        {"source": f"def f{number}(): ...", "summary": f"Return {number}.", "module": f"m{number % 20}"}
        for number in range(100)
    ]
    Path(example.EXAMPLE_PATH).write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder, summary, _ = run(data={"path": example.EXAMPLE_PATH})
    assert summary["rows"] == {"train": 90, "validation": 5, "test": 5}
    assert summary["groups"]["num_groups_by_split"] == {"train": 18, "validation": 1, "test": 1}
    assert summary["format"] == "prompt_response"
    (row,) = open_examples(folder, "train").head(1)
    number = row["row_id"] - 1
    assert row["prompt"] == f"Describe this Python function in one line.\n\ndef f{number}(): ..."
    assert row["response"] == f"Return {number}."


def test_both_pipelines_run_through_the_catalog(project):
    from kedro.io import DataCatalog, MemoryDataset
    from kedro.runner import SequentialRunner

    from lm_tuning.datasets import FolderStoreDataset, JSONDataset, StoredFolderDataset
    from lm_tuning.pipelines import example_data, split

    catalog = DataCatalog(
        {
            "raw_examples": JSONDataset(filepath="out/raw_examples.json"),
            "split_cache": FolderStoreDataset(filepath="out/splits"),
            "example_splits": StoredFolderDataset(filepath="out/splits"),
            "split_summary": JSONDataset(filepath="out/split_summary.json"),
            "params:data": MemoryDataset(DataParameters(path="rows.jsonl")),
            "params:split": MemoryDataset(SplitParameters()),
            "params:seed": MemoryDataset(3),
            "params:task": MemoryDataset("causal_lm"),
        }
    )
    SequentialRunner().run(example_data.create_pipeline() + split.create_pipeline(), catalog)
    summary = json.loads(Path("out/split_summary.json").read_text())
    assert len(open_examples(catalog.load("example_splits"), "validation")) == summary["rows"]["validation"] == 5
