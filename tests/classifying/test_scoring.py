"""Every row gets the probabilities that it has alone, however rows are batched, and in the order of the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm_tuning.batching import packed_attention
from lm_tuning.classifying.scoring import score_rows
from lm_tuning.text.store.table import TokenTable
from tests.support.rounding import SAME_LOSS
from tests.support.stored import evaluation_settings
from tests.support.tiny import PAD, ids
from tests.support.tiny_tasks import make_classifier, write_labelled

TEXTS = [f"text {'and more ' * (number % 7)}{number}" for number in range(40)]


@pytest.fixture
def table(tmp_path: Path) -> TokenTable:
    # Rows without a class, as those of a prediction are.
    return write_labelled([(ids(text), -1) for text in TEXTS], tmp_path / "rows.arrow")


@pytest.fixture(scope="module")
def model() -> Any:
    return make_classifier()


def alone(model: Any, text: str) -> list[float]:
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids(text)])).last_hidden_state
        scores: list[float] = torch.softmax(model.score(hidden[0, -1]), -1).tolist()
    return scores


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", [1, 100, 10_000])
def test_rows_have_the_scores_that_they_have_alone(
    table: TokenTable, model: Any, packed: bool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if packed:
        # By the mask, where no kernel is: which rows see each other is the same.
        monkeypatch.setattr(packed_attention, "runs_in_kernel", lambda *given, **options: True)
    rows = np.array([0, 3, 4, *range(10, 40)])
    settings = evaluation_settings(micro_batch_tokens=tokens)
    found = list(score_rows(model, table, rows, settings, pad_id=PAD, num_classes=4))
    assert np.concatenate([indices for indices, _ in found]).tolist() == rows.tolist()
    assert (len(found) > 1) is (tokens < 10_000)
    scores = np.concatenate([probabilities for _, probabilities in found])
    wanted = [alone(model, TEXTS[row]) for row in rows]
    assert scores == pytest.approx(np.array(wanted), rel=SAME_LOSS, abs=1e-6)
    assert model.training is False
