"""A model card says what an export was made from and how good it is, and nothing that is not known."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.export.card import CardSources, write_export_card
from lm_tuning.export.checks import ExportPlan
from lm_tuning.parameters.export import ExportParameters

DISTANCE = {
    "num_predictions": 139,
    "reference_nats": 2.0,
    "exported_nats": 2.001,
    "loss_change_fraction": 0.0005,
    "mean_kl_nats": 0.0002,
    "top_1_agreement": 0.995,
    "max_logit_difference": 0.01,
}
EVALUATION = {
    "split": "test",
    "skipped": None,
    "tokens_key": "k",
    "num_rows": 128,
    "verdict": "ROUGE-L is better by 0.15, 95 % 0.11 to 0.19, p < 0.001",
    "base": {"rouge_l": 0.1487, "num_tokens": 7},
    "tuned": {"rouge_l": 0.2994, "num_tokens": 7},
    "intervals": {"rouge_l": {"tuned_low": 0.26, "tuned_high": 0.34}},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("lm_tuning.export.card.read_token_summary", lambda folder: {"splits": {}})
    for name in ("tuned", "export", "reports", "base"):
        (tmp_path / name).mkdir()
    (tmp_path / "tuned/tuning.json").write_text("{}")
    return tmp_path


def write_card(
    folder: Path, *, base: dict[str, Any] | None = None, merge: Any = None, quantization: Any = None, **export: Any
) -> str:
    tuning: Any = {
        "method": "lora",
        "task": "causal_lm",
        "quantization": quantization,
        "base": {
            "name_or_path": str(folder / "base"),
            "revision": None,
            "digest": "d",
            "tokenizer_digest": "t",
            "trust_remote_code": False,
            "is_embedded": False,
            **(base or {}),
        },
        "tokens_key": "k",
        "rendering": {},
        "finished_step": 12,
        "compute_dtype": "bfloat16",
    }
    parameters = ExportParameters(**export)
    plan = ExportPlan(folder / "tuned", folder / "tokens", tuning, parameters, "bfloat16", None, 10)
    record: Any = {
        "format": parameters.format,
        "task": "causal_lm",
        "dtype": "bfloat16",
        "base_model": tuning["base"]["name_or_path"],
        "base_digest": "d",
        "mlflow_run_id": "r1",
        "merge": merge,
        "notes": [],
        "parity": {
            "split": "test",
            "num_rows": 64,
            "reference": "the full-precision base with the adapter, in float32",
            "distance": DISTANCE,
            "distance_in_dtype": {**DISTANCE, "mean_kl_nats": 0.0014},
            "bounds": [{"name": "mean_kl_nats", "value": 0.0002, "bound": 0.001, "is_met": True}],
            "num_answers": 4,
            "num_equal_answers": 3,
            "dtype": "bfloat16",
            "device": "cpu",
        },
    }
    write_export_card(folder / "export", record, plan, CardSources(folder / "reports", {}))
    return (folder / "export/README.md").read_text(encoding="utf-8")


def test_scores_have_their_interval_and_the_verdict(folder: Path) -> None:
    (folder / "reports/evaluation.json").write_text(json.dumps(EVALUATION))
    card = write_card(folder)
    assert "| `rouge_l` | 0.1487 | 0.2994 | 0.2600 to 0.3400 |" in card
    assert "better by 0.15" in card
    assert "num_tokens" not in card
    assert "| Mean KL divergence (nats) | 0.0002 | 0.001 |" in card
    assert "3 of 4" in card
    assert "Computed in bfloat16 throughout, as servers do (no bound): mean KL divergence 0.0014 nats" in card


@pytest.mark.parametrize("why", ["older", "other rows"])
def test_scores_of_another_model_are_left_out(folder: Path, why: str) -> None:
    path = folder / "reports/evaluation.json"
    path.write_text(json.dumps({**EVALUATION, "tokens_key": "k" if why == "older" else "k2"}))
    if why == "older":
        os.utime(path, (1, 1))
    card = write_card(folder)
    assert "Not evaluated since it was trained" in card
    assert "0.2994" not in card


def test_the_licence_is_that_of_the_base_s_own_card(folder: Path) -> None:
    assert "Licence of the base: not named" in write_card(folder)
    (folder / "base/README.md").write_text("---\nlicense: gemma\n---\n# Base\nlicense: mit\n")
    card = write_card(folder)
    assert "\nlicense: gemma\n" in card
    # Where the base lies on this machine is nobody's business.
    assert str(folder) not in card


def test_the_default_model_has_its_name_on_the_hub(folder: Path) -> None:
    card = write_card(folder, base={"is_embedded": True})
    assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in card
    assert "license: apache-2.0" in card


def test_an_adapter_is_loaded_by_peft(folder: Path) -> None:
    card = write_card(folder, format="adapter")
    assert "library_name: peft" in card
    assert "AutoPeftModelForCausalLM.from_pretrained(folder, generation_config=" in card


def test_both_bases_of_a_quantized_training_are_told(folder: Path) -> None:
    distances = {"full_precision": {**DISTANCE, "mean_kl_nats": 0.02}, "dequantized": DISTANCE}
    card = write_card(folder, merge={"base": "dequantized", "distance_to_trained": distances})
    assert "full-precision base 0.02 nats, dequantized base 0.0002 nats. Merged into the dequantized base" in card


def test_an_adapter_of_a_quantized_training_is_loaded_beside_a_quantized_base(folder: Path) -> None:
    held = {"bits": 4, "quant_type": "nf4", "double_quant": True}
    card = write_card(folder, format="adapter", quantization=held)
    assert "from transformers import AutoTokenizer, BitsAndBytesConfig, GenerationConfig" in card
    assert "quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', " in card
    assert "bnb_4bit_compute_dtype='bfloat16')" in card
    assert "quantization_config" not in write_card(folder, quantization=held)
