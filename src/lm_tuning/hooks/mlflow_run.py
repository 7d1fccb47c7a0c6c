"""The MLflow run of one ``kedro run``, which never waits long for the store, and what ``kedro send-tracking`` does."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_tuning.errors import UserError
from lm_tuning.hooks.locking import LOCK_FOLDER
from lm_tuning.json_types import JsonObject
from lm_tuning.secrets import mask, mask_values
from lm_tuning.tracking.address import bounded_requests
from lm_tuning.tracking.delivery import Delivery, now_ms
from lm_tuning.tracking.journal import (
    JOURNAL_FOLDER,
    Journal,
    describe_count,
    find_journal,
    is_stand_in,
    list_journals,
    read_run_id,
    set_current,
)
from lm_tuning.tracking.records import RunHeader, RunStatus
from lm_tuning.tracking.run_description import flatten_settings
from lm_tuning.tracking.sender import Sender
from lm_tuning.tracking.trouble import describe_trouble

if TYPE_CHECKING:
    from mlflow.entities import Run

logger = logging.getLogger(__name__)

#: How long the tracking store may show no sign of life, in seconds: before the first node, and after the last one where
#: it is known to be away; after the last one; and when a signal has asked to stop, with a longest wait over all, since
#: the whole run has to end soon.
OPEN_PATIENCE_SECONDS = 5.0
END_PATIENCE_SECONDS = 10.0
STOP_PATIENCE_SECONDS = 1.5
MAX_STOP_SECONDS = 2.0


class MlflowRun:
    """Write settings, tags, figures and files of a run, new or resumed; none of it waits for the tracking store."""

    def __init__(self, root: Path, uri: str, header: RunHeader) -> None:
        """Begin a journal, or go on with an earlier one; ``open`` starts to send and waits for the store.

        Args:
            root: project folder.
            uri: the tracking store, with its password.
            header: what is known of the run. Its ``run_id`` is that of the run to go on with, or that the user has
                opened; a stand-in for one that an earlier process could not make; None for a new run.
        """
        self._root = root
        self._header = header
        self._resumed = header["run_id"]
        self._is_taken_up = False
        self._exit = ExitStack()
        self._exit.enter_context(bounded_requests())
        journal = self._take_up_journal()
        self.journal = journal
        # Before the sender: the first fact of this process tells a resume from what an earlier one has left.
        journal.add({"kind": "begin"})
        self._sender = Sender(journal, Delivery(journal, uri, locks=root / LOCK_FOLDER))
        self._sender.on_open = self._note_open

    @property
    def run_id(self) -> str:
        """Id of the run, or what stands in for it until the store has made it."""
        return self.journal.run_id

    @property
    def run(self) -> Run | None:
        """The run as the store gave it, or None so far."""
        return self._sender.run

    def open(self, *, must_answer: bool) -> None:
        """Wait a few seconds for the store, and go on without it.

        Args:
            must_answer: refuse to go on without it.

        Raises:
            UserError: the store is away and must not be.
        """
        self._sender.start()
        if self._sender.wait_until_open(OPEN_PATIENCE_SECONDS):
            assert self.run is not None, "it is open"
            verb = "Going on with" if self._resumed == self.run_id and self._header["is_ours"] else "Started"
            logger.info("%s MLflow run '%s' (%s).", verb, self.run.info.run_name, self.run_id)
            if self._header["is_ours"]:
                enter_run(self.run)
        else:
            trouble = self._sender.trouble
            assert trouble is not None, "a store that is not open has a reason"
            shown_uri = self._sender.shown_uri
            if must_answer:
                raise UserError(
                    f"tracking.on_unreachable = stop: MLflow at {shown_uri} is away: {trouble.text}. Start it, set "
                    "MLFLOW_TRACKING_URI to another store, or set tracking.on_unreachable = continue."
                )
            # From now on checkpoints and metrics may name the run by its stand-in.
            self.journal.stand_in()
            logger.warning("%s", describe_trouble(shown_uri, trouble, self._shown_folder()))
        set_current(self.journal)

    def log_settings(self, parameters: JsonObject) -> None:
        """Log each setting as a parameter and all of them as a file.

        Args:
            parameters: groups of settings, JSON values.
        """
        import yaml

        parameters = mask_values(parameters)
        text = yaml.safe_dump(parameters, sort_keys=False, allow_unicode=True)
        self.journal.add({"kind": "settings", "values": flatten_settings(parameters), "text": text})

    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags; in a resumed run, those that differ stand beside the first ones."""
        self.journal.add({"kind": "tags", "values": {name: mask(str(value)) for name, value in tags.items()}})

    def log_figures(self, entry: str, figures: Mapping[str, float], *, split: str | None = None) -> None:
        """Log numbers that belong to the run as a whole, at step 0.

        Args:
            entry: key in the catalog of the report that they are from.
            figures: by their names in that report.
            split: the split that they were measured on; ``None`` for none.
        """
        self.journal.add(
            {"kind": "metrics", "step": 0, "time": now_ms(), "values": dict(figures), "of": entry, "split": split}
        )

    def log_artifact(self, path: Path, folder: str, what: str) -> None:
        """Copy a file, or what lies in a folder, into a folder of the run.

        Args:
            path: file or folder.
            folder: of the run.
            what: how to name it in a message.

        Raises:
            OSError: it cannot be copied.
        """
        if path.is_file():
            self.journal.add_file(path, folder, what)
            return
        # File by file, so that one that the store refuses costs no other.
        for file in sorted(each for each in path.rglob("*") if each.is_file()):
            inner = file.parent.relative_to(path).as_posix()
            self.journal.add_file(file, folder if inner == "." else f"{folder}/{inner}", f"{what} ({file.name})")

    def take_resume_back(self, reason: str) -> None:
        """Leave a resumed run as it was before, but for the reason why this resume was refused.

        Args:
            reason: kept as the tag ``refused`` until the next refusal.
        """
        self.journal.add({"kind": "refused", "reason": mask(reason)})

    def enter(self) -> None:
        """Make the run the active one of this thread, if the store has it and no other one is active."""
        import mlflow

        if self.run is not None and mlflow.active_run() is None:
            enter_run(self.run)

    def leave(self, status: RunStatus | None, timeout_seconds: float = -1) -> None:
        """Note on disk how the run ended, and leave it.

        Args:
            status: ``FINISHED``, ``FAILED`` or ``KILLED``; None leaves it to what was noted before, or to the user.
            timeout_seconds: the longest wait for another thread that writes to the journal; -1 for no limit.
        """
        # A run that the user has opened goes on after ours, and the user ends it.
        if status is not None and self._header["is_ours"]:
            self.journal.add({"kind": "end", "status": status, "time": now_ms()})
        if self._header["is_ours"]:
            leave_run(self.run_id)
            self._end_monitor()
        set_current(None)
        self._write_journal(timeout_seconds)

    def send_rest(self, *, is_hurried: bool) -> bool:
        """Wait for what is left to be sent while the store shows signs of life; say what stays.

        Args:
            is_hurried: a signal has asked to stop.

        Returns:
            Whether everything was sent.
        """
        all_sent = False
        try:
            if is_hurried:
                all_sent = self._sender.finish(STOP_PATIENCE_SECONDS, MAX_STOP_SECONDS)
            else:
                is_away = self._sender.trouble is not None
                all_sent = self._sender.finish(OPEN_PATIENCE_SECONDS if is_away else END_PATIENCE_SECONDS)
        finally:  # also where a signal has ended the wait
            self._write_journal()
            self._exit.close()
            if not all_sent and self.journal.folder.exists():
                self._say_what_is_kept()
        return all_sent

    def _say_what_is_kept(self) -> None:
        trouble = self._sender.trouble
        logger.warning(
            "MLflow at %s lacks %s of this run: %s. They are kept in %s. Send them later: kedro send-tracking "
            "(the run has waited %.0f s for MLflow).",
            self._sender.shown_uri,
            describe_count(*self.journal.count()),
            trouble.text if trouble is not None else "it does not take them",
            self._shown_folder(),
            self._sender.waited_seconds,
        )

    def _write_journal(self, timeout_seconds: float = -1) -> None:
        try:
            self.journal.write(timeout_seconds)
        except OSError as error:  # what is tracked never costs a result
            logger.warning("What the run has to tell MLflow cannot be kept in %s: %s", self._shown_folder(), error)

    def discard(self, reason: str) -> None:
        """Forget a run that was refused before it began, but not what an earlier process has left to send.

        Args:
            reason: why it was refused.
        """
        self._sender.abandon()
        self._exit.close()
        if self._is_taken_up:
            self.take_resume_back(reason)
            self._write_journal()
        else:
            self.journal.remove()

    def _take_up_journal(self) -> Journal:
        """Return a new journal, or that of the run to go on with where the store has not made it yet."""
        journals, run_id = self._root / JOURNAL_FOLDER, self._header["run_id"]
        if run_id is not None and is_stand_in(run_id):
            # Either what it had to tell is still here and goes on in the same journal, or it has been sent since, and
            # the store's id was noted.
            folder = find_journal(journals, run_id)
            if folder is not None:
                journal = Journal(folder)
                if journal.hold():
                    self._is_taken_up = True
                    return journal
            run_id = read_run_id(journals, run_id)
            if run_id is None:
                logger.warning("The MLflow run of %s is gone, so a new one is started.", self._header["run_id"])
            self._resumed = run_id
        tags = _context_tags(self._header["run_name"])
        header: RunHeader = {**self._header, "run_id": run_id, "start_time": now_ms(), "tags": tags}
        journal = Journal.create(journals, header)
        journal.hold()
        return journal

    def _shown_folder(self) -> Path:
        folder = self.journal.folder
        return folder.relative_to(self._root) if folder.is_relative_to(self._root) else folder

    def _note_open(self, run: Run) -> None:
        """Start MLflow's own watch over processor and memory where the user asked for it."""
        from mlflow import environment_variables

        is_wanted: Any = environment_variables.MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.get
        if self._header["is_ours"] and is_wanted():
            from mlflow.system_metrics import system_metrics_monitor
            from mlflow.tracking import fluent

            make_monitor: Any = system_metrics_monitor.SystemMetricsMonitor
            monitor = make_monitor(run.info.run_id, resume_logging=self._resumed is not None)
            fluent.run_id_to_system_metrics_monitor[run.info.run_id] = monitor
            monitor.start()

    def _end_monitor(self) -> None:
        """End MLflow's own watch; it may be waiting for the store, so nobody waits for it."""
        from mlflow.tracking import fluent

        monitor = fluent.run_id_to_system_metrics_monitor.pop(self.run_id, None)
        if monitor is not None:
            threading.Thread(target=monitor.finish, name="system-metrics-end", daemon=True).start()


def enter_run(run: Run) -> None:
    """Make a run the active one of this thread, and its experiment that of the process.

    Args:
        run: as the store gave it.
    """
    # What mlflow.start_run() does, but for its requests, with which it would wait for a store that is away.
    fluent = _fluent()
    fluent._active_experiment_id = run.info.experiment_id
    fluent._active_run_stack.get().append(fluent.ActiveRun(run))


def leave_run(run_id: str) -> None:
    """Leave a run, if it is the active one of this thread.

    Args:
        run_id: its id.
    """
    fluent = _fluent()
    stack = fluent._active_run_stack.get()
    # mlflow.end_run() would tell the store that the run has ended; the sender does that, in its turn.
    while stack and stack[-1].info.run_id == run_id:
        stack.pop()
        fluent._last_active_run_id.set(run_id)


def _fluent() -> Any:
    """Return the module that keeps these things; none of it is MLflow's public interface."""
    from mlflow.tracking import fluent

    return fluent


def _context_tags(name: str) -> dict[str, str]:
    """Return what MLflow notes of every run: user, source, and its name."""
    # mlflow.start_run() would add them; runs are made by the client here, which adds nothing.
    from mlflow.tracking.context.registry import resolve_tags

    tags = resolve_tags({"mlflow.runName": name}, ignore=_notebook_contexts())
    return {str(key): mask(str(value)) for key, value in tags.items()}


def _notebook_contexts() -> list[Any]:
    """Return the contexts that cannot be: to look for a notebook, MLflow imports IPython, which takes 0.8 s."""
    if "IPython" in sys.modules or os.environ.get("DATABRICKS_RUNTIME_VERSION"):
        return []
    from mlflow.tracking.context import registry

    kinds = ("JupyterNotebook", "DatabricksNotebook", "DatabricksJob", "DatabricksCluster", "DatabricksCommand")
    return [getattr(registry, f"{kind}RunContext") for kind in (*kinds, "DatabricksRepo")]


def send_what_is_kept(root: Path, env: str | None, *, say: Callable[[str], None]) -> list[str]:
    """Send every journal of a project to MLflow.

    Args:
        root: project folder.
        env: configuration environment; None takes ``KEDRO_ENV`` or the default.
        say: receives what was sent, a line each.

    Returns:
        What stays, and why.

    Raises:
        UserError: ``mlflow.yml`` is wrong, or the address of the store is none.
    """
    from kedro.framework.session import KedroSession

    from lm_tuning.tracking.later import send_journals

    # Before a session, which imports MLflow: most of the time there is nothing to send.
    if not list_journals(root / JOURNAL_FOLDER):
        say("Nothing is kept: every run has told MLflow everything.")
        return []
    with KedroSession.create(project_path=root, env=env or os.environ.get("KEDRO_ENV")) as session:
        context: Any = session.load_context()  # type: ignore[attr-defined]  # only its subclass declares it
        config = context.mlflow  # by our tracking hook, which sets MLflow up, with credentials
    uri = str(config.server.mlflow_tracking_uri)
    return send_journals(root / JOURNAL_FOLDER, uri, locks=root / LOCK_FOLDER, say=say)
