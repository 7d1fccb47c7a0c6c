"""The default model as a classifier of 77 intents: how its first step is split changes nothing."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path

import pytest

from lm_tuning.models.base_model import EMBEDDED_MODEL, is_converted
from lm_tuning.text.store.table import TokenTableWriter
from lm_tuning.training.run import TrainingPaths, run_training
from tests.support.real_tokenizer import real_tokenizer
from tests.support.settings import make_settings

REPOSITORY = Path(__file__).parents[2]
NUM_ROWS = 32


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, int]:
    """Write the first rows of BANKING77 as tokens and return its label map."""
    data = Path(os.environ.get("LM_TUNING_TEST_DATA", REPOSITORY / "../shared/data")) / "banking77" / "train.csv"
    if not data.is_file():
        pytest.skip(f"no {data}; LM_TUNING_TEST_DATA names the folder")
    with data.open(newline="", encoding="utf-8") as file:
        examples = list(csv.DictReader(file))
    names = sorted({row["category"] for row in examples})
    tokenizer = real_tokenizer()
    for split, chosen in (("train", examples[:: len(examples) // NUM_ROWS][:NUM_ROWS]), ("validation", [])):
        with TokenTableWriter(tmp_path / f"{split}.arrow") as writer:
            for number, row in enumerate(chosen, 1):
                writer.append(number, tokenizer(row["text"]).input_ids, [], label=names.index(row["category"]))
    return {name: position for position, name in enumerate(names)}


@pytest.mark.slow
def test_the_first_loss_of_77_intents_is_chance_however_the_step_is_split(tmp_path: Path, rows: dict[str, int]) -> None:
    folder = REPOSITORY / EMBEDDED_MODEL
    if not is_converted(folder):
        pytest.skip(f"{folder} is not there yet: kedro run makes it")
    assert len(rows) == 77
    first = {}
    for micro_batch_tokens in (1000, 130, 37):
        settings = make_settings(
            folder,
            task="sequence_classification",
            label_map=rows,
            method="lora",
            lora={"r": 8, "alpha": 16, "dropout": 0.0, "target_modules": "all-linear"},
            learning_rate=1e-4,
            effective_batch_rows=NUM_ROWS,
            max_steps=1,
            batching="packed",
            micro_batch_tokens=micro_batch_tokens,
            trainer={},
        )
        result = run_training(TrainingPaths(tmp_path, tmp_path / "runs"), settings)
        facts, cut = result.health["facts"], result.efficiency[0]["num_micro_batches"]
        first[cut] = result.steps[0]["loss_nats_per_row"]
        assert first[cut] == pytest.approx(facts["first_step_measured_nats_per_row"], rel=1e-5)
        assert [finding for finding in result.health["findings"] if finding["severity"] != "note"] == []
    print(first)  # noqa: T201 - the figures for the log
    assert list(first) == [1, 4, 12]
    assert max(first.values()) == pytest.approx(min(first.values()), rel=1e-5)
    assert first[1] == pytest.approx(math.log(77), rel=0.03)
