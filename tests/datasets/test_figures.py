"""A folder of figures holds those of the last save and no others."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from kedro.io import DatasetError

from lm_tuning.datasets import FigureFolderDataset
from tests.datasets.test_files import make_figure


def test_figures_are_saved_by_name_and_old_ones_go(tmp_path: Path) -> None:
    dataset = FigureFolderDataset(filepath=str(tmp_path / "figures"))
    assert not dataset.exists()
    assert dataset.preview() is None
    dataset.save({"calibration": make_figure(), "confusion_matrix": b"image"})
    paths = [tmp_path / "figures" / name for name in ("calibration.png", "confusion_matrix.png")]
    assert dataset.artifact_paths == paths
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert paths[1].read_bytes() == b"image"
    assert base64.b64decode(dataset.preview()) == paths[0].read_bytes()
    dataset.save({"calibration": b"other"})
    assert dataset.artifact_paths == paths[:1]
    assert paths[0].read_bytes() == b"other"
    dataset.save({})
    assert dataset.exists()
    assert dataset.artifact_paths == []
    with pytest.raises(DatasetError, match="cannot be loaded"):
        dataset.load()
