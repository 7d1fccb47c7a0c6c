"""Weights in 4 and 8 bits: what is quantized, that it trains rightly, and that it loads as it was trained."""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_tuning.errors import UserError
from lm_tuning.models import quantization
from lm_tuning.models.loading import load_model
from lm_tuning.models.quantization import Quantization, check_quantization, quantized_bits
from lm_tuning.models.tuned import attach_adapter, load_tuned
from lm_tuning.parameters import LoraParameters
from lm_tuning.training.setup.adapters import add_lora, count_parameters, save_adapter
from tests.recipes.tiny_models import save_model
from tests.training.test_adapters import IDS, LABEL_MAP, SMALL, logits, task_of_architecture, train

ARCHITECTURES = ("llama", "qwen3", "gpt_neox", "bart")
FOUR, EIGHT = Quantization(), Quantization(bits=8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give a random model of an architecture, made once."""
    root = tmp_path_factory.mktemp("models")

    def folder(architecture: str) -> Path:
        path = root / architecture
        return path if path.is_dir() else save_model(path, architecture)

    return folder


def load(folder: Path, held: Quantization | None = FOUR, task: str = "causal_lm", **options: Any) -> Any:
    torch.manual_seed(1)
    labels = {"label_map": LABEL_MAP} if task == "sequence_classification" else {}
    return load_model(str(folder), task=task, quantization=held, **labels, **options)


def quantized_layers(model: Any) -> dict[str, Any]:
    import bitsandbytes as bnb

    kinds = (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.train()
    model.zero_grad()
    logits(model).logsumexp(-1).mean().backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("held", [FOUR, EIGHT], ids=["4 bits", "8 bits"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_linear_layers_are_quantized_and_head_and_embeddings_are_not(folders, architecture, held):
    task = task_of_architecture(architecture)
    plain = load(folders(architecture), None, task)
    head = plain.get_output_embeddings()
    linear = {name for name, each in plain.named_modules() if isinstance(each, torch.nn.Linear) and each is not head}
    model = load(folders(architecture), held, task)
    assert quantized_layers(model).keys() == linear
    assert (quantized_bits(model), quantized_bits(plain)) == (held.bits, None)
    kept = (model.get_output_embeddings(), model.get_input_embeddings())
    assert all(type(module.weight) is torch.nn.Parameter and module.weight.dtype == torch.float32 for module in kept)
    with torch.no_grad():
        ours, theirs = logits(model).flatten(), logits(plain).flatten()
    assert float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0)) > 0.95
    assert (ours - theirs).abs().max() > 1e-6


@pytest.mark.parametrize("held", [FOUR, EIGHT], ids=["4 bits", "8 bits"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt_neox"])
def test_a_classification_head_is_never_quantized(folders, architecture, held):
    model = load(folders(architecture), held, "sequence_classification", dtype="bfloat16")
    assert type(model.score) is torch.nn.Linear and model.score.weight.dtype == torch.float32
    assert model.lm_tuning_fresh_head and quantized_layers(model)
    assert logits(model).shape == (2, len(LABEL_MAP))


@pytest.mark.parametrize(
    ("held", "quant_type", "nested"),
    [
        (Quantization(), "nf4", True),
        (Quantization(double_quant=False), "nf4", False),
        (Quantization(quant_type="fp4"), "fp4", True),
    ],
)
def test_the_format_is_the_asked_one(folders, held, quant_type, nested):
    for layer in quantized_layers(load(folders("llama"), held)).values():
        assert (layer.weight.quant_state.quant_type, layer.weight.quant_state.nested) == (quant_type, nested)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_are_computed_in_the_asked_type(folders, dtype):
    held = Quantization(compute_dtype=dtype)
    model = load(folders("llama"), held, dtype=dtype)
    assert {layer.compute_dtype for layer in quantized_layers(model).values()} == {getattr(torch, dtype)}
    assert model.model.embed_tokens.weight.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_an_evaluation_changes_no_gradient_afterwards(folders, architecture, dtype):
    """It does on CPUs with AVX512-BF16 unless their inference kernel is switched off."""

    def trained(*, evaluates: bool) -> dict[str, torch.Tensor]:
        model = load(folders(architecture), Quantization(compute_dtype=dtype), dtype=dtype)
        assert not any(layer.support_avx512bf16_for_cpu for layer in quantized_layers(model).values())
        torch.manual_seed(2)
        model = add_lora(model, LoraParameters(**SMALL))
        with torch.no_grad():
            for name, each in model.named_parameters():
                if "lora_B" in name:
                    each.normal_(std=0.1)
        if evaluates:
            model.eval()
            with torch.no_grad():
                logits(model)
                model.generate(input_ids=IDS, max_new_tokens=2, do_sample=False)
        return gradients(model)

    before, after = trained(evaluates=False), trained(evaluates=True)
    assert before.keys() == after.keys() and len(before) > 8
    for name, gradient in before.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(after[name], gradient, atol=0, rtol=0, msg=name)


@pytest.mark.parametrize("held", [FOUR, EIGHT], ids=["4 bits", "8 bits"])
@pytest.mark.parametrize("kind", [{}, {"use_dora": True}, {"use_rslora": True}, {"init": "gaussian"}])
def test_adapters_train_beside_quantized_weights_that_stay(folders, held, kind):
    if held.bits == 8 and kind.get("use_dora"):
        with pytest.raises(UserError, match=r"use_dora = true cannot train beside .* = 8 on a CPU: set .*bits = 4"):
            add_lora(load(folders("llama"), held), LoraParameters(**kind, **SMALL))
        return
    model = add_lora(load(folders("llama"), held), LoraParameters(**kind, **SMALL))
    assert all(each.dtype == torch.float32 for each in model.parameters() if each.requires_grad)
    frozen = {name: copy.deepcopy(each.data) for name, each in model.named_parameters() if not each.requires_grad}
    with torch.no_grad():
        before = logits(model)
    train(model)
    with torch.no_grad():
        assert (logits(model) - before).abs().max() > 1e-3
    for name, each in model.named_parameters():
        if name in frozen:
            assert torch.equal(each.data, frozen[name]), name


@pytest.mark.parametrize("held", [FOUR, EIGHT], ids=["4 bits", "8 bits"])
def test_checkpointing_changes_no_gradient(folders, held):
    def made(*, checkpointing: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(2)
        model = add_lora(load(folders("llama"), held), LoraParameters(**SMALL))
        if checkpointing:
            model.activation_checkpointing_enable()
        return gradients(model)

    plain, recomputed = made(checkpointing=False), made(checkpointing=True)
    assert plain and plain.keys() == recomputed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("task", ["causal_lm", "sequence_classification"])
@pytest.mark.parametrize("held", [FOUR, EIGHT], ids=["4 bits", "8 bits"])
def test_a_tuned_model_loads_on_the_base_quantized_as_in_training(folders, tmp_path, task, held):
    model = add_lora(load(folders("llama"), held, task), LoraParameters(**SMALL), task=task)
    train(model)
    with torch.no_grad():
        trained = logits(model)
    folder = tmp_path / "tuned"
    save_adapter(model, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((folders("llama") / name).read_bytes())
    (folder / "label_map.json").write_text(json.dumps(LABEL_MAP))
    facts = {
        "method": "qlora",
        "task": task,
        "quantization": {"bits": held.bits, "quant_type": "nf4", "double_quant": True},
        "base": {"name_or_path": str(folders("llama")), "revision": None},
    }
    (folder / "tuning.json").write_text(json.dumps(facts))
    again = load_tuned(folder)
    assert quantized_layers(again)
    with torch.no_grad():
        torch.testing.assert_close(logits(again), trained, atol=1e-5, rtol=1e-5)
        other = attach_adapter(load(folders("llama"), None, task), folder)
        assert (logits(other) - trained).abs().max() > 1e-4, "the plain base gives other logits"


def test_two_weights_in_a_byte_count_as_two(folders):
    plain, held = count_parameters(load(folders("llama"), None)), count_parameters(load(folders("llama")))
    assert held[1] == plain[1]


def test_the_seed_decides_an_adapter_on_quantized_weights(folders):
    def made() -> list[torch.Tensor]:
        torch.manual_seed(4)
        model = add_lora(load(folders("llama")), LoraParameters(**SMALL))
        return [each for each in model.parameters() if each.requires_grad]

    assert all(torch.equal(first, second) for first, second in zip(made(), made(), strict=True))


def test_eight_bit_layers_say_once_what_they_cast(folders, caplog):
    model = load(folders("llama"), EIGHT)
    with caplog.at_level(logging.WARNING, logger="bitsandbytes"):
        logits(model)
        logits(model)
    assert sum("cast" in record.message for record in caplog.records) <= 1


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package bitsandbytes, which is not installed: pip install"):
        check_quantization("cpu")


def test_a_device_that_cannot_do_it_is_named():
    with pytest.raises(UserError, match=r"runs on cpu and cuda, and the device here is mps: set train\.method = lora"):
        check_quantization("mps")
    check_quantization("cpu")


def test_a_library_that_does_not_load_is_named(monkeypatch):
    from bitsandbytes import cextension

    broken = cextension.ErrorHandlerMockBNBNativeLibrary("libcudart.so.13: cannot open shared object file")
    monkeypatch.setattr(cextension, "lib", broken)
    with pytest.raises(UserError, match=r"cannot be loaded here \(libcudart\.so\.13: cannot open"):
        check_quantization("cuda:0")


def test_a_model_that_is_stored_quantized_is_refused(folders, tmp_path):
    folder = save_model(tmp_path / "stored", "llama")
    config = json.loads((folder / "config.json").read_text())
    held = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": held}))
    with pytest.raises(UserError, match=r"stored quantized \(bitsandbytes\).*train\.method = qlora quantizes it"):
        load_model(str(folder))


OPTIMIZERS = (
    "adamw_8bit",
    "adamw_bnb_8bit",
    "paged_adamw_32bit",
    "paged_adamw_8bit",
    "lion_32bit",
    "lion_8bit",
    "paged_lion_32bit",
    "paged_lion_8bit",
    "adamw_torch",
    "adamw_torch_fused",
    "adafactor",
    "sgd",
    "adagrad",
    "rmsprop",
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_that_is_offered_takes_a_step(folders, tmp_path, name):
    from transformers import Trainer, TrainingArguments

    from lm_tuning.parameters.schema import find_entry

    assert set(find_entry(("train", "trainer", "optim"))["enum"]) == set(OPTIMIZERS)
    model = load(folders("llama"), None)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), optim=name, use_cpu=True, report_to="none", learning_rate=1e-3, max_steps=3
    )
    trainer = Trainer(model=model, args=arguments)
    optimizer = trainer.create_optimizer()
    before = logits(model).logsumexp(-1).mean()
    for _ in range(3):
        optimizer.zero_grad()
        logits(model).logsumexp(-1).mean().backward()
        optimizer.step()
    after = logits(model).logsumexp(-1).mean()
    assert math.isfinite(float(after)) and float(after) < float(before)
