"""An encoder-decoder is compared with its base by the loss of its targets and by the answers that beams find."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.evaluation.report import describe_outcome
from lm_tuning.evaluation.results import Comparison, evaluate_models
from lm_tuning.storage.folders import FolderStore
from tests.evaluation.reports import as_markdown
from tests.support.rounding import SAME_LOSS
from tests.support.stored import evaluation_settings
from tests.support.tiny_tasks import make_seq2seq, save_base, save_tuned_task, write_pairs

PAIRS = [(f"the number {number} and {'more ' * (number % 4)}", f"it is {number}") for number in range(9)]
NUM_TOKENS = sum(len(target) + 1 for _, target in PAIRS)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    store = FolderStore(tmp_path / "tokens")
    staged = store.stage("key1")
    for split, rows in (("train", PAIRS), ("validation", []), ("test", PAIRS)):
        write_pairs(rows, staged.path / f"{split}.arrow")
    return store.publish(staged)


@pytest.fixture
def tuned(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    method = getattr(request, "param", "full")
    base = save_base(make_seq2seq(), tmp_path / "base")
    model = make_seq2seq(seed=0 if method == "lora" else 1)
    return save_tuned_task(tmp_path / "tuned", base, model, method, "seq2seq_lm", tokens_key="key1")


def compare(tuned: Path, tokens: Path, cache: Path, **changes: Any) -> Comparison:
    settings = {
        "num_generate_rows": 4,
        "max_new_tokens": 8,
        "num_beams": 2,
        "num_samples": 2,
        **changes,
    }
    return evaluate_models(tuned, tokens, FolderStore(cache), evaluation_settings(**settings))


@pytest.mark.parametrize("tuned", ["lora", "full"], indirect=True)
def test_base_and_tuned_are_measured_on_the_targets(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    compared = compare(tuned, tokens, tmp_path / "cache")
    result = compared.result
    assert (result["task"], result["split"], result["num_rows"]) == ("seq2seq_lm", "test", 9)
    assert result["generation"] == "beam search with 2 beams"
    for name in ("base", "tuned"):
        assert result[name]["num_tokens"] == NUM_TOKENS
        assert result[name]["perplexity"] == pytest.approx(math.exp(result[name]["nats_per_token"]), rel=1e-6)
        assert result[name]["num_generated"] == 4
        assert 0 <= result[name]["rouge_l"] <= 1
    assert result["base"]["nats_per_token"] != pytest.approx(result["tuned"]["nats_per_token"], rel=1e-3)
    assert result["warnings"] == []
    for row in compared.answers:
        source, target = PAIRS[row["row_id"] - 100]
        assert (row["prompt"], row["reference"]) == (source, target)
    assert result["num_split_rows"] == 9
    json.dumps(result, allow_nan=False)
    sentence = f"Test split: 9 rows, {NUM_TOKENS} target tokens, 4 answers of each model by beam search with 2 beams"
    assert describe_outcome(result).startswith(sentence)
    assert sentence in as_markdown(result)


@pytest.mark.parametrize("tuned", ["lora"], indirect=True)
def test_figures_do_not_depend_on_the_batch_and_the_base_is_reused(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    cache = FolderStore(tmp_path / "cache")
    first = compare(tuned, tokens, cache.root)
    cache.publish(first.base_evaluation)
    second = compare(tuned, tokens, cache.root, micro_batch_tokens=1, generate_batch_rows=1)
    assert isinstance(second.base_evaluation, Path)
    assert second.result["base"] == first.result["base"]
    assert second.answers == first.answers
    before, after = (compared.result["tuned"]["nats_per_token"] for compared in (first, second))
    assert after == pytest.approx(before, rel=SAME_LOSS)


def test_beams_change_the_answers_and_not_the_loss(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    beams = compare(tuned, tokens, tmp_path / "cache", num_generate_rows=9, num_beams=4)
    greedy = compare(tuned, tokens, tmp_path / "cache", num_generate_rows=9, num_beams=1)
    assert greedy.result["generation"] == "greedy"
    assert greedy.result["tuned"]["nats_per_token"] == beams.result["tuned"]["nats_per_token"]
    assert [row["tuned"] for row in greedy.answers] != [row["tuned"] for row in beams.answers]
