"""A tuned model loads as what was trained, whichever method trained it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_tuning.errors import UserError
from lm_tuning.models.loading import load_model
from lm_tuning.models.tuned import attach_adapter, load_tuned, merge_adapter, read_tuning
from tests.support.stored import save_tuned
from tests.support.tiny import PAD, ids, make_model, save_tiny_model


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "base")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids("hello")])).logits


def test_an_adapter_changes_the_base_and_can_be_switched_off(base, tmp_path):
    folder = save_tuned(tmp_path / "tuned", base, "lora", tokens_key="k")
    model = load_tuned(folder)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    plain = logits(load_model(str(base)))
    assert not torch.allclose(logits(model), plain, atol=1e-3)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), plain)
    assert not model.training
    assert model.config.pad_token_id == PAD


def test_full_weights_are_the_model(base, tmp_path):
    folder = save_tuned(tmp_path / "tuned", base, "full", tokens_key="k")
    tuned = logits(load_tuned(folder))
    torch.testing.assert_close(tuned, logits(load_model(str(folder))))
    assert not torch.allclose(tuned, logits(load_model(str(base))), atol=1e-3)


def test_an_adapter_goes_onto_a_base_that_is_loaded_already(base, tmp_path):
    folder = save_tuned(tmp_path / "tuned", base, "lora", tokens_key="k")
    loaded = load_model(str(base))
    torch.testing.assert_close(logits(load_tuned(folder, base=loaded)), logits(load_tuned(folder)))


def test_the_facts_of_a_tuning_are_read(base, tmp_path):
    folder = save_tuned(tmp_path / "tuned", base, "lora", tokens_key="k")
    facts = read_tuning(folder)
    assert (facts["method"], facts["tokens_key"], facts["finished_step"]) == ("lora", "k", 3)


def test_other_folders_are_no_tuned_models(base, tmp_path):
    with pytest.raises(UserError, match=r"not a tuned model: it has no readable tuning\.json"):
        load_tuned(base)
    (base / "tuning.json").write_text(json.dumps({"method": "magic"}))
    with pytest.raises(UserError, match="'magic'; this version knows lora, qlora, full"):
        load_tuned(base)


def test_a_damaged_or_missing_adapter_is_named(base, tmp_path):
    folder = save_tuned(tmp_path / "tuned", base, "lora", tokens_key="k")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    with pytest.raises(UserError, match=r"adapter in .* is damaged"):
        load_tuned(folder)
    weights.unlink()
    with pytest.raises(UserError, match=r"adapter_model\.safetensors missing"):
        load_tuned(folder)


def test_an_adapter_of_another_model_is_refused(base, tmp_path):
    from tests.support.tiny import make_model

    folder = save_tuned(tmp_path / "tuned", base, "lora", tokens_key="k")
    with pytest.raises(UserError, match="does not fit its base model"):
        attach_adapter(make_model(hidden_size=64), folder)


def test_facts_of_an_earlier_version_mean_a_language_model(base, tmp_path):
    facts = read_tuning(save_tuned(tmp_path / "tuned", base, "lora", tokens_key="k"))
    assert (facts["task"], facts["quantization"]) == ("causal_lm", None)


def test_a_full_classifier_loads_with_the_classes_it_was_trained_for(tmp_path):
    from tests.support.tiny import make_tokenizer
    from tests.support.tiny_tasks import LABEL_MAP, make_classifier

    model = make_classifier()
    model.config.id2label, model.config.label2id = {index: name for name, index in LABEL_MAP.items()}, LABEL_MAP
    folder = tmp_path / "tuned"
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "tuning.json").write_text(json.dumps({"method": "full", "task": "sequence_classification"}))
    again = load_tuned(folder)
    assert again.config.label2id == LABEL_MAP and not again.lm_tuning_fresh_head
    torch.testing.assert_close(logits(again), logits(model.eval()))


class TestAddedTokens:
    """An adapter from elsewhere, trained after its vocabulary was made larger."""

    def train_elsewhere(self, base: Path, folder: Path, *, saves: bool | str) -> torch.Tensor:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        from tests.support.tiny import make_tokenizer

        tokenizer = make_tokenizer()
        assert tokenizer.add_tokens(["<a>", "<b>", "<c>", "<d>"]) == 4
        model = AutoModelForCausalLM.from_pretrained(base)
        model.resize_token_embeddings(len(tokenizer))
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.3)
            model.get_input_embeddings().weight[-4:].normal_(std=0.5)
        model.save_pretrained(folder, save_embedding_layers=saves)
        tokenizer.save_pretrained(folder)
        return logits(model.eval())

    def test_it_brings_its_embedding_along(self, base, tmp_path, caplog):
        trained = self.train_elsewhere(base, tmp_path / "adapter", saves=True)
        loaded = load_model(str(base))
        rows = loaded.get_input_embeddings().weight.shape[0]
        with caplog.at_level("INFO"):
            model = attach_adapter(loaded, tmp_path / "adapter")
        assert f"an embedding of {rows + 4} tokens; the base's embedding is resized from {rows}." in caplog.text
        assert model.get_input_embeddings().weight.shape[0] == rows + 4
        torch.testing.assert_close(logits(model), trained, atol=1e-5, rtol=1e-5)
        added = torch.tensor([[rows, rows + 3]])
        assert torch.isfinite(model(input_ids=added).logits).all()

    def test_without_its_embedding_it_is_refused_with_both_numbers(self, base, tmp_path):
        self.train_elsewhere(base, tmp_path / "adapter", saves=False)
        loaded = load_model(str(base))
        rows = loaded.get_input_embeddings().weight.shape[0]
        with pytest.raises(
            UserError, match=rf"has {rows + 4} tokens, but its base model embeds {rows} and the adapter"
        ):
            attach_adapter(loaded, tmp_path / "adapter")


class TestMergedAdapter:
    """An adapter in the weights of its base answers as beside them."""

    def test_a_merged_adapter_is_the_same_model(self, base, tmp_path):
        folder = save_tuned(tmp_path / "tuned", base, "lora", tokens_key="k")
        apart, model = load_tuned(folder), load_tuned(folder)
        assert merge_adapter(model)
        assert all(module.merged for module in model.modules() if hasattr(module, "merged_adapters"))
        torch.testing.assert_close(logits(model), logits(apart), atol=1e-5, rtol=1e-4)

    def test_a_model_without_adapter_has_nothing_to_merge(self, base):
        assert not merge_adapter(load_model(str(base)))

    def test_a_head_that_is_tied_to_the_embedding_stays_apart(self, tmp_path):
        """Merged, what was learned for the head alone would be in the embedding, too."""
        model = self.with_adapter(make_model(tied=True), ["lm_head"])
        before = logits(model)
        assert not merge_adapter(model)
        torch.testing.assert_close(logits(model), before)
        assert merge_adapter(self.with_adapter(make_model(tied=False), ["lm_head"]))

    def test_quantized_weights_stay_as_they_are(self):
        model = self.with_adapter(make_model(), ["q_proj"])
        layer = model.get_base_model().model.layers[0].self_attn.q_proj.get_base_layer()
        layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
        assert not merge_adapter(model)

    def test_an_adapter_with_biases_stays_apart(self):
        assert not merge_adapter(self.with_adapter(make_model(), ["q_proj"], lora_bias=True))

    def with_adapter(self, model: Any, targets: list[str], **options: Any) -> Any:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **options)
        return get_peft_model(model, config).eval()
