"""Metrics reach a real store from a thread of their own, and a broken store stops nothing."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lm_tuning.datasets import MetricStreamDataset
from lm_tuning.datasets.metric_stream import MetricStream
from lm_tuning.tracking import delivery, sender
from tests.support.cost import count_calls
from tests.support.patience import PATIENCE_SECONDS
from tests.support.tracking_store import history, new_run, new_store


@pytest.fixture
def store(tmp_path: Path) -> tuple[str, str]:
    uri = new_store(tmp_path)
    return uri, new_run(uri, tmp_path)


@pytest.fixture
def stream(store: tuple[str, str]) -> MetricStream:
    return MetricStream(run_id=store[1], tracking_uri=store[0])


def test_every_step_arrives_with_its_step_and_time(stream: MetricStream, store: tuple[str, str]) -> None:
    started = time.time()
    for step in range(1, 301):
        stream.log(step, {"loss": 1.0 / step, "learning_rate": 0.5, "grad_norm": 2.0, "tokens_per_second": 9.0})
    stream.set_tags({"device": "cpu", "long": "x" * 9000})
    stream.close()
    assert history(*store, "loss") == [(step, 1.0 / step) for step in range(1, 301)]
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store[0])
    tags = client.get_run(store[1]).data.tags
    assert tags["device"] == "cpu"
    assert len(tags["long"]) == delivery.MAX_TAG_CHARACTERS
    logged = client.get_metric_history(store[1], "loss")[0].timestamp / 1000
    assert started - 0.001 <= logged <= time.time(), "milliseconds since 1970"
    assert stream.num_lost == 0


def test_values_show_while_the_stream_stays_open(stream: MetricStream, store: tuple[str, str]) -> None:
    stream.log(1, {"loss": 3.0})
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and not history(*store, "loss"):
        time.sleep(0.2)
    assert history(*store, "loss") == [(1, 3.0)]
    stream.log(2, {"loss": 2.0})
    assert stream.flush()
    assert history(*store, "loss") == [(1, 3.0), (2, 2.0)]
    stream.close()
    stream.log(3, {"loss": 1.0})  # a closed stream opens again
    stream.close()
    assert [step for step, _ in history(*store, "loss")] == [1, 2, 3]


def test_a_dead_store_loses_metrics_loudly_and_never_blocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(sender, "FLUSH_SECONDS", 0.05)
    stream = MetricStream(run_id="0" * 32, tracking_uri=new_store(tmp_path))
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            stream.log(step, {"loss": 1.0, "grad_norm": 2.0})
            time.sleep(0.1)
        stream.close()
    assert stream.num_lost == 5
    (message,) = caplog.messages
    assert "5 metric entries" in message and "it has no run" in message


def test_a_store_that_does_not_answer_holds_nobody_up(
    stream: MetricStream, store: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    log_batch = mlflow.MlflowClient.log_batch
    asked, answers = threading.Event(), threading.Event()

    def wait(self: object, run_id: str, **batch: object) -> None:
        asked.set()
        assert answers.wait(PATIENCE_SECONDS)
        log_batch(self, run_id, **batch)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", wait)
    stream.log(1, {"loss": 3.0})
    assert asked.wait(PATIENCE_SECONDS)
    for step in range(2, 300):
        stream.log(step, {"loss": 2.0})
    assert not history(*store, "loss"), "all of them came back before the store answered"
    answers.set()
    stream.close()
    assert len(history(*store, "loss")) == 299


def test_a_store_that_recovers_loses_nothing(
    stream: MetricStream, store: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    monkeypatch.setattr(sender, "RETRY_SECONDS", 0.01)
    log_batch, calls = mlflow.MlflowClient.log_batch, []

    def fail_twice(self: object, run_id: str, **batch: object) -> None:
        calls.append(run_id)
        if len(calls) <= 2:
            raise OSError("database is locked")
        log_batch(self, run_id, **batch)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", fail_twice)
    stream.log(1, {"loss": 3.0})
    stream.close()
    assert stream.num_lost == 0
    assert history(*store, "loss") == [(1, 3.0)]


def test_a_value_that_is_no_number_costs_only_itself(stream: MetricStream, store: tuple[str, str]) -> None:
    stream.log(1, {"loss": "high", "grad_norm": 2.0})  # type: ignore[dict-item]
    stream.log(2, {"loss": float("nan")})
    stream.close()
    assert stream.num_lost == 1
    assert history(*store, "grad_norm") == [(1, 2.0)]
    assert [step for step, _ in history(*store, "loss")] == [2]


def test_pickled_stream_writes_to_the_same_run(stream: MetricStream, store: tuple[str, str]) -> None:
    stream.log(1, {"loss": 3.0})
    copy = pickle.loads(pickle.dumps(stream))
    copy.log(2, {"loss": 2.0})
    copy.close()
    stream.close()
    assert history(*store, "loss") == [(1, 3.0), (2, 2.0)]


def test_end_of_the_process_writes_what_is_queued(store: tuple[str, str]) -> None:
    code = "import sys; from lm_tuning.datasets.metric_stream import MetricStream as M; M(sys.argv[2], sys.argv[1])"
    subprocess.run([sys.executable, "-c", f"{code}.log(1, {{'loss': 3.0}})", *store], check=True)
    assert history(*store, "loss") == [(1, 3.0)]


def test_forked_copy_neither_writes_nor_waits(stream: MetricStream, store: tuple[str, str]) -> None:
    stream.log(1, {"loss": 3.0})
    child = os.fork()
    if child == 0:
        stream.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    stream.close()
    assert history(*store, "loss") == [(1, 3.0)]


def test_without_a_run_nothing_is_logged_and_no_thread_starts() -> None:
    stream = MetricStreamDataset().load()
    assert stream.run_id is None
    stream.log(1, {"loss": 3.0})
    stream.set_tags({"a": 1})
    assert stream._sender is None
    stream.close()


def test_dataset_finds_the_active_run(store: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow
    from mlflow.tracking import fluent

    # Another test of this process may have left its experiment active; MLflow then refuses the run.
    monkeypatch.setattr(fluent, "_active_experiment_id", None)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID", raising=False)
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(store[0])
    try:
        with mlflow.start_run(run_id=store[1]):
            stream = MetricStreamDataset().load()
            stream.log(1, {"loss": 3.0})
            stream.close()
    finally:
        mlflow.set_tracking_uri(before)
    assert history(*store, "loss") == [(1, 3.0)]


def test_logging_only_queues(stream: MetricStream) -> None:
    stream.log(0, {"loss": 1.0})
    assert stream.flush()
    metrics = {"loss": 1.0, "learning_rate": 2.0, "grad_norm": 3.0, "tokens_per_second": 4.0}
    assert count_calls(lambda: stream.log(1, metrics)) <= 10
    stream.close()
