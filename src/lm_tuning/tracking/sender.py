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
from lm_tuning.tracking.journal import Entry, Journal, describe_fact
from lm_tuning.tracking.trouble import (
    StoreAway,
    Trouble,
    describe,
    describe_silence,
    describe_trouble,
    judge,
    strip_passwords,
    wait_patiently,
    work_of,
)

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
#: The longest wait over a whole run for a store that has never answered, whatever signs of life it shows; only the last
#: chance at the end comes on top. Making a new database takes a part of it.
MAX_OPEN_SECONDS = 20.0


_abandoned: list[threading.Thread] = []


def holds_up_the_end() -> bool:
    """Return whether a call that cannot be broken off keeps threads which the interpreter would wait for when it ends.

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
    def shown_uri(self) -> str:
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
        _, seconds = self._wait(self._attempted.is_set, patience_seconds, MAX_OPEN_SECONDS)
        if not self.is_open and self.trouble is None:
            self.trouble = self._silence(seconds)
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
        target = self._num_attempts + 2  # the attempt in hand may have begun before what was added

        def is_reached() -> bool:
            self._wake.set()
            return self._num_attempts >= target or self._done.is_set()

        if not self._wait(is_reached, patience_seconds)[0]:
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
        longest = at_most_seconds
        if longest is None and not self.is_open:
            longest = max(MAX_OPEN_SECONDS - self.waited_seconds, patience_seconds)
        self._ending = True
        self._num_failures = 0
        self._wake.set()
        # Failures of the past are forgiven: this is the last chance, and only a new one ends it early.
        has_ended, seconds = self._wait(self._done.is_set, patience_seconds, longest)
        if not has_ended and self.trouble is None:
            is_cut_short = at_most_seconds is not None  # by a signal
            self.trouble = Trouble("away", "the run had to end") if is_cut_short else self._silence(seconds)
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
        # Whether it is still inside of a call decides how the process may end, see holds_up_the_end().
        _abandoned[:] = [thread for thread in [*_abandoned, self._thread] if thread.is_alive()]

    def _wait(self, condition: Callable[[], bool], patience: float, at_most: float | None = None) -> tuple[bool, float]:
        """Wait for a condition while the sender shows signs of life; return whether it came true, and the seconds."""
        came_true, seconds = wait_patiently(condition, self._life, patience, at_most)
        if not came_true:
            self.waited_seconds += seconds
        return came_true, seconds

    def _silence(self, seconds: float) -> Trouble:
        return Trouble("away", describe_silence(seconds, is_database=is_database(self._delivery.uri)))

    def _life(self) -> tuple[int, ...]:
        """Return what grows while the sender gets on: facts sent, its processor time, bytes read by this process.

        A call that fails costs time as well. So once one has failed, only facts that are sent count.
        """
        return (self._num_done, *(() if self._num_failures else work_of(self._thread)))

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
                self.journal.keep()
            self._wake.clear()
            # Asked before the last round, not after: what is added until the end is sent in that round.
            ending = self._ending
            if self._is_unwanted:
                return
            self.journal.keep()
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
                    if ending:  # of a run that had nothing more to tell, such as one that the user ends
                        self._delivery.tell_changes()
            self._num_attempts += 1
            self._attempted.set()

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
            # One fact among many is refused: each by itself, so that the others are not lost with it.
            if len(batch) > 1:
                for entry in batch:
                    self._send([entry])
                return
            is_settled = self._give_up(batch[0], judge(error))
        else:
            self._num_done += 1
            is_settled = True
        if batch[-1].start >= 0:  # facts that were set aside have no position
            self.journal.mark_sent(batch[-1].end)
        fact = batch[0].fact
        if is_settled and fact["kind"] == "file":
            self.journal.drop_file(fact)

    def _try(self, batch: list[Entry]) -> None:
        # Where the last fact had to be set aside, as when artifacts have a store of their own, one try must do.
        num_attempts = 1 if self.journal.state.get("aside") else ATTEMPTS
        for attempt in range(1, num_attempts + 1):
            try:
                self._delivery.send(batch)
            except Exception as error:
                self._num_failures += 1
                # Whether the store is away or dislikes this fact is told by a request that it cannot dislike.
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
        """Log what the run lacks, and keep it if that may pass; return whether it is for good."""
        what = describe_fact(entry.fact)
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
            logger.warning("%s", describe_trouble(self.shown_uri, trouble, folder))
        self._was_away = True

    def _note_success(self) -> None:
        self.trouble = None
        if self._was_away:
            self._was_away = False
            logger.info("MLflow at %s answers; what was kept for it is sent.", self.shown_uri)
