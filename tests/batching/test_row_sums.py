"""Each row's part of a held-out loss is its own, however rows share a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm_tuning.batching import losses
from lm_tuning.batching.head_loss import choose_head_loss
from lm_tuning.batching.held_out_loss import HeldOut, measure_held_out
from lm_tuning.batching.row_sums import RowSums
from lm_tuning.batching.tasks.registry import task_of
from lm_tuning.text.store.table import TokenTable
from tests.support.rounding import SAME_LOSS
from tests.support.tiny import END, PAD, VOCABULARY, make_model
from tests.support.tiny_tasks import make_classifier, make_seq2seq, write_labelled, write_pairs

WriteTable = Callable[..., TokenTable]

# In another order than the rows lie in, with one twice, and one that has nothing supervised.
ASKED = [7, 0, 3, 3, 9, 10, 5]
SCORED = [7, 0, 3, 3, 9, 5]


@pytest.fixture
def table(write_table: WriteTable) -> TokenTable:
    random = np.random.default_rng(0)
    rows: list[Any] = []
    model = make_model()
    for length in (5, 40, 9, 17, 3, 60, 22, 22, 8, 31):
        ids = random.integers(8, len(VOCABULARY), length).tolist()
        # Every other token is the one that the model expects, so that some are right.
        for position in range(2, length - 1, 2):
            with torch.no_grad():
                ids[position] = int(model(torch.tensor([ids[:position]])).logits[0, -1].argmax())
        ids[-1] = END
        rows.append((ids, [(4, 7), (length - 5, length)] if length > 15 else [(0, length)]))
    return write_table([*rows, ([9, 10], [])])


def by_hand(model: Any, table: TokenTable, index: int) -> tuple[float, int, int]:
    """Return nats, tokens and right tokens of one row, a token at a time."""
    row = table[index]
    with torch.no_grad():
        logits = model(torch.tensor(row.input_ids.astype(np.int64))[None]).logits[0].double()
    nats, count, right = 0.0, 0, 0
    for start, end in row.spans:
        for position in range(start, end):
            token = int(row.input_ids[position])
            nats -= float(torch.log_softmax(logits[position - 1], -1)[token])
            right += int(logits[position - 1].argmax()) == token
            count += 1
    return nats, count, right


def measure(model: Any, table: TokenTable, rows: Any, task: Any, **changes: Any) -> tuple[HeldOut, RowSums]:
    options: dict[str, Any] = {"micro_batch_tokens": 64, "device": "cpu", "keeps_rows": True, **changes}
    found = measure_held_out(task, model, table, rows, **options)
    assert found.by_row is not None
    return found, found.by_row


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("batching", ["packed", "padded"])
@pytest.mark.parametrize("micro_batch_tokens", [1, 64, 100_000])
def test_rows_have_the_sums_that_they_have_alone(
    table: TokenTable, batching: str, micro_batch_tokens: int, chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    task = task_of(model, "causal_lm", pad_id=PAD)
    if chunked:
        monkeypatch.setattr(losses, "chunk_positions", lambda *_, **__: 3)
        task.head_loss, _ = choose_head_loss(model, table[0].input_ids, device="cpu", compute_dtype="float32")
        assert task.head_loss is not None
    found, rows = measure(model, table, ASKED, task, batching=batching, micro_batch_tokens=micro_batch_tokens)
    wanted = [by_hand(model, table, index) for index in SCORED]
    assert rows.rows.tolist() == SCORED
    assert rows.nats.tolist() == pytest.approx([nats for nats, _, _ in wanted], rel=SAME_LOSS)
    assert rows.num_supervised.tolist() == [count for _, count, _ in wanted]
    assert rows.num_right.tolist() == [right for _, _, right in wanted]
    assert sum(rows.num_right) > 0
    # Added up they are the loss, to the last digit.
    assert found.loss.nats == float(rows.nats.sum())
    assert found.loss.num_supervised == rows.num_supervised.sum()


def test_keeping_rows_changes_no_figure(table: TokenTable) -> None:
    model = make_model()
    task = task_of(model, "causal_lm", pad_id=PAD)
    kept, rows = measure(model, table, range(10), task, counts_hits=True)
    plain = measure_held_out(task, model, table, range(10), micro_batch_tokens=64, device="cpu", counts_hits=True)
    assert plain.by_row is None
    assert kept.loss.nats == pytest.approx(plain.loss.nats, rel=SAME_LOSS)
    assert kept.metrics == plain.metrics
    assert rows.num_right.sum() / rows.num_supervised.sum() == kept.metrics["token_accuracy"]


def test_rows_of_an_encoder_decoder(tmp_path: Path) -> None:
    model = make_seq2seq()
    pairs = [("what is 2?", "two"), ("a", "a longer target than its source"), ("b?", "no")]
    table = write_pairs(pairs, tmp_path / "pairs.arrow")
    task = task_of(model, "seq2seq_lm", pad_id=PAD)
    _, together = measure(model, table, range(3), task, micro_batch_tokens=1000)
    alone = [measure(model, table, [index], task)[1] for index in range(3)]
    assert together.nats.tolist() == pytest.approx([float(row.nats[0]) for row in alone], rel=SAME_LOSS)
    assert together.num_right.tolist() == [int(row.num_right[0]) for row in alone]
    # The end is supervised too.
    assert together.num_supervised.tolist() == [len(target) + 1 for _, target in pairs]


def test_rows_of_a_classifier(tmp_path: Path) -> None:
    model = make_classifier()
    table = write_labelled([([9, 10, 11], 0), ([12], 1), ([13, 14], 2), ([15] * 9, 1)], tmp_path / "rows.arrow")
    task = task_of(model, "sequence_classification", pad_id=PAD)
    found, rows = measure(model, table, range(4), task, batching="packed")
    assert found.predictions is not None
    assert rows.num_supervised.tolist() == [1] * 4
    assert rows.num_right.tolist() == (found.predictions.classes == table.labels).astype(int).tolist()
    with torch.no_grad():
        logits = [model(torch.tensor(row.input_ids.astype(np.int64))[None]).logits[0].double() for row in table]
    wanted = [-float(torch.log_softmax(each, -1)[label]) for each, label in zip(logits, table.labels, strict=True)]
    assert rows.nats.tolist() == pytest.approx(wanted, rel=SAME_LOSS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_packed_rows_on_a_gpu_are_summed_the_same_each_time(table: TokenTable) -> None:
    model = make_model().cuda()
    task = task_of(model, "causal_lm", pad_id=PAD)
    first, again = (
        measure(model, table, range(10), task, batching="packed", device="cuda", micro_batch_tokens=1000)[1]
        for _ in range(2)
    )
    padded = measure(model, table, range(10), task, batching="padded", device="cuda")[1]
    assert first.nats.tolist() == again.nats.tolist()
    assert first.nats.tolist() == pytest.approx(padded.nats.tolist(), rel=1e-3)
    assert first.num_supervised.tolist() == padded.num_supervised.tolist()
