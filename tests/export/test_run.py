"""Exports of every kind of tuned model, compared in processes of their own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from lm_tuning.errors import MachineFault, UserError
from lm_tuning.export import checks, run
from lm_tuning.export.card import CardSources
from lm_tuning.export.checks import ExportPlan, plan_export
from lm_tuning.models.record import ModelLocation
from lm_tuning.models.tuned import load_tuned
from lm_tuning.parameters.export import ExportParameters
from lm_tuning.storage.folders import FolderStore
from tests.support.stored import chat_row, publish_tokens, save_tuned
from tests.support.tiny import save_tiny_model
from tests.support.tiny_tasks import (
    LABEL_MAP,
    make_classifier,
    make_seq2seq,
    save_base,
    save_tuned_task,
    write_labelled,
    write_pairs,
)

ROWS = [chat_row(f"what is {number}?", f"it is {number}") for number in range(12)]
SUMMARY = {"splits": {"test": {"num_rows_read": 13, "num_rows": 12, "dropped": {"too_long": 1}}}}


def publish(root: Path, key: str, write: Any) -> Path:
    """Store a test split that ``write`` fills, beside two empty ones."""
    from tests.support.stored import write_rows

    store = FolderStore(root)
    staged = store.stage(key)
    for split in ("train", "validation"):
        write_rows([], staged.path / f"{split}.arrow")
    write(staged.path / "test.arrow")
    return store.publish(staged)


@pytest.fixture
def language(tmp_path: Path) -> Path:
    """A folder with a base, rows, and a LoRA adapter."""
    base = save_tiny_model(tmp_path / "base")
    save_tuned(tmp_path / "tuned", base, "lora", tokens_key="key1")
    publish_tokens(tmp_path / "tokens", "key1", test=ROWS)
    return tmp_path


@pytest.fixture(autouse=True)
def _card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token folders of tests have no summary."""
    monkeypatch.setattr("lm_tuning.export.card.read_token_summary", lambda folder: SUMMARY)


def plan_in(folder: Path, base: str = "base", **export: Any) -> ExportPlan:
    location = ModelLocation(name_or_path=str(folder / base), revision=None, trust_remote_code=False)
    return plan_export(
        folder / "tuned",
        FolderStore(folder / "tokens").current(),
        ExportParameters(**export),
        base=location,
        digest_cache=None,
        target=folder / "export",
    )


def export_in(folder: Path, **export: Any) -> run.Export:
    sources = CardSources(folder / "reports", {"train": [{"path": "rows.jsonl", "digest": "d1" * 32}]})
    return run.export_model(plan_in(folder, **export), folder / "work", device="cpu", card=sources)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits.float()


def test_a_merged_adapter_in_float32(language: Path) -> None:
    export = export_in(language)
    assert {"model.safetensors", "config.json", "tokenizer.json", "generation_config.json"} <= names(export.folder) | {
        "generation_config.json"
    }
    assert not {"adapter_config.json", "tuning.json"} & names(export.folder)
    record = json.loads((export.folder / "export.json").read_text())
    assert record == export.record
    assert (record["dtype"], record["format"], record["merge"]["base"]) == ("float32", "merged", "full_precision")
    (bound,) = record["parity"]["bounds"]
    assert bound["name"] == "max_logit_difference"
    assert 0 < bound["value"] <= bound["bound"] == 1e-4
    assert record["parity"]["num_equal_answers"] == record["parity"]["num_answers"] == 4
    assert record["parity"]["distance"]["num_predictions"] == sum(len(f"it is {n}") + 1 for n in range(12))
    again = AutoModelForCausalLM.from_pretrained(export.folder).eval()
    tuned = load_tuned(language / "tuned")
    torch.testing.assert_close(logits(again, ROWS[0][0]), logits(tuned, ROWS[0][0]), atol=1e-5, rtol=1e-4)
    card = (export.folder / "README.md").read_text()
    for part in ("d1d1d1", "| test | 13 | 1 | 12 |", "Mean KL divergence", "Not evaluated", "AutoModelForCausalLM"):
        assert part in card, part
    assert record["base_model"] == "base"
    for path in export.folder.glob("*.json"):
        assert str(language) not in path.read_text(), path


def test_a_corrupted_merge_is_not_published(language: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = run.write_weights

    def corrupt(model: Any, *given: Any) -> None:
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight.mul_(1.05)
        write(model, *given)

    monkeypatch.setattr(run, "write_weights", corrupt)
    with pytest.raises(UserError, match=r"not published.*max_logit_difference is .*1e-05|0\.0001\)"):
        export_in(language)
    assert not (language / "work").exists()


def test_a_merged_adapter_in_bfloat16(language: Path) -> None:
    loose = {"max_kl_nats": 0.01, "min_top_1_agreement": 0.8, "max_loss_change_fraction": 0.01}
    record = export_in(language, dtype="bfloat16", parity=loose).record
    assert {bound["name"] for bound in record["parity"]["bounds"]} == {
        "loss_change_fraction",
        "mean_kl_nats",
        "top_1_agreement",
    }
    assert record["parity"]["dtype"] == "bfloat16"
    served = record["parity"]["distance_in_dtype"]
    assert served is not None and served["mean_kl_nats"] > 0
    assert served["exported_nats"] != record["parity"]["distance"]["exported_nats"]
    assert json.loads((language / "work/writing/config.json").read_text())["dtype"] == "bfloat16"


def test_an_adapter_alone(language: Path) -> None:
    export = export_in(language, format="adapter")
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names(export.folder)
    assert not {"model.safetensors", "tuning.json"} & names(export.folder)
    assert export.record["parity"]["distance"]["max_logit_difference"] <= 1e-4
    assert "AutoPeftModelForCausalLM" in (export.folder / "README.md").read_text()


def test_fully_trained_weights(language: Path) -> None:
    save_tuned(language / "tuned", language / "base", "full", tokens_key="key1")
    (language / "tuned/adapter_config.json").unlink()
    record = export_in(language).record
    assert (record["method"], record["merge"]) == ("full", None)
    assert record["parity"]["distance"]["max_logit_difference"] == 0.0


@pytest.mark.parametrize("bits", [4, 8])
def test_an_adapter_over_quantized_weights_goes_into_the_closer_base(language: Path, bits: int) -> None:
    held = {"bits": 4, "quant_type": "nf4", "double_quant": True} if bits == 4 else {"bits": 8}
    save_tuned(
        language / "tuned", language / "base", "lora", tokens_key="key1", quantization=held, compute_dtype="float32"
    )
    facts = json.loads((language / "tuned/tuning.json").read_text())
    (language / "tuned/tuning.json").write_text(json.dumps({**facts, "method": "qlora"}))
    export = export_in(language)
    merge = export.record["merge"]
    assert merge is not None
    distances = merge["distance_to_trained"]
    assert set(distances) == {"full_precision", "dequantized"}
    # It was trained beside the rounded weights, so beside those it is the model that was trained.
    assert merge["base"] == "dequantized"
    # Products of 8 bits round what they read as well, which no weights show.
    most = 0.1 if bits == 4 else 1.0
    assert distances["dequantized"]["mean_kl_nats"] < most * distances["full_precision"]["mean_kl_nats"]
    assert "quantization_config" not in json.loads((export.folder / "config.json").read_text())
    assert export.record["parity"]["distance"]["max_logit_difference"] <= 1e-4
    assert "Merged into the dequantized base" in (export.folder / "README.md").read_text()


@pytest.mark.parametrize("options", [{}, {"format": "adapter"}], ids=["merged", "adapter"])
def test_a_classifier(tmp_path: Path, options: dict[str, Any]) -> None:
    base = save_base(make_classifier(), tmp_path / "base")
    tuned = make_classifier(seed=1)
    save_tuned_task(
        tmp_path / "tuned", base, tuned, "lora", "sequence_classification", tokens_key="k", label_map=LABEL_MAP
    )
    rows = [([20 + n, 30, 40 + n], n % 4) for n in range(10)]
    publish(tmp_path / "tokens", "k", lambda path: write_labelled(rows, path))
    # The adapter belongs to this base; its weights are other ones than those that the adapter was made beside.
    export = export_in(tmp_path, **options)
    assert export.record["parity"]["distance"]["num_predictions"] == 10
    assert json.loads((export.folder / "label_map.json").read_text()) == LABEL_MAP
    if not options:
        again = AutoModelForSequenceClassification.from_pretrained(export.folder)
        assert again.config.label2id == LABEL_MAP


def test_an_encoder_decoder(tmp_path: Path) -> None:
    base = save_base(make_seq2seq(), tmp_path / "base")
    save_tuned_task(tmp_path / "tuned", base, make_seq2seq(seed=0), "lora", "seq2seq_lm", tokens_key="k")
    pairs = [(f"source {n}", f"target {n}") for n in range(6)]
    publish(tmp_path / "tokens", "k", lambda path: write_pairs(pairs, path))
    export = export_in(tmp_path)
    distance = export.record["parity"]["distance"]
    assert distance["num_predictions"] == sum(len(target) + 1 for _, target in pairs)
    assert distance["max_logit_difference"] <= 1e-4
    AutoModelForSeq2SeqLM.from_pretrained(export.folder)


class TestBeforeAnyWork:
    def test_all_that_is_missing_is_told_together(self, language: Path) -> None:
        (language / "tuned/tokenizer.json").unlink()
        (language / "tuned/adapter_model.safetensors").unlink()
        with pytest.raises(UserError) as caught:
            plan_in(language)
        assert len(caught.value.problems) == 2
        assert "has no tokenizer" in caught.value.problems[0]
        assert "adapter_model.safetensors missing" in caught.value.problems[1]

    def test_a_base_that_has_changed(self, language: Path) -> None:
        from tests.support.tiny import make_model

        make_model(seed=5).save_pretrained(language / "base")
        with pytest.raises(UserError, match=r"trained on another base: .*base has the digest \w+ now, and had \w+"):
            plan_in(language)

    def test_another_base_in_the_parameters(self, language: Path) -> None:
        from tests.support.tiny import make_model

        save_tiny_model(language / "other")
        plan_in(language, base="other")  # the same files elsewhere
        make_model(seed=5).save_pretrained(language / "other")
        with pytest.raises(UserError, match=r"model\.name_or_path = .*other is another model"):
            plan_in(language, base="other")

    def test_rows_of_another_training(self, language: Path) -> None:
        publish_tokens(language / "tokens", "key2", test=ROWS)
        with pytest.raises(UserError, match="trained on the token set key1, but the present one is key2"):
            plan_in(language)

    def test_an_adapter_of_a_model_that_was_trained_in_full(self, language: Path) -> None:
        save_tuned(language / "tuned", language / "base", "full", tokens_key="key1")
        with pytest.raises(UserError, match=r"export\.format = adapter needs an adapter"):
            plan_in(language, format="adapter")

    def test_no_room_on_the_disk(self, language: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = checks.shutil.disk_usage(language)
        monkeypatch.setattr(checks.shutil, "disk_usage", lambda folder: usage._replace(free=2**20))
        with pytest.raises(MachineFault, match=r"The export takes about 0\.\d GiB, and 0\.0 GiB is free in"):
            plan_in(language)
        assert not (language / "work").exists()

    def test_the_dtype_is_that_of_the_base_s_files(self, language: Path) -> None:
        assert plan_in(language).dtype == "float32"
        config = json.loads((language / "base/config.json").read_text())
        (language / "base/config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
        tuning = json.loads((language / "tuned/tuning.json").read_text())
        digest = checks.describe_base_model(str(language / "base"))["digest"]
        tuning["base"]["digest"] = digest
        (language / "tuned/tuning.json").write_text(json.dumps(tuning))
        assert plan_in(language).dtype == "bfloat16"
        assert plan_in(language, format="adapter").dtype == "float32"


def test_arguments_of_the_template_become_its_own() -> None:
    from jinja2 import Environment

    template = "{% if enable_thinking %}<think>{% endif %}{{ tone }}"
    own = run.fix_template_arguments(template, {"enable_thinking": False, "tone": "it's"})
    render = Environment(autoescape=False).from_string(own).render
    assert render() == "it's"
    assert render(enable_thinking=True) == "<think>it's"


def test_a_row_that_ends_in_the_padding_shows_in_the_comparison(tmp_path: Path) -> None:
    """Plain classes read the last token that is no padding, which the training did not."""
    from tests.support.tiny import PAD

    base = save_base(make_classifier(), tmp_path / "base")
    save_tuned_task(
        tmp_path / "tuned",
        base,
        make_classifier(seed=1),
        "lora",
        "sequence_classification",
        tokens_key="k",
        label_map=LABEL_MAP,
    )
    publish(tmp_path / "tokens", "k", lambda path: write_labelled([([20, 30, PAD], 1)] * 3, path))
    with pytest.raises(UserError, match="not published"):
        export_in(tmp_path)


def test_the_plan_is_about_what_is_asked_for(language: Path) -> None:
    plan = plan_in(language)
    assert plan.merges and plan.is_exact
    held: Any = {"bits": 8}
    quantized = replace(plan, tuning={**plan.tuning, "quantization": held})
    assert quantized.is_exact, "merged weights are quantized no more"
    assert not replace(quantized, export=ExportParameters(format="adapter")).is_exact
