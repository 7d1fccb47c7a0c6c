"""Turn the facts of a journal into calls of MLflow."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from lm_tuning.storage.locks import one_at_a_time
from lm_tuning.tracking.address import is_database, lock_name, make_database
from lm_tuning.tracking.journal import Entry, Journal
from lm_tuning.tracking.names import distinct_name, distinct_names, has_earlier_names, name_figures, name_step_metrics
from lm_tuning.tracking.records import STEP, Experiment, Fact, MetricsFact, RunStatus, SettingsFact
from lm_tuning.tracking.run_description import NOT_SET, PARAMETERS_ARTIFACT, find_changes, offer_view
from lm_tuning.tracking.trouble import StoreAway, Trouble

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

logger = logging.getLogger(__name__)

#: How many parameters or tags MLflow takes at once, and how many metrics.
BATCH_SIZE = 100
MAX_BATCH_METRICS = 1000
MAX_TAG_CHARACTERS = 5000
RESUME_COUNT_TAG = "resume.count"
#: Tells the run of a journal from others, should the answer to its creation have been lost.
JOURNAL_TAG = "lm_tuning.journal"
_ENDED = frozenset(get_args(RunStatus))


class Delivery:
    """Make or find the run of a journal and write to it.

    MLflow never changes a parameter, and a resumed run should still tell how it began. So what differs from the
    beginning goes to tags ``resume.<n>.<name>``, with n counting the resumes.

    Sending a fact twice does no harm: parameters and tags have the same value again, a metric has the same step and
    time, and how a resume is counted is kept in the journal before it is sent.

    Attributes:
        journal: what is sent.
        uri: the tracking store, with its password.
        run: the run once it is open.
        num_refused: metrics that are no numbers.
    """

    def __init__(self, journal: Journal, uri: str, *, locks: Path) -> None:
        """Choose journal and store; nothing is sent yet.

        Args:
            journal: what is sent.
            uri: the tracking store, with its password.
            locks: folder for the lock of whoever makes the tables of a database.
        """
        self.journal = journal
        self.uri = uri
        self.run: Run | None = None
        self.num_refused = 0
        self._locks = locks
        self._client: MlflowClient | None = None
        self._changes: str | None = None

    @property
    def client(self) -> MlflowClient:
        """The client of the store. Making it may take long: a database gets its tables."""
        if self._client is None:
            from mlflow import MlflowClient

            make_database(self.uri)
            self._client = MlflowClient(tracking_uri=self.uri)
        return self._client

    def open(self) -> Run:
        """Make the run, or find the one that the journal belongs to.

        Raises:
            Exception: whatever MLflow raises when the store is away.
        """
        # A server makes its tables itself and stands before them; only a bare database has several makers.
        lock = self._locks / lock_name(self.uri)
        # Two processes that make the tables of a new database at the same time break each other's.
        with one_at_a_time(lock) if is_database(self.uri) else nullcontext():
            run = self._find_run()
            if run is None:
                run = self._create_run()
        self.run = run
        return run

    def probe(self) -> None:
        """Ask the store for the run.

        Raises:
            Exception: whatever MLflow raises when the store is away.
        """
        self.client.get_run(self._run_id)

    def send(self, entries: Sequence[Entry]) -> None:
        """Send facts.

        Args:
            entries: one fact, or several that ``joins`` puts together.

        Raises:
            Exception: whatever MLflow raises.
        """
        fact = entries[0].fact
        # Settings and tags come before anybody knows whether a resume is refused; all else comes after it was not.
        if fact["kind"] not in {"settings", "tags", "refused"}:
            self.tell_changes()
        if fact["kind"] == "metrics":
            self._send_metrics([entry.fact for entry in entries if entry.fact["kind"] == "metrics"])
        elif fact["kind"] == "tags":
            self._log_tags(fact["values"])
        elif fact["kind"] == "file":
            path = self.journal.folder / fact["path"]
            if not path.is_file():
                raise ValueError("its copy is gone")
            self.client.log_artifact(self._run_id, str(path), fact["folder"])
        elif fact["kind"] == "begin":
            self._begin(entries[0].start)
        elif fact["kind"] == "settings":
            self._log_settings(fact)
        elif fact["kind"] == "refused":
            self._take_resume_back(fact["reason"])
        elif fact["kind"] == "end":
            self.client.set_terminated(self._run_id, fact["status"], fact["time"])
        else:
            raise ValueError(f"a later version wrote this: {fact['kind']}")

    def tell_changes(self) -> None:
        """Log which settings a resume has changed, once, unless it was refused."""
        changes, self._changes = self._changes, None
        if changes is not None:
            logger.warning("%s", changes)

    @property
    def _run_id(self) -> str:
        assert self.run is not None, "the run is open"
        return str(self.run.info.run_id)

    @property
    def _num_resumes(self) -> int:
        """How often the run was resumed, this time included; 0 in a new run."""
        return int(self.journal.state.get("num_resumes", 0))

    def _find_run(self) -> Run | None:
        """Return the run that the journal names, or that an earlier attempt has made."""
        journal, client = self.journal, self.client
        run_id = journal.state.get("run_id") or journal.header["run_id"]
        if run_id:
            run = _get_run(client, run_id)
            if run is not None:
                return run
            if "experiment" not in journal.header:
                raise StoreAway(Trouble("away", f"it has no run {run_id}"))
            logger.warning("The MLflow run %s is gone, so a new one is started.", run_id)
            journal.header["run_id"] = None
        elif journal.state.get("is_creating"):
            experiments = [experiment.experiment_id for experiment in client.search_experiments()]
            found = client.search_runs(experiments, f"tags.`{JOURNAL_TAG}` = '{journal.folder.name}'", max_results=1)
            if found:
                journal.take_name(found[0].info.run_id)
                return found[0]
        return None

    def _create_run(self) -> Run:
        journal, header = self.journal, self.journal.header
        experiment = self._find_or_create_experiment(header["experiment"])
        # Before the request: if its answer is lost, the run is found again by the tag, and not made twice.
        journal.state["is_creating"] = True
        journal.save_state()
        tags = {**header["tags"], JOURNAL_TAG: journal.folder.name}
        run = self.client.create_run(experiment, header["start_time"], tags, header["run_name"])
        journal.take_name(run.info.run_id)
        return run

    def _find_or_create_experiment(self, wanted: Experiment) -> str:
        """Return the id of an experiment by its name; another run may make it at the same time."""
        from mlflow.exceptions import MlflowException

        client, name = self.client, wanted["name"]
        found = client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(client.create_experiment(name, wanted["artifact_location"], wanted["tags"]))
            except MlflowException:
                # Somebody else has made it between the two requests, or it is another trouble.
                found = client.get_experiment_by_name(name)
                if found is None:
                    raise
        # MLflow keeps the name of a deleted experiment taken, and refuses runs in it.
        if found.lifecycle_stage == "deleted":
            client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    def _begin(self, start: int) -> None:
        """Count a resume, if the run was written to before, and set it running again."""
        state = self.journal.state
        run = self.client.get_run(self._run_id)
        if state.get("begun_at") != start:
            # Parameters are the first thing that a run is given: without any, this is its beginning and no resume.
            count = int(run.data.tags.get(RESUME_COUNT_TAG, 0)) + 1 if run.data.params else 0
            # A process that was killed outright has left its run as running.
            earlier = run.info.status if run.info.status in _ENDED else "KILLED"
            state |= {"begun_at": start, "num_resumes": count, "earlier_status": earlier, "is_taken_back": False}
            self.journal.save_state()
        offer_view(self.client, run.info.experiment_id)
        if self._num_resumes:
            self._set_tags({RESUME_COUNT_TAG: str(self._num_resumes)})
            if self.journal.header["is_ours"]:
                self.client.update_run(self._run_id, status="RUNNING")

    def _log_settings(self, fact: SettingsFact) -> None:
        """Log each setting as a parameter and all of them as a file."""
        from mlflow.entities import Param

        settings = fact["values"]
        folder, count = "", self._num_resumes
        if count:
            folder = f"resume/{count}/"
            # MLflow never changes a parameter, and the first values tell how the run began.
            stored = self.client.get_run(self._run_id).data.params
            changes = find_changes(stored, settings)
            self._set_tags({f"resume.{count}.{name}": value for name, value in changes.items()})
            if changes:
                told = ", ".join(f"{name} ({stored.get(name, NOT_SET)} -> {value})" for name, value in changes.items())
                self._changes = (
                    f"Resumed with other settings: {told}. MLflow keeps the first values as parameters; the new ones "
                    f"are the tags resume.{count}.*."
                )
            settings = {name: value for name, value in settings.items() if name not in stored and name not in changes}
        for batch in _cut([Param(name, value) for name, value in settings.items()], BATCH_SIZE):
            self.client.log_batch(self._run_id, params=batch)
        self.client.log_text(self._run_id, fact["text"], f"{folder}{PARAMETERS_ARTIFACT}")

    def _log_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags; in a resumed run, those that differ stand beside the first ones."""
        if self._num_resumes:
            stored = self.client.get_run(self._run_id).data.tags
            tags = {
                f"resume.{self._num_resumes}.{name}" if name in stored else name: value
                for name, value in tags.items()
                if stored.get(name) != value
            }
        self._set_tags(tags)

    def _take_resume_back(self, reason: str) -> None:
        """Leave a resumed run as it was before, but for the reason why this resume was refused."""
        run_id, state = self._run_id, self.journal.state
        self._changes = None
        if not self._num_resumes and not state.get("is_taken_back"):  # the earlier run is gone, and this one is new
            self._set_tags({"error": reason})
            if self.journal.header["is_ours"]:
                self.client.set_terminated(run_id, "FAILED")
            return
        if not state.get("is_taken_back"):
            prefix = f"resume.{self._num_resumes}."
            # What the resume changed stands in these tags. Its figures were held back until now, see TrackingHook.
            for name in self.client.get_run(run_id).data.tags:
                if name.startswith(prefix):
                    self.client.delete_tag(run_id, name)
            state |= {"is_taken_back": True, "num_resumes": self._num_resumes - 1}
            self.journal.save_state()
        self._set_tags({"refused": reason, RESUME_COUNT_TAG: str(self._num_resumes)})
        if self.journal.header["is_ours"]:
            self.client.set_terminated(run_id, state["earlier_status"])

    def _send_metrics(self, facts: Iterable[MetricsFact]) -> None:
        from mlflow.entities import Metric

        metrics = []
        for fact in facts:
            for name, value in self._named(fact).items():
                try:
                    # NaN and infinities are numbers to MLflow, which a diverged training should show.
                    metrics.append(Metric(distinct_name(name), float(value), fact["time"], fact["step"]))
                except (TypeError, ValueError):
                    self.num_refused += 1
                    logger.warning("The MLflow run lacks %s of step %d: %r is no number.", name, fact["step"], value)
        for batch in _cut(metrics, MAX_BATCH_METRICS):
            self.client.log_batch(self._run_id, metrics=batch)

    def _named(self, fact: MetricsFact) -> dict[str, float]:
        """Name metrics as MLflow groups them; a run of an earlier version goes on with the names that it has."""
        of, values = fact.get("of"), fact["values"]
        assert self.run is not None, "the run is open"
        # A curve that goes on under another name would be two halves.
        if of is None or has_earlier_names(self.run.data.metrics):
            return dict(values)
        return name_step_metrics(values) if of == STEP else name_figures(of, values, split=fact.get("split"))

    def _set_tags(self, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        names = distinct_names(tags)
        entries = [RunTag(names[name], str(value)[:MAX_TAG_CHARACTERS]) for name, value in tags.items()]
        for batch in _cut(entries, BATCH_SIZE):
            self.client.log_batch(self._run_id, tags=batch)


def joins(first: Fact, other: Fact) -> bool:
    """Return whether two facts that follow one another are sent together."""
    return first["kind"] == other["kind"] == "metrics"


def now_ms() -> int:
    """Return the time in milliseconds, as MLflow counts it."""
    return time.time_ns() // 1_000_000


def _get_run(client: MlflowClient, run_id: str) -> Run | None:
    """Return a run, or None where the store does not have it any more."""
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        # An id that is no id of this store at all is refused as a value.
        if error.error_code not in {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}:
            raise
        return None
    return run if run.info.lifecycle_stage == "active" else None


def _cut(entries: list[Any], size: int) -> list[list[Any]]:
    return [entries[start : start + size] for start in range(0, len(entries), size)]
