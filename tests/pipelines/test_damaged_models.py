"""Model folders that hold nonsense or something unsafe, in a whole ``kedro run``: exit code 2, and nothing was made."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.pipelines.test_whole_run import Project
from tests.support.shell import Shell


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    project = Project(tmp_path_factory.mktemp("damaged") / "project")
    with Shell(project.folder.parent, project.environment) as project.shell:
        yield project


class Planted:
    """A pickle that leaves a file when it is read."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return (Path.touch, (self.trace,))


def set_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def hide_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "weights.bin").write_bytes(pickle.dumps(Planted(folder / "was_run")))
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "weights.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def rename_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(Planted(folder / "was_run")))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "index": (hide_a_pickle, "model.safetensors.index.json names 'weights.bin'"),
    "pickle": (rename_a_pickle, "model.safetensors is damaged or no safetensors file"),
    "layers": (lambda folder: set_config(folder, num_hidden_layers=10**7), "num_hidden_layers = 10000000"),
    "words": (lambda folder: set_config(folder, hidden_size="big"), 'hidden_size = "big"'),
    "padding": (lambda folder: set_config(folder, pad_token_id=10**6), "pad_token_id = 1000000"),
    "type": (lambda folder: set_config(folder, hidden_act=7), "hidden_act"),
    "config": (lambda folder: (folder / "config.json").write_text("[]"), "config.json holds no JSON object but a list"),
    "tokenizer": (lambda folder: (folder / "tokenizer.json").write_text('{"model": {}}'), "tokenizer"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_model_folder_ends_the_run_before_anything_is_made(project: Project, name: str) -> None:
    damage, words = DAMAGES[name]
    folder = project.folder / "models" / name
    shutil.copytree(project.folder / "models/tiny", folder)
    damage(folder)
    assert project.shell is not None
    arguments = project.arguments("--pipelines=split,train", model__name_or_path=f"models/{name}")
    done = project.shell.kedro(project.folder, *arguments)
    assert done.code == 2, done.stdout + done.stderr
    # The first run says that MLflow makes its database.
    told = [line for line in done.stderr.splitlines() if not line.startswith("(traceback") and " INFO " not in line]
    assert len(told) == 1
    assert words in told[0]
    assert f"models/{name}" in told[0]
    assert "Traceback" not in done.stdout + done.stderr
    assert not (folder / "was_run").exists()
    data = project.folder / "data"
    assert not (data / "05_model_input").exists()
    assert {path.name for path in data.glob("06_models/**/*") if path.is_file()} <= {"base_model.json"}
