"""The held-out loss is a sum over supervised tokens that does not depend on how rows are batched."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm_tuning.evaluation.held_out_loss import (
    HeldOutLoss,
    choose_micro_batch_tokens,
    choose_rows,
    sum_held_out_nats,
)
from lm_tuning.text.token_table import TokenTable
from tests.support.tiny import END, PAD, VOCABULARY, make_model

WriteTable = Callable[..., TokenTable]


@pytest.fixture
def table(write_table: WriteTable) -> TokenTable:
    random = np.random.default_rng(0)
    rows = []
    for length in (5, 40, 9, 17, 3, 60, 22, 22, 8, 31):
        ids = random.integers(8, len(VOCABULARY), length).tolist()
        ids[-1] = END
        # Two answers in the longer rows; the first token of a short row is in its span and never counts.
        spans = [(4, 7), (length - 5, length)] if length > 15 else [(0, length)]
        rows.append((ids, spans))
    return write_table(rows)


def nats_by_hand(model: Any, table: TokenTable) -> tuple[float, int]:
    """Score one row at a time, one token at a time."""
    total, count = 0.0, 0
    for row in table:
        with torch.no_grad():
            logits = model(torch.tensor(row.input_ids.astype(np.int64))[None]).logits[0].double()
        for start, end in row.spans:
            for position in range(start, end):
                total -= float(torch.log_softmax(logits[position - 1], -1)[int(row.input_ids[position])])
                count += 1
    return total, count


@pytest.mark.parametrize("batching", ["packed", "padded"])
@pytest.mark.parametrize("micro_batch_tokens", [1, 64, 100_000])
def test_equals_the_hand_computed_sum_whatever_the_batch(
    table: TokenTable, batching: Any, micro_batch_tokens: int
) -> None:
    model = make_model()
    nats, num_tokens = nats_by_hand(model, table)

    loss = sum_held_out_nats(
        model,
        table,
        range(len(table)),
        micro_batch_tokens=micro_batch_tokens,
        batching=batching,
        pad_id=PAD,
        device="cpu",
    )

    assert (loss.num_tokens, loss.num_rows) == (num_tokens, 10)
    assert num_tokens == 6 * (3 + 5) + (4 + 8 + 2 + 7)
    assert loss.nats == pytest.approx(nats, rel=1e-6)
    assert loss.nats_per_token == pytest.approx(nats / num_tokens, rel=1e-6)
    assert loss.perplexity == pytest.approx(math.exp(nats / num_tokens), rel=1e-6)


def test_a_uniform_model_loses_the_log_of_its_vocabulary(table: TokenTable) -> None:
    model = make_model(tied=False)
    torch.nn.init.zeros_(model.lm_head.weight)

    loss = sum_held_out_nats(model, table, [0, 1], micro_batch_tokens=64, batching="padded", pad_id=PAD, device="cpu")

    assert loss.nats_per_token == pytest.approx(math.log(len(VOCABULARY)), rel=1e-6)
    assert loss.perplexity == pytest.approx(len(VOCABULARY), rel=1e-5)


def test_weighs_tokens_rather_than_batches() -> None:
    parts = [HeldOutLoss(8 * 1.0, 8, 1), HeldOutLoss(2 * 3.0, 2, 1)]
    whole = HeldOutLoss(sum(part.nats for part in parts), sum(part.num_tokens for part in parts), 2)
    assert whole.nats_per_token == pytest.approx(1.4)


def test_gives_the_model_back_in_the_mode_it_had(table: TokenTable) -> None:
    model = make_model()
    model.train()
    model.model.layers[0].eval()
    before = {name: module.training for name, module in model.named_modules()}

    sum_held_out_nats(model, table, [0], micro_batch_tokens=64, batching="packed", pad_id=PAD, device="cpu")

    assert {name: module.training for name, module in model.named_modules()} == before
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_dropout_is_off_while_evaluating(table: TokenTable) -> None:
    model = make_model()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    options: dict[str, Any] = {"micro_batch_tokens": 64, "batching": "padded", "pad_id": PAD, "device": "cpu"}
    first = sum_held_out_nats(model, table, range(10), **options)
    assert sum_held_out_nats(model, table, range(10), **options).nats == first.nats


def test_rows_without_supervised_tokens_are_left_out(write_table: WriteTable) -> None:
    table = write_table([([9, 10, 11], []), ([9, 10, 11], [(2, 3)])])
    loss = sum_held_out_nats(
        make_model(), table, [0, 1], micro_batch_tokens=8, batching="padded", pad_id=PAD, device="cpu"
    )
    assert (loss.num_rows, loss.num_tokens) == (1, 1)
    nothing = sum_held_out_nats(
        make_model(), table, [0], micro_batch_tokens=8, batching="padded", pad_id=PAD, device="cpu"
    )
    assert (nothing.nats, nothing.num_rows, nothing.num_tokens) == (0.0, 0, 0)
    assert math.isnan(nothing.nats_per_token)


def test_progress_counts_every_row_once(table: TokenTable) -> None:
    seen: list[tuple[str, int, int | None, str]] = []
    sum_held_out_nats(
        make_model(),
        table,
        range(10),
        micro_batch_tokens=64,
        batching="padded",
        pad_id=PAD,
        device="cpu",
        on_progress=lambda *event: seen.append(event),
        label="Scoring",
    )
    assert seen[0] == ("Scoring", 0, 10, "rows")
    assert seen[-1] == ("Scoring", 10, 10, "rows")
    assert [event[1] for event in seen] == sorted({event[1] for event in seen})


def test_perplexity_beyond_a_float_is_infinite() -> None:
    assert HeldOutLoss(nats=10_000.0, num_tokens=1, num_rows=1).perplexity == math.inf


@pytest.mark.parametrize(("num_rows", "max_rows"), [(10, None), (10, 10), (10, 99), (0, 5), (0, None)])
def test_choose_rows_takes_all_when_there_are_few(num_rows: int, max_rows: int | None) -> None:
    assert choose_rows(num_rows, max_rows, seed=1).tolist() == list(range(num_rows))


def test_choose_rows_is_spread_and_depends_on_the_seed_alone() -> None:
    rows = choose_rows(1003, 50, seed=7)
    assert rows.tolist() == choose_rows(1003, 50, seed=7).tolist()
    assert rows.tolist() != choose_rows(1003, 50, seed=8).tolist()
    assert len(set(rows.tolist())) == 50
    assert rows.min() < 21
    assert rows.max() >= 1003 - 21
    assert np.diff(rows).max() <= 2 * 21
    assert choose_rows(10, 0, seed=1).tolist() == []


def test_auto_batch_is_bounded_by_the_logits(write_table: WriteTable, tmp_path: Path) -> None:
    full = write_table([([9] * 256, [(1, 256)])], tmp_path / "full.arrow")
    answer = write_table([([9] * 256, [(224, 256)])], tmp_path / "answer.arrow")
    small = choose_micro_batch_tokens(full, vocab_size=32_000, on_gpu=False, memory_bytes=None)
    assert 512 <= small < 1024
    assert small < choose_micro_batch_tokens(answer, vocab_size=32_000, on_gpu=False, memory_bytes=None) <= 4096
    assert choose_micro_batch_tokens(full, vocab_size=150_000, on_gpu=False, memory_bytes=None) == 256
    assert choose_micro_batch_tokens(full, vocab_size=150_000, on_gpu=True, memory_bytes=80 * 2**30) > 2048


def test_never_holds_the_logits_of_all_rows(write_table: WriteTable) -> None:
    """All logits would take 500 MB here: 64 rows of 64 tokens with 32,000 words."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32_000, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    random = np.random.default_rng(0)
    rows = [(random.integers(0, 32_000, 64).tolist(), [(0, 64)]) for _ in range(64)]
    table = write_table(rows)
    options: dict[str, Any] = {"micro_batch_tokens": 256, "batching": "padded", "pad_id": 0, "device": "cpu"}
    sum_held_out_nats(model, table, range(4), **options)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    loss = sum_held_out_nats(model, table, range(64), **options)

    growth_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert loss.num_tokens == 64 * 63
    assert growth_bytes < 100 * 2**20
