"""A report that a node writes while it works."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from kedro.io import DatasetError

from lm_tuning.datasets import LiveReportDataset


def test_a_report_is_replaced_as_often_as_there_is_news(tmp_path: Path) -> None:
    path = tmp_path / "new" / "health.json"
    dataset = LiveReportDataset(filepath=str(path), metadata={"lm_tuning": {}})
    report = dataset.load()
    assert not path.exists()
    for state in ("running", "finished"):
        report.write({"state": state, "name": "환불"})
        assert json.loads(path.read_text(encoding="utf-8")) == {"state": state, "name": "환불"}
    assert [entry.name for entry in path.parent.iterdir()] == ["health.json"]
    pickle.loads(pickle.dumps(report)).write({"state": "copied"})
    assert json.loads(path.read_text()) == {"state": "copied"}


def test_nothing_is_saved_by_name(tmp_path: Path) -> None:
    dataset = LiveReportDataset(filepath=str(tmp_path / "health.json"))
    with pytest.raises(DatasetError, match="written by the node"):
        dataset.save({})  # type: ignore[arg-type]
    assert dataset.exists()
