"""Held-out figures are sums over what is supervised that do not depend on how rows are batched."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm_tuning.batching import losses as linear_loss
from lm_tuning.batching.head_loss import choose_head_loss
from lm_tuning.batching.held_out_loss import (
    HeldOut,
    HeldOutLoss,
    choose_micro_batch_tokens,
    choose_rows,
    measure_held_out,
)
from lm_tuning.batching.tasks.registry import task_of
from lm_tuning.text.store.table import TokenTable
from tests.support.rounding import SAME_LOSS
from tests.support.tiny import END, PAD, VOCABULARY, make_model
from tests.support.tiny_tasks import make_classifier, make_seq2seq, write_labelled, write_pairs

WriteTable = Callable[..., TokenTable]


def measure(model: Any, table: TokenTable, rows: Any, task: str = "causal_lm", **changes: Any) -> HeldOut:
    options: dict[str, Any] = {"micro_batch_tokens": 64, "batching": "padded", "device": "cpu", **changes}
    return measure_held_out(task_of(model, task, pad_id=PAD), model, table, rows, **options)


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

    held_out = measure(model, table, range(len(table)), micro_batch_tokens=micro_batch_tokens, batching=batching)

    loss = held_out.loss
    assert (loss.num_supervised, loss.num_rows, loss.unit) == (num_tokens, 10, "token")
    assert num_tokens == 6 * (3 + 5) + (4 + 8 + 2 + 7)
    assert loss.nats == pytest.approx(nats, rel=SAME_LOSS)
    assert loss.mean_nats == pytest.approx(nats / num_tokens, rel=SAME_LOSS)
    assert math.log(loss.perplexity) == pytest.approx(nats / num_tokens, rel=SAME_LOSS)
    assert held_out.figures == {"nats_per_token": loss.mean_nats}
    assert held_out.predictions is None


def test_a_uniform_model_loses_the_log_of_its_vocabulary(table: TokenTable) -> None:
    model = make_model(tied=False)
    torch.nn.init.zeros_(model.lm_head.weight)

    loss = measure(model, table, [0, 1]).loss

    assert loss.mean_nats == pytest.approx(math.log(len(VOCABULARY)), rel=SAME_LOSS)
    assert math.log(loss.perplexity) == pytest.approx(math.log(len(VOCABULARY)), rel=SAME_LOSS)


def test_weighs_tokens_rather_than_batches() -> None:
    parts = [HeldOutLoss(8 * 1.0, 8, 1), HeldOutLoss(2 * 3.0, 2, 1)]
    whole = HeldOutLoss(sum(part.nats for part in parts), sum(part.num_supervised for part in parts), 2)
    assert whole.mean_nats == pytest.approx(1.4)


def test_gives_the_model_back_in_the_mode_it_had(table: TokenTable) -> None:
    model = make_model()
    model.train()
    model.model.layers[0].eval()
    before = {name: module.training for name, module in model.named_modules()}

    measure(model, table, [0], batching="packed")

    assert {name: module.training for name, module in model.named_modules()} == before
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_dropout_is_off_while_evaluating(table: TokenTable) -> None:
    model = make_model()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    first = measure(model, table, range(10)).loss
    assert measure(model, table, range(10)).loss.nats == first.nats


def test_rows_without_supervised_tokens_are_left_out(write_table: WriteTable) -> None:
    table = write_table([([9, 10, 11], []), ([9, 10, 11], [(2, 3)])])
    loss = measure(make_model(), table, [0, 1]).loss
    assert (loss.num_rows, loss.num_supervised) == (1, 1)
    nothing = measure(make_model(), table, [0]).loss
    assert (nothing.nats, nothing.num_rows, nothing.num_supervised) == (0.0, 0, 0)
    assert math.isnan(nothing.mean_nats)


def test_progress_counts_every_row_once(table: TokenTable) -> None:
    seen: list[tuple[str, int, int | None, str]] = []
    measure(make_model(), table, range(10), on_progress=lambda *event: seen.append(event), label="Scoring")
    assert seen[0] == ("Scoring", 0, 10, "rows")
    assert seen[-1] == ("Scoring", 10, 10, "rows")
    assert [event[1] for event in seen] == sorted({event[1] for event in seen})


def test_perplexity_beyond_a_float_is_infinite() -> None:
    assert HeldOutLoss(nats=10_000.0, num_supervised=1, num_rows=1).perplexity == math.inf


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
    small = choose_micro_batch_tokens(full, num_classes=32_000, on_gpu=False, memory_bytes=None)
    assert 512 <= small < 1024
    assert small < choose_micro_batch_tokens(answer, num_classes=32_000, on_gpu=False, memory_bytes=None) <= 4096
    assert choose_micro_batch_tokens(full, num_classes=150_000, on_gpu=False, memory_bytes=None) == 256
    assert choose_micro_batch_tokens(full, num_classes=150_000, on_gpu=True, memory_bytes=80 * 2**30) > 2048


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
    measure(model, table, range(4), micro_batch_tokens=256)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    loss = measure(model, table, range(64), micro_batch_tokens=256).loss

    growth_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert loss.num_supervised == 64 * 63
    assert growth_bytes < 100 * 2**20


LABELS = [0, 3, 1, 2, 2, 0, 1]


@pytest.fixture
def labelled(tmp_path: Path) -> TokenTable:
    """Texts of unequal length; the third ends in the token that is also the padding."""
    random = np.random.default_rng(2)
    texts = [random.integers(8, len(VOCABULARY), length).tolist() for length in (5, 30, 9, 17, 3, 17, 1)]
    texts[2][-1] = PAD
    return write_labelled(list(zip(texts, LABELS, strict=True)), tmp_path / "test.arrow")


def classes_by_hand(model: Any, table: TokenTable) -> Any:
    """Return the log-probabilities of each row's classes, the row alone, from its last token."""
    rows = []
    for row in table:
        with torch.no_grad():
            hidden = model.model(torch.tensor(row.input_ids.astype(np.int64))[None]).last_hidden_state
            rows.append(torch.log_softmax(model.score(hidden[0, -1]).double(), -1))
    return torch.stack(rows)


@pytest.mark.parametrize("batching", ["packed", "padded"])
@pytest.mark.parametrize("micro_batch_tokens", [1, 3 * 17, 100_000])
def test_a_classifier_is_measured_as_by_hand_whatever_the_batch(
    labelled: TokenTable, batching: Any, micro_batch_tokens: int
) -> None:
    model = make_classifier()
    rows = [6, 0, 5, 1, 2, 4, 3]  # not in their order, and not in that of their lengths
    log_probabilities = classes_by_hand(model, labelled)[rows]
    references = np.array(LABELS)[rows]
    chosen = log_probabilities.argmax(-1).tolist()
    assert len(set(chosen)) > 1, "the classes must differ for this to prove anything"

    held_out = measure(
        model,
        labelled,
        rows,
        "sequence_classification",
        batching=batching,
        micro_batch_tokens=micro_batch_tokens,
    )

    nats = -float(log_probabilities[range(7), references.tolist()].sum())
    assert held_out.loss.nats == pytest.approx(nats, rel=SAME_LOSS)
    assert (held_out.loss.num_supervised, held_out.loss.num_rows, held_out.loss.unit) == (7, 7, "row")
    assert held_out.predictions is not None
    assert held_out.predictions.rows.tolist() == rows
    assert held_out.predictions.classes.tolist() == chosen
    expected = log_probabilities.max(-1).values.exp().tolist()
    assert held_out.predictions.probabilities.tolist() == pytest.approx(expected, rel=SAME_LOSS)
    assert list(held_out.figures) == ["nats_per_row", "accuracy", "macro_f1"]
    assert held_out.figures["nats_per_row"] == pytest.approx(nats / 7, rel=SAME_LOSS)
    right = [int(one == other) for one, other in zip(chosen, references, strict=True)]
    assert held_out.metrics["accuracy"] == pytest.approx(sum(right) / 7)


def test_accuracy_and_macro_f1_are_those_of_all_rows_together(labelled: TokenTable) -> None:
    """A head of zeros says class 0 each time: two of seven rows are right, and all four classes occur."""
    model = make_classifier()
    torch.nn.init.zeros_(model.score.weight)
    held_out = measure(model, labelled, range(7), "sequence_classification", micro_batch_tokens=1)
    assert held_out.loss.mean_nats == pytest.approx(math.log(4), rel=SAME_LOSS)
    assert held_out.predictions is not None
    assert held_out.predictions.classes.tolist() == [0] * 7
    assert held_out.metrics["accuracy"] == pytest.approx(2 / 7)
    assert held_out.metrics["macro_f1"] == pytest.approx((2 * 2 / (2 + 7)) / 4)


def test_no_rows_to_classify_give_no_numbers(labelled: TokenTable) -> None:
    held_out = measure(make_classifier(), labelled, [], "sequence_classification")
    assert all(math.isnan(value) for value in held_out.figures.values())
    assert held_out.loss.num_rows == 0


@pytest.mark.parametrize("micro_batch_tokens", [1, 60, 100_000])
def test_an_encoder_decoder_is_measured_as_by_hand_whatever_the_batch(tmp_path: Path, micro_batch_tokens: int) -> None:
    pairs = [("a long source text", "short"), ("b", "a much longer target"), ("", "c"), ("the source", "")]
    table = write_pairs(pairs, tmp_path / "test.arrow")
    model = make_seq2seq()
    nats, num_tokens = 0.0, 0
    for row in table:
        [(start, _)] = row.spans
        source, target = (torch.tensor(part.astype(np.int64)) for part in np.split(row.input_ids, [start]))
        for position, token in enumerate(target.tolist()):
            given = torch.cat([torch.tensor([model.config.decoder_start_token_id]), target[:position]])
            with torch.no_grad():
                logits = model(input_ids=source[None], decoder_input_ids=given[None]).logits[0, -1].double()
            nats -= float(torch.log_softmax(logits, -1)[token])
            num_tokens += 1
    assert num_tokens == sum(len(target) + 1 for _, target in pairs)

    held_out = measure(model, table, range(4), "seq2seq_lm", micro_batch_tokens=micro_batch_tokens)

    assert (held_out.loss.num_supervised, held_out.loss.num_rows) == (num_tokens, 4)
    assert held_out.loss.nats == pytest.approx(nats, rel=SAME_LOSS)
    assert held_out.figures == {"nats_per_token": held_out.loss.mean_nats}


@pytest.mark.parametrize("chunked", [False, True])
def test_hits_are_those_of_the_models_own_logits(write_table: WriteTable, chunked: bool, monkeypatch: Any) -> None:
    model = make_model()
    rows = []
    for start in range(10, 30):
        ids = [start, start + 1]
        for rank in (0, 3, 20):  # the likeliest token, one of the five likeliest, and neither
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argsort(descending=True)[rank]))
        rows.append((ids, [(0, 5)]))
    table = write_table(rows)
    likeliest = among_five = count = 0
    for row in table:
        with torch.no_grad():
            logits = model(torch.tensor(row.input_ids.astype(np.int64))[None]).logits[0]
        for start, end in row.spans:
            for position in range(max(start, 1), end):
                order = logits[position - 1].argsort(descending=True)[:5].tolist()
                likeliest += order[0] == row.input_ids[position]
                among_five += int(row.input_ids[position]) in order
                count += 1
    assert 0 < likeliest < among_five < count, "else the test shows nothing"

    task = task_of(model, "causal_lm", pad_id=PAD)
    if chunked:
        monkeypatch.setattr(linear_loss, "chunk_positions", lambda *_, **__: 3)
        task.head_loss, _ = choose_head_loss(model, table[0].input_ids, device="cpu", compute_dtype="float32")
        assert task.head_loss is not None
    options: dict[str, Any] = {"micro_batch_tokens": 64, "device": "cpu", "counts_hits": True}
    held_out = measure_held_out(task, model, table, range(len(table)), **options)
    assert held_out.metrics == {"token_accuracy": likeliest / count, "top_5_accuracy": among_five / count}
    assert list(held_out.figures) == ["nats_per_token", "token_accuracy", "top_5_accuracy"]
