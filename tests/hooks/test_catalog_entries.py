"""Catalog entries that would fail or mislead after a training are refused before it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm_tuning import datasets
from lm_tuning.datasets.options import OPTIONS
from lm_tuning.errors import UserError
from tests.support.tiny_project import run_session


def test_options_are_those_of_the_classes() -> None:
    refused = {"version", "credentials", "fs_args", "metadata"}
    classes = {name: getattr(datasets, name) for name in datasets.__all__}
    assert set(OPTIONS) == set(classes)
    for name, kind in classes.items():
        assert OPTIONS[name] == set(inspect.signature(kind).parameters) - refused, name


def problems_with(root: Path, entry: str, **changes: Any) -> list[str]:
    catalog = yaml.safe_load((root / "conf" / "base" / "catalog.yml").read_text())
    known = catalog.get(entry, {"type": "lm_tuning.datasets.JSONDataset"})
    overlay = {entry: {**known, "filepath": f"data/{entry}", **changes}}
    (root / "conf" / "local" / "catalog.yml").write_text(yaml.safe_dump(overlay))
    with pytest.raises(UserError) as caught:
        run_session(root)
    assert not (root / "data").exists()
    return caught.value.problems


@pytest.mark.parametrize("entry", ["tuned_model", "training_summary", "evaluation", "example_splits", "checkpoints"])
def test_versions_are_refused(project: Path, entry: str) -> None:
    (problem,) = problems_with(project, entry, versioned=True)
    assert problem.startswith(f"Catalog entry '{entry}': versioned = true: versioned is not supported")
    assert "MLflow" in problem


@pytest.mark.parametrize("path", ["s3://bucket/x.json", "gs://bucket/x.json", "memory://x"])
def test_a_path_that_is_no_local_disk_is_refused(project: Path, path: str) -> None:
    (problem,) = problems_with(project, "evaluation", filepath=path)
    assert problem.startswith(f"Catalog entry 'evaluation': filepath = {path}: ")
    assert "local path" in problem
    assert not (project / "bucket").exists()


def test_unknown_options_and_marks_are_named(project: Path) -> None:
    found = problems_with(
        project, "evaluation", credentials="cloud", metadata={"lm_tuning": {"mlflow_artefact": "reports"}}
    )
    assert found == [
        "Catalog entry 'evaluation': JSONDataset has no option credentials. "
        "Options: filepath, metadata, save_args, type.",
        "Catalog entry 'evaluation': metadata.lm_tuning has no key mlflow_artefact. Did you mean mlflow_artifact?",
    ]


def test_an_entry_that_no_pipeline_uses_is_named_with_the_nearest(project: Path) -> None:
    (problem,) = problems_with(project, "evalution")
    assert problem == "Catalog entry 'evalution' is used by no pipeline. Did you mean evaluation?"


def test_a_mistyped_class_is_named_with_the_nearest(project: Path) -> None:
    (problem,) = problems_with(project, "evaluation", type="lm_tuning.datasets.JsonDataset")
    assert problem == (
        "Catalog entry 'evaluation': there is no dataset class lm_tuning.datasets.JsonDataset. "
        "Did you mean lm_tuning.datasets.JSONDataset?"
    )


def test_an_entry_of_one_s_own_passes(project: Path) -> None:
    own = {"my_notes": {"type": "lm_tuning.datasets.JSONDataset", "filepath": "data/notes.json"}}
    (project / "conf" / "local" / "catalog.yml").write_text(yaml.safe_dump(own))
    run_session(project)
    assert (project / "data" / "default" / "evaluation.json").is_file()


def test_a_model_never_takes_the_place_of_other_files(project: Path) -> None:
    rows = project / "rows"
    rows.mkdir()
    (rows / "train.jsonl").write_text("{}")
    entry = {"tuned_model": {"type": "lm_tuning.datasets.ModelFolderDataset", "filepath": str(rows)}}
    (project / "conf" / "local" / "catalog.yml").write_text(yaml.safe_dump(entry))
    with pytest.raises(UserError, match="holds files that are no tuned model"):
        run_session(project)
    assert (rows / "train.jsonl").is_file()
