"""A model is compared with the best earlier one on the same data, row by row, and with nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from lm_tuning.evaluation.statistics import earlier_runs
from lm_tuning.evaluation.statistics.earlier_runs import (
    RunName,
    compare_with_best,
    history_folder,
    keep_run,
    write_earlier,
)
from lm_tuning.evaluation.statistics.outcomes import judge_scores
from lm_tuning.evaluation.statistics.scored_rows import ScoredRows, mean_of_rows

ROWS = np.arange(100, 160)
VALUES = np.random.default_rng(0).beta(2, 4, 60)


def score(gain: float, *, rows: slice = slice(None), signature: str = "v1", lower: bool = False) -> ScoredRows:
    noise = np.random.default_rng(round(abs(gain) * 1000)).normal(0, 0.02, 60)
    return mean_of_rows(
        "rouge_l",
        (VALUES + gain + noise)[rows],
        ROWS[rows],
        signature=signature,
        title="ROUGE-L",
        higher_is_better=not lower,
    )


def run(output: str, digest: str) -> RunName:
    return {"output": output, "date": "2026-11-30T10:00:00+00:00", "model_digest": digest, "mlflow_run_id": None}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return history_folder(tmp_path, tokens_key="key1", split="test")


def keep(folder: Path, **gains: float) -> None:
    for name, gain in gains.items():
        keep_run(folder, run(name, f"digest-{name}"), {"rouge_l": score(gain)})


def test_the_best_earlier_model_is_the_one_to_beat(folder: Path) -> None:
    keep(folder, weak=0.0, strong=0.2, middle=0.1)
    present = score(0.3)
    found = compare_with_best(folder, present, model_digest="new", seed=1)
    assert found is not None
    assert (found["output"], found["num_earlier"], found["num_rows"]) == ("strong", 3, 60)
    assert (found["outcome"], found["present"]) == ("better", pytest.approx(present.value))
    assert found["difference"]["value"] == pytest.approx(0.1, abs=0.02)
    (record,) = judge_scores({"rouge_l": (score(0.0), present)}, seed=1)
    assert write_earlier(found, record).startswith(
        "Against the best of 3 earlier models on this data, output strong of 2026-11-30 10:00: better by 0."
    )
    worse = compare_with_best(folder, score(-0.1), model_digest="new", seed=1)
    assert worse is not None and worse["outcome"] == "worse"


def test_the_lowest_loss_is_the_best(folder: Path) -> None:
    for name, gain in (("high", 0.2), ("low", 0.0)):
        keep_run(folder, run(name, name), {"rouge_l": score(gain, lower=True)})
    found = compare_with_best(folder, score(0.1, lower=True), model_digest="new", seed=1)
    assert found is not None
    assert (found["output"], found["outcome"]) == ("low", "worse")


def test_a_model_is_not_compared_with_itself(folder: Path) -> None:
    keep(folder, mine=0.2)
    assert compare_with_best(folder, score(0.2), model_digest="digest-mine", seed=1) is None
    keep(folder, mine=0.2)
    assert len(list(folder.iterdir())) == 1, "evaluated again, it is kept once"


def test_only_the_same_score_on_the_same_data_counts(folder: Path, tmp_path: Path) -> None:
    keep(folder, earlier=0.1)
    assert compare_with_best(folder, score(0.2, signature="v2"), model_digest="new", seed=1) is None
    for other in ({"tokens_key": "key2", "split": "test"}, {"tokens_key": "key1", "split": "validation"}):
        assert compare_with_best(history_folder(tmp_path, **other), score(0.2), model_digest="new", seed=1) is None


def test_rows_that_both_have_are_compared(folder: Path) -> None:
    keep_run(folder, run("part", "part"), {"rouge_l": score(0.0, rows=slice(0, 40))})
    present = score(0.2, rows=slice(25, 60))
    found = compare_with_best(folder, present, model_digest="new", seed=1)
    assert found is not None
    assert found["num_rows"] == 15
    assert found["earlier"] == pytest.approx(score(0.0, rows=slice(25, 40)).value)
    assert found["present"] == pytest.approx(score(0.2, rows=slice(25, 40)).value)
    assert compare_with_best(folder, score(0.2, rows=slice(35, 60)), model_digest="new", seed=1) is None, "5 rows"


def test_a_damaged_file_costs_a_comparison_and_no_evaluation(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep(folder, whole=0.0)
    (folder / "damaged.npz").write_bytes(b"PK\x03\x04 half")
    (folder / "empty.npz").write_bytes(b"")
    found = compare_with_best(folder, score(0.2), model_digest="new", seed=1)
    assert found is not None and found["output"] == "whole"
    assert caplog.text.count("Scores of an earlier run cannot be read") == 2


def test_a_wrong_byte_costs_no_evaluation_wherever_it_is(folder: Path) -> None:
    keep(folder, whole=0.0)
    (path,) = folder.iterdir()
    content = path.read_bytes()
    for index in range(0, len(content), 7):
        path.write_bytes(content[:index] + bytes([content[index] ^ 255]) + content[index + 1 :])
        compare_with_best(folder, score(0.2), model_digest="new", seed=1)


def test_a_folder_that_another_run_removes_meanwhile_is_no_failure(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(folder, first=0.0)
    gone = folder.parent / "gone-test"
    plain = Path.glob
    monkeypatch.setattr(
        Path, "glob", lambda self, pattern: [*plain(self, pattern), *([gone] if self != folder else [])]
    )
    keep(folder, second=0.1)
    assert len(list(folder.iterdir())) == 2


def test_the_store_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier_runs, "MAX_MODELS", 2)
    monkeypatch.setattr(earlier_runs, "MAX_DATA", 2)
    folders = [history_folder(tmp_path, tokens_key=f"key{number}", split="test") for number in range(3)]
    for time, (number, name) in enumerate([(0, "a"), (0, "b"), (0, "c"), (1, "a"), (2, "a")]):
        keep(folders[number], **{name: 0.1})
        for path in (folders[number] / f"digest-{name}.npz", folders[number]):
            os.utime(path, (1000 + time, 1000 + time))
    assert not folders[0].exists()
    assert [len(list(folder.iterdir())) for folder in folders[1:]] == [1, 1]
    for name in ("d", "e"):
        keep(folders[2], **{name: 0.1})
    assert len(list(folders[2].iterdir())) == 2


def test_scores_that_are_too_large_to_keep_are_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier_runs, "MAX_CELLS", 100)
    keep(folder, large=0.1)
    assert compare_with_best(folder, score(0.2), model_digest="new", seed=1) is None
