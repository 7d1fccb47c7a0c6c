"""Sections of one report are saved each by its own node and stay in order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kedro.io import DatasetError

from lm_tuning.datasets import ReportSectionDataset

SECTIONS = ["rows", "splits", "tokens"]


def section(path: Path, name: str) -> ReportSectionDataset:
    return ReportSectionDataset(filepath=str(path), section=name, sections=SECTIONS, title="Data report")


def content(name: str) -> dict[str, Any]:
    return {"facts": {"of": name}, "metrics": {f"data_{name}": 1}, "markdown": f"## {name}\n\ntext of {name}\n"}


def test_sections_stand_in_order_in_both_files(tmp_path: Path) -> None:
    path = tmp_path / "reports" / "data_report.json"
    for name in SECTIONS:
        section(path, name).save(content(name))
    assert list(json.loads(path.read_text(encoding="utf-8"))) == SECTIONS
    assert path.with_suffix(".md").read_text(encoding="utf-8") == (
        "# Data report\n\n## rows\n\ntext of rows\n\n## splits\n\ntext of splits\n\n## tokens\n\ntext of tokens\n"
    )
    assert section(path, "splits").load() == content("splits")


def test_saving_a_section_drops_those_that_told_of_the_rows_before(tmp_path: Path) -> None:
    path = tmp_path / "data_report.json"
    for name in SECTIONS:
        section(path, name).save(content(name))
    section(path, "splits").save({**content("splits"), "markdown": "## splits\n\nagain"})
    assert list(json.loads(path.read_text(encoding="utf-8"))) == ["rows", "splits"]
    assert path.with_suffix(".md").read_text(encoding="utf-8").endswith("text of rows\n\n## splits\n\nagain\n")
    assert not section(path, "tokens").exists()


def test_a_section_that_was_not_saved_is_named_as_missing(tmp_path: Path) -> None:
    path = tmp_path / "data_report.json"
    section(path, "rows").save(content("rows"))
    with pytest.raises(DatasetError) as caught:
        section(path, "tokens").load()
    assert str(path) in str(caught.value.__cause__)


def test_a_value_that_is_no_json_leaves_the_report_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "data_report.json"
    section(path, "rows").save(content("rows"))
    before = path.read_bytes(), path.with_suffix(".md").read_bytes()
    with pytest.raises(DatasetError):
        section(path, "rows").save({**content("rows"), "facts": {"bad": object()}, "markdown": "other"})
    assert (path.read_bytes(), path.with_suffix(".md").read_bytes()) == before


def test_the_preview_escapes_what_rows_say(tmp_path: Path) -> None:
    dataset = section(tmp_path / "data_report.json", "rows")
    assert dataset.preview() is None
    dataset.save({**content("rows"), "markdown": "<script>"})
    assert dataset.preview() == "<pre>&lt;script&gt;</pre>"


def test_an_unknown_section_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'row' is not one of"):
        section(tmp_path / "a.json", "row")


def test_tracking_copies_both_files(tmp_path: Path) -> None:
    path = tmp_path / "data_report.json"
    assert section(path, "rows").artifact_paths == [path, path.with_suffix(".md")]
