"""GGUF exports from the command line, read by llama.cpp; they need llama-cpp-python."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipelines.test_export import Project
from tests.support.shell import Shell
from tests.support.tiny_gguf import save_family

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llama_cpp") is None, reason='needs llama-cpp-python: pip install -e ".[gguf-check]"'
    ),
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    folder = tmp_path_factory.mktemp("gguf")
    project = Project(folder / "project")
    for path in (project.folder / "models/tiny").iterdir():
        path.unlink()
    save_family(project.folder / "models/tiny")
    project.start("--pipelines=split,train")
    with Shell(folder, project.environment) as project.shell:
        yield project


def record_of(project: Project) -> dict:
    return json.loads((project.exported / "export.json").read_text())


def test_a_float32_file_gives_the_model_s_logits(project: Project) -> None:
    printed = project.export(export__format="gguf")
    assert "A process that knows llama.cpp alone compared" in printed
    record = record_of(project)
    (bound,) = record["parity"]["bounds"]
    assert bound["name"] == "max_logit_difference" and 0 < bound["value"] <= bound["bound"] == 1e-4
    assert record["parity"]["num_equal_answers"] == record["parity"]["num_answers"] == 4
    assert record["gguf"]["is_checked"] and record["gguf"]["pre_tokenizer"] == "gpt-2"
    assert record["gguf"]["num_texts"] == record["parity"]["num_rows"]
    names = set(project.digests())
    assert {"model.gguf", "README.md", "export.json", "tokenizer.json"} <= names
    assert not {"model.safetensors", "config.json"} & names
    assert "from llama_cpp import Llama" in (project.exported / "README.md").read_text()


def test_the_published_file_answers(project: Project) -> None:
    import llama_cpp

    project.export(export__format="gguf", export__dtype="float16")
    assert record_of(project)["parity"]["dtype"] == "float16"
    model = llama_cpp.Llama(str(project.exported / "model.gguf"), n_ctx=128, verbose=False)
    reply = model.create_chat_completion([{"role": "user", "content": "cat 3?"}], max_tokens=4, temperature=0.0)
    assert reply["usage"]["completion_tokens"] >= 1


def test_eight_bits_are_bounded_by_the_loss(project: Project) -> None:
    printed = project.export(export__format="gguf", export__gguf__quantization="q8_0")
    record = record_of(project)
    (bound,) = record["parity"]["bounds"]
    assert bound["name"] == "quantized_loss_change_fraction" and bound["value"] <= 0.02
    low, high = record["gguf"]["loss_change_interval"]
    assert low <= high and "95 % over rows drawn again" in printed
    before = project.digests()
    printed = project.export(
        exit_code=2,
        export__format="gguf",
        export__gguf__quantization="q4_0",
        export__gguf__max_loss_change_fraction=1e-9,
    )
    assert "quantized_loss_change_fraction is" in printed and "export.gguf.max_loss_change_fraction = 1e-09" in printed
    assert "Set export.gguf.quantization to one of more bits" in printed
    assert project.digests() == before


@pytest.mark.parametrize(
    ("file", "sound", "planted", "words"),
    [
        ("gguf_writing.py", "halves.transpose(1, 2)", "halves", "max_logit_difference is"),
        (
            "gguf_vocabulary.py",
            'for merge in facts["model"]["merges"]]',
            "for merge in []]",
            "cannot be used by llama.cpp alone",
        ),
        ("gguf_vocabulary.py", "_TYPE_CONTROL if token", "_TYPE_NORMAL if token", "other tokens of"),
    ],
    ids=["rows not interleaved", "no merges", "control tokens as text"],
)
def test_a_planted_fault_publishes_nothing(project: Project, file: str, sound: str, planted: str, words: str) -> None:
    project.export()
    before, source = project.digests(), project.folder / "src/lm_tuning/export" / file
    text = source.read_text()
    assert sound in text
    source.write_text(text.replace(sound, planted))
    try:
        printed = project.start("--pipelines=export", exit_code=2, export__format="gguf")
    finally:
        source.write_text(text)
    assert words in printed and "not published" in printed
    assert "Traceback" not in printed
    assert project.digests() == before


def test_what_contradicts_is_refused_before_any_work(project: Project) -> None:
    printed = project.export(
        exit_code=2,
        export__format="gguf",
        export__gguf__quantization="q8_0",
        export__dtype="float16",
        export__register_as="tiny",
    )
    assert "both say how weights are written" in printed and "MLflow cannot answer with" in printed
    printed = project.export(exit_code=2, export__gguf__quantization="q8_0")
    assert "is for a GGUF, and export.format = merged" in printed


def test_without_a_reader_it_is_refused_or_said(project: Project, tmp_path: Path) -> None:
    paths = os.pathsep.join(
        path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if not (Path(path) / "llama_cpp").is_dir()
    )
    if paths == os.environ.get("PYTHONPATH", ""):
        pytest.skip("llama-cpp-python is installed, and cannot be left out")
    kept = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = paths
    try:
        printed = project.start("--pipelines=export", exit_code=2, export__format="gguf")
        assert "llama-cpp-python is not installed" in printed
        project.start("--pipelines=export", export__format="gguf", export__gguf__publish_unchecked="true")
    finally:
        os.environ["PYTHONPATH"] = str(kept)
    record = record_of(project)
    assert not record["gguf"]["is_checked"]
    assert "No llama.cpp has read this file" in (project.exported / "README.md").read_text()
