"""The evaluation pipeline stores its figures, report and answers, and shows them."""

from __future__ import annotations

import functools
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kedro.io import DataCatalog, MemoryDataset
from kedro.runner import SequentialRunner
from peft.tuners.lora import LoraLayer
from transformers import LlamaForCausalLM

from lm_tuning.datasets import (
    CSVDataset,
    FigureFolderDataset,
    FolderDataset,
    FolderStoreDataset,
    JSONDataset,
    ModelFolderDataset,
    StoredFolderDataset,
    TextDataset,
)
from lm_tuning.parameters import EnvironmentParameters, EvaluateParameters, GenerationParameters, ModelParameters
from lm_tuning.pipelines.evaluate import create_pipeline
from tests.support.stored import chat_row, publish_tokens, save_tuned
from tests.support.tiny import save_tiny_model

ROWS = [chat_row(f"what is {number}?", f"it is {number}") for number in range(8)]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    base = save_tiny_model(tmp_path / "base")
    save_tuned(tmp_path / "tuned_model", base, "lora", tokens_key="key1")
    publish_tokens(tmp_path / "tokens", "key1", train=ROWS, test=ROWS)
    return tmp_path


def make_catalog(project: Path, **evaluate: Any) -> DataCatalog:
    generation = GenerationParameters(max_new_tokens=4)
    options = {"num_generate_rows": 3, "generation": generation, "num_samples": 1, **evaluate}
    return DataCatalog(
        {
            "tuned_model": ModelFolderDataset(filepath=str(project / "tuned_model")),
            "tokenized_examples": StoredFolderDataset(filepath=str(project / "tokens")),
            "base_evaluation_cache": FolderStoreDataset(filepath=str(project / "base_evaluation")),
            "base_evaluation": StoredFolderDataset(filepath=str(project / "base_evaluation")),
            "evaluation_history": FolderDataset(filepath=str(project / "history")),
            "evaluation_page": TextDataset(filepath=str(project / "evaluation.html")),
            "evaluation_row_scores": CSVDataset(filepath=str(project / "row_scores.csv")),
            "evaluation_figures": FigureFolderDataset(filepath=str(project / "figures")),
            "params:output": MemoryDataset("mine"),
            "evaluation": JSONDataset(filepath=str(project / "evaluation.json")),
            "evaluation_report": TextDataset(filepath=str(project / "evaluation.md")),
            "evaluation_samples": CSVDataset(filepath=str(project / "samples.csv")),
            "params:evaluate": MemoryDataset(EvaluateParameters(**options)),
            "params:model": MemoryDataset(ModelParameters(dtype="float32")),
            "params:environment": MemoryDataset(EnvironmentParameters()),
            "params:seed": MemoryDataset(42),
        }
    )


def run(catalog: DataCatalog) -> None:
    SequentialRunner().run(create_pipeline(), catalog)


def test_stores_and_shows_the_comparison(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    catalog = make_catalog(project)
    run(catalog)

    evaluation = json.loads((project / "evaluation.json").read_text())
    for name in ("base", "tuned"):
        assert evaluation[name]["nats_per_token"] > 0
        assert evaluation[name]["perplexity"] > 1
        assert 0 <= evaluation[name]["rouge_l"] <= 1
        assert evaluation[name]["num_tokens"] == sum(len(f"it is {number}") + 1 for number in range(8))
    assert len(evaluation["samples"]) == 1
    assert "| Perplexity |" in (project / "evaluation.md").read_text()
    samples = catalog.load("evaluation_samples")
    assert len(samples) == 3
    assert samples["prompt"].str.startswith("what is").all()
    assert catalog["base_evaluation"].preview()["columns"]
    shown = capsys.readouterr().out
    assert f"{evaluation['tuned']['nats_per_token']:.4f}" in shown
    assert str(project / "tuned_model") in shown.replace("\n", "")
    assert "1,234 tokens per second" in shown
    assert "make mlflow" in shown


def test_a_part_of_the_split_is_called_one_in_the_report_and_as_a_metric(
    project: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="lm_tuning"):
        run(make_catalog(project, max_loss_rows=1, num_generate_rows=1))
    evaluation = json.loads((project / "evaluation.json").read_text())
    assert (evaluation["num_rows"], evaluation["num_split_rows"]) == (1, 8)
    for text in ((project / "evaluation.md").read_text(), capsys.readouterr().out, caplog.text):
        assert "Test split: 1 of 8 rows, " in text


def test_the_second_run_reuses_the_base_and_agrees(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(make_catalog(project))
    first = (project / "evaluation.json").read_bytes()
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="lm_tuning"):
        run(make_catalog(project))
    assert (project / "evaluation.json").read_bytes() == first
    assert "Evaluation of the base model: reused" in caplog.text
    assert "Held-out loss of the base model" not in caplog.text
    assert "Held-out loss of the tuned model" in caplog.text


@pytest.mark.parametrize(("trained", "chosen"), [("float32", "float32"), ("bfloat16", "bfloat16"), (None, "bfloat16")])
def test_what_was_trained_in_float32_is_measured_in_float32(
    project: Path, monkeypatch: pytest.MonkeyPatch, trained: str | None, chosen: str
) -> None:
    from lm_tuning.evaluation import results as comparison
    from lm_tuning.evaluation import settings

    fast = replace(settings.describe_device(), supports_bf16=True)
    monkeypatch.setattr(settings, "describe_device", lambda: fast)
    facts = json.loads((project / "tuned_model" / "tuning.json").read_text())
    (project / "tuned_model" / "tuning.json").write_text(json.dumps({**facts, "compute_dtype": trained}))
    seen: list[str] = []
    evaluate = comparison.evaluate_models

    def note(*given: Any, **more: Any) -> Any:
        seen.append(given[-1].compute_dtype)
        return evaluate(*given, **more)

    monkeypatch.setattr(comparison, "evaluate_models", note)
    run(make_catalog(project))
    assert seen == [chosen]


def test_without_held_out_rows_every_output_is_stored(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish_tokens(project / "tokens", "key2", train=ROWS)
    save_tuned(project / "tuned_model", project / "base", "lora", tokens_key="key2")
    catalog = make_catalog(project)
    run(catalog)
    assert json.loads((project / "evaluation.json").read_text())["skipped"]
    assert list(catalog.load("evaluation_samples").columns)[:2] == ["row_id", "prompt"]
    assert "Evaluation skipped." in (project / "evaluation.md").read_text()
    assert "Evaluation skipped" in capsys.readouterr().out


def test_the_graph_is_grouped_and_names_stay_plain() -> None:
    pipeline = create_pipeline()
    (node,) = pipeline.nodes
    assert node.namespace == "evaluate"
    assert "torch" in node.tags
    assert pipeline.outputs() == {
        "base_evaluation",
        "evaluation",
        "evaluation_figures",
        "evaluation_page",
        "evaluation_report",
        "evaluation_row_scores",
        "evaluation_samples",
    }
    assert pipeline.inputs() >= {"tuned_model", "tokenized_examples", "params:evaluate"}


def test_every_type_hint_resolves() -> None:
    from typing import get_type_hints

    from lm_tuning.pipelines.evaluate.nodes import evaluate_models

    assert get_type_hints(evaluate_models)["evaluate"] is EvaluateParameters


def test_memory_that_runs_out_while_answering_is_told_and_changes_no_answer(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(make_catalog(project))
    expected = (project / "samples.csv").read_text()
    shutil.rmtree(project / "base_evaluation")
    forward = LlamaForCausalLM.forward

    @functools.wraps(forward)
    def small(model: Any, *arguments: Any, **options: Any) -> Any:
        if options.get("use_cache") and len(options["input_ids"]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(model, *arguments, **options)

    monkeypatch.setattr(LlamaForCausalLM, "forward", small)
    with caplog.at_level(logging.WARNING):
        run(make_catalog(project))
    assert (project / "samples.csv").read_text() == expected
    told = [record.getMessage() for record in caplog.records if "Out of memory" in record.getMessage()]
    assert len(told) == 2, "once for each model"
    assert all("evaluate.generate_batch_rows" in text for text in told)


def test_the_adapter_is_merged_for_the_answers_and_not_for_the_loss(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, bool]] = []
    forward = LlamaForCausalLM.forward

    @functools.wraps(forward)
    def watch(model: Any, *arguments: Any, **options: Any) -> Any:
        adapted = [module for module in model.modules() if isinstance(module, LoraLayer)]
        seen.append((bool(options.get("use_cache")), bool(adapted) and all(module.merged for module in adapted)))
        return forward(model, *arguments, **options)

    monkeypatch.setattr(LlamaForCausalLM, "forward", watch)
    run(make_catalog(project))
    answers = [merged for is_answer, merged in seen if is_answer]
    assert answers == sorted(answers), "the base model answers first"
    assert set(answers) == {False, True}
    assert not any(merged for is_answer, merged in seen if not is_answer)


def test_how_answers_are_made_is_seen_in_the_result_and_in_each_answer(project: Path) -> None:
    plain = make_catalog(project)
    run(plain)
    free = plain.load("evaluation_samples")
    string = free["tuned"][0][1:3]
    generation = GenerationParameters(max_new_tokens=4, repetition_penalty=1.5, stop_strings=[string])
    stopped = make_catalog(project, generation=GenerationParameters(max_new_tokens=4, stop_strings=[string]))
    run(stopped)
    samples = stopped.load("evaluation_samples")
    assert samples["tuned"][0] == free["tuned"][0].partition(string)[0]
    assert samples["tuned_finish_reason"][0] == "stop_string"
    assert set(free["tuned_finish_reason"]) <= {"stop", "length"}
    assert (samples[["base_log_prob", "tuned_log_prob"]] < 0).all(axis=None)
    penalized = make_catalog(project, generation=generation)
    run(penalized)
    evaluation = json.loads((project / "evaluation.json").read_text())
    assert evaluation["generation"].startswith("greedy, repetition_penalty 1.5, stop_strings ")
    assert "answers of each model by greedy, repetition_penalty 1.5" in (project / "evaluation.md").read_text()
