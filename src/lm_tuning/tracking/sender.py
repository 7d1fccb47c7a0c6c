"""The one thread that waits for the tracking store, so that nothing else has to."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import thread as pools
from pathlib import Path
from typing import TYPE_CHECKING

from lm_tuning.tracking.address import is_database
from lm_tuning.tracking.delivery import MAX_BATCH_METRICS, Delivery, joins
from lm_tuning.tracking.journal import Entry, Journal
from lm_tuning.tracking.trouble import StoreAway, Trouble, describe, judge, strip_passwords

if TYPE_CHECKING:
    from mlflow.entities import Run

logger = logging.getLogger(__name__)

#: How soon a logged step shows in the MLflow UI, seconds.
FLUSH_SECONDS = 2.0
#: After a failure the sender waits this long, then twice as long, up to the second value; seconds.
BACK_OFF_SECONDS = (5.0, 60.0)
#: A fact that fails although the store answers is tried this often, with such pauses.
ATTEMPTS = 3
RETRY_SECONDS = 1.0
#: What counts as a sign of life of a call in hand: processor time of the sender, in hundredths of a second, and bytes
#: that the process has read. Where the system does not tell (other than Linux), only facts that are sent count.
_LIFE_TICKS = 2
_LIFE_BYTES = 2**18
#: The longest wait for a store that has never answered, whatever signs of life it shows; a new database takes a part.
MAX_OPEN_SECONDS = 20.0
_LOOK_SECONDS = 0.05


_abandoned: list[threading.Thread] = []


def holds_up_the_end() -> bool:
    """Say whether a call that cannot be broken off keeps threads which the interpreter would wait for when it ends.

    MLflow has pools of its own for some artifact stores, whose workers are waited for although they are daemons.
    """
    workers = getattr(pools, "_threads_queues", {})  # of all pools, where the interpreter looks for them
    main = threading.main_thread()
    others = (each for each in threading.enumerate() if each is not main and (not each.daemon or each in workers))
    return any(thread.is_alive() for thread in _abandoned) and any(others)


class Sender:
    """Send a journal from a daemon thread, which nobody waits for without a limit.

    Attributes:
        journal: what is sent.
        trouble: why the store takes nothing now; None while it does.
        waited_seconds: how long other threads have waited in vain.
    """

    def __init__(self, journal: Journal, delivery: Delivery) -> None:
        """Choose journal and store; nothing starts yet."""
        self.journal = journal
        self.trouble: Trouble | None = None
        self.waited_seconds = 0.0
        self._num_refused = 0
        self.on_open: Callable[[Run], None] = lambda run: None
        self._delivery = delivery
        self._num_done = 0
        self._num_attempts = 0
        self._attempted = threading.Event()
        self._wake = threading.Event()
        self._ending = False
        self._is_unwanted = False
        self._num_failures = 0
        self._done = threading.Event()
        self._was_away = False
        self._thread = threading.Thread(target=self._run, name="tracking-sender", daemon=True)

    @property
    def is_open(self) -> bool:
        """Whether the tracking store has made or found the run."""
        return self._delivery.run is not None

    @property
    def run(self) -> Run | None:
        """The run as the store gave it, or None."""
        return self._delivery.run

    @property
    def num_lost(self) -> int:
        """How many facts and metrics the store refused for good."""
        return self._num_refused + self._delivery.num_refused

    @property
    def place(self) -> str:
        """The address of the store, without password."""
        return strip_passwords(self._delivery.uri)

    def start(self) -> None:
        """Start to send."""
        import mlflow  # here, since a thread that outlives the main one may not import it any more  # noqa: F401

        self._thread.start()

    def wait_until_open(self, patience_seconds: float) -> bool:
        """Wait for the first answer of the store.

        Args:
            patience_seconds: how long it may show no sign of life.

        Returns:
            Whether the run is there; if not, ``trouble`` says why.
        """
        # A server that sends and sends shows life and never an answer.
        self._wait(self._attempted.is_set, patience_seconds, MAX_OPEN_SECONDS)
        if not self.is_open and self.trouble is None:
            self.trouble = Trouble("away", _describe_silence(self._delivery.uri, patience_seconds))
            self._was_away = True
        return self.is_open

    def flush(self, patience_seconds: float) -> bool:
        """Wait until what was added so far is sent.

        Args:
            patience_seconds: how long the store may show no sign of life.

        Returns:
            Whether it was.
        """
        self.journal.write()
        target = self._num_attempts + 2  # the attempt in hand may have begun before

        def is_reached() -> bool:
            self._wake.set()
            return self._num_attempts >= target or self._done.is_set()

        if not self._wait(is_reached, patience_seconds):
            return False
        return self.trouble is None and self.journal.count() == (0, 0)

    def finish(self, patience_seconds: float, at_most_seconds: float | None = None) -> bool:
        """Send what is left, for as long as the store shows signs of life, and end the thread.

        Args:
            patience_seconds: how long it may show none.
            at_most_seconds: the longest wait all the same; None waits on.

        Returns:
            Whether everything was sent. Then the journal is removed, unless facts were set aside.
        """
        if not self.is_open and at_most_seconds is None:
            at_most_seconds = MAX_OPEN_SECONDS
        self._ending = True
        self._num_failures = 0
        self._wake.set()
        if not self._wait(self._done.is_set, patience_seconds, at_most_seconds) and self.trouble is None:
            is_cut_short = at_most_seconds is not None
            text = "the run had to end" if is_cut_short else _describe_silence(self._delivery.uri, patience_seconds)
            self.trouble = Trouble("away", text)
        if self._done.is_set() and self.journal.count() == (0, 0):
            self.journal.remove()
            return True
        self.abandon()  # a call in hand cannot be broken off, but no other one is made
        if self._done.is_set():
            self.journal.let_go()
        return False

    def abandon(self) -> None:
        """Send nothing more."""
        self._is_unwanted = self._ending = True
        self._wake.set()
        _abandoned[:] = [thread for thread in [*_abandoned, self._thread] if thread.is_alive()]

    def _wait(self, condition: Callable[[], bool], patience: float, at_most: float | None = None) -> bool:
        """Wait for a condition while the sender shows signs of life; return whether it came true."""
        life, began = self._life(), time.monotonic()
        since = began
        while not condition():
            time.sleep(_LOOK_SECONDS)
            now, new = time.monotonic(), self._life()
            if new != life:
                life, since = new, now
            if now - since >= patience or (at_most is not None and now - began >= at_most):
                self.waited_seconds += now - began
                return condition()
        return True

    def _life(self) -> tuple[int, int, int]:
        """Return what grows while the sender gets on: facts sent, its processor time, bytes read by this process.

        A call that fails costs time as well. So once one has failed, only facts that are sent count.
        """
        if self._num_failures:
            return (self._num_done, 0, 0)
        return (self._num_done, _ticks_of(self._thread) // _LIFE_TICKS, _bytes_read() // _LIFE_BYTES)

    def _run(self) -> None:
        try:
            self._send_until_ended()
        except Exception:  # a mistake of ours: said aloud, and the journal keeps the facts
            logger.exception("Sending to MLflow broke off; what is left stays in %s.", self.journal.folder)
            self.trouble = self.trouble or Trouble("away", "sending broke off")
        finally:
            self._attempted.set()
            self._done.set()
            if self._is_unwanted:
                self.journal.let_go()

    def _send_until_ended(self) -> None:
        pause, ending = 0.0, False
        while not ending:
            deadline = time.monotonic() + pause
            while not self._ending and (left := deadline - time.monotonic()) > 0:
                if self._wake.wait(min(left, FLUSH_SECONDS)) and self.trouble is None:
                    break
                self._wake.clear()
                self._write_journal()
            self._wake.clear()
            ending = self._ending
            if self._is_unwanted:
                return
            self._write_journal()
            try:
                self._send_all()
            except StoreAway as away:
                first, longest = BACK_OFF_SECONDS
                pause = first if self.trouble is None else min(max(pause, first / 2) * 2, longest)
                self._note_trouble(away.trouble)
            else:
                pause = FLUSH_SECONDS
                if not self._is_unwanted:
                    self._note_success()
            self._num_attempts += 1
            self._attempted.set()

    def _write_journal(self) -> None:
        try:
            self.journal.write()
        except OSError as error:
            logger.warning("What the run has to tell MLflow cannot be kept in %s: %s", self.journal.folder, error)

    def _send_all(self) -> None:
        """Send what is on disk.

        Raises:
            StoreAway: the store takes nothing now.
        """
        if not self.is_open:
            try:
                run = self._delivery.open()
            except Exception as error:
                trouble = judge(error)
                raise StoreAway(Trouble("away" if trouble.kind == "refused" else trouble.kind, trouble.text)) from error
            self._num_done += 1
            try:
                self.on_open(run)
            except Exception as error:
                logger.warning("The MLflow run lacks what is noted when it opens: %s", describe(error))
            self._attempted.set()
        self._send_aside()
        batch: list[Entry] = []
        for entry in self.journal.unsent():
            if self._is_unwanted:
                return
            if batch and (not joins(batch[0].fact, entry.fact) or len(batch) >= MAX_BATCH_METRICS):
                self._send(batch)
                batch = []
            batch.append(entry)
        if batch and not self._is_unwanted:
            self._send(batch)

    def _send_aside(self) -> None:
        """Try again, once, what an earlier sender of this journal had set aside."""
        aside = self.journal.state.pop("aside", []) if self._num_attempts == 0 else []
        while aside:
            try:
                self._send([Entry(aside[0], -1, -1)])
            except StoreAway:
                self.journal.state["aside"] = aside + self.journal.state.get("aside", [])
                raise
            del aside[0]
            self.journal.save_state()

    def _send(self, batch: list[Entry]) -> None:
        """Send facts and note it; set aside, or drop, what the store does not take although it works.

        Raises:
            StoreAway: the store takes nothing now.
        """
        try:
            self._try(batch)
        except StoreAway:
            raise
        except Exception as error:
            if len(batch) > 1:
                for entry in batch:
                    self._send([entry])
                return
            is_settled = self._give_up(batch[0], judge(error))
        else:
            self._num_done += 1
            is_settled = True
        if batch[-1].start >= 0:
            self.journal.mark_sent(batch[-1].end)
        if is_settled and batch[0].fact["kind"] == "file":
            self.journal.drop_file(batch[0].fact)

    def _try(self, batch: list[Entry]) -> None:
        # Where the last fact had to be set aside, as when artifacts have a store of their own, one try must do.
        num_attempts = 1 if self.journal.state.get("aside") else ATTEMPTS
        for attempt in range(1, num_attempts + 1):
            try:
                self._delivery.send(batch)
            except Exception as error:
                self._num_failures += 1
                try:
                    self._delivery.probe()
                except Exception as silence:
                    raise StoreAway(judge(silence)) from error
                if attempt == num_attempts or judge(error).kind == "refused":
                    raise
                time.sleep(RETRY_SECONDS)
            else:
                return

    def _give_up(self, entry: Entry, trouble: Trouble) -> bool:
        """Say what the run lacks; return whether that is for good."""
        what = _name(entry)
        if trouble.kind == "refused":
            self._num_refused += 1
            logger.warning("The MLflow run lacks %s: %s", what, trouble.text)
        else:
            self.journal.set_aside(entry.fact)
            logger.warning("The MLflow run lacks %s for now: %s", what, trouble.text)
        return trouble.kind == "refused"

    def _note_trouble(self, trouble: Trouble) -> None:
        is_new, self.trouble = self.trouble is None, trouble
        if is_new and self._num_attempts:  # of the first attempt, whoever waits for it tells
            folder = Path(os.path.relpath(self.journal.folder))
            logger.warning("%s", describe_trouble(self.place, trouble, folder))
        self._was_away = True

    def _note_success(self) -> None:
        self.trouble = None
        if self._was_away:
            self._was_away = False
            logger.info("MLflow at %s answers; what was kept for it is sent.", self.place)


def describe_trouble(place: str, trouble: Trouble, folder: Path) -> str:
    """Say that the store is away, that the run goes on, and where its facts stay.

    Args:
        place: address of the store, without password.
        trouble: why.
        folder: of the journal.
    """
    if trouble.kind == "denied":
        fix = " Check MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN."
        first = f"MLflow at {place} does not let this run in: {trouble.text}.{fix}"
    else:
        first = f"MLflow at {place} is away: {trouble.text}."
    return (
        f"{first} The run goes on. What it has to tell is kept in {folder} and sent as soon as MLflow takes it; "
        "after the run, send it with: kedro send-tracking"
    )


def _describe_silence(uri: str, seconds: float) -> str:
    if is_database(uri):
        return f"the database gave no answer for {seconds:.0f} seconds; another process may hold it"
    return f"it gave no answer for {seconds:.0f} seconds"


def _name(entry: Entry) -> str:
    fact = entry.fact
    if fact["kind"] == "metrics":
        return f"the metrics {', '.join(fact['values'])} of step {fact['step']}"
    if fact["kind"] == "tags":
        return f"the tags {', '.join(fact['values'])}"
    return str(fact.get("what") or {"settings": "its settings", "end": "its end"}.get(fact["kind"], fact["kind"]))


def _ticks_of(thread: threading.Thread) -> int:
    """Return how much processor time a thread has taken, in ticks of the system, or 0 where it does not say."""
    try:
        with open(f"/proc/self/task/{thread.native_id}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])  # in user and in system mode
    except (OSError, ValueError, IndexError):
        return 0


def _bytes_read() -> int:
    """Return how many bytes this process has read so far, or 0 where the system does not say."""
    try:
        with open("/proc/self/io", "rb") as file:
            return int(file.readline().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
