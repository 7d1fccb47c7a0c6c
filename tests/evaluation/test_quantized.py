"""The tuned model in 8 or 4 bits beside itself, and the split that is evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lm_tuning.errors import UserError
from lm_tuning.evaluation.report import compose_report, describe_outcome
from lm_tuning.evaluation.results import Comparison, choose_split, evaluate_models
from lm_tuning.evaluation.settings import training_facts
from lm_tuning.models import quantization
from lm_tuning.models.tuned import load_tuned
from lm_tuning.parameters.scores import ScoreParameters
from lm_tuning.reporting.markdown import write_markdown
from lm_tuning.storage.folders import FolderStore
from tests.support.stored import chat_row, evaluation_settings, publish_tokens, save_tuned
from tests.support.tiny import save_tiny_model

ROWS = [chat_row(f"what is {number}?", f"it is {number}") for number in range(8)]


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return publish_tokens(tmp_path / "tokens", "key1", train=ROWS, test=ROWS, validation=ROWS[:3])


@pytest.fixture
def tuned(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    method = getattr(request, "param", "lora")
    return save_tuned(tmp_path / "tuned", save_tiny_model(tmp_path / "base"), method, tokens_key="key1")


def compare(tuned: Path, tokens: Path, **changes: Any) -> Comparison:
    settings = {"num_generate_rows": 4, "max_new_tokens": 6, **changes}
    return evaluate_models(tuned, tokens, FolderStore(tokens.parent / "cache"), evaluation_settings(**settings))


@pytest.mark.parametrize("tuned", ["lora", "full"], indirect=True)
@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_both_measurements_stand_side_by_side(tuned: Path, tokens: Path, name: str) -> None:
    plain = compare(tuned, tokens)
    result = compare(tuned, tokens, quantization=name).result
    assert "quantized" not in plain.result
    assert {key: value for key, value in result.items() if key != "quantized"} == plain.result
    found = result["quantized"]
    # Rounded weights give another loss, and not one of another model.
    loss, before = found["figures"]["nats_per_token"], result["tuned"]["nats_per_token"]
    assert loss != before
    assert loss == pytest.approx(before, rel=0.2)
    assert found["nats_per_token_rise_fraction"] == pytest.approx((loss - before) / before)
    assert found["figures"]["num_generated"] == 4
    weights = {part: found[part]["weights_bytes"] for part in ("usage", "unquantized_usage")}
    model = load_tuned(tuned)
    assert weights["unquantized_usage"] == sum(weight.nbytes for weight in model.parameters())
    assert found["weights_bytes_fraction"] == weights["usage"] / weights["unquantized_usage"] < 0.6
    assert found["usage"]["answer_tokens_per_second"] > 0
    report = write_markdown(compose_report(result, training_facts(tuned)))
    assert f"## In {name}" in report
    assert f"| Held-out loss (nats per token) | {before:.4f} | {loss:.4f} |" in report
    assert "## In " not in write_markdown(compose_report(plain.result, training_facts(tuned)))


def test_the_scores_that_were_asked_for_are_shown(tuned: Path, tokens: Path) -> None:
    result = compare(tuned, tokens, quantization="int8", scores=ScoreParameters(names=["chrf"])).result
    report = write_markdown(compose_report(result, training_facts(tuned)))
    summary, quantized = report.split("## ")[0], report.split("## In int8")[1].split("## ")[0]
    assert "| chrF (0 to 100) |" in summary
    before, after = result["tuned"]["chrf"], result["quantized"]["figures"]["chrf"]
    assert f"| chrF (0 to 100) | {before:.4f} | {after:.4f} |" in quantized
    assert "ROUGE" not in summary + quantized
    assert "chrF (0 to 100)" in describe_outcome(result)


def test_the_same_bits_as_in_training_are_refused_before_a_model_is_loaded(
    tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {"bits": 4, "quant_type": "nf4", "double_quant": True}
    base = save_tiny_model(tmp_path / "base")
    tuned = save_tuned(tmp_path / "tuned", base, "lora", tokens_key="key1", quantization=held)
    monkeypatch.setattr("lm_tuning.evaluation.language.load_base", lambda *given, **options: pytest.fail("loaded"))
    with pytest.raises(UserError, match=r"evaluate.quantization = nf4, but .*tuned was trained over weights"):
        compare(tuned, tokens, quantization="nf4")


def test_a_missing_package_is_said_by_the_parameter_that_asks_for_it(
    tuned: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"evaluate.quantization = int8 needs .* bitsandbytes.*quantization = none"):
        compare(tuned, tokens, quantization="int8")


def test_the_split_is_the_one_that_is_asked_for(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    assert [compare(tuned, tokens, split=split).result["num_rows"] for split in ("auto", "test")] == [8, 8]
    result = compare(tuned, tokens, split="validation").result
    assert (result["split"], result["num_rows"]) == ("validation", 3)
    without = publish_tokens(tmp_path / "other", "key1", train=ROWS, validation=ROWS[:3])
    assert choose_split(without)[0] == "validation"
    with pytest.raises(UserError, match=r"evaluate.split = test, but that split has no row.*split.test"):
        compare(tuned, without, split="test")
