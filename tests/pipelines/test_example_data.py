"""The example is made once, when it is asked for; other files are only looked at."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import pytest

from lm_tuning.data import example
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import DataParameters
from lm_tuning.pipelines.example_data.nodes import prepare_raw_examples

LIBRARY_MODULE = '''
def count_up(number):
    """Return the next number."""
    following = number + 1  # long enough for the example to take it
    return following
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of one function, and a project to run in."""
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / "json.py").write_text(LIBRARY_MODULE)
    monkeypatch.setattr(example.sysconfig, "get_paths", lambda: {"stdlib": str(folder)})
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    return folder


def test_the_example_is_made_and_then_reused(library, caplog):
    caplog.set_level(logging.INFO)
    first = prepare_raw_examples(DataParameters())
    path = Path(example.EXAMPLE_PATH)
    content = path.read_bytes()
    assert first["train"] == [
        {
            "path": example.EXAMPLE_PATH,
            "format": "jsonl",
            "compression": None,
            "num_bytes": len(content),
            "digest": hashlib.sha256(content).hexdigest(),
            "source": 0,
        }
    ]
    assert (first["validation"], first["test"], first["is_example"]) == (None, None, True)
    assert first["sources"] == [{"path": example.EXAMPLE_PATH, "weight": 1.0, "num_files": 1}]
    assert json.loads(json.dumps(first)) == first
    assert "Made the example: 1 function of" in caplog.text
    assert f"Rows of train: {path} (0.0 MB, jsonl)" in caplog.text
    (library / "json.py").unlink()
    caplog.clear()
    assert prepare_raw_examples(DataParameters()) == first
    assert f"Example reused: {path}" in caplog.text


def test_the_parameters_as_shipped_point_at_the_example():
    assert DataParameters().path == example.EXAMPLE_PATH


def test_nothing_is_made_for_files_of_ones_own(library, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    own, held_out = tmp_path / "own.csv", tmp_path / "held_out.jsonl"
    own.write_text("text\na\n")
    held_out.write_text('{"text": "b"}\n')
    files = prepare_raw_examples(
        DataParameters(path=[{"path": str(own), "weight": 0.5}, str(held_out)], validation_path=str(held_out))
    )
    assert [file["format"] for file in files["train"]] == ["csv", "jsonl"]
    assert [source["weight"] for source in files["sources"]] == [0.5, 1.0]
    assert [file["source"] for file in files["validation"]] == [-1]
    assert files["is_example"] is False
    assert f"Rows of train: 2 files, first {own} (0.0 MB, csv, jsonl)" in caplog.text
    assert not Path(example.EXAMPLE_PATH).exists()


def test_the_example_among_other_sources_is_made_and_read_as_any_file(library, tmp_path):
    own = tmp_path / "own.csv"
    own.write_text("text\na\n")
    files = prepare_raw_examples(DataParameters(path=[str(own), "data\\01_raw\\example\\functions.jsonl"]))
    assert [file["path"] for file in files["train"]] == [str(own), example.EXAMPLE_PATH]
    assert files["is_example"] is False


def test_the_example_alone_is_the_example_however_it_is_written(library):
    for path in (f"./{example.EXAMPLE_PATH}", [example.EXAMPLE_PATH], {"path": example.EXAMPLE_PATH}):
        assert prepare_raw_examples(DataParameters(path=path))["is_example"] is True


def test_a_missing_file_is_named_with_its_parameter(library):
    with pytest.raises(UserError, match=r"data.path names the file 'data/01_raw/mine.jsonl', which does not exist"):
        prepare_raw_examples(DataParameters(path="data\\01_raw\\mine.jsonl"))
