"""A norm in one operation gives what the model's own gives, and the model comes back as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from lm_tuning.batching.fused_norms import fused_norms

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def build(family: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


@pytest.mark.parametrize(("family", "norms"), [("Llama", 5), ("Qwen3", 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_models_logits_stay_the_same(family: str, norms: int, dtype: torch.dtype) -> None:
    model = build(family).to(dtype)
    ids = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        before = model(ids).logits.float()
        with fused_norms(model) as count:
            fused = model(ids).logits.float()
        after = model(ids).logits.float()
    assert count == norms
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(fused, before, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_norm_of_another_rule_stays_as_it_is() -> None:
    # It scales by one plus its weight.
    with fused_norms(build("Gemma")) as count:
        assert count == 0


def test_the_runs_random_state_is_left_alone() -> None:
    model = build("Llama")
    state = torch.random.get_rng_state()
    with fused_norms(model):
        pass
    assert torch.equal(torch.random.get_rng_state(), state)
