"""GGUF files, read back by transformers, and what is refused before one is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_tuning.errors import UserError
from lm_tuning.export import gguf_export, gguf_vocabulary
from lm_tuning.export.gguf_export import convert_to_gguf
from lm_tuning.export.gguf_vocabulary import find_tokenizer_problems, read_vocabulary
from lm_tuning.export.gguf_writing import find_architecture_problems
from lm_tuning.parameters.export import ExportParameters, GgufParameters
from tests.support.tiny import make_tokenizer
from tests.support.tiny_gguf import END, NUM_UNUSED, SPECIALS, make_byte_tokenizer, make_family, save_family

IDS = [[3, 40, 50, 60, 70, 80, 90, 2, 4, 100, 110, 120]]


def splits() -> dict[str, Any]:
    """The pre-tokenizers of four published models, as their tokenizer.json has them."""
    from tokenizers import Regex, pre_tokenizers

    level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    chat = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    )

    def split(digits: str) -> Any:
        expression = pre_tokenizers.Split(Regex(chat.replace("DIGITS", digits)), "isolated", invert=False)
        return pre_tokenizers.Sequence([expression, level])

    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True)
    return {
        "gpt-2": plain,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain]),
        "qwen2": split(""),
        "llama-bpe": split("{1,3}"),
        # One more character class than qwen2, or spaces added: a known name would be wrong.
        "marks": pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(
                    Regex(chat.replace("DIGITS", "").replace(r"\p{L}+", r"[\p{L}\p{M}]+")), "isolated"
                ),
                level,
            ]
        ),
        "prefix": pre_tokenizers.ByteLevel(add_prefix_space=True),
    }


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "qwen2", "llama-bpe", "marks", "prefix"])
def test_the_way_to_split_is_found_by_what_it_does(name: str) -> None:
    found = gguf_vocabulary._pre_tokenizer_of(make_byte_tokenizer(splits()[name]))
    assert found == (name if name not in ("marks", "prefix") else None)


def read_back(folder: Path, path: Path) -> Any:
    """Let transformers read the file; its reader of these files is not the one of llama.cpp."""
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tied": False}),
        ("qwen2", {}),
        ("qwen3", {"tied": False}),
    ],
    ids=["llama", "llama untied", "qwen2", "qwen3"],
)
def test_a_float32_file_is_the_model(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    folder = save_family(tmp_path / "merged", family, **changes)
    (tmp_path / "gguf").mkdir()
    target, told = tmp_path / "gguf/model.gguf", []
    vocabulary = convert_to_gguf(
        folder,
        target,
        ExportParameters(),
        tokenizer=make_byte_tokenizer(),
        dtype="float32",
        name="tiny",
        on_tensor=lambda *each: told.append(each),
    )
    assert told[-1][0] == told[-1][1] >= 20
    model, again = AutoModelForCausalLM.from_pretrained(folder).eval(), read_back(tmp_path / "gguf", target)
    with torch.no_grad():
        wanted, found = model(torch.tensor(IDS)).logits, again(torch.tensor(IDS)).logits
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert again.config.model_type == family
    assert again.config.tie_word_embeddings == model.config.tie_word_embeddings
    assert vocabulary.tokens[: len(SPECIALS)] == SPECIALS
    assert vocabulary.types[: len(SPECIALS)] == [3] * len(SPECIALS)
    assert vocabulary.types[-NUM_UNUSED:] == [5] * NUM_UNUSED
    assert vocabulary.special_ids["eos"] == END


def test_eight_bits_are_near_and_half_of_sixteen(tmp_path: Path) -> None:
    folder, sizes = save_family(tmp_path / "merged"), {}
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        wanted = model(torch.tensor(IDS)).logits
    for kind in ("none", "q8_0", "q4_0"):
        (tmp_path / kind).mkdir()
        export = ExportParameters(format="gguf", gguf=GgufParameters(quantization=kind))
        convert_to_gguf(
            folder,
            tmp_path / kind / "model.gguf",
            export,
            tokenizer=make_byte_tokenizer(),
            dtype="float16",
            name="tiny",
            on_tensor=lambda *_: None,
        )
        sizes[kind] = (tmp_path / kind / "model.gguf").stat().st_size
        with torch.no_grad():
            found = read_back(tmp_path / kind, tmp_path / kind / "model.gguf")(torch.tensor(IDS)).logits
        distance = float((found - wanted).abs().max() / wanted.std())
        least, most = {"none": (0.0, 0.01), "q8_0": (1e-4, 0.2), "q4_0": (0.01, 3.0)}[kind]
        assert least <= distance <= most, (kind, distance)
    assert sizes["q4_0"] < sizes["q8_0"] < sizes["none"]


def test_the_tokens_of_the_file_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    folder = save_family(tmp_path / "merged")
    target = tmp_path / "model.gguf"
    convert_to_gguf(
        folder,
        target,
        ExportParameters(),
        tokenizer=make_byte_tokenizer(),
        dtype="float32",
        name="tiny",
        on_tensor=lambda *_: None,
    )
    again, tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=target.name), make_byte_tokenizer()
    text = "what is 12? <|end|>it is\n 7 cats  안녕"
    assert again(text, add_special_tokens=False).input_ids == tokenizer(text).input_ids
    assert again.chat_template == tokenizer.chat_template


class TestRefused:
    def test_another_family(self) -> None:
        from transformers import GPT2Config

        assert "of the family gpt2" in find_architecture_problems(GPT2Config(), "none")[0]

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "scales its rotary"),
            ({"hidden_act": "gelu"}, "activation gelu"),
            ({"hidden_size": 72, "num_attention_heads": 4, "intermediate_size": 100}, "hidden_size = 72"),
        ],
    )
    def test_what_llama_cpp_computes_otherwise(self, changes: dict[str, Any], words: str) -> None:
        assert any(words in each for each in find_architecture_problems(make_family("llama", **changes).config, "q8_0"))
        assert not find_architecture_problems(make_family("llama").config, "q8_0")

    def test_a_sliding_window(self) -> None:
        from transformers import Qwen2Config

        (problem,) = find_architecture_problems(Qwen2Config(use_sliding_window=True), "none")
        assert "sliding window" in problem

    def test_a_tokenizer_without_bytes(self) -> None:
        assert find_tokenizer_problems(make_tokenizer()) == [
            "is no byte-level BPE, which is the only kind whose segments are written here"
        ]

    def test_an_unknown_split(self) -> None:
        (problem,) = find_tokenizer_problems(make_byte_tokenizer(splits()["marks"]))
        assert "splits a text in a way that has no name" in problem

    def test_added_tokens_that_take_spaces(self) -> None:
        from tokenizers import AddedToken

        tokenizer = make_byte_tokenizer()
        assert find_tokenizer_problems(tokenizer) == []
        tokenizer.add_tokens([AddedToken("<tool>", rstrip=True)])
        (problem,) = find_tokenizer_problems(tokenizer)
        assert "<tool>" in problem

    def test_a_classifier(self, tmp_path: Path) -> None:
        (problem,) = gguf_export.find_gguf_problems(tmp_path, "sequence_classification", None, GgufParameters())
        assert "is for language models" in problem

    def test_nothing_to_read_it_with(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gguf_export, "is_checkable", lambda: False)
        folder = save_family(tmp_path / "tuned")
        config = make_family("llama").config
        (problem,) = gguf_export.find_gguf_problems(folder, "causal_lm", config, GgufParameters())
        assert "llama-cpp-python is not installed" in problem
        assert "export.gguf.publish_unchecked = true" in problem
        assert not gguf_export.find_gguf_problems(folder, "causal_lm", config, GgufParameters(publish_unchecked=True))


def test_an_added_token_that_is_shown_has_a_type_of_its_own() -> None:
    from tokenizers import AddedToken

    tokenizer = make_byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    vocabulary = read_vocabulary(tokenizer, num_embeddings=len(tokenizer), stop_ids=[END, 7])
    assert (vocabulary.tokens[-1], vocabulary.types[-1]) == ("<think>", 4)
    assert vocabulary.stop_ids == [7]


def test_a_weight_without_a_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_family(tmp_path / "merged")
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.layers.0.extra.weight": torch.zeros(2)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"no name in a GGUF of llama: model\.layers\.0\.extra\.weight"):
        convert_to_gguf(
            folder,
            tmp_path / "m.gguf",
            ExportParameters(),
            tokenizer=make_byte_tokenizer(),
            dtype="float32",
            name="x",
            on_tensor=lambda *_: None,
        )
