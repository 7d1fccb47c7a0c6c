"""Packed rows attend to themselves alone, without a mask."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from lm_tuning.batching import packed_attention
from lm_tuning.batching.packed_attention import why_not
from tests.support.tiny import VOCABULARY, make_model


def test_each_row_gets_what_it_would_get_alone() -> None:
    random = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 9, 8, generator=random, requires_grad=True)
    key, value = (torch.randn(1, 2, 9, 8, generator=random, requires_grad=True) for _ in range(2))
    bounds = [0, 4, 5, 9]
    out, weights = packed_attention.packed_attention(
        torch.nn.Module(),
        query,
        key,
        value,
        None,
        scaling=0.3,
        cu_seq_lens_q=torch.tensor(bounds, dtype=torch.int32),
        max_length_q=4,
    )
    assert weights is None
    assert out.shape == (1, 9, 4, 8)
    for a, b in pairwise(bounds):
        alone = scaled_dot_product_attention(
            query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], is_causal=True, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(out[:, a:b], alone.transpose(1, 2))
    # Nothing flows back from the last row into the ones before it.
    out[:, 5:].sum().backward()
    assert key.grad is not None
    assert key.grad[:, :, :5].abs().sum() == 0
    assert key.grad[:, :, 5:].abs().sum() > 0


def test_without_bounds_it_is_ordinary_causal_attention() -> None:
    query, key, value = (torch.randn(2, 4, 6, 8) for _ in range(3))
    out, _ = packed_attention.packed_attention(torch.nn.Module(), query, key, value, None)
    torch.testing.assert_close(out, scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2))


@pytest.mark.parametrize("setting", ["softcap", "s_aux", "position_bias"])
def test_a_setting_that_it_cannot_follow_is_refused(setting: str) -> None:
    query = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match=setting):
        packed_attention.packed_attention(torch.nn.Module(), query, query, query, None, **{setting: 1.0})


def test_products_follow_autocast() -> None:
    query = torch.randn(1, 2, 3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = packed_attention.packed_attention(
            torch.nn.Module(), query, query, query, None, cu_seq_lens_q=torch.tensor([0, 3], dtype=torch.int32)
        )
    assert out.dtype == torch.bfloat16


def make(kind: str, **changes: Any) -> Any:
    import transformers

    config_class, model_class = getattr(transformers, f"{kind}Config"), getattr(transformers, f"{kind}ForCausalLM")
    small = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    return model_class(config_class(**small | changes))


def test_a_plain_decoder_can_be_packed() -> None:
    assert why_not(make_model(), device="cpu", longest_row_tokens=500) is None


def test_a_window_that_is_shorter_than_a_row_cannot_be_packed() -> None:
    model = make("Mistral", sliding_window=16)
    assert why_not(model, device="cpu", longest_row_tokens=16) is None
    reason = why_not(model, device="cpu", longest_row_tokens=17)
    assert reason is not None
    assert "looks back 16 tokens" in reason
    assert "17" in reason


def test_scores_that_are_bounded_cannot_be_packed() -> None:
    reason = why_not(make("Gemma2", sliding_window=4096), device="cpu", longest_row_tokens=20)
    assert reason is not None
    assert "caps its attention logits (soft-capping)" in reason


def test_a_bias_on_scores_cannot_be_packed() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=4))
    assert why_not(model, device="cpu", longest_row_tokens=20) is not None


def test_dropped_attention_weights_cannot_be_packed_on_a_gpu() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=4))
    assert why_not(model, device="cpu", longest_row_tokens=20) is None
    reason = why_not(model, device="cuda", longest_row_tokens=20)
    assert reason is not None
    assert "drops 10%" in reason


def test_layers_that_keep_the_bounds_to_themselves_cannot_be_packed() -> None:
    model = make("Nemotron").train()
    reason = why_not(model, device="cpu", longest_row_tokens=20)
    assert reason == "NemotronForCausalLM does not tell its attention where rows begin"
    assert model.config._attn_implementation == "sdpa"
    assert model.training


def test_attention_sinks_cannot_be_packed() -> None:
    model = make("GptOss", num_local_experts=2, num_experts_per_tok=1, sliding_window=128)
    reason = why_not(model, device="cpu", longest_row_tokens=20)
    assert reason is not None
    assert "s_aux" in reason


def test_values_of_another_size_than_queries_cannot_be_packed_on_a_gpu() -> None:
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    model = make("DeepseekV3", **sizes, num_key_value_heads=4, first_k_dense_replace=2)
    assert why_not(model, device="cpu", longest_row_tokens=20) is None
    reason = why_not(model, device="cuda", longest_row_tokens=20)
    assert reason is not None
    assert "queries of 16 and values of 8 numbers" in reason


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_computes_the_same_on_a_gpu() -> None:
    torch.manual_seed(0)
    query = torch.randn(1, 8, 500, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    key, value = (torch.randn(1, 2, 500, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
    bounds = torch.tensor([0, 200, 201, 450, 500], dtype=torch.int32)
    module = torch.nn.Module()
    fast, _ = packed_attention.packed_attention(
        module, query, key, value, None, cu_seq_lens_q=bounds.cuda(), max_length_q=256
    )
    plain, _ = packed_attention.packed_attention(
        module, *(part.detach().float().cpu() for part in (query, key, value)), None, cu_seq_lens_q=bounds
    )
    assert float((fast.float().cpu() - plain).norm() / plain.norm()) < 1e-2
