"""Packed rows do not see each other."""

from __future__ import annotations

from pathlib import Path

import torch

from lm_tuning.batching.tasks.registry import get_task
from lm_tuning.text.store.table import TokenTable, TokenTableWriter
from tests.support.tiny import make_model


def test_logits_of_packed_rows_are_those_of_each_row_alone(tmp_path: Path) -> None:
    rows = [[1, 5, 6, 2], [1, 9, 2]]
    with TokenTableWriter(tmp_path / "train.arrow") as writer:
        for row_id, ids in enumerate(rows, 1):
            writer.append(row_id, ids, [(0, len(ids))])
    batch = get_task("causal_lm", pad_id=2).lay_out(TokenTable(tmp_path / "train.arrow"), [0, 1], batching="packed")
    assert batch.input_ids.shape == (1, 7)
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert batch.num_supervised == 5, "the second row's first token is nobody's answer"
    model = make_model().eval()
    with torch.no_grad():
        packed = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits[0]
        alone = [model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in rows]
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-5, rtol=1e-5)
