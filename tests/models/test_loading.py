"""Models and tokenizers load ready to use, and what is wrong with a folder or a name is said in words."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.errors import UserError
from lm_tuning.models.folders import check_weight_files, is_local
from lm_tuning.models.hub import hub_answers
from lm_tuning.models.loading import load_model, load_tokenizer
from tests.support.tiny import END, PAD, make_model, make_tokenizer, save_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model", pad_token="<|end|>")


def load(folder: Path, **options: Any) -> Any:
    return load_model(str(folder), **options)


def test_the_tokenizer_pads_on_the_right_with_a_token_unlike_its_end(folder):
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.padding_side == "right"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD, END)


def test_the_pad_id_reaches_model_and_generation_config(folder):
    model = load(folder)
    assert model.config.pad_token_id == PAD
    assert model.generation_config.pad_token_id == PAD
    assert not model.training


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_come_in_the_asked_type_with_equal_values(folder, dtype):
    import torch

    model = load(folder, dtype=dtype)
    assert model.dtype == getattr(torch, dtype)
    expected = make_model().lm_head.weight.to(getattr(torch, dtype))
    assert torch.equal(model.lm_head.weight, expected)


@pytest.mark.parametrize(("attention", "used"), [("auto", "sdpa"), ("eager", "eager"), ("sdpa", "sdpa")])
def test_the_attention_is_the_asked_one(folder, attention, used):
    assert load(folder, attention=attention).config._attn_implementation == used


def test_an_attention_that_is_not_installed_is_named(folder):
    with pytest.raises(UserError, match="needs a package that is missing: FlashAttention2"):
        load(folder, attention="flash_attention_2")


def test_a_missing_folder_is_named():
    with pytest.raises(UserError, match="folder data/06_models/base/nothing does not exist"):
        load_tokenizer("data/06_models/base/nothing")
    with pytest.raises(UserError, match="does not exist"):
        load_model("./nothing")


def test_a_folder_without_weights_names_the_files_that_were_looked_for(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no weights: looked for model\.safetensors and model\.safetensors\.index"):
        load(folder)


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"weights in pytorch_model\.bin only.*can run code"):
        load(folder)


def test_an_adapter_is_no_model(folder):
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="holds an adapter"):
        load(folder)


def test_a_missing_shard_is_named(folder):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    with pytest.raises(UserError, match=r"lacks 1 of 2 weight files, first model-2\.safetensors"):
        check_weight_files(folder)
    shutil.copy(folder / "model-1.safetensors", folder / "model-2.safetensors")
    assert [path.name for path in check_weight_files(folder)] == ["model-1.safetensors", "model-2.safetensors"]


def test_cut_off_weights_are_called_damaged(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="damaged"):
        load(folder)


def test_weights_that_would_be_made_up_are_refused(folder):
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"1 tensor missing.*model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_a_folder_without_tokenizer_names_the_files_that_were_looked_for(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer: looked for tokenizer\.json"):
        load_tokenizer(str(folder))


def test_an_unknown_architecture_is_said(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nonsense"}))
    with pytest.raises(UserError, match=r"cannot be read.*nonsense"):
        load(folder)


def test_a_pad_token_that_the_model_does_not_embed_is_refused(folder):
    with pytest.raises(UserError, match=r"pad token .* has id 5000, but the model embeds ids below"):
        load(folder, pad_token_id=5000)


def test_code_of_a_stranger_does_not_run(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(
            {**config, "model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
        )
    )
    (folder / "own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UserError, match=r"comes with its own code.*trust_remote_code: true"):
        load(folder, pad_token_id=0)


@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("gpt2", False),
        ("owner/name", False),
        ("./owner/name", True),
        ("/models/x", True),
        ("~/models", True),
        ("data/06_models/base/x", True),
    ],
)
def test_hub_names_and_paths_are_told_apart(name, local):
    assert is_local(name) is local


def test_a_hub_that_is_out_of_reach_is_asked_once_and_said(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    asked = []
    connect = socket.socket.connect

    def count(self: socket.socket, address: Any) -> None:
        asked.append(address)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", count)
    for function in (load_tokenizer, load_model):
        with pytest.raises(
            UserError, match=r"owner/name is not in the local cache and .* cannot be reached.*local folder"
        ):
            function("owner/name")
    assert 0 < len(asked) <= 4, "libraries would try each file again and again, for minutes"


def test_offline_mode_asks_nobody(monkeypatch):
    import huggingface_hub
    from huggingface_hub import constants

    def fail() -> None:
        raise AssertionError("asked the hub")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "get_session", fail)
    assert not hub_answers()


def test_a_saved_tokenizer_does_not_remember_how_it_was_loaded(folder, tmp_path):
    load_tokenizer(str(folder)).save_pretrained(tmp_path / "again")
    assert "local_files_only" not in (tmp_path / "again" / "tokenizer_config.json").read_text()
    assert make_tokenizer().get_vocab() == load_tokenizer(str(tmp_path / "again")).get_vocab()
