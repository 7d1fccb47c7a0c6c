"""The split pipeline stores checked rows and splits by key, and makes them anew only when it must."""

from __future__ import annotations

import errno
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.data import example
from lm_tuning.data.settings import split_settings
from lm_tuning.data.store import open_examples
from lm_tuning.errors import MachineFault, UserError
from lm_tuning.parameters.data import DataParameters, SplitParameters
from lm_tuning.parameters.train import TrainParameters
from lm_tuning.pipelines.example_data.nodes import prepare_raw_examples
from lm_tuning.pipelines.split.nodes import check_examples, split_examples
from lm_tuning.storage.folders import FolderStore, read_manifest


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in, with a file of rows."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{number}?", "answer": f"{number}.", "topic": f"t{number % 9}"} for number in range(90)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


class Run:
    """What both nodes gave, published."""

    def __init__(
        self,
        *,
        seed: int = 1,
        data: dict[str, Any] | None = None,
        split: dict[str, Any] | None = None,
        train: dict[str, Any] | None = None,
        task: str = "causal_lm",
    ) -> None:
        parameters = DataParameters(**{"path": "rows.jsonl", **(data or {})})
        dividing = SplitParameters(**(split or {}))
        check_cache, split_cache = FolderStore(Path("rows"), keep=10), FolderStore(Path("splits"), keep=10)
        checked, self.rows_section = check_examples(
            prepare_raw_examples(parameters),
            check_cache=check_cache,
            data=parameters,
            split=dividing,
            task=task,
        )
        self.checked = check_cache.publish(checked)
        self.rows_reused = isinstance(checked, Path)
        made, self.summary, self.splits_section = split_examples(
            self.checked,
            split_cache=split_cache,
            data=parameters,
            split=dividing,
            train=TrainParameters(**(train or {})),
            seed=seed,
            task=task,
            output="mine",
        )
        self.folder = split_cache.publish(made)
        self.reused = isinstance(made, Path)
        self.settings = split_settings(parameters, dividing, seed=seed, task=task)


def run(**settings: Any) -> tuple[Path, dict[str, Any], bool]:
    """Run both nodes and publish; say whether the stored folder was reused."""
    made = Run(**settings)
    return made.folder, made.summary, made.reused


def test_rows_and_splits_are_published_and_reused_with_the_same_reports(project, caplog):
    caplog.set_level(logging.INFO)
    first = Run()
    assert not first.reused
    assert not first.rows_reused
    assert first.summary["rows"] == {"train": 81, "validation": 5, "test": 4}
    assert "Rows checked: 90 read, 90 kept, 0 skipped; prompt_response, in rows/" in caplog.text
    assert "Splits made: 81 train, 5 validation, 4 test; no duplicates" in caplog.text
    assert len(open_examples(first.folder, "train")) == 81
    facts = read_manifest(first.folder)["facts"]
    assert facts["files"]["train"][0]["path"] == "rows.jsonl"
    assert facts["settings"] == first.settings
    again = Run()
    assert again.reused
    assert again.rows_reused
    assert (again.folder, again.checked, again.summary) == (first.folder, first.checked, first.summary)
    assert again.rows_section == first.rows_section
    assert again.splits_section == first.splits_section
    assert "Rows reused: 90 read" in caplog.text
    assert "Splits reused: 81 train" in caplog.text
    assert sorted(first.rows_section) == sorted(first.splits_section) == ["facts", "markdown", "metrics"]


@pytest.mark.parametrize(
    ("split", "rows_are_reused"),
    [
        ({"validation": 0.2}, True),
        ({"duplicates": "drop"}, True),
        ({"num_folds": 3}, True),
        ({"near_duplicates": "report"}, True),
        ({"group": "topic", "validation": 0.3}, False),
        ({"stratify": "topic"}, False),
        ({"key": "question"}, False),
    ],
)
def test_rows_are_read_again_only_when_other_columns_are_needed(project, split, rows_are_reused):
    Run()
    made = Run(split=split)
    assert not made.reused
    assert made.rows_reused == rows_are_reused
    assert Run(split=split).reused


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
        {"data": {"max_rows": 50}},
        {"data": {"on_bad_row": "skip"}},
        {"data": {"max_row_bytes": 1000}},
        {"data": {"path": [{"path": "rows.jsonl", "weight": 2}]}},
        {"data": {"test_path": "rows.jsonl"}},
    ],
)
def test_whatever_the_splits_depend_on_makes_them_again(project, change):
    folder, _, _ = run()
    other, _, reused = run(**change)
    assert not reused
    assert other != folder
    assert run()[2]


def test_settings_that_came_later_leave_the_keys_of_stored_rows_as_they_were():
    settings = split_settings(DataParameters(), SplitParameters(), seed=1, task="causal_lm")
    assert not settings.keys() & {"field", "explode", "delimiter", "max_row_bytes"}
    given = {"field": "a", "explode": ["b"], "delimiter": ";", "max_row_bytes": 9}
    assert split_settings(DataParameters(**given), SplitParameters(), seed=1, task="causal_lm").items() >= given.items()


def test_new_content_under_the_same_name_makes_them_again(project):
    folder, _, _ = run()
    with Path("rows.jsonl").open("a") as file:
        file.write('{"question": "new", "answer": "row", "topic": "t0"}\n')
    other, summary, reused = run()
    assert not reused
    assert other != folder
    assert sum(summary["rows"].values()) == 91


def test_bad_rows_are_reported_first_and_refused_then(project):
    Run()
    before = sorted(Path("splits").rglob("*"))
    with Path("rows.jsonl").open("a") as file:
        file.write("not json\n")
    parameters = DataParameters(path="rows.jsonl")
    store = FolderStore(Path("rows"))

    def check() -> tuple[Path, dict[str, Any]]:
        made, section = check_examples(
            prepare_raw_examples(parameters),
            check_cache=store,
            data=parameters,
            split=SplitParameters(),
            task="causal_lm",
        )
        return store.publish(made), section

    folder, section = check()
    assert section["facts"]["findings"]["not_json"]["row_numbers"] == {"rows.jsonl": [91]}
    assert section["metrics"]["data_rows_skipped"] == 1
    with pytest.raises(UserError) as caught:
        Run()
    assert caught.value.problems[0].startswith("rows.jsonl, row 91: is not JSON")
    assert caught.value.problems[-1].endswith(": data/08_reporting/mine/data_report.md")
    assert sorted(Path("splits").rglob("*")) == before
    assert check() == (folder, section)
    skipped = Run(data={"on_bad_row": "skip"})
    assert sum(skipped.summary["rows"].values()) == 90


def test_rows_that_were_checked_with_other_parameters_are_refused(project):
    made = Run()
    with pytest.raises(UserError) as caught:
        split_examples(
            made.checked,
            split_cache=FolderStore(Path("splits")),
            data=DataParameters(path="rows.jsonl", normalize="none"),
            split=SplitParameters(key="topic"),
            train=TrainParameters(),
            seed=1,
            task="causal_lm",
            output="mine",
        )
    assert caught.value.problems[1:3] == [
        "  - normalize: the stored rows were checked with 'nfc', the parameters say 'none'",
        "  - key: the stored rows were checked with None, the parameters say 'topic'",
    ]


def test_a_file_of_another_name_is_read_again_so_that_reports_name_it(project):
    Run()
    Path("rows.jsonl").rename("renamed.jsonl")
    made = Run(data={"path": "renamed.jsonl"})
    assert not made.rows_reused
    assert "renamed.jsonl" in made.rows_section["markdown"]
    assert read_manifest(made.folder)["facts"]["files"]["train"][0]["path"] == "renamed.jsonl"


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

    from lm_tuning.datasets import FolderStoreDataset, JSONDataset, ReportSectionDataset, StoredFolderDataset
    from lm_tuning.pipelines import example_data, split

    catalog = DataCatalog(
        {
            "raw_examples": JSONDataset(filepath="out/raw_examples.json"),
            "check_cache": FolderStoreDataset(filepath="out/rows"),
            "checked_examples": StoredFolderDataset(filepath="out/rows"),
            "data_report": ReportSectionDataset("out/report.json", "rows", ["rows", "splits"], "Data report"),
            "split_report": ReportSectionDataset("out/report.json", "splits", ["rows", "splits"], "Data report"),
            "split_cache": FolderStoreDataset(filepath="out/splits"),
            "example_splits": StoredFolderDataset(filepath="out/splits"),
            "split_summary": JSONDataset(filepath="out/split_summary.json"),
            "params:data": MemoryDataset(DataParameters(path="rows.jsonl")),
            "params:split": MemoryDataset(SplitParameters()),
            "params:train": MemoryDataset(TrainParameters()),
            "params:seed": MemoryDataset(3),
            "params:task": MemoryDataset("causal_lm"),
            "params:output": MemoryDataset("out"),
        }
    )
    SequentialRunner().run(example_data.create_pipeline() + split.create_pipeline(), catalog)
    summary = json.loads(Path("out/split_summary.json").read_text())
    assert len(open_examples(catalog.load("example_splits"), "validation")) == summary["rows"]["validation"] == 5
    report = Path("out/report.md").read_text()
    assert report.startswith("# Data report\n\n## Rows\n\nRows read from 1 file: **90**.")
    assert "## Splits" in report


def test_what_a_user_is_warned_of_is_said_again_when_the_splits_are_reused(project, caplog):
    rows = [{"text": f"t{number}", "label": f"c{number}"} for number in range(40)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for is_reused in (False, True):
        caplog.clear()
        made = Run(task="sequence_classification", split={"validation": 5, "test": 5})
        assert made.reused is is_reused
        warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert [one for one in warned if one.startswith("Held-out rows of classes that no training row has: 10")]
    assert made.splits_section["metrics"]["data_untrained_classes"] == 10
    assert made.splits_section["facts"]["untrained_classes"] == made.summary["untrained_classes"]


def test_a_class_weight_of_no_class_is_refused_before_and_after_splitting(project):
    rows = [{"text": f"t{number}", "label": ("card", "cash")[number % 2]} for number in range(40)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wrong = {"class_weights": {"crad": 2.0}}
    refusal = r"train.class_weights.crad = 2: .* 'crad'. Did you mean 'card'\?\nThe classes are 'card', 'cash';"
    with pytest.raises(UserError, match=refusal):
        Run(task="sequence_classification", train=wrong)
    assert FolderStore(Path("rows")).current().is_dir()  # checked, and not checked again once the name is fixed
    assert not Path("splits/current.json").exists()
    made = Run(task="sequence_classification", train={"class_weights": {"card": 2.0}})
    assert made.rows_reused
    with pytest.raises(UserError, match=refusal):
        Run(task="sequence_classification", train=wrong)


def test_a_full_disk_is_no_report_of_unreadable_rows(project, monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lm_tuning.data.check.checked.write_checked_rows", fail)
    with pytest.raises(MachineFault, match="Could not write 'rows/"):
        run()
    assert not Path("rows/current.json").exists()
