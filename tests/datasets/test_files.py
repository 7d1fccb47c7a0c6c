"""Small files come back as saved, survive a failed save, and preview."""

from __future__ import annotations

import base64
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kedro.io import DatasetError

from lm_tuning.datasets import CSVDataset, FigureDataset, JSONDataset, TextDataset
from lm_tuning.errors import UserError


def make_figure() -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1, 1))
    figure.subplots().plot([1, 2, 3])
    return figure


def test_json_keeps_letters_and_types(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.json"
    value = {"값": [1, 2.5, None, True], "b": {"c": "x"}}
    dataset = JSONDataset(filepath=str(path))
    assert not dataset.exists()
    dataset.save(value)
    assert dataset.load() == value
    assert "값" in path.read_text(encoding="utf-8")


def test_json_preview_can_be_parsed_even_with_nan(tmp_path: Path) -> None:
    dataset = JSONDataset(filepath=str(tmp_path / "a.json"))
    dataset.save({"loss": math.nan, "steps": [1.0, math.inf]})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert json.loads(dataset.preview(), parse_constant=refuse) == {"loss": "nan", "steps": [1.0, "inf"]}


def test_text_keeps_line_ends_and_previews_as_written(tmp_path: Path) -> None:
    dataset = TextDataset(filepath=str(tmp_path / "a.md"))
    dataset.save("| a |\r\n<b>값</b>\n")
    assert dataset.load() == "| a |\r\n<b>값</b>\n"
    assert dataset.preview() == "<pre>| a |\r\n&lt;b&gt;값&lt;/b&gt;\n</pre>"


def test_csv_takes_rows_or_frame_and_only_empty_cells_are_missing(tmp_path: Path) -> None:
    rows = [{"text": "null", "loss": 1.5}, {"text": "N/A", "loss": math.nan}, {"text": "None", "loss": math.inf}]
    dataset = CSVDataset(filepath=str(tmp_path / "a.csv"))
    dataset.save(rows)
    frame = dataset.load()
    assert list(frame["text"]) == ["null", "N/A", "None"]
    assert list(frame["loss"].isna()) == [False, True, False]
    dataset.save(frame.head(1))
    assert dataset.load().to_dict(orient="records") == [{"text": "null", "loss": 1.5}]


def test_csv_previews_the_first_rows(tmp_path: Path) -> None:
    dataset = CSVDataset(filepath=str(tmp_path / "a.csv"))
    dataset.save([{"step": step} for step in range(9)])
    assert dataset.preview(nrows=2) == {"index": [0, 1], "columns": ["step"], "data": [[0], [1]]}
    dataset.save([])
    assert dataset.preview()["data"] == []


def test_an_image_that_was_drawn_before_is_stored_as_it_is(tmp_path: Path) -> None:
    dataset = FigureDataset(filepath=str(tmp_path / "a.png"))
    dataset.save(b"\x89PNG drawn")
    assert (tmp_path / "a.png").read_bytes() == b"\x89PNG drawn"


def test_figure_is_a_png_and_previews(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    dataset = FigureDataset(filepath=str(path))
    dataset.save(make_figure())
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert base64.b64decode(dataset.preview()) == content
    with pytest.raises(DatasetError, match=r"curve\.png"):
        dataset.load()


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (JSONDataset, {"a": 1}, {"a": object()}),
        (TextDataset, "good", 5),
        (CSVDataset, [{"a": 1}], 5),
        (FigureDataset, "figure", "no figure"),
    ],
)
def test_failed_save_keeps_the_previous_file(tmp_path: Path, kind: Any, good: Any, bad: Any) -> None:
    path = tmp_path / "result.png"
    dataset = kind(filepath=str(path))
    dataset.save(make_figure() if kind is FigureDataset else good)
    before = path.read_bytes()
    with pytest.raises(DatasetError):
        dataset.save(bad)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.png"]


SIZE_LIMITED = """
import resource, sys
from lm_tuning import datasets
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
getattr(datasets, sys.argv[1])(filepath=sys.argv[2]).save([{"a": "x" * 100}] * 1000)
"""


@pytest.mark.parametrize("kind", ["JSONDataset", "CSVDataset"])
def test_file_that_the_system_cuts_short_keeps_the_previous_one(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "result"
    path.write_text("old")
    command = [sys.executable, "-c", SIZE_LIMITED, kind, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "The previous output is kept" in done.stderr
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["result"]


@pytest.mark.parametrize("kind", [JSONDataset, TextDataset, CSVDataset])
def test_missing_file_names_entry_and_path(tmp_path: Path, kind: Any) -> None:
    dataset = kind(filepath=str(tmp_path / "absent"))
    dataset.entry_name = "evaluation"
    with pytest.raises(DatasetError) as caught:
        dataset.load()
    assert isinstance(caught.value.__cause__, UserError)
    assert "'evaluation' is not stored yet" in str(caught.value.__cause__)
    assert str(tmp_path / "absent") in str(caught.value.__cause__)


def test_importing_the_package_and_figures_loads_neither_pandas_nor_matplotlib() -> None:
    code = (
        "import sys; import lm_tuning.datasets as d; d.FigureDataset, d.JSONDataset, d.StoredFolderDataset,"
        "d.MetricStreamDataset; sys.exit(' '.join({'pandas', 'matplotlib', 'torch', 'mlflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1:] in ([], [""])
