"""A classifier whose weights are damaged is told by row, and predicts nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lm_tuning.classifying import run
from lm_tuning.errors import UserError
from lm_tuning.parameters import Parameters
from tests.support.tiny_tasks import LABEL_MAP, make_classifier, save_base, save_tuned_task


def test_weights_that_are_no_numbers_are_told_by_row(tmp_path: Path) -> None:
    base = save_base(make_classifier(), tmp_path / "base")
    model = make_classifier(seed=1)
    with torch.no_grad():
        model.score.weight.fill_(torch.nan)
    tuned = save_tuned_task(
        tmp_path / "tuned", base, model, "full", "sequence_classification", tokens_key="k", label_map=LABEL_MAP
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "hello"}\n{"text": "a"}\n')
    parameters = Parameters(
        task="sequence_classification",
        predict={"path": str(rows)},
        model={"dtype": "float32"},
        data={"path": "r.jsonl"},
    )
    settings = run.PredictSettings.choose(
        tuned,
        parameters.predict,
        parameters.data,
        parameters.tokenize,
        evaluate=parameters.evaluate,
        model=parameters.model,
        environment=parameters.environment,
        seed=1,
    )
    (tmp_path / "work").mkdir()
    with pytest.raises(UserError, match=r"gives row [12] of .*rows\.jsonl no number as its probability"):
        run.predict_rows(tuned, tmp_path / "work", settings)
