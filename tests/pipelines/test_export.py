"""The export from the command line: what lies there afterwards, what MLflow answers, and what a failure leaves."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import PATIENCE_SECONDS
from tests.support.project_copy import copy_project
from tests.support.shell import Shell
from tests.support.tiny import make_model, make_tokenizer

ANIMALS = ["cat", "dog", "bird", "fish", "horse", "sheep", "goat", "duck"]
MAX_NEW_TOKENS = 8
"""As conf/smoke evaluates."""


def save_talkative_model(folder: Path) -> None:
    """Write a random model whose answers differ from prompt to prompt."""
    import torch

    model = make_model()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


class Project:
    """A copy of this project in which everything was run once, in float32."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        copy_project(folder)
        save_talkative_model(folder / "models/tiny")
        rows = [{"question": f"{ANIMALS[n % 8]} {n}?", "answer": f"{n} {ANIMALS[n % 8]}"} for n in range(160)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.shell: Shell | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Of its processes: no other store, and no hub."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
        return {**kept, "COLUMNS": "400", "HF_HUB_OFFLINE": "1"}

    def arguments(self, *arguments: str, **params: object) -> list[str]:
        given: dict[str, object] = {
            "model.name_or_path": "models/tiny",
            "data.path": "rows.jsonl",
            "train.precision": "float32",
            "evaluate.num_generate_rows": 8,
        }
        given |= {key.replace("__", "."): value for key, value in params.items()}
        text = ",".join(f"{key}={value}" for key, value in given.items())
        return ["run", "--env", "smoke", *arguments, "--params", text]

    def start(self, *arguments: str, exit_code: int = 0, **params: object) -> str:
        """Run in a process of its own."""
        done = subprocess.run(
            [sys.executable, "-m", "kedro", *self.arguments(*arguments, **params)],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == exit_code, done.stdout[-6000:]
        return done.stdout

    def export(self, exit_code: int = 0, **params: object) -> str:
        """Export in the shared process and return everything that was printed."""
        assert self.shell is not None
        done = self.shell.kedro(self.folder, *self.arguments("--pipelines=export", **params))
        printed = done.stdout + done.stderr
        assert done.code == exit_code, printed[-6000:]
        return printed

    @property
    def exported(self) -> Path:
        return self.folder / "data/06_models/smoke/export"

    def digests(self) -> dict[str, str]:
        """Name the content of the export's files."""
        files = sorted(path for path in self.exported.rglob("*") if path.is_file())
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    def evaluated_answers(self) -> dict[str, str]:
        """Return what the evaluation got from the tuned model, by prompt."""
        path = self.folder / "data/07_model_output/smoke/evaluation_samples.csv"
        with path.open(newline="", encoding="utf-8") as file:
            return {row["prompt"]: row["tuned"] for row in csv.DictReader(file)}

    @property
    def store(self) -> str:
        return f"sqlite:///{self.folder}/mlflow.db"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    folder = tmp_path_factory.mktemp("export")
    project = Project(folder / "project")
    project.start()
    with Shell(folder, project.environment) as project.shell:
        yield project


@pytest.fixture
def store(project: Project, monkeypatch: pytest.MonkeyPatch) -> str:
    """The project's MLflow store as that of this process."""
    import mlflow

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(project.store)
    yield project.store
    mlflow.set_tracking_uri(before)


def test_a_merged_model_is_registered_and_gives_the_evaluated_answers(project: Project, store: str) -> None:
    import mlflow
    from mlflow import MlflowClient

    printed = project.export(export__register_as="tiny", export__alias="champion")
    assert "mlflow models serve -m 'models:/tiny@champion' --env-manager local" in printed
    assert "max_logit_difference" in printed
    assert {"model.safetensors", "tokenizer.json", "chat_template.jinja", "generation_config.json"} <= set(
        project.digests()
    )
    version = MlflowClient().get_model_version_by_alias("tiny", "champion")
    tuning = json.loads((project.folder / "data/06_models/smoke/tuned_model/tuning.json").read_text())
    assert version.tags["lm_tuning.training_run"] == tuning["mlflow_run_id"]
    assert version.tags["lm_tuning.tokens_key"] == tuning["tokens_key"]
    run = MlflowClient().get_run(version.run_id)
    assert run.data.tags["data.tokenized_examples"] == tuning["tokens_key"]
    assert "data.raw_examples.train" in run.data.tags
    model = mlflow.pyfunc.load_model("models:/tiny@champion")
    assert model.metadata.flavors["transformers"]["inference_task"] == "llm/v1/chat"
    answers = project.evaluated_answers()
    assert len(set(answers.values())) > 2
    for prompt, answer in answers.items():
        request = {"messages": [{"role": "user", "content": prompt}], "max_tokens": MAX_NEW_TOKENS}
        (reply,) = model.predict(request)
        assert reply["choices"][0]["message"]["content"].strip() == answer.strip()
    requirements = Path(mlflow.pyfunc.get_model_dependencies("models:/tiny@champion")).read_text()
    assert "transformers==" in requirements and "torch==" in requirements and "+cpu" not in requirements


def test_an_adapter_answers_by_code_of_its_own(project: Project, store: str) -> None:
    import mlflow
    import pandas as pd

    printed = project.export(export__format="adapter", export__register_as="tiny_adapter")
    assert "models:/tiny_adapter/1" in printed
    assert {"adapter_model.safetensors", "adapter_config.json"} <= set(project.digests())
    assert "model.safetensors" not in project.digests()
    model = mlflow.pyfunc.load_model("models:/tiny_adapter/1")
    answers = project.evaluated_answers()
    # A request that names no limit has that of the evaluation.
    replies = model.predict(pd.DataFrame({"text": list(answers)}))
    assert [each.strip() for each in replies["answer"]] == [each.strip() for each in answers.values()]


def test_a_corrupted_merge_ends_the_run_and_leaves_the_earlier_export(project: Project) -> None:
    project.export()
    before = project.digests()
    source = project.folder / "src/lm_tuning/export/merge.py"
    sound = source.read_text()
    planted = sound.replace(
        "        module.merge(safe_merge=False)\n",
        "        module.merge(safe_merge=False)\n        layer.weight.data *= 1.01\n",
    )
    assert planted != sound
    source.write_text(planted)
    try:
        printed = project.start("--pipelines=export", exit_code=2)
    finally:
        source.write_text(sound)
    assert "The export is not published, since it is another model than the full-precision base" in printed
    assert "max_logit_difference is" in printed
    assert "Traceback" not in printed
    assert project.digests() == before
    assert not any((project.folder / "data/06_models/smoke/.export").glob("*"))


class TestUpload:
    def test_a_dry_run_lists_what_would_be_sent(self, project: Project) -> None:
        printed = project.export(export__hub_repository="me/tiny")
        assert "Dry run: these" in printed and "Nothing was sent" in printed
        record = json.loads((project.folder / "data/08_reporting/smoke/export_upload.json").read_text())
        sizes = {path.name: path.stat().st_size for path in project.exported.iterdir()}
        assert {file["path"]: file["num_bytes"] for file in record["files"]} == sizes
        assert (record["repository"], record["url"]) == ("me/tiny", None)

    def test_without_a_hub_there_is_one_message_and_the_export(self, project: Project) -> None:
        printed = project.export(exit_code=2, export__hub_repository="me/tiny", export__hub_dry_run="false")
        assert printed.count("The model hub does not answer") == 1
        assert (project.exported / "export.json").is_file()


class TestRefusals:
    def test_no_tuned_model(self, project: Project) -> None:
        printed = project.export(exit_code=2, output="never_trained")
        assert "'tuned_model' is not stored yet" in printed
        assert not (project.folder / "data/06_models/never_trained").exists()

    def test_an_alias_of_nothing(self, project: Project) -> None:
        printed = project.export(exit_code=2, export__alias="champion")
        assert "export.alias = champion names a version of a registered model" in printed

    def test_another_base(self, project: Project) -> None:
        other = project.folder / "models/other"
        make_model(seed=9).save_pretrained(other)
        make_tokenizer().save_pretrained(other)
        printed = project.export(exit_code=2, model__name_or_path="models/other")
        assert "model.name_or_path = models/other is another model" in printed

    def test_mlflow_that_tracks_nothing(self, project: Project) -> None:
        path = project.folder / "conf/smoke/mlflow.yml"
        path.write_text("tracking: {disable_tracking: {pipelines: [export]}}\n")
        try:
            printed = project.export(exit_code=2, export__log_to_mlflow="true")
        finally:
            path.unlink()
        assert "has no run to log the export into" in printed
        assert "The export is whole in" in printed


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.slow
def test_the_served_model_answers_a_request(project: Project) -> None:
    project.export(export__register_as="served", export__alias="champion")
    import uvicorn

    # MLflow starts its server by its name, which an activated environment has on its path.
    scripts = [str(Path(sys.executable).parent), str(Path(uvicorn.__file__).parents[4] / "bin")]
    path = os.pathsep.join([*scripts, os.environ["PATH"]])
    port, environment = free_port(), {**project.environment, "MLFLOW_TRACKING_URI": project.store, "PATH": path}
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", "models:/served@champion"]
    process = subprocess.Popen(
        [*command, "--env-manager", "local", "-h", "127.0.0.1", "-p", str(port)], env=environment, cwd=project.folder
    )
    try:
        prompt, answer = next(iter(project.evaluated_answers().items()))
        body: Any = {"messages": [{"role": "user", "content": prompt}], "max_tokens": MAX_NEW_TOKENS}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/invocations",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        reply = None
        while reply is None:
            assert process.poll() is None, "the server has ended"
            try:
                with urllib.request.urlopen(request) as response:
                    reply = json.loads(response.read())
            except urllib.error.URLError as error:
                if isinstance(error, urllib.error.HTTPError):
                    raise
                time.sleep(0.5)
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_SECONDS)
    choices = (reply[0] if isinstance(reply, list) else reply)["choices"]
    assert choices[0]["message"]["content"].strip() == answer.strip()
