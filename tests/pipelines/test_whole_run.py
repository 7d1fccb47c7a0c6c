"""The whole project from the command line, on a tiny model.

The first run and the one that is killed are processes of their own, as a user starts them; all other commands share one
process, which has seen neither.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import PATIENCE_SECONDS
from tests.support.project_copy import copy_project
from tests.support.shell import Shell
from tests.support.tiny import save_tiny_model

ANIMALS = ["cat", "dog", "bird", "fish", "horse", "sheep", "goat", "duck"]


class Project:
    """A copy of this project's configuration with its own data, model and MLflow store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        copy_project(folder)
        save_tiny_model(folder / "models/tiny")
        self.write_rows(160)
        self.first = ""
        self.shell: Shell | None = None

    def write_rows(self, count: int) -> None:
        """Write questions and answers, no two alike."""
        rows = [
            {"question": f"{ANIMALS[n % 8]} number {n}?", "answer": f"{n} {ANIMALS[n % 8][::-1]}"} for n in range(count)
        ]
        (self.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def arguments(self, *arguments: str, **params: object) -> list[str]:
        """Return what follows ``kedro`` in a run of the smoke environment with the tiny model and the rows."""
        given: dict[str, object] = {"model.name_or_path": "models/tiny", "data.path": "rows.jsonl"}
        given |= {key.replace("__", "."): value for key, value in params.items()}
        text = ",".join(f"{key}={value}" for key, value in given.items())
        return ["run", "--env", "smoke", *arguments, "--params", text]

    def start(self, *arguments: str, **params: object) -> subprocess.Popen[str]:
        """Start a run in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "kedro", *self.arguments(*arguments, **params)],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def environment(self) -> dict[str, str]:
        """The environment of its processes: this user's, without another store."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
        return {**kept, "COLUMNS": "400"}

    def run(self, *arguments: str, exit_code: int = 0, **params: object) -> str:
        """Run to the end in the shared process and return everything that was printed."""
        assert self.shell is not None
        done = self.shell.kedro(self.folder, *self.arguments(*arguments, **params))
        printed = done.stdout + done.stderr
        assert done.code == exit_code, printed[-6000:]
        return printed

    def read(self, layer: str, name: str) -> Any:
        """Read a stored JSON result."""
        return json.loads((self.folder / "data" / layer / "smoke" / name).read_text())

    def mlflow_runs(self) -> list[Any]:
        """Return the runs of the project's store, newest first."""
        from mlflow.tracking import MlflowClient

        client = MlflowClient(f"sqlite:///{self.folder}/mlflow.db")
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        return list(client.search_runs(experiments, order_by=["attributes.start_time DESC"]))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project in which everything was run once; ``first`` is what that printed."""
    folder = tmp_path_factory.mktemp("whole")
    project = Project(folder / "project")
    process = project.start()
    project.first, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, project.first[-6000:]
    with Shell(folder, project.environment) as project.shell:
        yield project


def test_everything_comes_out(project: Project) -> None:
    evaluation = project.read("08_reporting", "evaluation.json")
    assert evaluation["split"] == "test"
    for model in ("base", "tuned"):
        figures = evaluation[model]
        assert figures["nats_per_token"] > 0
        assert figures["num_tokens"] > 0
        assert 0 <= figures["rouge_l"] <= 1
    assert evaluation["base"]["num_tokens"] == evaluation["tuned"]["num_tokens"]
    reporting = project.folder / "data/08_reporting/smoke"
    for name in (
        "split_summary.json",
        "token_summary.json",
        "length_histogram.png",
        "training_summary.csv",
        "efficiency_summary.csv",
        "health.json",
        "loss_curve.png",
        "evaluation.md",
    ):
        assert (reporting / name).stat().st_size > 0, name
    tuned = project.folder / "data/06_models/smoke/tuned_model"
    assert (tuned / "adapter_model.safetensors").is_file()
    assert len((reporting / "training_summary.csv").read_text().splitlines()) == 1 + 2


def test_the_run_says_what_it_does(project: Project) -> None:
    printed = project.first
    for words in ("Before step 1: measured loss", "Step 1 logged", "make mlflow", "tuned_model", "perplexity"):
        assert words.lower() in printed.lower(), words


def test_one_mlflow_run_has_metrics_parameters_and_artifacts(project: Project) -> None:
    from mlflow.tracking import MlflowClient

    runs = project.mlflow_runs()
    first = runs[-1]
    assert first.info.status == "FINISHED"
    client = MlflowClient(f"sqlite:///{project.folder}/mlflow.db")
    history = client.get_metric_history(first.info.run_id, "train/loss_nats_per_token")
    assert [metric.step for metric in history] == [1, 2]
    assert first.data.metrics["test/tuned_nats_per_token"] == pytest.approx(
        project.read("08_reporting", "evaluation.json")["tuned"]["nats_per_token"]
    )
    evaluation = project.read("08_reporting", "evaluation.json")
    for name in ("num_rows", "num_split_rows"):
        assert first.data.metrics[f"test/{name}"] == evaluation[name] > 0
    assert first.data.params["train.lora.r"] == "4"
    stored = {path.name for path in (project.folder / "mlruns").rglob("*") if path.is_file()}
    assert {"adapter_model.safetensors", "evaluation.json", "health.json", "loss_curve.png"} <= stored


def test_one_file_and_several_are_named_by_digests_of_one_form(project: Project) -> None:
    more = project.folder / "more.jsonl"
    more.write_text('{"question": "a", "answer": "b"}\n')
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (project.folder / "rows.jsonl", more)]
    project.run("--pipelines=example_data")
    assert project.mlflow_runs()[0].data.tags["data.raw_examples.train"] == digests[0]
    project.run("--pipelines=example_data", data__path="[rows.jsonl,more.jsonl]")
    of_both = hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()
    assert project.mlflow_runs()[0].data.tags["data.raw_examples.train"] == of_both


def test_a_second_run_reuses_what_has_not_changed(project: Project) -> None:
    before = project.read("06_models", "tuned_model/tuning.json")
    printed = project.run()
    assert printed.lower().count("reused") >= 3, printed[-6000:]  # split, tokens, base evaluation
    assert "Training" in printed
    after = project.read("06_models", "tuned_model/tuning.json")
    assert after["tokens_key"] == before["tokens_key"]
    assert after["run_folder"] != before["run_folder"]


def test_stale_tokens_are_never_trained_on(project: Project) -> None:
    old = project.read("06_models", "tuned_model/tuning.json")["tokens_key"]
    project.write_rows(176)
    project.run("--pipeline=split")
    printed = project.run("--pipeline=train")
    new = project.read("06_models", "tuned_model/tuning.json")["tokens_key"]
    assert new != old
    assert new == json.loads((project.folder / "data/05_model_input/smoke/tokens/current.json").read_text())["key"]
    assert "Deprecat" not in printed
    # And back again: the earlier rows have the earlier key.
    project.write_rows(160)
    project.run("--pipelines=split")
    assert "reused" in project.run("--pipelines=train").lower()
    assert project.read("06_models", "tuned_model/tuning.json")["tokens_key"] == old


def test_a_terminated_training_is_killed_and_goes_on_in_its_run(project: Project) -> None:
    many = {"train__max_steps": 4000, "train__eval_every_steps": "null", "train__save_every_steps": "null"}
    process = project.start("--pipelines=train", **many)
    assert process.stdout is not None
    for line in process.stdout:
        if "Step 1 logged" in line:
            break
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 143, printed
    assert "train.resume=true" in printed
    assert project.shell is not None  # a busy machine may have had no time to tell MLflow everything
    assert project.shell.kedro(project.folder, "send-tracking").code == 0
    killed = project.mlflow_runs()[0]
    assert killed.info.status == "KILLED"
    (checkpoint,) = sorted((project.folder / "data/06_models/smoke/checkpoints").glob("run-*"))[-1].glob("checkpoint-*")
    step = int(checkpoint.name.rpartition("-")[2])
    number_of_runs = len(project.mlflow_runs())
    printed = project.run("--pipelines=train", train__resume="true", **{**many, "train__max_steps": step + 2})
    changed = f"Resumed with other settings: train.max_steps (4000 -> {step + 2}). MLflow keeps the first values"
    assert printed.count(changed) == 1, printed[-6000:]
    runs = project.mlflow_runs()
    assert len(runs) == number_of_runs
    resumed = next(run for run in runs if run.info.run_id == killed.info.run_id)
    assert resumed.info.status == "FINISHED"
    assert project.read("06_models", "tuned_model/tuning.json")["finished_step"] == step + 2
    health = project.read("08_reporting", "health.json")["facts"]
    assert health["resumed_from_step"] == step
    assert health["first_step_measured_nats_per_token"] > 0
    # A resume that is refused leaves the finished run as it is.
    other = {**many, "train__max_steps": step + 2, "train__effective_batch_tokens": 256}
    printed = project.run("--pipelines=train", exit_code=2, train__resume="true", **other)
    assert "another effective batch: train.effective_batch_tokens: 128 -> 256" in printed
    assert "Resumed with other settings" not in printed
    kept = next(run for run in project.mlflow_runs() if run.info.run_id == killed.info.run_id)
    assert kept.info.status == "FINISHED"
    assert "train.effective_batch_tokens: 128 -> 256" in kept.data.tags["refused"]
    assert {name for name in kept.data.tags if name.startswith("resume.")} == {
        name for name in resumed.data.tags if name.startswith("resume.")
    }


@pytest.mark.parametrize(
    ("content", "params", "words"),
    [
        (None, {}, ["bad.jsonl"]),
        ("", {}, ["bad.jsonl", "empty"]),
        ('{"question": "a", "answer": "b"}\nnot json\n', {}, ["bad.jsonl", "2"]),
        ('{"question": "a", "reply": "b"}\n', {"data.columns.response": "answer"}, ["answer", "question", "reply"]),
        ('{"question": "a", "answer": 7}\n{"question": "a", "answer": null}\n', {}, ["answer", "1", "2"]),
    ],
)
def test_bad_rows_end_with_one_clear_message(
    project: Project, content: str | None, params: dict[str, object], words: list[str]
) -> None:
    before = (project.folder / "data/02_intermediate/smoke/splits/current.json").read_text()
    bad = project.folder / "bad.jsonl"
    bad.unlink(missing_ok=True)
    if content is not None:
        bad.write_text(content)
    columns = {"data.columns.prompt": "question", "data.columns.response": "answer", **params}
    printed = project.run("--pipelines=split", exit_code=2, **{"data.path": "bad.jsonl", **columns})
    for word in words:
        assert word in printed, printed
    assert "Traceback" not in printed
    assert (project.folder / "data/02_intermediate/smoke/splits/current.json").read_text() == before


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("models/none", ["models/none"]),
        ("models/empty", ["config.json"]),
        ("someone/some-model", ["someone/some-model", "hub"]),
    ],
)
def test_a_model_that_is_not_there_ends_with_one_clear_message(project: Project, model: str, words: list[str]) -> None:
    (project.folder / "models/empty").mkdir(exist_ok=True)
    printed = project.run("--pipelines=tokenize", exit_code=2, **{"model.name_or_path": model})
    for word in words:
        assert word in printed, printed
    assert "Traceback" not in printed
