"""What an evaluation says beside the loss: bits per byte, token accuracy, scores by group, and what is missing."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lm_tuning.errors import UserError
from lm_tuning.evaluation import language
from lm_tuning.evaluation.results import Comparison, evaluate_models
from lm_tuning.models import loading
from lm_tuning.models.tuned import load_tuned
from lm_tuning.storage.folders import FolderStore, StagedFolder
from lm_tuning.text.store.origins import ORIGINS_NAME
from lm_tuning.text.store.table import TokenTable, open_split
from tests.evaluation.reports import as_markdown
from tests.support.rounding import SAME_LOSS
from tests.support.stored import chat_row, evaluation_settings, publish_tokens, save_tuned

ANSWERS = [f"it is {number} {'x' * (number % 7)}" for number in range(12)]
ROWS = [chat_row(f"what is {number}?", answer) for number, answer in enumerate(ANSWERS)]


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return publish_tokens(tmp_path / "tokens", "key1", test=ROWS)


@pytest.fixture
def tuned(tmp_path: Path, base_folder: Path) -> Path:
    return save_tuned(tmp_path / "tuned", base_folder, "lora", tokens_key="key1")


def compare(tuned: Path, tokens: Path, cache: Path, **changes: Any) -> Comparison:
    settings = {"num_generate_rows": 12, "max_new_tokens": 6, "num_samples": 2, **changes}
    return evaluate_models(tuned, tokens, FolderStore(cache), evaluation_settings(**settings))


def by_hand(model: Any, table: TokenTable) -> tuple[float, int]:
    """Return nats and right tokens of all rows, one row at a time."""
    nats, right = 0.0, 0
    for row in table:
        with torch.no_grad():
            logits = model(torch.tensor(row.input_ids.astype(np.int64))[None]).logits[0].double()
        for start, end in row.spans:
            wanted = torch.tensor(row.input_ids[start:end].astype(np.int64))
            predicted = torch.log_softmax(logits[start - 1 : end - 1], -1)
            nats -= float(predicted.gather(1, wanted[:, None]).sum())
            right += int((predicted.argmax(-1) == wanted).sum())
    return nats, right


def test_bits_per_byte_and_token_accuracy_are_as_by_hand(
    tuned: Path, tokens: Path, base_folder: Path, tmp_path: Path
) -> None:
    result = compare(tuned, tokens, tmp_path / "cache").result
    num_bytes = sum(len(answer) for answer in ANSWERS)
    for name, model in (("base", loading.load_model(str(base_folder))), ("tuned", load_tuned(tuned))):
        nats, right = by_hand(model, open_split(tokens, "test"))
        figures = result[name]  # type: ignore[literal-required]
        assert figures["num_bytes"] == num_bytes
        # The end of each answer is supervised, and is no text.
        assert figures["num_tokens"] == num_bytes + len(ANSWERS)
        assert figures["bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, rel=SAME_LOSS)
        assert figures["token_accuracy"] == pytest.approx(right / figures["num_tokens"])
    improvement = result["improvement"]
    assert improvement["bits_per_byte_fraction"] == pytest.approx(improvement["nats_per_token_fraction"])


def test_scores_come_first_and_then_the_loss_with_the_same_rows(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    names = ["chrf", "rouge_l", "exact_match"]
    compared = compare(tuned, tokens, tmp_path / "cache", scores={"names": names}, max_loss_rows=5)
    assert [*compared.scored] == [*names, "nats_per_token", "bits_per_byte", "token_accuracy"]
    for name, (base, after) in compared.scored.items():
        assert base.row_ids.tolist() == after.row_ids.tolist()
        assert base.num_rows == (12 if name in names else 5)
        assert base.signature == after.signature == compared.result["signatures"][name]  # type: ignore[typeddict-item]
        assert compared.result["base"][name] == base.value  # type: ignore[literal-required]
        assert compared.result["tuned"][name] == after.value  # type: ignore[literal-required]
    assert compared.result["improvement"]["chrf_difference"] == pytest.approx(  # type: ignore[typeddict-item]
        compared.scored["chrf"][1].value - compared.scored["chrf"][0].value
    )
    # What was not asked for is missing, and no zero.
    assert compared.result["base"]["rouge_1"] is None


def test_other_scores_take_the_same_stored_measurement(
    tuned: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = FolderStore(tmp_path / "cache")
    first = compare(tuned, tokens, cache.root, scores={"names": ["rouge_l"]})
    cache.publish(first.base_evaluation)
    measured: list[str] = []
    measure = language.measure_model
    monkeypatch.setattr(language, "measure_model", lambda *a, **kw: measured.append(kw["name"]) or measure(*a, **kw))
    second = compare(tuned, tokens, cache.root, scores={"names": ["bleu", "rouge_l"], "rouge_tokenizer": "characters"})
    assert measured == ["tuned model"]
    assert [*second.scored][:2] == ["bleu", "rouge_l"]
    for name in ("nats_per_token", "bits_per_byte", "token_accuracy"):
        before, again = first.scored[name][0], second.scored[name][0]
        assert again.statistics.tolist() == before.statistics.tolist()


def test_a_measurement_of_an_earlier_version_is_used_as_far_as_it_goes(
    tuned: Path, tokens: Path, tmp_path: Path
) -> None:
    cache = FolderStore(tmp_path / "cache")
    first = compare(tuned, tokens, cache.root)
    staged = first.base_evaluation
    assert isinstance(staged, StagedFolder)
    stored = json.loads((staged.path / "measurement.json").read_text())
    del stored["rows"]
    (staged.path / "measurement.json").write_text(json.dumps(stored))
    folder = cache.publish(staged)
    second = compare(tuned, tokens, cache.root)
    for name in ("nats_per_token", "bits_per_byte", "rouge_l"):
        assert second.result["base"][name] == first.result["base"][name]  # type: ignore[literal-required]
    assert second.result["base"]["token_accuracy"] is None
    assert "nats_per_token" not in second.scored
    assert any(str(folder) in warning and "Remove that folder" in warning for warning in second.result["warnings"])


def write_origins(tokens: Path, groups: list[str]) -> None:
    ids = open_split(tokens, "test").row_ids
    names = {
        "row_id": pa.array(ids),
        "row": pa.array(range(1, len(ids) + 1)),
        "file": pa.array(["one.jsonl"] * len(ids)).dictionary_encode(),
        "source": pa.array([None] * len(ids), pa.string()).dictionary_encode(),
        "group": pa.array(groups).dictionary_encode(),
    }
    table = pa.table(names).replace_schema_metadata({b"lm_tuning.group_column": b"book"})
    pq.write_table(table, tokens / ORIGINS_NAME)


def test_figures_by_group_are_those_of_its_rows_alone(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    write_origins(tokens, ["a|b", "c", "c"] * 4)
    compared = compare(tuned, tokens, tmp_path / "cache")
    result: Any = compared.result
    assert [(part["by"], part["name"], part["num_rows"]) for part in result["parts"]] == [
        ("group", "c", 8),
        ("group", "a|b", 4),
    ]
    alone = publish_tokens(tmp_path / "alone", "key1", test=ROWS[::3])
    wanted: Any = compare(tuned, alone, tmp_path / "other").result
    for model in ("base", "tuned"):
        for name, value in result["parts"][1][model].items():
            assert value == pytest.approx(wanted[model][name], rel=SAME_LOSS), name
    text = as_markdown(result)
    assert "By group 'book'" in text
    assert "a\\|b" in text


def test_one_group_is_the_whole_and_not_told_again(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    write_origins(tokens, ["a"] * 12)
    assert "parts" not in compare(tuned, tokens, tmp_path / "cache").result


def test_a_reference_without_the_pattern_is_refused_before_a_model_is_loaded(
    tuned: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_origins(tokens, ["a"] * 12)
    monkeypatch.setattr(language, "measure_model", lambda *_, **__: pytest.fail("a model was measured"))
    scores = {"names": ["exact_match"], "answer_pattern": "(x+)"}
    # Of the twelve answers, two have no x.
    with pytest.raises(UserError, match=r"2 held-out rows \(one.jsonl, row 1, one.jsonl, row 8\) have a reference"):
        compare(tuned, tokens, tmp_path / "cache", scores=scores)


def test_an_own_metric_that_fails_on_answers_is_said_and_all_else_is_there(
    tuned: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "def score(references, answers, rows):\n    return [1 / (r == a) for r, a in zip(references, answers)]\n"
    (tmp_path / "planted_failing.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    result: Any = compare(tuned, tokens, tmp_path / "cache", scores={"own_metrics": ["planted_failing.score"]}).result
    sys.modules.pop("planted_failing")
    assert "raised ZeroDivisionError" in result["failed_scores"]["planted_failing.score"]
    assert any("No score planted_failing.score" in warning for warning in result["warnings"])
    assert "planted_failing.score" not in result["tuned"]
    assert result["tuned"]["rouge_l"] is not None
