from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.parameters import ModelParameters, TrainParameters
from lm_tuning.pipelines.profile.nodes import profile_steps
from lm_tuning.runtime.device import describe_device
from lm_tuning.runtime.precision import choose_precision
from lm_tuning.storage.folders import FolderStore
from tests.support.tiny import save_tiny_model
from tests.training.conftest import write_rows


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Tokens and a model as the tokenize pipeline stores them."""
    from lm_tuning.models.base_model import describe_base_model

    monkeypatch.chdir(tmp_path)
    save_tiny_model(Path("model"))
    store = FolderStore(Path("tokens"))
    staged = store.stage("k1")
    for seed, split in enumerate(("train", "validation", "test")):
        write_rows(staged.path, split, 12, seed=seed)
    summary = {"task": "causal_lm", "sources": [], "label_map": None}
    summary |= {"format": "prompt_response", "control_tokens": "text"}
    (staged.path / "summary.json").write_text(json.dumps(summary))
    return {"tokens": store.publish(staged), "base_model": describe_base_model("model"), "work": tmp_path / "work"}


def run(stored: dict[str, Any], *, task: str = "causal_lm", **train: Any) -> tuple[dict[str, Any], str, Path]:
    stored["work"].mkdir()
    return profile_steps(
        stored["tokens"],
        stored["base_model"],
        profile_work=stored["work"],
        batch_plans=Path("plans"),
        train=TrainParameters(**{"effective_batch_rows": 4, "effective_batch_tokens": None, "max_steps": 50} | train),
        model=ModelParameters(name_or_path="model"),
        seed=1,
        task=task,
        output="mine",
    )


def test_a_profile_comes_as_figures_markdown_and_trace_and_on_the_terminal(stored, capsys, caplog):
    caplog.set_level(logging.INFO)
    figures, markdown, trace = run(stored, save_every_steps=1, eval_every_steps=1)
    assert figures["metrics"]["profile"]["num_steps"] == 3
    assert 0 < figures["metrics"]["profile"]["matrix_products_fraction"] < 1
    weights = choose_precision(describe_device()).weights
    assert "- model: model" in markdown and f"lora, {weights} weights" in markdown
    assert trace.is_file() and list(stored["work"].iterdir()) == [trace]
    assert "matrix products" in capsys.readouterr().out
    assert "data/08_reporting/mine/profile/profile.md" in caplog.text


def test_the_graph_is_a_table_and_knows_no_checkpoints():
    from lm_tuning.pipelines.profile import create_pipeline

    pipeline = create_pipeline()
    assert [node.name for node in pipeline.nodes] == ["profile.profile_steps"]
    settings = {f"params:{name}" for name in ("model", "train", "seed", "task", "output")}
    assert pipeline.inputs() == settings | {"tokenized_examples", "base_model", "profile_work", "batch_plans"}
    assert pipeline.all_outputs() == {"profile", "profile_report", "profile_trace"}
    assert pipeline.nodes[0].tags == {"torch", "gpu", "reports"}


def test_the_registered_pipeline_makes_its_tokens():
    from lm_tuning.pipeline_registry import register_pipelines

    pipelines = register_pipelines()
    assert set(pipelines["profile"].nodes) - set(pipelines["tokenize"].nodes) == {
        node for node in pipelines["profile"].nodes if node.namespace == "profile"
    }
    assert set(pipelines["tokenize"].nodes) < set(pipelines["profile"].nodes)
