"""Base and tuned model are measured on the same held-out rows, and the base's measurement is reused."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm_tuning.batching import packed_attention
from lm_tuning.batching.tasks.causal_lm import CausalLanguageModeling
from lm_tuning.errors import UserError
from lm_tuning.evaluation import language
from lm_tuning.evaluation.report import describe_outcome
from lm_tuning.evaluation.results import Comparison, choose_split, evaluate_models
from lm_tuning.models import loading
from lm_tuning.models import tuned as tuned_models
from lm_tuning.models.tuned import load_tuned
from lm_tuning.storage.folders import FolderStore
from lm_tuning.text.store.table import TokenTable, open_split
from tests.evaluation.reports import as_markdown, on_terminal
from tests.support.rounding import SAME_LOSS
from tests.support.stored import Row, chat_row, evaluation_settings, publish_tokens, save_tuned

TEST_ROWS = [chat_row(f"what is {number}?", f"it is {number} {'x' * (number % 7)}") for number in range(12)]
VALIDATION_ROWS = [chat_row(f"say {number}", str(number)) for number in range(5)]


def nats_by_hand(model: Any, table: TokenTable, rows: range) -> tuple[float, int]:
    total, count = 0.0, 0
    for index in rows:
        row = table[index]
        with torch.no_grad():
            logits = model(torch.tensor(row.input_ids.astype(np.int64))[None]).logits[0].double()
        for start, end in row.spans:
            for position in range(start, end):
                total -= float(torch.log_softmax(logits[position - 1], -1)[int(row.input_ids[position])])
                count += 1
    return total, count


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return publish_tokens(tmp_path / "tokens", "key1", test=TEST_ROWS, validation=VALIDATION_ROWS)


@pytest.fixture
def tuned(tmp_path: Path, base_folder: Path, request: pytest.FixtureRequest) -> Path:
    method = getattr(request, "param", "lora")
    return save_tuned(tmp_path / "tuned", base_folder, method, tokens_key="key1")


def compare(tuned: Path, tokens: Path, cache: Path, **changes: Any) -> Comparison:
    settings = {
        "num_generate_rows": 4,
        "max_new_tokens": 6,
        "num_samples": 2,
        **changes,
    }
    return evaluate_models(tuned, tokens, FolderStore(cache), evaluation_settings(**settings))


@pytest.mark.parametrize("tuned", ["lora", "full"], indirect=True)
def test_both_models_are_measured_as_by_hand(tuned: Path, tokens: Path, base_folder: Path, tmp_path: Path) -> None:
    result = compare(tuned, tokens, tmp_path / "cache").result

    table = open_split(tokens, "test")
    base_nats, num_tokens = nats_by_hand(loading.load_model(str(base_folder)), table, range(12))
    tuned_nats, _ = nats_by_hand(load_tuned(tuned), table, range(12))
    assert abs(base_nats - tuned_nats) > 1
    assert result["base"]["nats_per_token"] == pytest.approx(base_nats / num_tokens, rel=SAME_LOSS)
    assert result["tuned"]["nats_per_token"] == pytest.approx(tuned_nats / num_tokens, rel=SAME_LOSS)
    assert math.log(result["tuned"]["perplexity"]) == pytest.approx(tuned_nats / num_tokens, rel=SAME_LOSS)
    improvement = result["improvement"]["nats_per_token_fraction"]
    assert improvement == pytest.approx(1 - tuned_nats / base_nats, abs=2 * SAME_LOSS)
    assert abs(improvement) > 100 * SAME_LOSS, "far more than rounding"
    assert result["base"]["num_tokens"] == result["tuned"]["num_tokens"] == num_tokens
    assert (result["split"], result["task"], result["num_rows"]) == ("test", "causal_lm", 12)
    assert result["num_split_rows"] == 12
    assert describe_outcome(result).startswith("Test split: 12 rows, ")
    assert result["generation"] == "greedy"
    assert result["base"]["num_generated"] == result["tuned"]["num_generated"] == 4
    assert result["tuned_method"] == json.loads((tuned / "tuning.json").read_text())["method"]
    assert result["tokens_key"] == "key1"
    assert result["warnings"] == []
    assert result["skipped"] is None
    json.dumps(result, allow_nan=False)


def test_samples_belong_to_their_rows(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    compared = compare(tuned, tokens, tmp_path / "cache")
    assert len(compared.answers) == 4
    assert len(compared.result["samples"]) == 2
    for row in [*compared.answers, *compared.result["samples"]]:
        number = row["row_id"] - 100
        assert row["prompt"] == f"what is {number}?"
        assert row["reference"] == f"it is {number} {'x' * (number % 7)}"
    assert any(row["base"] != row["tuned"] for row in compared.answers)
    assert tuple(compared.answers[0]) == compared.columns == language.ANSWER_COLUMNS


def test_rouge_is_the_mean_over_the_answers(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    compared = compare(tuned, tokens, tmp_path / "cache", num_generate_rows=12)
    for name in ("base", "tuned"):
        each = [row[f"{name}_rouge_l"] for row in compared.answers]
        assert compared.result[name]["rouge_l"] == pytest.approx(sum(each) / 12)


@pytest.mark.parametrize("tuned", ["lora", "full"], indirect=True)
def test_the_base_evaluation_is_reused(
    tuned: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = FolderStore(tmp_path / "cache")
    first = compare(tuned, tokens, cache.root)
    cache.publish(first.base_evaluation)
    measured: list[str] = []
    measure = language.measure_model
    monkeypatch.setattr(
        language, "measure_model", lambda *args, **kw: measured.append(kw["name"]) or measure(*args, **kw)
    )

    with caplog.at_level(logging.INFO):
        second = compare(tuned, tokens, cache.root)

    assert measured == ["tuned model"]
    assert second.result == first.result
    assert second.answers == first.answers
    assert isinstance(second.base_evaluation, Path)
    assert f"reused {second.base_evaluation}" in caplog.text


def test_one_base_model_is_loaded_for_an_adapter(
    tuned: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    load = loading.load_model
    monkeypatch.setattr(tuned_models, "load_model", lambda **kw: loads.append(kw["name_or_path"]) or load(**kw))
    compare(tuned, tokens, tmp_path / "cache")
    assert len(loads) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"max_loss_rows": 5},
        {"num_generate_rows": 3},
        {"max_new_tokens": 5},
        {"num_beams": 2},
        {"compute_dtype": "bfloat16", "weights_dtype": "bfloat16"},
        {"attention": "eager"},
    ],
)
def test_what_decides_the_base_evaluation_is_in_its_key(
    tuned: Path, tokens: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    first = compare(tuned, tokens, tmp_path / "cache").base_evaluation
    other = compare(tuned, tokens, tmp_path / "cache", **changes).base_evaluation
    assert first.key != other.key  # type: ignore[union-attr]


def test_how_it_is_batched_is_not_in_the_key(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    first = compare(tuned, tokens, tmp_path / "cache")
    other = compare(
        tuned, tokens, tmp_path / "cache", micro_batch_tokens=32, generate_batch_rows=1, num_samples=1, tf32=False
    )
    assert first.base_evaluation.key == other.base_evaluation.key  # type: ignore[union-attr]
    before, after = (compared.result["tuned"]["nats_per_token"] for compared in (first, other))
    assert after == pytest.approx(before, rel=SAME_LOSS)
    assert without_log_probs(other.answers) == without_log_probs(first.answers)
    assert log_probs(other.answers) == pytest.approx(log_probs(first.answers), rel=1e-5)


def log_probs(answers: Sequence[Any]) -> list[float]:
    return [answer[f"{name}_log_prob"] for answer in answers for name in ("base", "tuned")]


def without_log_probs(answers: Sequence[Any]) -> list[dict[str, Any]]:
    """Return answers without what another order of sums changes in its last digits."""
    return [{name: value for name, value in answer.items() if "log_prob" not in name} for answer in answers]


def test_rows_packed_as_on_a_gpu_have_the_same_figures(
    tuned: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    padded = compare(tuned, tokens, tmp_path / "padded")
    splits: list[str] = []
    split = CausalLanguageModeling.split

    def note(self: Any, *given: Any, batching: Any, **options: Any) -> Any:
        splits.append(batching)
        return split(self, *given, batching=batching, **options)

    monkeypatch.setattr(CausalLanguageModeling, "split", note)
    # Packed as where the kernel is: the attention that is told where rows begin stands in for it.
    monkeypatch.setattr(packed_attention, "runs_in_kernel", lambda *given, **options: True)
    packed = compare(tuned, tokens, tmp_path / "packed")
    assert splits == ["packed", "packed"]
    for model in ("base", "tuned"):
        assert packed.result[model]["nats_per_token"] == pytest.approx(padded.result[model]["nats_per_token"], rel=1e-5)
    assert without_log_probs(packed.answers) == without_log_probs(padded.answers)


def test_validation_stands_in_for_an_empty_test_split(tuned: Path, tmp_path: Path) -> None:
    tokens = publish_tokens(tmp_path / "tokens", "key1", validation=VALIDATION_ROWS)
    result = compare(tuned, tokens, tmp_path / "cache").result
    assert (result["split"], result["num_rows"]) == ("validation", 5)


def test_without_held_out_rows_it_is_skipped_and_says_so(tuned: Path, tmp_path: Path) -> None:
    tokens = publish_tokens(tmp_path / "tokens", "key1", train=VALIDATION_ROWS)
    assert choose_split(tokens)[0] is None
    compared = compare(tuned, tokens, tmp_path / "cache")
    assert compared.result["split"] is None
    assert "split.test" in compared.result["skipped"]
    assert compared.result["base"]["nats_per_token"] is None
    assert compared.answers == []
    assert describe_outcome(compared.result).startswith("Evaluation skipped. Neither test nor validation has rows")
    folder = FolderStore(tmp_path / "cache").publish(compared.base_evaluation)
    again = compare(tuned, tokens, tmp_path / "cache")
    assert again.base_evaluation == folder
    assert "Evaluation skipped." in as_markdown(again.result)
    assert "Evaluation skipped." in on_terminal(again.result)


def test_plain_text_has_a_loss_and_no_rouge(tuned: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain: list[Row] = [(row[0], [(0, len(row[0]))]) for row in TEST_ROWS]
    tokens = publish_tokens(tmp_path / "tokens", "key1", test=plain)
    with caplog.at_level(logging.INFO):
        compared = compare(tuned, tokens, tmp_path / "cache")
    assert compared.result["tuned"]["nats_per_token"] > 0
    assert compared.result["tuned"]["rouge_l"] is None
    assert compared.result["tuned"]["num_generated"] == 0
    assert compared.result["improvement"]["rouge_l_difference"] is None
    assert (compared.answers, compared.result["samples"]) == ([], [])
    assert "Rows without a prompt to answer, left out of ROUGE: 4 of 4" in caplog.text
    for text in (describe_outcome(compared.result), as_markdown(compared.result)):
        assert "supervised tokens. No ROUGE, since the rows have no prompt to answer." in text
        assert "ROUGE-L" not in text


def test_generation_can_be_left_out(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    result = compare(tuned, tokens, tmp_path / "cache", num_generate_rows=0).result
    assert "No ROUGE, since evaluate.num_generate_rows: 0 leaves answers out." in describe_outcome(result)
    assert "ROUGE-L" not in as_markdown(result)
    assert result["base"]["rouge_l"] is None
    assert result["base"]["nats_per_token"] > 0


def test_a_part_of_the_rows_is_called_one(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    result = compare(tuned, tokens, tmp_path / "cache", max_loss_rows=1, num_generate_rows=1).result
    assert (result["num_rows"], result["num_split_rows"]) == (1, 12)
    for text in (describe_outcome(result), as_markdown(result), on_terminal(result)):
        assert "Test split: 1 of 12 rows, " in text


def test_a_model_that_was_trained_on_other_tokens_is_refused(tuned: Path, tmp_path: Path) -> None:
    tokens = publish_tokens(tmp_path / "tokens", "key2", test=TEST_ROWS)
    with pytest.raises(UserError) as caught:
        compare(tuned, tokens, tmp_path / "cache")
    (problem,) = caught.value.problems
    assert f"{tuned} was trained on the token set key1, but the present one is key2:" in problem
    for command in ("kedro run --pipelines=train,evaluate", "kedro run --pipelines=split,tokenize,evaluate"):
        assert f"`{command}`" in problem
    assert not (tmp_path / "cache").exists()


def test_a_loss_that_is_no_number_is_reported(base_folder: Path, tokens: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tuned = save_tuned(tmp_path / "tuned", base_folder, "full", tokens_key="key1")
    weights = load_file(tuned / "model.safetensors")
    weights["model.norm.weight"][0] = math.nan
    save_file(weights, tuned / "model.safetensors", metadata={"format": "pt"})
    result = compare(tuned, tokens, tmp_path / "cache").result
    assert result["tuned"]["nats_per_token"] is None
    assert result["base"]["nats_per_token"] > 0
    assert any("tuned model" in warning for warning in result["warnings"])
    json.dumps(result, allow_nan=False)


def test_a_folder_that_is_no_tuned_model_is_refused(tmp_path: Path, tokens: Path, base_folder: Path) -> None:
    with pytest.raises(UserError, match=r"tuning\.json"):
        compare(base_folder, tokens, tmp_path / "cache")


def test_half_precision_runs_under_autocast(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    exact = compare(tuned, tokens, tmp_path / "cache").result
    half = compare(tuned, tokens, tmp_path / "cache", weights_dtype="float32", compute_dtype="bfloat16").result
    assert half["tuned"]["nats_per_token"] == pytest.approx(exact["tuned"]["nats_per_token"], rel=0.02)
    assert half["tuned"]["nats_per_token"] != exact["tuned"]["nats_per_token"]


def test_what_quantizes_the_base_is_in_its_key(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    """A base in 4 bits is another one, so its measurement is never taken for that of the base in full."""
    facts = json.loads((tuned / "tuning.json").read_text())
    split = publish_tokens(tmp_path / "other", "key1", train=VALIDATION_ROWS)  # nothing to evaluate, so nothing loads
    keys = set()
    for quantization in (None, {"bits": 4}, {"bits": 8}):
        (tuned / "tuning.json").write_text(json.dumps({**facts, "quantization": quantization}))
        keys.add(compare(tuned, split, tmp_path / "cache").base_evaluation.key)  # type: ignore[union-attr]
    assert len(keys) == 3


def test_the_base_of_a_quantized_training_is_the_quantized_one(
    tuned: Path, tokens: Path, base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_tuning.models.quantization import Quantization

    held = {"bits": 4, "quant_type": "nf4", "double_quant": True}
    facts = json.loads((tuned / "tuning.json").read_text())
    (tuned / "tuning.json").write_text(json.dumps({**facts, "method": "qlora", "quantization": held}))
    loads: list[Any] = []
    load = loading.load_model
    monkeypatch.setattr(tuned_models, "load_model", lambda **kw: loads.append(kw["quantization"]) or load(**kw))

    result = compare(tuned, tokens, tmp_path / "cache").result

    assert loads == [Quantization(**held, compute_dtype="float32")], "one base, which then gets the adapter"
    table = open_split(tokens, "test")
    quantized = load(str(base_folder), quantization=loads[0])
    nats, num_tokens = nats_by_hand(quantized, table, range(12))
    in_full, _ = nats_by_hand(load(str(base_folder)), table, range(12))
    assert result["base"]["nats_per_token"] == pytest.approx(nats / num_tokens, rel=1e-4)
    assert abs(nats - in_full) / num_tokens > 1e-4, "four bits must make a difference for this to prove anything"
    tuned_nats, _ = nats_by_hand(load_tuned(tuned), table, range(12))
    assert result["tuned"]["nats_per_token"] == pytest.approx(tuned_nats / num_tokens, rel=1e-4)
    assert result["tuned_method"] == "qlora"
