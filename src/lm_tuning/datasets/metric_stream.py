"""Send metrics to MLflow while training goes on, and never wait for it."""

from __future__ import annotations

import atexit
import logging
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from kedro.io import AbstractDataset, DatasetError

from lm_tuning.datasets.entry import CatalogEntry
from lm_tuning.json_types import JsonObject
from lm_tuning.tracking.delivery import Delivery, now_ms
from lm_tuning.tracking.journal import Journal, current_journal
from lm_tuning.tracking.records import STEP, RunHeader
from lm_tuning.tracking.sender import Sender
from lm_tuning.tracking.trouble import strip_passwords

logger = logging.getLogger(__name__)


class MetricStream:
    """Keep metrics on the training thread, for another one to send.

    In a ``kedro run`` they go into the journal of the run. Without one, as in a notebook, a stream that is given a run
    has a journal and a sending thread of its own. It survives pickling: the copy writes to the same run by itself.

    Attributes:
        run_id: the MLflow run that receives the metrics, or what stands in for it while the tracking store is away;
            None logs nothing.
        tracking_uri: where that run is kept.
        earlier_names: whether names stay as earlier versions had them.
        num_lost: entries that the tracking store refused or that did not reach it, of a stream of its own.
    """

    def __init__(
        self,
        run_id: str | None = None,
        tracking_uri: str | None = None,
        *,
        journal: Journal | None = None,
        earlier_names: bool = False,
    ) -> None:
        """Choose the run; nothing starts before the first value.

        Args:
            run_id: the MLflow run, or None.
            tracking_uri: the tracking store; None takes MLflow's current one.
            journal: of the run of now, which then sends what is logged.
            earlier_names: whether :meth:`log_step` leaves names as they are. A run that has metrics by the names of
                earlier versions keeps them anyway.
        """
        self.run_id = run_id
        self.tracking_uri = tracking_uri
        self.earlier_names = earlier_names
        self.num_lost = 0
        self._journal = journal
        self._sender: Sender | None = None
        self._owner = os.getpid()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Append one step's metrics: microseconds, whatever the tracking store does.

        Args:
            step: optimizer step, from 1.
            metrics: value by metric name. The dict is kept, so do not change it afterwards.
        """
        if self.run_id is not None:
            self._take_up().add({"kind": "metrics", "step": step, "time": now_ms(), "values": metrics})

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        """Append what training reports of a step, by the names that MLflow groups.

        Args:
            step: optimizer step, from 1; 0 for an evaluation before the first one.
            metrics: value by its name in the step log.
        """
        if self.earlier_names:
            self.log(step, metrics)
        elif self.run_id is not None:
            self._take_up().add({"kind": "metrics", "step": step, "time": now_ms(), "values": metrics, "of": STEP})

    def set_tags(self, tags: JsonObject) -> None:
        """Append tags for the run.

        Args:
            tags: value by tag name; values are turned into strings of at most 5000 characters.
        """
        if self.run_id is not None and tags:
            self._take_up().add({"kind": "tags", "values": {str(name): str(value) for name, value in tags.items()}})

    def flush(self, timeout_seconds: float = 60.0) -> bool:
        """Make safe what was logged so far: on disk, or at the store for a stream of its own.

        Args:
            timeout_seconds: how long the store of a stream of its own may show no sign of life.

        Returns:
            Whether it is.
        """
        if self._sender is not None:
            return self._sender.flush(timeout_seconds)
        if self._journal is not None:
            try:
                self._journal.write()
            except OSError as error:  # a full disk costs metrics, and no training
                logger.warning("Metrics cannot be kept in %s: %s", self._journal.folder, error)
                return False
        return True

    def close(self, timeout_seconds: float = 60.0) -> None:
        """Make safe what was logged; a later ``log`` goes on.

        Args:
            timeout_seconds: how long the store of a stream of its own may show no sign of life.
        """
        sender, self._sender = self._sender, None
        atexit.unregister(self.close)
        if sender is None:
            self.flush()
            return
        self._journal = None
        if os.getpid() != self._owner:  # a forked copy has no thread, and its parent sends
            return
        # Without a run of ours nobody sends the rest later, so what is not sent now is lost, and counted.
        all_sent = sender.finish(timeout_seconds)
        self.num_lost += sender.num_lost + sum((0, 0) if all_sent else sender.journal.count())
        sender.journal.remove()
        if self.num_lost:
            reason = f": {sender.trouble.text}" if sender.trouble is not None else ""
            logger.warning("%d metric entries of run %s are missing in MLflow%s.", self.num_lost, self.run_id, reason)

    def _take_up(self) -> Journal:
        """Return the journal to write to; a stream of its own starts one."""
        if self._journal is None:
            import mlflow

            if self.tracking_uri is None:
                self.tracking_uri = mlflow.get_tracking_uri()
            # Not the project's folder of journals: this one is nobody else's to send, and there may be no project.
            folder = Path(tempfile.mkdtemp(prefix="lm-tuning-metrics-"))
            header: RunHeader = {"uri": strip_passwords(self.tracking_uri), "run_id": self.run_id, "is_ours": False}
            journal = Journal.create(folder, header)
            self._sender = Sender(journal, Delivery(journal, self.tracking_uri, locks=folder))
            self._sender.start()
            self._journal = journal
            self._owner = os.getpid()
            atexit.register(self.close)  # a notebook may never close it
        return self._journal

    def __reduce__(self) -> tuple[Callable[..., MetricStream], tuple[str | None, str | None]]:
        """Pickle the address of the run, without thread and queue: the copy starts afresh in another process."""
        return partial(MetricStream, earlier_names=self.earlier_names), (self.run_id, self.tracking_uri)


class MetricStreamDataset(CatalogEntry, AbstractDataset[NoReturn, MetricStream]):
    """Hand a node the stream into the MLflow run of this ``kedro run``.

    Without a run, as in a notebook, the stream takes values and drops them.

    Example:
        .. code-block:: yaml

            metric_stream:
              type: lm_tuning.datasets.MetricStreamDataset
    """

    def __init__(self, metadata: JsonObject | None = None) -> None:
        """Keep the description for plugins.

        Args:
            metadata: for plugins and our tracking hook.
        """
        self.metadata = metadata

    def load(self) -> MetricStream:
        """Return a stream into the run of now, or into the one that the user has made MLflow's active one."""
        import mlflow

        # The journal takes metrics also while the store is away, and MLflow has no active run then.
        if (journal := current_journal()) is not None:
            return MetricStream(journal.run_id, mlflow.get_tracking_uri(), journal=journal)
        run = mlflow.active_run()
        return MetricStream() if run is None else MetricStream(run.info.run_id, mlflow.get_tracking_uri())

    def save(self, data: NoReturn) -> NoReturn:
        """Refuse: metrics go through the stream that ``load`` returns."""
        raise DatasetError("Metrics are logged through the stream that a node takes as input.")

    def _exists(self) -> bool:
        return True

    def _describe(self) -> dict[str, str]:
        return {}
