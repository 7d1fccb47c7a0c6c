"""A Kedro project of four short nodes under this project's hooks, so that a test can run real sessions in seconds.

Its nodes do as the environment variable ``TINY_NODE`` says: ``finish``, ``raise``, ``report and raise``, ``report and
stop`` (as a health check does after a step), ``refuse`` (before the first step), ``interrupt`` (raises
``KeyboardInterrupt``), ``wait`` (says so on stdout, then sleeps until a signal comes), ``swallow`` (takes a signal for
an error of its own and goes on), ``stuck`` (never comes back from a call of the C library, beside a child process whose
id it prints) or ``stuck step`` (the same in a training step).

``TINY_SERVER``, as in ``train hang``, makes a test's tracking server, whose file ``TINY_SERVER_FILE`` names, behave so
from the time of a node on. With ``TINY_POOL`` an artifact store never answers, and holds a thread pool. ``TINY_SPLIT``
names the split that is evaluated, ``test`` when it is not set.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

PACKAGE = "tiny_project"

SETTINGS = """
from lm_tuning.hooks.locking import OutputLockHook
from lm_tuning.hooks.parameters import ParametersHook
from lm_tuning.hooks.validation import StoredInputsHook
from lm_tuning.hooks.tracking import TrackingHook

HOOKS = (TrackingHook(), OutputLockHook(), StoredInputsHook(), ParametersHook())
DISABLE_HOOKS_FOR_PLUGINS = ("kedro_mlflow", "kedro-viz", "kedro-telemetry")
CONFIG_LOADER_ARGS = {
    "base_env": "base",
    "default_run_env": "local",
    "merge_strategy": {"parameters": "soft"},
    "config_patterns": {"mlflow": ["mlflow*"]},
}
"""

REGISTRY = """
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from pathlib import Path

from kedro.pipeline import Pipeline, node

from lm_tuning.errors import UserError
from lm_tuning.training.checkpoints.signals import stop_on_signal


if os.environ.get("TINY_POOL"):
    from concurrent.futures import ThreadPoolExecutor

    from mlflow import MlflowClient

    def log_artifact(self, *_):
        ThreadPoolExecutor().submit(time.sleep, 3600).result()

    MlflowClient.log_artifact = log_artifact


def turn_server(node):
    at, _, mode = os.environ.get("TINY_SERVER", "").partition(" ")
    if at == node:
        # Until now the server was sound and given time; from here on a request waits for nothing.
        os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = "60" if mode == "ok" else "3"
        file = Path(os.environ["TINY_SERVER_FILE"])
        aside = file.with_suffix(".tiny")
        aside.write_text(mode)
        aside.rename(file)


def make_rows(data):
    described = {"train": [{"path": data["path"], "digest": "d1"}], "test": [{"digest": "d2"}], "is_example": True}
    return described, {"facts": {"secret": 9}, "metrics": {"data_rows_read": 7}, "markdown": "## Rows"}


def split_rows(raw_examples, split_cache):
    found = split_cache.find("k1")
    if found:
        return found
    staged = split_cache.stage("k1")
    (staged.path / "train.arrow").write_text("rows")
    return staged


def train_model(example_splits, checkpoints, metric_stream, train):
    if os.environ.get("TINY_NODE") == "refuse":
        raise UserError("train.resume: not this one")
    metric_stream.log_step(1, {"loss": 3.0})
    turn_server("train")
    run = checkpoints / "run-1" / "checkpoint-1"
    run.mkdir(parents=True, exist_ok=True)
    marker = {"mlflow_run_id": metric_stream.run_id, "complete": True, "step": 1}
    (run / "lm_tuning_checkpoint.json").write_text(json.dumps(marker))
    behaviour = os.environ.get("TINY_NODE", "finish")
    if behaviour.startswith("report"):
        checkpoints.with_name("health.json").write_text(json.dumps({"findings": 1}))
    if behaviour.endswith("raise"):
        raise RuntimeError("step 2 failed")
    if behaviour.endswith("stop"):
        raise UserError("Training was stopped by its health check")
    if behaviour == "interrupt":
        raise KeyboardInterrupt
    if behaviour == "swallow":
        with contextlib.suppress(Exception):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
    if behaviour == "wait":
        print("waiting", flush=True)
        time.sleep(120)
    if behaviour.startswith("stuck"):
        child = subprocess.Popen(["sleep", "100000"])  # longer than any test waits
        print("waiting beside", child.pid, flush=True)
        with stop_on_signal() as stop:
            if behaviour == "stuck step":
                stop.begin_steps()
            lock = ctypes.create_string_buffer(64)
            for _ in range(2):  # the second time waits for the first for ever, whatever signal comes
                ctypes.CDLL(None).pthread_mutex_lock(lock)
    metric_stream.log_step(2, {"loss": 2.0})
    metric_stream.close()
    folder = checkpoints / "finished"
    folder.mkdir()
    (folder / "adapter.bin").write_text("weights")
    (folder / "tuning.json").write_text(json.dumps({"method": train["method"]}))
    return folder, [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}], {"findings": 0}


def evaluate_models(tuned_model):
    turn_server("evaluate")
    base = {"nats_per_token": 3.5, "num_tokens": 10, "rouge_l": None}
    split = os.environ.get("TINY_SPLIT", "test")
    return {"base": base, "tuned": {"nats_per_token": 2.5}, "num_rows": 3, "split": split or None, "is_skipped": False}


def register_pipelines():
    split = Pipeline(
        [
            node(make_rows, "params:data", ["raw_examples", "data_report"]),
            node(split_rows, ["raw_examples", "split_cache"], "example_splits"),
        ]
    )
    inputs = ["example_splits", "checkpoints", "metric_stream", "params:train"]
    train = Pipeline([node(train_model, inputs, ["tuned_model", "training_summary", "health_report"])])
    evaluate = Pipeline([node(evaluate_models, "tuned_model", "evaluation")])
    return {"split": split, "train": train, "evaluate": evaluate, "__default__": split + train + evaluate}
"""

CATALOG = """
_output: ${runtime_params:output, ${globals:output}}
raw_examples:
  type: lm_tuning.datasets.JSONDataset
  filepath: data/${_output}/raw_examples.json
data_report:
  type: lm_tuning.datasets.ReportSectionDataset
  filepath: data/${_output}/data_report.json
  section: rows
  sections: [rows]
  title: Data report
  metadata: {lm_tuning: {mlflow_artifact: reports, mlflow_metrics: metrics}}
split_cache:
  type: lm_tuning.datasets.FolderStoreDataset
  filepath: data/${_output}/splits
example_splits:
  type: lm_tuning.datasets.StoredFolderDataset
  filepath: data/${_output}/splits
checkpoints:
  type: lm_tuning.datasets.FolderDataset
  filepath: data/${_output}/checkpoints
metric_stream:
  type: lm_tuning.datasets.MetricStreamDataset
tuned_model:
  type: lm_tuning.datasets.ModelFolderDataset
  filepath: data/${_output}/tuned_model
  metadata: {lm_tuning: {mlflow_artifact: model}}
training_summary:
  type: lm_tuning.datasets.CSVDataset
  filepath: data/${_output}/training_summary.csv
  metadata: {lm_tuning: {mlflow_artifact: reports}}
health_report:
  type: lm_tuning.datasets.JSONDataset
  filepath: data/${_output}/health.json
  metadata: {lm_tuning: {mlflow_artifact: reports, also_on_failure: true}}
evaluation:
  type: lm_tuning.datasets.JSONDataset
  filepath: data/${_output}/evaluation.json
  metadata: {lm_tuning: {mlflow_artifact: reports, mlflow_metrics: true}}
"""

PYPROJECT = f"""
[tool.kedro]
package_name = "{PACKAGE}"
project_name = "tiny"
kedro_init_version = "1.7.0"
"""

PARAMETERS = {
    "output": "${globals:output}",
    "data": {"path": "rows.jsonl"},
    "train": {"method": "lora", "max_steps": 2, "effective_batch_rows": 2},
}

MLFLOW = {
    "tracking": {
        "experiment": {"create_experiment_kwargs": {"artifact_location": "mlruns"}},
        "run": {"nested": False},
    }
}


def write_project(root: Path, parameters: Mapping[str, Any] | None = None, mlflow: Mapping[str, Any] = MLFLOW) -> Path:
    """Write the project's files.

    Args:
        root: an empty folder.
        parameters: groups to set beside ``output``.
        mlflow: content of ``mlflow.yml``.

    Returns:
        The root.
    """
    files = {
        "pyproject.toml": PYPROJECT,
        f"src/{PACKAGE}/__init__.py": "",
        f"src/{PACKAGE}/settings.py": SETTINGS,
        f"src/{PACKAGE}/cli.py": "from lm_tuning.cli import cli as cli\n",
        f"src/{PACKAGE}/pipeline_registry.py": REGISTRY,
        "conf/base/catalog.yml": CATALOG,
        "conf/base/globals.yml": "output: default\n",
        "conf/base/parameters.yml": yaml.safe_dump({**PARAMETERS, **(parameters or {})}),
        "conf/base/mlflow.yml": yaml.safe_dump(dict(mlflow)),
        "conf/local/.gitkeep": "",
    }
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def run_session(
    root: Path, pipelines: list[str] | None = None, params: Mapping[str, Any] | None = None, runner: Any = None
) -> Any:
    """Run pipelines in a session of this process.

    Args:
        root: what ``write_project`` returned.
        pipelines: their names; None runs all.
        params: nested parameters on top.
        runner: one of Kedro's runners.
    """
    from kedro.framework.session import KedroSession
    from kedro.framework.startup import bootstrap_project

    forget_project()
    bootstrap_project(root)
    with KedroSession.create(project_path=root, runtime_params=dict(params or {})) as session:
        return session.run(pipeline_names=pipelines, runner=runner)


def send_what_is_kept_by(root: Path) -> list[str]:
    """Do as ``kedro send-tracking`` does after a run in another process.

    Args:
        root: what ``write_project`` returned.

    Returns:
        What is kept still, and why.
    """
    from kedro.framework.startup import bootstrap_project

    from lm_tuning.hooks.mlflow_run import send_what_is_kept

    forget_project()
    bootstrap_project(root)
    return send_what_is_kept(root, None, say=print)


def forget_project() -> None:
    """Let the next ``bootstrap_project`` read the project's modules again, with hooks of its own."""
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        del sys.modules[name]
    sys.path[:] = [entry for entry in sys.path if not (Path(entry) / PACKAGE).is_dir()]
