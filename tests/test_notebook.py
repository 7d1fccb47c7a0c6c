"""The notebook reads a real MLflow store and the files of a real, tiny training."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.patience import PATIENCE_SECONDS
from tests.support.settings import make_settings
from tests.support.stored import evaluation_settings
from tests.support.tiny import ASSISTANT, END, USER, ids, save_tiny_model
from tests.support.tracking_store import new_run, new_store

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "read_results.ipynb"
NUM_STEPS = 4


def write_tokens(folder: Path, split: str, words: list[str]) -> None:
    """Write one row per word: it is asked for and answered backwards."""
    from lm_tuning.text.store.table import TokenTableWriter

    with TokenTableWriter(folder / f"{split}.arrow") as writer:
        for row_id, word in enumerate(words, start=1):
            prompt, answer = [USER, *ids(word), END, ASSISTANT], [*ids(word[::-1]), END]
            writer.append(row_id, [*prompt, *answer], [(len(prompt), len(prompt) + len(answer))])


def train_and_evaluate(
    project: Path, uri: str, run_id: str, *, earlier_names: bool = False
) -> tuple[Any, dict[str, Any]]:
    """Do what the pipelines do, through the same functions and datasets; return the results of both parts."""
    from lm_tuning.datasets import CSVDataset, JSONDataset
    from lm_tuning.datasets.metric_stream import MetricStream
    from lm_tuning.evaluation.results import evaluate_models
    from lm_tuning.storage.folders import FolderStore
    from lm_tuning.training.run import TrainingPaths, run_training

    store = FolderStore(project / "tokens")
    staged = store.stage("tokens-1")
    words = ["cat", "dog", "bird", "fish", "horse", "mouse", "lion", "bear"]
    for split, chosen in (("train", words), ("validation", words[:2]), ("test", words[2:6])):
        write_tokens(staged.path, split, chosen)
    tokens = store.publish(staged)

    stream = MetricStream(run_id, uri, earlier_names=earlier_names)
    training = run_training(
        TrainingPaths(tokens=tokens, checkpoints=project / "checkpoints"),
        make_settings(
            save_tiny_model(project / "model"),
            method="lora",
            lora={"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"},
            learning_rate=1e-2,
            effective_batch_rows=4,
            max_steps=NUM_STEPS,
            eval_every_steps=2,
            run_id=run_id,
        ),
        on_metrics=stream.log_step,
    )
    stream.close()
    comparison = evaluate_models(
        training.model_folder,
        tokens,
        FolderStore(project / "base_evaluation"),
        evaluation_settings(seed=7, num_generate_rows=3, max_new_tokens=6),
    )
    reports = project / "data" / "08_reporting" / "default"
    CSVDataset(filepath=str(reports / "training_summary.csv")).save(training.steps)
    CSVDataset(filepath=str(reports / "efficiency_summary.csv")).save(training.efficiency)
    JSONDataset(filepath=str(reports / "evaluation.json")).save(comparison.result)
    samples = project / "data" / "07_model_output" / "default" / "evaluation_samples.csv"
    CSVDataset(filepath=str(samples)).save(comparison.answers)
    return training, comparison.result


def execute(project: Path, uri: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the notebook inside a project and return the text that each code cell puts out."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    # Its kernel keeps a history and settings, else in the user's home folder.
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(project / name.lower()))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook,
        timeout=PATIENCE_SECONDS,
        startup_timeout=PATIENCE_SECONDS,
        resources={"metadata": {"path": str(project)}},
    ).execute()
    return [
        "\n".join(describe(output) for output in cell.outputs) for cell in notebook.cells if cell.cell_type == "code"
    ]


def describe(output: Any) -> str:
    """Return an output's plain text, and ``[image]`` for a figure."""
    data = output.get("data", {})
    return ("[image]" if "image/png" in data else "") + data.get(
        "text/html", data.get("text/plain", output.get("text", ""))
    )


@pytest.mark.parametrize("earlier_names", [False, True])
def test_the_notebook_shows_runs_curves_and_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier_names: bool
) -> None:
    from mlflow import MlflowClient
    from mlflow.entities import Param

    from lm_tuning.tracking.names import name_figures
    from lm_tuning.tracking.run_description import flatten_settings, numbers_of

    (tmp_path / "conf" / "base").mkdir(parents=True)
    uri = new_store(tmp_path)
    run_id = new_run(uri, tmp_path)
    settings = flatten_settings({"output": "default", "train": {"method": "lora", "learning_rate": 1e-2}})
    MlflowClient(uri).log_batch(run_id, params=[Param(name, value) for name, value in settings.items()])
    training, result = train_and_evaluate(tmp_path, uri, run_id, earlier_names=earlier_names)
    figures = numbers_of(result)
    for name, value in (figures if earlier_names else name_figures("evaluation", figures, split="test")).items():
        MlflowClient(uri).log_metric(run_id, name, value)
    # A later run of another output, whose curves must not be taken for this one's.
    time.sleep(0.01)
    other = MlflowClient(uri).create_run(MlflowClient(uri).get_run(run_id).info.experiment_id).info.run_id
    MlflowClient(uri).log_param(other, "output", "other")
    MlflowClient(uri).log_metric(other, "train/loss_nats_per_token", 99.0, step=1)

    _, runs, figure, curves, efficiency, comparison, samples = execute(tmp_path, uri, monkeypatch)

    assert run_id in runs
    assert other in runs
    for column in ("train.learning_rate", "train/loss_nats_per_token", "base/nats_per_token", "tuned rouge_l"):
        assert column in runs
    assert f"{result['tuned']['nats_per_token']:.6f}" in runs
    assert "[image]" in figure
    last_loss = training.steps[-1]["loss_nats_per_token"]
    assert f"{last_loss:.4f}" in curves
    assert "99.0" not in curves
    assert "tokens_per_second" in efficiency
    assert f"{NUM_STEPS}.0" in efficiency  # the count of steps in the description
    for name in ("base", "tuned"):
        assert f"{result[name]['nats_per_token']:.6f}" in comparison
    assert len(result["samples"]) == 3
    for sample in result["samples"]:
        assert sample["reference"] in samples


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert not re.search(r"/(home|root|Users|work)/", NOTEBOOK.read_text(encoding="utf-8"))
