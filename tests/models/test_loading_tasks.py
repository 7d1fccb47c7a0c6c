"""Models load for each task: heads and labels, encoder-decoders, padding, and what does not belong to a task."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_tuning.errors import UserError
from lm_tuning.models.generation_settings import clean_generation_settings
from lm_tuning.models.loading import build_skeleton, load_model, load_tokenizer
from tests.recipes.tiny_models import save_model
from tests.support.tiny import END, PAD, make_model, make_tokenizer, save_tiny_model
from tests.support.tiny_tasks import make_classifier

LABEL_MAP = {"card": 0, "cash": 1, "loan": 2, "none_of_these": 3}
IDS = torch.arange(24).reshape(2, 12) % 90 + 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give a random model of an architecture, made once."""
    root = tmp_path_factory.mktemp("models")

    def folder(architecture: str) -> Path:
        path = root / architecture
        return path if path.is_dir() else save_model(path, architecture)

    return folder


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    """A folder with a trained classifier."""
    model = make_classifier()
    model.config.id2label = {index: name for name, index in LABEL_MAP.items()}
    model.config.label2id = LABEL_MAP
    model.save_pretrained(tmp_path / "classifier")
    make_tokenizer().save_pretrained(tmp_path / "classifier")
    return tmp_path / "classifier"


def classify(folder: Path, label_map: dict[str, int] | None = LABEL_MAP, **options: Any) -> Any:
    return load_model(str(folder), task="sequence_classification", label_map=label_map, **options)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt_neox"])
def test_a_causal_model_gets_a_new_head_with_the_labels(folders, architecture):
    model = classify(folders(architecture))
    assert model.lm_tuning_fresh_head is True
    assert model.score.weight.shape == (4, 64)
    assert (model.config.num_labels, model.config.label2id) == (4, LABEL_MAP)
    assert model.config.id2label == {0: "card", 1: "cash", 2: "loan", 3: "none_of_these"}
    backbone = load_model(str(folders(architecture)))
    for name, weight in backbone.base_model.state_dict().items():
        assert torch.equal(model.base_model.state_dict()[name], weight), name
    assert 0.01 < float(model.score.weight.detach().std()) < 0.04


def test_a_batch_of_two_is_classified_by_a_model_whose_tokenizer_had_no_pad_token(tmp_path):
    folder = save_tiny_model(tmp_path / "model", pad_token=None)
    config = json.loads((folder / "config.json").read_text())
    config.pop("pad_token_id")
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(folder))
    model = classify(folder, {"a": 0, "b": 1, "c": 2}, pad_token_id=tokenizer.pad_token_id)
    assert model.config.pad_token_id == tokenizer.pad_token_id
    rows = tokenizer(["hello", "a longer text"], padding=True, return_tensors="pt")
    logits = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
    assert logits.shape == (2, 3)
    alone = model(input_ids=tokenizer("hello", return_tensors="pt")["input_ids"]).logits
    torch.testing.assert_close(logits[:1], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_is_float32_and_runs_with_and_without_autocast(folders, dtype):
    model = classify(folders("llama"), dtype=dtype)
    assert model.score.weight.dtype == torch.float32
    assert model.model.embed_tokens.weight.dtype == getattr(torch, dtype)
    plain = model(input_ids=IDS).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fast = model(input_ids=IDS).logits
    torch.testing.assert_close(fast.float(), plain.float(), atol=0.02, rtol=0.1)


def test_the_seed_decides_a_new_head(folders):
    def head(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return classify(folders("llama")).score.weight

    assert torch.equal(head(1), head(1)) and not torch.equal(head(1), head(2))


def test_a_stored_head_is_kept_for_its_own_classes(classifier, caplog):
    stored = make_classifier().score.weight
    with caplog.at_level(logging.WARNING):
        for label_map in (LABEL_MAP, None):
            model = classify(classifier, label_map)
            assert model.lm_tuning_fresh_head is False
            assert torch.equal(model.score.weight, stored)
            assert model.config.label2id == LABEL_MAP
    assert caplog.text == ""


@pytest.mark.parametrize(
    "label_map",
    [{"yes": 0, "no": 1}, {"cash": 0, "card": 1, "loan": 2, "none_of_these": 3}],
    ids=["fewer", "reordered"],
)
def test_a_stored_head_for_other_classes_starts_again_and_that_is_said(classifier, caplog, label_map):
    with caplog.at_level(logging.WARNING):
        model = classify(classifier, label_map)
    assert (
        f"a classification head for other classes (4: card, cash, loan, ...). The data has {len(label_map)}"
        in caplog.text
    )
    assert model.lm_tuning_fresh_head is True
    assert model.score.weight.shape[0] == len(label_map) == model.config.num_labels
    assert not torch.equal(model.score.weight[:2], make_classifier().score.weight[:2])
    assert 0.01 < float(model.score.weight.detach().std()) < 0.04


def test_a_base_model_without_classes_is_refused(folders):
    with pytest.raises(UserError, match="has no classification head, so its classes must be given"):
        classify(folders("llama"), None)


def test_only_the_head_of_a_classifier_may_be_missing(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save_tiny_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UserError, match=r"1 tensor missing, 0 of another shape \(first: model\.layers\.1\.mlp\.up_proj"
    ):
        classify(folder)


def test_weights_of_another_shape_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save_tiny_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"0 tensors missing, 1 of another shape \(first: model\.norm\.weight\)"):
        load_model(str(folder))


def test_an_encoder_decoder_loads_as_one(folders):
    model = load_model(str(folders("bart")), task="seq2seq_lm")
    assert type(model).__name__ == "BartForConditionalGeneration"
    assert model.config.decoder_start_token_id is not None
    assert not hasattr(model, "lm_tuning_fresh_head")
    tokenizer = load_tokenizer(str(folders("bart")))
    assert model.config.pad_token_id == model.generation_config.pad_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize("make", [load_model, build_skeleton])
@pytest.mark.parametrize(
    ("architecture", "task", "words"),
    [
        (
            "bart",
            "causal_lm",
            r"\(bart\) is an encoder-decoder, and task = causal_lm needs a decoder alone: .* seq2seq_lm",
        ),
        (
            "bart",
            "sequence_classification",
            r"is an encoder-decoder, and task = sequence_classification needs a decoder",
        ),
        (
            "llama",
            "seq2seq_lm",
            r"\(llama\) is a decoder alone, and task = seq2seq_lm needs an encoder-decoder: .* causal",
        ),
    ],
)
def test_a_model_for_another_task_is_refused(folders, make, architecture, task, words):
    with pytest.raises(UserError, match=words):
        make(str(folders(architecture)), task=task, label_map=LABEL_MAP)


def test_an_encoder_that_is_no_causal_model_has_no_head_of_that_kind(tmp_path):
    from transformers import BertConfig, BertModel

    folder = tmp_path / "bert"
    config = BertConfig(
        vocab_size=120, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    BertModel(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    with pytest.raises(UserError, match="is a BertForSequenceClassification, which has none of that kind"):
        build_skeleton(str(folder), task="sequence_classification", label_map=LABEL_MAP)
    with pytest.raises(UserError, match=r"is a BertForSequenceClassification|do not fit its config"):
        classify(folder)


def test_an_architecture_without_a_model_for_the_task_is_named(tmp_path):
    from transformers import T5Config, ViTConfig

    folder = tmp_path / "other"
    for config, task in ((ViTConfig(), "causal_lm"), (T5Config(), "seq2seq_lm")):
        config.save_pretrained(folder)
        if task == "seq2seq_lm":
            with pytest.raises(UserError, match="no decoder_start_token_id, which a target starts from"):
                build_skeleton(str(folder), task=task)
        else:
            with pytest.raises(
                UserError, match=r"architecture vit, for which transformers has no model of task = causal"
            ):
                build_skeleton(str(folder), task=task)


@pytest.mark.parametrize(
    ("architecture", "task"),
    [("llama", "causal_lm"), ("llama", "sequence_classification"), ("gpt_neox", "causal_lm"), ("bart", "seq2seq_lm")],
)
def test_a_skeleton_has_the_names_and_shapes_of_the_model(folders, architecture, task):
    options = {"task": task, "label_map": LABEL_MAP if task == "sequence_classification" else None}
    skeleton, model = (
        build_skeleton(str(folders(architecture)), **options),
        load_model(str(folders(architecture)), **options),
    )
    shapes = {name: each.shape for name, each in model.named_parameters()}
    assert {name: each.shape for name, each in skeleton.named_parameters()} == shapes
    assert {each.device.type for each in skeleton.parameters()} == {"meta"}


def test_the_eos_is_supervised_where_a_model_was_published_with_it_as_padding(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = save_model(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": END}))

    def gradient_of_end(model: Any) -> float:
        model(input_ids=torch.tensor([[9, END, 10]])).logits.logsumexp(-1).sum().backward()
        return float(model.get_input_embeddings().weight.grad[END].abs().max())

    assert gradient_of_end(AutoModelForCausalLM.from_pretrained(folder)) == 0
    model = load_model(str(folder))
    assert model.config.pad_token_id == PAD
    assert gradient_of_end(model) > 0


def test_every_embedding_of_an_encoder_decoder_learns_its_padding_row_too(folders):
    model = load_model(str(folders("bart")), task="seq2seq_lm")
    embeddings = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    assert len(embeddings) >= 4 and all(module.padding_idx is None for module in embeddings)


class TestGenerationSettings:
    def write(self, folder: Path, **settings: Any) -> None:
        path = folder / "generation_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    def test_settings_without_effect_are_left_out_before_training_not_missed_after_it(self, tmp_path, caplog):
        folder = save_tiny_model(tmp_path / "model")
        self.write(folder, do_sample=False, temperature=0.7, top_p=0.9, length_penalty=2.0)
        with caplog.at_level(logging.WARNING, logger="lm_tuning"):
            model = load_model(str(folder))
        (record,) = [record for record in caplog.records if record.name.startswith("lm_tuning")]
        for word in ("temperature = 0.7", "top_p = 0.9", "length_penalty = 2.0", "do_sample = False"):
            assert word in record.getMessage()
        model.save_pretrained(tmp_path / "saved")
        saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
        assert "temperature" not in saved and saved["pad_token_id"] == PAD and saved["eos_token_id"] == END

    def test_without_it_saving_would_fail(self, tmp_path):
        from transformers import AutoModelForCausalLM

        folder = save_tiny_model(tmp_path / "model")
        self.write(folder, do_sample=False, temperature=0.7)
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.generation_config.pad_token_id = 7
        with pytest.raises(ValueError, match="temperature"):
            model.save_pretrained(tmp_path / "saved")

    def test_settings_with_effect_stay(self, tmp_path, caplog):
        folder = save_tiny_model(tmp_path / "model")
        self.write(folder, do_sample=True, temperature=0.7, top_k=20)
        with caplog.at_level(logging.WARNING, logger="lm_tuning"):
            settings = load_model(str(folder)).generation_config
        assert (settings.do_sample, settings.temperature, settings.top_k) == (True, 0.7, 20)
        assert not [record for record in caplog.records if record.name.startswith("lm_tuning")]

    def test_settings_that_only_their_author_can_fix_are_refused(self, tmp_path):
        folder = save_tiny_model(tmp_path / "model")
        self.write(folder, do_sample=False, num_return_sequences=3)
        with pytest.raises(UserError, match=r"cannot be read: Greedy methods .* do not support `num_return_sequences`"):
            load_model(str(folder))
        model = make_model()
        model.generation_config.num_return_sequences = 3
        with pytest.raises(UserError, match=r"generation_config\.json of here is invalid, .*num_return_sequences"):
            clean_generation_settings(model, "here")

    def test_an_encoder_decoder_keeps_its_beams(self, folders, tmp_path):
        folder = save_model(tmp_path / "bart", "bart")
        self.write(folder, num_beams=4, early_stopping=True, length_penalty=2.0)
        settings = load_model(str(folder), task="seq2seq_lm").generation_config
        assert (settings.num_beams, settings.early_stopping, settings.length_penalty) == (4, True, 2.0)
