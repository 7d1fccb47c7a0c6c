"""Model folders that hold nonsense or something unsafe are refused by name, before a weight is read."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.errors import UserError
from lm_tuning.models.base_model import describe_base_model
from lm_tuning.models.loading import load_model, load_tokenizer
from lm_tuning.training.setup.adapters import check_targets
from tests.support.tiny import make_model, save_tiny_model

INDEX = "model.safetensors.index.json"


class Planted:
    """A pickle that leaves a file when it is read."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return (Path.touch, (self.trace,))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model")


def problems_of(folder: Path) -> list[str]:
    with pytest.raises(UserError) as caught:
        describe_base_model(str(folder))
    with pytest.raises(UserError):
        load_model(str(folder))
    return caught.value.problems


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "../weights.bin", "/weights.safetensors", "a/b.safetensors", "x.pt"]
)
def test_an_index_leads_to_safetensors_in_the_folder_only(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    trace = tmp_path / "was_run"
    for index in (folder / "pytorch_model.bin", tmp_path / "weights.bin", folder / "x.pt"):
        index.write_bytes(pickle.dumps(Planted(trace)))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": name}}))
    (problem,) = problems_of(folder)
    assert f"{INDEX} names {name!r}" in problem
    assert "only safetensors files in the same folder are read" in problem
    assert not trace.exists()


def test_a_pickle_under_the_name_of_safetensors_is_not_run(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "was_run"
    (folder / "model.safetensors").write_bytes(pickle.dumps(Planted(trace)))
    (problem,) = problems_of(folder)
    assert "model.safetensors is damaged or no safetensors file" in problem
    assert not trace.exists()


@pytest.mark.parametrize(
    "content", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "[]", "no json", '{"weight_map": 3}']
)
def test_an_index_without_a_map_is_named(folder: Path, content: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(content)
    (problem,) = problems_of(folder)
    assert INDEX in problem


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"num_attention_heads": 0}, ["num_attention_heads = 0"]),
        ({"hidden_size": "big"}, ['hidden_size = "big"']),
        ({"hidden_size": []}, ["hidden_size = []"]),
        ({"num_hidden_layers": -3}, ["num_hidden_layers = -3"]),
        ({"num_hidden_layers": 10**7}, ["num_hidden_layers = 10000000"]),
        ({"vocab_size": 0}, ["vocab_size = 0"]),
        ({"vocab_size": 10**12}, ["vocab_size = 1000000000000"]),
        ({"vocab_size": 10**8}, ["describes a matrix of 3,200,000,000 numbers"]),
        ({"intermediate_size": 5_000_000}, ["describes a matrix of 160,000,000 numbers"]),
        ({"attention_dropout": 5}, ["attention_dropout = 5, and it takes a number from 0 to 1"]),
        ({"vocab_size": True}, ["vocab_size = true"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads = 4 is no multiple of num_key_value_heads = 3"]),
        ({"hidden_size": 33, "head_dim": None}, ["hidden_size = 33 cannot be divided evenly"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps = nan"]),
        ({"architectures": "Llama"}, ['architectures = "Llama"']),
        ({"num_attention_heads": 0, "vocab_size": -1}, ["num_attention_heads = 0", "vocab_size = -1"]),
    ],
)
def test_sizes_that_make_no_model_are_named_with_their_key(
    folder: Path, values: dict[str, Any], named: list[str]
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    problems = problems_of(folder)
    assert len(problems) == len(named)
    for problem, words in zip(problems, named, strict=True):
        assert words in problem
        assert "config.json" in problem


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id"])
@pytest.mark.parametrize("value", [-2, 10**9, "2", True, 1.5, [], [[1]], {"id": 1}, ["x"] * 200])
def test_what_is_no_token_id_is_named(folder: Path, name: str, key: str, value: object) -> None:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    (problem,) = problems_of(folder)
    assert f"{path}: {key} = {json.dumps(value)[:200]}" in problem
    assert "and it takes an integer from 0 to " in problem
    assert len(problem) < 1000


def test_padding_beyond_the_embedding_is_named(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token_id": 104}))
    (problem,) = problems_of(folder)
    assert f"{path}: pad_token_id = 104, and it takes an integer from 0 to 103, -1 or null." in problem


@pytest.mark.parametrize("factor", [float("inf"), float("nan"), "8", 0, None, True])
def test_a_rotary_embedding_is_stretched_by_a_number(folder: Path, factor: object) -> None:
    path = folder / "config.json"
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": factor}
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_parameters": rope}))
    (problem,) = problems_of(folder)
    assert f"{path}: rope_parameters.factor = {json.dumps(factor)}" in problem


@pytest.mark.parametrize(
    "values",
    [
        {"eos_token_id": [1, 103]},
        {
            "bos_token_id": 50256,
            "eos_token_id": 50256,
        },  # of the architecture, where a tokenizer of one's own is smaller
        {"pad_token_id": -1},
        {"pad_token_id": None},
        {"pad_token_id": 103},
    ],
)
def test_token_ids_of_published_models_pass(folder: Path, values: dict[str, Any]) -> None:
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    describe_base_model(str(folder))
    load_model(str(folder))


def test_a_type_that_transformers_refuses_is_named_with_file_key_and_value(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_act": 7}))
    with pytest.raises(UserError) as caught:
        load_model(str(folder))
    (problem,) = caught.value.problems
    for words in ("config.json", "'hidden_act'", "expected str", "7"):
        assert words in problem


@pytest.mark.parametrize("content", ["[]", "3", '"text"', "{", ""])
def test_a_config_that_is_no_object_is_named(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    (problem,) = problems_of(folder)
    assert "config.json" in problem


@pytest.mark.parametrize("content", ["{", "", "[]", '{"model": {}}'])
def test_a_damaged_tokenizer_is_a_problem_of_the_folder(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(UserError) as caught:
        load_tokenizer(str(folder))
    (problem,) = caught.value.problems
    assert str(folder) in problem


def test_a_header_that_tells_of_more_than_there_is_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    (problem,) = problems_of(folder)
    assert "model.safetensors is damaged" in problem


def test_an_adapter_on_a_tied_head_is_refused_with_the_reason() -> None:
    check_targets(make_model(tied=False), ["q_proj", "lm_head"])
    with pytest.raises(UserError) as caught:
        check_targets(make_model(tied=True), ["q_proj", "lm_head"])
    (problem,) = caught.value.problems
    assert "'lm_head' shares its weights with the embedding" in problem
    assert "tie_word_embeddings" in problem
