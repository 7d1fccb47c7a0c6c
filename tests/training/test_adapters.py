"""Adapters go where they are asked to, learn in every kind, and give their logits again once stored."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from lm_tuning.errors import UserError
from lm_tuning.models.loading import build_skeleton, load_model
from lm_tuning.models.tuned import attach_adapter
from lm_tuning.parameters import LoraParameters
from lm_tuning.training.setup.adapters import add_lora, check_targets, count_parameters, save_adapter, target_names
from tests.recipes.tiny_models import save_model

ARCHITECTURES = ("llama", "qwen3", "gpt_neox", "bart")
LABEL_MAP = {"a": 0, "b": 1, "c": 2}
SMALL: dict[str, Any] = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"}
INITS = ("default", "gaussian", "orthogonal", "pissa", "pissa_niter_4", "olora", "mica")
IDS = torch.arange(24).reshape(2, 12) % 90 + 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give a random model of an architecture, made once."""
    root = tmp_path_factory.mktemp("models")

    def folder(architecture: str) -> Path:
        path = root / architecture
        return path if path.is_dir() else save_model(path, architecture)

    return folder


def task_of_architecture(architecture: str) -> str:
    return "seq2seq_lm" if architecture == "bart" else "causal_lm"


def load(folder: Path, task: str = "causal_lm", **options: Any) -> Any:
    torch.manual_seed(1)
    labels = {"label_map": LABEL_MAP} if task == "sequence_classification" else {}
    return load_model(str(folder), task=task, **labels, **options)


def logits(model: Any) -> torch.Tensor:
    inputs: dict[str, Any] = {"input_ids": IDS}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = IDS[:, :6]
    return model(**inputs, use_cache=False).logits.float()


def train(model: Any, *, num_steps: int = 3, rate: float = 0.02) -> None:
    """Move what is trainable by a few steps of a made-up loss."""
    model.train()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=rate)
    for _ in range(num_steps):
        optimizer.zero_grad()
        logits(model).logsumexp(-1).mean().backward()
        optimizer.step()
    model.eval()


def stored_tensors(folder: Path) -> dict[str, torch.Size]:
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        return {key: torch.Size(file.get_slice(key).get_shape()) for key in file.keys()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_linear_means_every_layer_but_the_head(folders, architecture):
    model = load(folders(architecture), task_of_architecture(architecture))
    layers = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    (head,) = [name for name, module in layers.items() if module is model.get_output_embeddings()]
    assert head not in target_names(model)
    wrapped = add_lora(model, LoraParameters(**SMALL), task=task_of_architecture(architecture))
    adapted = {
        name.removesuffix(".lora_A.default") for name, _ in wrapped.named_modules() if name.endswith("lora_A.default")
    }
    assert adapted == {f"base_model.model.{name}" for name in layers.keys() - {head}}
    assert all(each.dtype == torch.float32 for each in wrapped.parameters() if each.requires_grad)


@pytest.mark.parametrize(
    ("architecture", "targets", "num_layers"),
    [
        ("llama", ["q_proj", "v_proj"], 4),
        ("qwen3", ["gate_proj"], 2),
        ("gpt_neox", ["query_key_value"], 2),
        ("bart", ["q_proj"], 6),
        ("bart", ["encoder_attn.q_proj"], 2),
    ],
)
def test_named_targets_are_adapted_and_nothing_else(folders, architecture, targets, num_layers):
    task = task_of_architecture(architecture)
    wrapped = add_lora(
        load(folders(architecture), task), LoraParameters(**{**SMALL, "target_modules": targets}), task=task
    )
    adapted = [name for name, _ in wrapped.named_modules() if name.endswith("lora_A.default")]
    assert len(adapted) == num_layers
    assert all(name.removesuffix(".lora_A.default").endswith(tuple(targets)) for name in adapted)


@pytest.mark.parametrize(
    ("architecture", "target", "hint"),
    [
        ("llama", "v_porj", "did you mean 'v_proj'?"),
        ("gpt_neox", "q_proj", "it has dense, dense_4h_to_h, dense_h_to_4h, query_key_value"),
        ("bart", "query_key_value", "it has fc1, fc2, k_proj, out_proj, q_proj, v_proj"),
    ],
)
def test_a_target_that_the_model_lacks_is_refused_before_weights_are_loaded(folders, architecture, target, hint):
    skeleton = build_skeleton(str(folders(architecture)), task=task_of_architecture(architecture))
    known = target_names(skeleton)[0]
    with pytest.raises(UserError) as caught:
        check_targets(skeleton, [known, target, "nonsense"])
    assert len(caught.value.problems) == 2
    assert f"no linear layer named {target!r}" in caught.value.problems[0] and hint in caught.value.problems[0]
    assert "nonsense" in caught.value.problems[1] and known in caught.value.problems[1]
    with pytest.raises(UserError, match=target):
        add_lora(
            load(folders(architecture), task_of_architecture(architecture)),
            LoraParameters(**{**SMALL, "target_modules": [known, target]}),
            task=task_of_architecture(architecture),
        )


KINDS = {"lora": {}, "dora": {"use_dora": True}, "rslora": {"use_rslora": True}}


# mica with DoRA is refused with the parameters.
@pytest.mark.parametrize(
    ("init", "kind"),
    [
        pytest.param(init, kind, id=f"{init}-{name}")
        for init in INITS
        for name, kind in KINDS.items()
        if (init, name) != ("mica", "dora")
    ],
)
def test_a_stored_adapter_gives_the_logits_of_the_training(folders, tmp_path, init, kind):
    model = add_lora(load(folders("llama")), LoraParameters(init=init, **kind, **SMALL))
    train(model)
    with torch.no_grad():
        trained, plain = logits(model), logits(load(folders("llama")))
    assert (trained - plain).abs().max() > 1e-2
    save_adapter(model, tmp_path / "adapter")
    again = attach_adapter(load(folders("llama")), tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(logits(again), trained, atol=1e-5, rtol=1e-5)
        with again.disable_adapter():
            torch.testing.assert_close(logits(again), plain, atol=0, rtol=0)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["init_lora_weights"] is True
    assert config["r"] == (8 if init.startswith(("pissa", "olora")) else 4)
    assert config["inference_mode"] is True


@pytest.mark.parametrize(
    "options",
    [{}, {"init": "pissa"}, {"use_dora": True}, {"target_modules": ["c_attn"]}],
    ids=["lora", "pissa", "dora", "one target"],
)
def test_weights_with_inputs_first_are_adapted_without_a_warning(tmp_path, options):
    """GPT-2 has such layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=120, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)

    def base() -> Any:
        torch.manual_seed(1)
        return GPT2LMHeadModel(config).eval()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = add_lora(base(), LoraParameters(**{**SMALL, **options}))
    assert model.peft_config["default"].fan_in_fan_out is True
    train(model)
    with torch.no_grad():
        trained = logits(model)
        assert (trained - logits(base())).abs().max() > 1e-2
    save_adapter(model, tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = attach_adapter(base(), tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(logits(again), trained, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits(again.merge_and_unload()), trained, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("init", [init for init in INITS if init not in ("default", "gaussian")])
def test_every_start_is_the_base_model(folders, init):
    plain = logits(load(folders("llama")))
    torch.testing.assert_close(
        logits(add_lora(load(folders("llama")), LoraParameters(init=init, **SMALL))), plain, atol=2e-5, rtol=1e-5
    )


def test_a_base_in_16_bits_is_off_by_its_own_rounding_only(folders, tmp_path):
    model = add_lora(load(folders("llama"), dtype="bfloat16"), LoraParameters(init="pissa", **SMALL))
    train(model)
    save_adapter(model, tmp_path / "adapter")
    again = attach_adapter(load(folders("llama"), dtype="bfloat16"), tmp_path / "adapter")
    with torch.no_grad():
        trained, stored = logits(model), logits(again)
    assert (trained - stored).abs().max() < 0.02 * trained.abs().max()


def test_the_same_seed_starts_the_same_adapter_again(folders):
    """So that a resumed run takes the same part out of the frozen weights."""

    def made(init: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        return dict(add_lora(load(folders("llama")), LoraParameters(init=init, **SMALL)).named_parameters())

    for init in INITS:
        first, second = made(init), made(init)
        assert all(torch.equal(first[name], second[name]) for name in first), init


def test_a_rank_beyond_the_singular_values_is_refused(folders):
    with pytest.raises(UserError, match=r"train\.lora\.r = 40 is more than the 32 singular values of .*k_proj"):
        add_lora(load(folders("llama")), LoraParameters(init="pissa", **{**SMALL, "r": 40}))
    wide = {**SMALL, "r": 40, "target_modules": ["q_proj"]}
    wrapped = add_lora(load(folders("llama")), LoraParameters(init="pissa", **wide))
    assert count_parameters(wrapped)[0] == 2 * 40 * (64 + 64)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt_neox"])
def test_a_classifier_trains_its_head_in_full_and_stores_it_once(folders, tmp_path, architecture):
    model = load(folders(architecture), "sequence_classification")
    head = model.score
    wrapped = add_lora(model, LoraParameters(**SMALL), task="sequence_classification")
    trainable = {name for name, each in wrapped.named_parameters() if each.requires_grad and "lora_" not in name}
    assert trainable == {"base_model.model.score.modules_to_save.default.weight"}
    assert not any("score" in name and "lora_" in name for name, _ in wrapped.named_parameters())
    before = head.weight.detach().clone()
    train(wrapped)
    changed = wrapped.base_model.model.score.modules_to_save["default"].weight
    assert not torch.equal(changed, before)
    with torch.no_grad():
        trained = logits(wrapped)
    save_adapter(wrapped, tmp_path / "adapter")
    heads = [name for name in stored_tensors(tmp_path / "adapter") if "score" in name]
    assert heads == ["base_model.model.score.weight"]
    torch.manual_seed(99)  # another random head, which the stored one takes the place of
    base = load_model(str(folders(architecture)), task="sequence_classification", label_map=LABEL_MAP)
    with torch.no_grad():
        torch.testing.assert_close(logits(attach_adapter(base, tmp_path / "adapter")), trained, atol=1e-5, rtol=1e-5)


def test_a_converted_classifier_keeps_its_head(folders, tmp_path):
    wrapped = add_lora(
        load(folders("llama"), "sequence_classification"),
        LoraParameters(init="pissa", **SMALL),
        task="sequence_classification",
    )
    train(wrapped)
    with torch.no_grad():
        trained = logits(wrapped)
    save_adapter(wrapped, tmp_path / "adapter")
    again = attach_adapter(load(folders("llama"), "sequence_classification"), tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(logits(again), trained, atol=1e-5, rtol=1e-5)


def test_the_head_of_a_classifier_is_no_target(folders):
    model = load(folders("llama"), "sequence_classification")
    assert "score" not in target_names(model)
    with pytest.raises(UserError, match="'score' is the classification head, which is trained in full"):
        check_targets(model, ["q_proj", "score"])


def test_what_is_trained_on_16_bits_is_float32(folders):
    model = load(folders("llama"), "sequence_classification", dtype="bfloat16")
    wrapped = add_lora(model, LoraParameters(use_dora=True, **SMALL), task="sequence_classification")
    assert {each.dtype for each in wrapped.parameters() if each.requires_grad} == {torch.float32}
    assert wrapped.base_model.model.model.embed_tokens.weight.dtype == torch.bfloat16
    train(wrapped)  # with the head in float32 behind hidden states in bfloat16


@pytest.mark.parametrize(
    ("method", "options"),
    [("lora", {}), ("lora", {"use_dora": True}), ("lora", {"target_modules": ["q_proj"]}), ("full", {})],
    ids=["lora", "dora", "one target", "full"],
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_checkpointing_changes_no_gradient(folders, architecture, method, options):
    noise = architecture in ("qwen3", "bart")  # on the embeddings, drawn once and not again when recomputing
    task = task_of_architecture(architecture)
    if architecture == "gpt_neox" and "target_modules" in options:
        options = {"target_modules": ["query_key_value"]}

    def gradients(*, checkpointing: bool) -> dict[str, torch.Tensor]:
        model = load(folders(architecture), task)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model.config.dropout = 0.0
        for layer in model.modules():
            if isinstance(getattr(layer, "dropout", None), float):
                layer.dropout = 0.0
        if method == "lora":
            torch.manual_seed(5)
            model = add_lora(model, LoraParameters(**{**SMALL, **options}), task=task)
            with torch.no_grad():  # so that both matrices get a gradient
                for name, each in model.named_parameters():
                    if "lora_B" in name:
                        each.normal_(std=0.05)
        if checkpointing:
            model.activation_checkpointing_enable()
        model.config.use_cache = False
        model.train()
        if noise:
            from transformers.integrations.neftune import activate_neftune

            activate_neftune(model, 5.0)
        torch.manual_seed(6)
        logits(model).logsumexp(-1).mean().backward()
        return {name: each.grad for name, each in model.named_parameters() if each.requires_grad}

    plain, recomputed = gradients(checkpointing=False), gradients(checkpointing=True)
    assert plain and plain.keys() == recomputed.keys()
    for name, gradient in plain.items():
        if gradient is None:
            assert recomputed[name] is None, name
            continue
        torch.testing.assert_close(recomputed[name], gradient, atol=1e-6, rtol=1e-5, msg=name)
    assert any(gradient is not None and gradient.abs().max() > 1e-6 for gradient in plain.values())


def test_parameters_are_counted(folders):
    model = load(folders("llama"))
    everything = sum(each.numel() for each in model.parameters())
    assert count_parameters(model) == (everything, everything)
    wrapped = add_lora(model, LoraParameters(**{**SMALL, "target_modules": ["q_proj"]}))
    assert count_parameters(wrapped) == (2 * 4 * (64 + 64), everything + 2 * 4 * (64 + 64))
