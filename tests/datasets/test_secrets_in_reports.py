"""What this run knows to be secret is masked where a report is saved, and kept where a later node needs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lm_tuning import secrets
from lm_tuning.datasets import CSVDataset, JSONDataset, LiveReportDataset, ReportSectionDataset, TextDataset
from lm_tuning.secrets import remember

SECRET = "Pw-<planted>-1"
REPORT = {"lm_tuning": {"mlflow_artifact": "reports"}}


@pytest.fixture(autouse=True)
def one_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_known", set())
    monkeypatch.setattr(secrets, "_known_pattern", None)
    remember([SECRET])


def test_reports_are_masked(tmp_path: Path) -> None:
    path = str(tmp_path / "a.json")
    value: dict[str, Any] = {"prompt": f"read {SECRET}, TOKEN=abc", "n": 1}
    shown = {"prompt": "read ***, TOKEN=abc", "n": 1}
    JSONDataset(filepath=path, metadata=REPORT).save(value)
    assert json.loads(Path(path).read_text()) == shown
    LiveReportDataset(filepath=path).load().write(value)
    assert json.loads(Path(path).read_text()) == shown
    TextDataset(filepath=path).save("<p>read Pw-&lt;planted&gt;-1</p>")
    assert Path(path).read_text() == "<p>read ***</p>"
    CSVDataset(filepath=path, save_args={"index": False}).save([value])
    assert Path(path).read_text() == 'prompt,n\n"read ***, TOKEN=abc",1\n'
    section = ReportSectionDataset(filepath=str(tmp_path / "b.json"), section="rows", sections=["rows"], title="Data")
    section.save({"facts": value, "metrics": {}, "markdown": r"read Pw-\<planted\>-1"})
    assert section.load()["facts"] == shown
    assert (tmp_path / "b.md").read_text() == "# Data\n\nread ***\n"


def test_what_a_later_node_works_with_is_kept(tmp_path: Path) -> None:
    path = str(tmp_path / "raw_examples.json")
    JSONDataset(filepath=path).save({"path": f"folder/{SECRET}/rows.jsonl"})
    assert JSONDataset(filepath=path).load() == {"path": f"folder/{SECRET}/rows.jsonl"}
