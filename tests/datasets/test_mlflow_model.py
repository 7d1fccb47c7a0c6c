"""MLflow gives the answers of classifiers and encoder-decoders as transformers gives them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import pytest
import torch
from kedro.io import DatasetError
from transformers import pipelines

from lm_tuning.datasets import MlflowModelDataset
from tests.support.tiny import END, EOS, PAD, ids, make_tokenizer, save_tiny_model
from tests.support.tiny_tasks import LABEL_MAP, make_classifier, make_seq2seq, save_base
from tests.support.tracking_store import new_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    before = mlflow.get_tracking_uri()
    uri = new_store(tmp_path / "store")
    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment(
        experiment_id=mlflow.create_experiment("e", artifact_location=(tmp_path / "artifacts").as_uri())
    )
    yield uri
    mlflow.set_tracking_uri(before)


def description(folder: Path, task: str, **changes: Any) -> Any:
    settings = {
        "task": task,
        "is_adapter": False,
        "base": None,
        "revision": None,
        "quantization": None,
        "num_embeddings": None,
        "is_chat": False,
        "adds_special_tokens": True,
        "append_token_id": None,
        "strip_token_id": None,
        "max_new_tokens": 6,
        "labels": [],
        "trust_remote_code": False,
        **changes.pop("settings", {}),
    }
    return {
        "is_wanted": True,
        "folder": str(folder),
        "flavor": "python",
        "pipeline_task": "",
        "settings": settings,
        "example": ["abc"],
        "requirements": ["torch"],
        "register_as": "m",
        "alias": "best",
        "tags": {"lm_tuning.dtype": "float32"},
        **changes,
    }


def save(data: Any) -> Any:
    (Path(data["folder"]) / "README.md").write_text("---\nlicense: mit\n---\n# x\n")
    with mlflow.start_run():
        MlflowModelDataset().save(data)
    return mlflow.pyfunc.load_model("models:/m@best")


def test_an_encoder_decoder_reads_a_source_with_its_end(store: str, tmp_path: Path) -> None:
    model = make_seq2seq()
    folder = save_base(model, tmp_path / "export")
    loaded = save(description(folder, "seq2seq_lm", settings={"append_token_id": EOS}))
    source = torch.tensor([[*ids("hello"), EOS]])
    made = model.generate(input_ids=source, attention_mask=torch.ones_like(source), max_new_tokens=6)[0]
    expected = make_tokenizer().decode(made, skip_special_tokens=True)
    assert loaded.predict(pd.DataFrame({"text": ["hello"]}))["answer"].tolist() == [expected]
    short = loaded.predict(pd.DataFrame({"text": ["hello"]}), params={"max_new_tokens": 1})["answer"]
    assert len(short[0]) < len(expected)


@pytest.mark.parametrize("flavor", ["transformers", "python"])
def test_a_classifier_names_its_class(store: str, tmp_path: Path, flavor: str) -> None:
    model = make_classifier()
    model.config.id2label = {index: name for name, index in LABEL_MAP.items()}
    model.config.label2id, model.config.pad_token_id = LABEL_MAP, PAD
    folder = save_base(model, tmp_path / "export")
    labels = sorted(LABEL_MAP, key=LABEL_MAP.__getitem__)
    given = description(
        folder,
        "sequence_classification",
        flavor=flavor,
        pipeline_task="text-classification",
        settings={"labels": labels},
    )
    loaded = save(given)
    texts = ["abc", "hello", "x9"]
    with torch.no_grad():
        probabilities = [model(input_ids=torch.tensor([ids(text)])).logits[0].softmax(-1) for text in texts]
    found = loaded.predict(texts if flavor == "transformers" else pd.DataFrame({"text": texts}))
    assert found["label"].tolist() == [labels[int(each.argmax())] for each in probabilities]
    assert found["score"].tolist() == pytest.approx([float(each.max()) for each in probabilities], rel=1e-4)
    # What was put into transformers for MLflow is out again.
    assert pipelines.check_task.__module__ == "transformers.pipelines"


@pytest.mark.parametrize("draws", [True, False])
def test_a_pipeline_draws_where_the_evaluation_did(store: str, tmp_path: Path, draws: bool) -> None:
    folder = save_tiny_model(tmp_path / "export")
    drawing = {"do_sample": True, "temperature": 0.5, "top_k": 0, "top_p": 1.0} if draws else {}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END, "pad_token_id": PAD, **drawing}))
    loaded = save(description(folder, "causal_lm", flavor="transformers", pipeline_task="text-generation"))
    assert loaded.model_config["do_sample"] is draws
    assert len(loaded.predict(["abc"])) == 1


def test_nothing_happens_unless_it_is_wanted(store: str) -> None:
    MlflowModelDataset().save({"is_wanted": False})
    assert not mlflow.MlflowClient().search_registered_models()


def test_without_a_run_the_user_is_told_that_the_export_is_whole(store: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"has no run to log the export into.*The export is whole in"):
        MlflowModelDataset().save(description(tmp_path, "causal_lm"))


def test_mlflow_s_refusal_is_a_message(store: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"MLflow did not take the export: .*The export is whole in"):
        save(description(tmp_path, "causal_lm", flavor="transformers", pipeline_task="text-generation"))
