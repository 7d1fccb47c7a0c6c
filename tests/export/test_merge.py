"""An adapter in the weights of its base is the model that it was beside them, whatever its kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from lm_tuning.errors import UserError
from lm_tuning.export.merge import check_mergeable, merge_layers, write_weights
from lm_tuning.models.loading import load_model
from lm_tuning.models.tuned import attach_adapter
from tests.support.tiny import END, VOCABULARY, ids, make_model, make_tokenizer, save_tiny_model
from tests.support.tiny_tasks import LABEL_MAP, make_classifier, make_seq2seq

INPUT = torch.tensor([ids("hello world")])


def with_adapter(model: Any, targets: Any = "all-linear", **options: Any) -> Any:
    """Wrap a model with an adapter of random weights that change what it says."""
    config = LoraConfig(r=2, lora_alpha=4, target_modules=targets, **options)
    wrapped = get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return wrapped


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=INPUT).logits.float()


def export(wrapped: Any, folder: Path, dtype: Any = "float32") -> Any:
    """Merge, write, and read again with transformers alone."""
    write_weights(merge_layers(wrapped, dtype).model, folder, dtype)
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


@pytest.mark.parametrize(
    "options", [{}, {"use_dora": True}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 4}}], ids=str
)
def test_a_merged_model_is_the_model_with_its_adapter(tmp_path: Path, options: dict[str, Any]) -> None:
    base = make_model()
    wrapped = with_adapter(base, **options)
    expected, plain = logits(wrapped), logits(make_model())
    assert not torch.allclose(expected, plain, atol=1e-2)
    again = export(wrapped, tmp_path)
    torch.testing.assert_close(logits(again), expected, atol=1e-5, rtol=1e-4)
    assert again.config.tie_word_embeddings
    assert not (tmp_path / "adapter_config.json").exists()


def test_weights_that_lie_the_other_way_round_are_merged(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(VOCABULARY), n_embd=32, n_layer=2, n_head=4, bos_token_id=END, eos_token_id=END)
    wrapped = with_adapter(GPT2LMHeadModel(config), ["c_attn", "c_proj"], fan_in_fan_out=True)
    expected = logits(wrapped)
    torch.testing.assert_close(logits(export(wrapped, tmp_path)), expected, atol=1e-5, rtol=1e-4)


def test_a_weight_is_rounded_once(tmp_path: Path) -> None:
    model = make_model().to(torch.bfloat16)
    before = model.model.layers[0].self_attn.q_proj.weight.detach().clone()
    wrapped = with_adapter(model, ["q_proj"], use_dora=True)
    layer = wrapped.get_base_model().model.layers[0].self_attn.q_proj
    exact = with_adapter(make_model().to(torch.bfloat16).float(), ["q_proj"], use_dora=True)
    exact_layer = exact.get_base_model().model.layers[0].self_attn.q_proj
    # The same adapter beside the same weights, all in float32.
    exact.load_state_dict({name: value.float() for name, value in wrapped.state_dict().items()})
    exact_layer.merge()
    wanted = exact_layer.get_base_layer().weight.to(torch.bfloat16)
    assert torch.equal(layer.get_base_layer().weight, before)
    merged = merge_layers(wrapped, "bfloat16")
    assert torch.equal(merged.model.model.layers[0].self_attn.q_proj.weight, wanted)
    assert merged.num_layers == 2


def test_a_head_that_is_tied_to_the_embedding_becomes_a_matrix_of_its_own(tmp_path: Path) -> None:
    wrapped = with_adapter(make_model(tied=True), ["lm_head"])
    expected, embedding = logits(wrapped), make_model().model.embed_tokens.weight.clone()
    merged = merge_layers(wrapped, "float32")
    assert merged.is_untied
    write_weights(merged.model, tmp_path, "float32")
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
    torch.testing.assert_close(logits(again.eval()), expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(again.model.embed_tokens.weight, embedding)


def test_an_embedding_that_was_trained_beside_its_head_stays_tied(tmp_path: Path) -> None:
    wrapped = with_adapter(
        make_model(tied=True), ["q_proj"], modules_to_save=["embed_tokens", "lm_head"], ensure_weight_tying=True
    )
    with torch.no_grad():
        wrapped.get_input_embeddings().weight.add_(0.1 * torch.randn(wrapped.get_input_embeddings().weight.shape))
    expected = logits(wrapped)
    merged = merge_layers(wrapped, "float32")
    assert not merged.is_untied
    write_weights(merged.model, tmp_path, "float32")
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval()), expected, atol=1e-5, rtol=1e-4
    )


def test_a_vocabulary_that_grew_is_that_of_the_merged_model(tmp_path: Path) -> None:
    """CASES H36."""
    base = save_tiny_model(tmp_path / "base")
    tokenizer = make_tokenizer()
    assert tokenizer.add_tokens(["<a>", "<b>", "<c>", "<d>"]) == 4
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(len(tokenizer))
    wrapped = with_adapter(model, ["q_proj"], task_type="CAUSAL_LM")
    with torch.no_grad():
        wrapped.get_input_embeddings().weight[-4:].normal_(std=0.5)
    wrapped.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    tokenizer.save_pretrained(tmp_path / "adapter")
    expected = logits(wrapped)
    again = export(attach_adapter(load_model(str(base)), tmp_path / "adapter"), tmp_path / "export")
    assert again.config.vocab_size == len(tokenizer) == len(VOCABULARY) + 4
    torch.testing.assert_close(logits(again), expected, atol=1e-5, rtol=1e-4)


def test_the_head_of_a_classifier_comes_along(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    model = make_classifier()
    model.config.id2label = {index: name for name, index in LABEL_MAP.items()}
    wrapped = with_adapter(model, ["q_proj"], task_type="SEQ_CLS")
    with torch.no_grad():
        wrapped.get_base_model().score.modules_to_save["default"].weight.add_(1.0)
    expected = logits(wrapped)
    write_weights(merge_layers(wrapped, "float32").model, tmp_path, "float32")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(again), expected, atol=1e-5, rtol=1e-4)
    assert again.config.id2label[1] == "cash"


class TestRefusals:
    def test_numbers_beyond_float16_are_named(self, tmp_path: Path) -> None:
        model = make_model()
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[0, 0] = 1e6
        with pytest.raises(UserError, match=r"float16 cannot hold model\.layers\.1\.mlp\.up_proj\.weight"):
            write_weights(model, tmp_path, "float16")

    @pytest.mark.parametrize(
        ("options", "why"),
        [({"lora_bias": True}, "it has biases"), ({"trainable_token_indices": [3]}, "it trains single tokens")],
    )
    def test_parts_that_have_no_place_in_a_weight(self, options: dict[str, Any], why: str) -> None:
        with pytest.raises(UserError, match=f"{why}.*Set export.format = adapter"):
            check_mergeable(LoraConfig(r=2, target_modules=["q_proj"], **options))

    def test_other_kinds_of_adapters(self) -> None:
        from peft import IA3Config

        with pytest.raises(UserError, match="of the kind IA3, and only LORA is merged"):
            check_mergeable(IA3Config(target_modules=["q_proj"]))

    def test_weights_that_encoder_decoder_and_head_share(self) -> None:
        wrapped = with_adapter(make_seq2seq(), ["lm_head"], task_type="SEQ_2_SEQ_LM")
        with pytest.raises(UserError, match="whose weights encoder, decoder and head share"):
            merge_layers(wrapped, "float32")
