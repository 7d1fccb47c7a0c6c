from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lm_tuning.batching.step_plan import StepPlan
from lm_tuning.parameters import LoraParameters
from lm_tuning.text.store.table import open_split
from lm_tuning.training.profile.flops import count_flops, flops_per_token
from lm_tuning.training.setup.adapters import add_lora, count_parameters
from lm_tuning.training.setup.model import freeze_modules
from tests.support.tiny import VOCABULARY, bart_config, make_model
from tests.training.conftest import write_rows

LAYERS, HIDDEN, INNER, HEADS, KEY_HEADS = 2, 32, 64, 4, 2
HEAD_SIZE = HIDDEN // HEADS
# Queries and output, keys and values, three products of the feed-forward part.
LAYER_MATRICES = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEY_HEADS * HEAD_SIZE + 3 * HIDDEN * INNER
BODY = LAYERS * LAYER_MATRICES
HEAD = HIDDEN * len(VOCABULARY)
CHANNELS = LAYERS * HIDDEN
LORA: dict[str, Any] = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"}


def adapter_size(model: Any) -> int:
    return sum(parameter.numel() for name, parameter in model.named_parameters() if "lora_" in name)


@pytest.mark.parametrize("tied", [True, False])
def test_full_training_takes_six_operations_a_matrix_weight(tied):
    flops = count_flops(make_model(tied=tied), task="causal_lm")
    assert flops.per_token == 6 * BODY
    assert flops.per_prediction == 6 * HEAD
    assert flops.per_pair == 12 * CHANNELS
    assert (flops.per_source_token, flops.per_source_pair, flops.per_cross_pair) == (0, 0, 0)


def test_rows_are_counted_by_tokens_predictions_and_causal_pairs():
    flops = count_flops(make_model(), task="causal_lm")
    pairs = (5 * 6 + 3 * 4) / 2
    assert flops.of_rows([5, 3], [2, 1]) == 8 * 6 * BODY + 3 * 6 * HEAD + pairs * 12 * CHANNELS


def test_long_rows_come_near_half_of_what_palm_counts_for_attention():
    flops = count_flops(make_model(), task="causal_lm")
    length = 4096
    palm = 6 * (BODY + HEAD) + 12 * LAYERS * HEADS * HEAD_SIZE * length
    causal_half = 6 * LAYERS * HEADS * HEAD_SIZE * length
    assert flops.of_rows([length], [length]) / length == pytest.approx(palm - causal_half, rel=1e-3)


def test_torchs_own_counter_agrees_for_full_training():
    from torch.utils.flop_counter import FlopCounterMode

    model = make_model()
    model.set_attn_implementation("eager")
    length = 48
    ids = torch.randint(8, 60, (1, length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    flops = count_flops(model, task="causal_lm")
    # Torch counts all pairs of positions, also those that are masked; ours are the causal ones.
    all_pairs = length * length - length * (length + 1) / 2
    # Within half a percent: torch also counts the small product that makes the angles of rotary embeddings.
    ours = flops.of_rows([length], [length]) + flops.per_pair * all_pairs
    assert counter.get_total_flops() == pytest.approx(ours, rel=0.005)


def test_a_frozen_base_takes_four_and_what_is_trained_on_it_six():
    model = add_lora(make_model(), LoraParameters(**LORA))
    flops = count_flops(model, task="causal_lm")
    trainable, _ = count_parameters(model)
    assert trainable == adapter_size(model)
    assert flops.per_token == 4 * BODY + 6 * trainable
    assert flops.per_prediction == 4 * HEAD
    assert flops.per_pair == 12 * CHANNELS


def test_checkpointing_does_not_change_the_count():
    model = make_model()
    before = count_flops(model, task="causal_lm")
    model.gradient_checkpointing_enable()
    assert count_flops(model, task="causal_lm") == before


def test_frozen_layers_before_all_that_is_trained_only_run_forward():
    model = make_model()
    freeze_modules(model, ["model.embed_tokens", "model.layers.0"])
    flops = count_flops(model, task="causal_lm")
    assert flops.per_token == (2 + 6) * LAYER_MATRICES
    assert flops.per_pair == 4 * CHANNELS * (1 + 2 * 0.5)


def test_quantized_weights_count_as_what_they_stand_for():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = make_model()
    plain = model.model.layers[0].mlp.up_proj
    packed = bitsandbytes.nn.Linear4bit(HIDDEN, INNER, bias=False, quant_type="nf4")
    packed.weight = bitsandbytes.nn.Params4bit(plain.weight.data, requires_grad=False, quant_type="nf4")
    model.model.layers[0].mlp.up_proj = packed.to("cpu")
    assert packed.weight.numel() < HIDDEN * INNER
    for parameter in model.parameters():
        parameter.requires_grad = False
    flops = count_flops(add_lora(model, LoraParameters(**LORA)), task="causal_lm")
    assert flops.per_token == 4 * BODY + 6 * adapter_size(model)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_classifiers_head_looks_at_one_position_a_row(method):
    from transformers import LlamaForSequenceClassification

    config = make_model().config
    config.num_labels = 3
    model: Any = LlamaForSequenceClassification(config)
    if method == "lora":
        model = add_lora(model, LoraParameters(**LORA), task="sequence_classification")
    flops = count_flops(model, task="sequence_classification")
    assert flops.per_prediction == 6 * 3 * HIDDEN
    body = 6 * BODY if method == "full" else 4 * BODY + 6 * adapter_size(model)
    assert flops.per_token == body
    assert flops.of_rows([4, 4], [1, 1]) == 8 * body + 2 * flops.per_prediction + 20 * flops.per_pair


def test_an_encoder_decoder_counts_each_stack_by_what_it_reads():
    from transformers import BartForConditionalGeneration

    config = bart_config(encoder_layers=3)
    flops = count_flops(BartForConditionalGeneration(config), task="seq2seq_lm")
    square, feed = 32 * 32, 2 * 32 * 64
    # Each encoder layer reads sources, and so do keys and values of the decoder's cross-attention.
    assert flops.per_source_token == 6 * (3 * (4 * square + feed) + 2 * square)
    assert flops.per_token == 6 * (4 * square + 2 * square + feed)
    assert flops.per_prediction == 6 * 32 * len(VOCABULARY)
    assert (flops.per_source_pair, flops.per_pair, flops.per_cross_pair) == (12 * 3 * 32, 12 * 32, 12 * 32)
    expected = (
        5 * flops.per_source_token
        + 3 * (flops.per_token + flops.per_prediction)
        + 25 * flops.per_source_pair
        + 6 * flops.per_pair
        + 15 * flops.per_cross_pair
    )
    assert flops.of_rows([8], [3]) == expected


def test_t5_is_read_by_its_own_names():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=1, num_heads=4)
    flops = count_flops(T5ForConditionalGeneration(config), task="seq2seq_lm")
    attention, feed = 4 * 16 * 32, 2 * 16 * 32
    assert flops.per_source_token == 6 * (2 * (attention + feed) + 2 * 16 * 32)
    assert flops.per_token == 6 * (attention + attention / 2 + feed)
    assert (flops.per_source_pair, flops.per_cross_pair) == (12 * 2 * 32, 12 * 32)


def test_a_model_with_experts_is_not_counted():
    from transformers import MixtralConfig

    model = make_model()
    model.config = MixtralConfig(num_local_experts=4)
    assert count_flops(model, task="causal_lm") is None


def test_operations_per_token_are_taken_over_the_rows_of_the_steps_that_were_made(tmp_path):
    write_rows(tmp_path, "train", 20)
    table = open_split(tmp_path, "train")
    plan = StepPlan(table.lengths, seed=3, effective_batch_rows=6, max_steps=7)
    flops = count_flops(make_model(), task="causal_lm")
    rows = np.concatenate([plan.rows_of_step(step) for step in range(2)])
    expected = flops.of_rows(table.lengths[rows], table.num_supervised[rows]) / table.lengths[rows].sum()
    assert flops_per_token(flops, table, plan, num_steps=2) == pytest.approx(expected)
    assert flops_per_token(flops, table, plan, num_steps=7) != pytest.approx(expected)
    assert flops_per_token(flops, table, plan, num_steps=0) is None
    assert flops_per_token(None, table, plan, num_steps=2) is None
