"""Send metrics to MLflow while training goes on, from a thread of its own."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from typing import Any, NoReturn

from kedro.io import AbstractDataset, DatasetError

from lm_tuning.datasets.entry import CatalogEntry
from lm_tuning.datasets.metric_names import has_earlier_names, name_step_metrics

logger = logging.getLogger(__name__)

#: How soon a logged step shows in the MLflow UI, seconds.
FLUSH_SECONDS = 2.0
#: Limits of MLflow's ``log_batch``.
MAX_BATCH_METRICS = 1000
MAX_BATCH_TAGS = 100
MAX_TAG_CHARACTERS = 5000
#: A batch that the tracking store refuses is tried this often, then counted as lost.
ATTEMPTS = 3
RETRY_SECONDS = 1.0

_Item = tuple[int, int, dict[str, float]] | dict[str, str] | threading.Event


class MetricStream:
    """Queue metrics on the training thread, write them on another.

    It survives pickling: the copy writes to the same run from a thread of its own.

    Attributes:
        run_id: the MLflow run that receives the metrics; None logs nothing.
        tracking_uri: where that run is kept.
        earlier_names: whether the run has metrics by the names of earlier versions, and so keeps them.
        num_lost: metric values and tags that the tracking store refused.
        busy_seconds: time that the writing thread spent on the processor.
    """

    def __init__(
        self, run_id: str | None = None, tracking_uri: str | None = None, *, earlier_names: bool = False
    ) -> None:
        """Choose the run; nothing starts before the first value.

        Args:
            run_id: the MLflow run, or None.
            tracking_uri: the tracking store; None takes MLflow's current one.
            earlier_names: whether :meth:`log_step` leaves names as they are.
        """
        self.run_id = run_id
        self.tracking_uri = tracking_uri
        self.earlier_names = earlier_names
        self.num_lost = 0
        self.busy_seconds = 0.0
        self._queue: deque[_Item] = deque()
        self._wake = threading.Event()
        self._ending = False
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()
        self._client: Any = None
        self._warned = False

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Append one step's metrics to a queue: about a microsecond, whatever the tracking store does.

        Args:
            step: optimizer step, from 1.
            metrics: value by metric name. The dict is kept, so do not change it afterwards.
        """
        if self.run_id is not None:
            self._queue.append((step, time.time_ns() // 1_000_000, metrics))
            if self._thread is None:
                self._start()

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        """Append what training reports of a step, by the names that MLflow groups.

        Args:
            step: optimizer step, from 1; 0 for an evaluation before the first one.
            metrics: value by its name in the step log.
        """
        self.log(step, metrics if self.earlier_names else name_step_metrics(metrics))

    def set_tags(self, tags: dict[str, Any]) -> None:
        """Queue tags for the run.

        Args:
            tags: value by tag name; values are turned into strings of at most 5000 characters.
        """
        if self.run_id is not None and tags:
            self._queue.append({str(name): str(value)[:MAX_TAG_CHARACTERS] for name, value in tags.items()})
            if self._thread is None:
                self._start()

    def flush(self, timeout_seconds: float = 60.0) -> bool:
        """Wait until everything that was queued so far is written or counted as lost.

        Args:
            timeout_seconds: the longest wait.

        Returns:
            Whether it is done.
        """
        if self._thread is None:
            return True
        done = threading.Event()
        self._queue.append(done)
        self._wake.set()
        return done.wait(timeout_seconds)

    def close(self, timeout_seconds: float = 60.0) -> None:
        """Write what is queued and end the thread; a later ``log`` starts it again.

        Args:
            timeout_seconds: the longest wait, for a tracking store that does not answer.
        """
        thread, self._thread = self._thread, None
        atexit.unregister(self.close)
        if thread is None or os.getpid() != self._owner:  # a forked copy has no thread
            return
        self._ending = True
        self._wake.set()
        thread.join(timeout_seconds)
        if thread.is_alive():
            logger.warning(
                "MLflow did not take the last metrics of run %s within %.0f seconds; they may be missing there.",
                self.run_id,
                timeout_seconds,
            )
        elif self.num_lost:
            logger.warning("%d metric values of run %s are missing in MLflow.", self.num_lost, self.run_id)

    def _start(self) -> None:
        """Start the writing thread and see to it that the end of the process closes the stream."""
        import mlflow  # here, since a thread that outlives the main one may not import it any more

        if self.tracking_uri is None:
            self.tracking_uri = mlflow.get_tracking_uri()
        self._ending = False
        # A daemon, so that a store that hangs never keeps the process alive.
        self._thread = threading.Thread(target=self._write_forever, name="metric-stream", daemon=True)
        self._thread.start()
        self._owner = os.getpid()
        atexit.register(self.close)

    def _write_forever(self) -> None:
        """Write what is queued every two seconds, until told to end.

        The thread sleeps rather than wait on the queue, so that appending to it wakes nobody.
        """
        ending = False
        while not ending:
            self._wake.wait(FLUSH_SECONDS)
            self._wake.clear()
            ending = self._ending
            started = time.thread_time()
            items = [self._queue.popleft() for _ in range(len(self._queue))]
            self._write(items)
            self.busy_seconds += time.thread_time() - started
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()

    def _write(self, items: list[_Item]) -> None:
        """Write items in batches that MLflow takes."""
        from mlflow.entities import Metric, RunTag

        metrics: list[Metric] = []
        tags: list[RunTag] = []
        for item in items:
            if isinstance(item, dict):
                tags.extend(RunTag(name, value) for name, value in item.items())
            elif isinstance(item, tuple):
                step, stamp, values = item
                for name, value in values.items():
                    try:
                        metrics.append(Metric(name, float(value), stamp, step))
                    except (TypeError, ValueError) as error:
                        self.num_lost += 1
                        self._warn(error)
        for start in range(0, len(metrics), MAX_BATCH_METRICS):
            self._write_batch({"metrics": metrics[start : start + MAX_BATCH_METRICS]})
        for start in range(0, len(tags), MAX_BATCH_TAGS):
            self._write_batch({"tags": tags[start : start + MAX_BATCH_TAGS]})

    def _write_batch(self, batch: dict[str, list[Any]]) -> None:
        """Write one batch; count it as lost when the store keeps refusing it."""
        for attempt in range(ATTEMPTS):
            try:
                if self._client is None:
                    from mlflow import MlflowClient

                    self._client = MlflowClient(tracking_uri=self.tracking_uri)
                self._client.log_batch(self.run_id, **batch)
            except Exception as error:  # whatever the store raises, training goes on
                self._warn(error)
                if attempt + 1 < ATTEMPTS:
                    time.sleep(RETRY_SECONDS)
            else:
                return
        self.num_lost += sum(len(entries) for entries in batch.values())

    def _warn(self, error: Exception) -> None:
        """Say once that values are lost; the count follows when the stream closes."""
        if not self._warned:
            self._warned = True
            logger.warning("MLflow does not take metrics of run %s; training goes on. %s", self.run_id, error)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the address of the run, without thread and queue."""
        return {"run_id": self.run_id, "tracking_uri": self.tracking_uri, "earlier_names": self.earlier_names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start afresh in another process."""
        self.__init__(**state)  # type: ignore[misc]


class MetricStreamDataset(CatalogEntry, AbstractDataset[NoReturn, MetricStream]):
    """Hand a node the stream into the MLflow run of this ``kedro run``.

    Without an active run, as in a notebook, the stream takes values and drops them.

    Example:
        .. code-block:: yaml

            metric_stream:
              type: lm_tuning.datasets.MetricStreamDataset
    """

    def __init__(self, metadata: dict[str, Any] | None = None) -> None:
        """Take the description for plugins.

        Args:
            metadata: for plugins and our tracking hook.
        """
        self.metadata = metadata

    def load(self) -> MetricStream:
        """Return a stream into the active run."""
        import mlflow

        run = mlflow.active_run()
        if run is None:
            return MetricStream()
        # The metrics of when the run was opened: none of a new one.
        earlier_names = has_earlier_names(run.data.metrics)
        return MetricStream(run.info.run_id, mlflow.get_tracking_uri(), earlier_names=earlier_names)

    def save(self, data: NoReturn) -> NoReturn:
        """Refuse: metrics go through the stream that ``load`` returns."""
        raise DatasetError("Metrics are logged through the stream that a node takes as input.")

    def _exists(self) -> bool:
        return True

    def _describe(self) -> dict[str, Any]:
        return {}
