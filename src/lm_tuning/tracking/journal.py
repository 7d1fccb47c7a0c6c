"""What a run has to tell its tracking store, on disk until it is told."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lm_tuning.storage.atomic import write_text_atomic
from lm_tuning.storage.locks import try_lock
from lm_tuning.tracking.records import STEP, Fact, FileFact, JournalHeader, JournalState, RunHeader
from lm_tuning.wording import count_of

logger = logging.getLogger(__name__)

#: Where the journals of a project lie, one folder per run.
JOURNAL_FOLDER = Path("data/.tracking")
#: Facts that wait in memory; the next one takes them to disk.
MAX_WAITING = 5000
#: A file up to this size is copied. A larger one is linked, which costs nothing and needs no space, but would follow
#: a program that writes into the same file again.
MAX_COPIED_BYTES = 16 * 2**20
#: Marks the id that stands in for a run that the tracking store has not made yet.
STAND_IN_PREFIX = "local-"
#: Longest part of the facts that is read at once.
_READ_BYTES = 4 * 2**20

_HEADER, _FACTS, _STATE, _FILES, _LOCK, _RUN_IDS = "run.json", "facts.jsonl", "state.json", "files", "lock", "run_ids"


class Entry(NamedTuple):
    """A fact and where it stands.

    Attributes:
        fact: as it was added.
        start: its first byte in the file.
        end: the byte after it.
    """

    fact: Fact
    start: int
    end: int


class Journal:
    """Facts in the order in which they were added, with the files that they name.

    Adding costs microseconds; ``write`` takes what was added to disk. Any thread may call any method.

    Attributes:
        folder: where it lies.
        header: what is known from the beginning: where the run is kept, its name and when it began.
        state: what sending has come to; ``save_state`` keeps it.
        has_steps: whether this process has added metrics of a training step.
    """

    def __init__(self, folder: Path) -> None:
        """Open a journal.

        Args:
            folder: an existing journal.

        Raises:
            OSError: it cannot be read.
            ValueError: its header is no JSON.
        """
        self.folder = folder
        self.header: JournalHeader = json.loads((folder / _HEADER).read_text(encoding="utf-8"))
        state = folder / _STATE
        self.state: JournalState = json.loads(state.read_text(encoding="utf-8")) if state.exists() else {"sent": 0}
        self.has_steps = False
        self._waiting: deque[Fact] = deque()
        self._lock = threading.RLock()
        self._holding: int | None = None
        self._drop_half_line()
        self._num_files = max((int(path.name) for path in (folder / _FILES).glob("[0-9]*")), default=0)

    @classmethod
    def create(cls, root: Path, header: RunHeader) -> Journal:
        """Begin a journal.

        Args:
            root: folder of the journals.
            header: of the run.
        """
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
        folder = root / name
        folder.mkdir(parents=True)
        whole: JournalHeader = {"version": 1, "stand_in": f"{STAND_IN_PREFIX}{name}", **header}
        write_text_atomic(folder / _HEADER, json.dumps(whole, ensure_ascii=False, indent=2) + "\n")
        return cls(folder)

    @property
    def run_id(self) -> str:
        """Id of the run, or the one that stands in for it until the tracking store has made it."""
        return str(self.state.get("run_id") or self.header["run_id"] or self.header["stand_in"])

    def add(self, fact: Fact) -> None:
        """Add a fact. It is kept as it is, so do not change it afterwards.

        Args:
            fact: of any kind.
        """
        if fact["kind"] == "metrics" and fact.get("of") == STEP:
            self.has_steps = True
        # append() of a deque is atomic: the training thread takes no lock, which a thread that writes might hold.
        self._waiting.append(fact)
        if len(self._waiting) % MAX_WAITING == 0:
            self.keep()

    def add_file(self, path: Path, folder: str, what: str) -> None:
        """Add a file, as it is now.

        Args:
            path: the file.
            folder: of the run, where it belongs.
            what: how to name it in a message.

        Raises:
            OSError: it can neither be linked nor copied.
        """
        # A folder for each file, since two may have the same name.
        with self._lock:
            self._num_files += 1
            kept = self.folder / _FILES / str(self._num_files) / path.name
        kept.parent.mkdir(parents=True)
        if path.stat().st_size > MAX_COPIED_BYTES:
            try:
                os.link(path.resolve(), kept)
            except OSError:
                shutil.copy2(path, kept)
        else:
            shutil.copy2(path, kept)
        self.add({"kind": "file", "path": str(kept.relative_to(self.folder)), "folder": folder, "what": what})

    def keep(self) -> None:
        """Write what was added to disk; a disk that takes no more is a warning, since a result matters more."""
        try:
            self.write()
        except OSError as error:
            logger.warning("What the run has to tell MLflow cannot be kept in %s: %s", self.folder, error)

    def write(self, timeout_seconds: float = -1) -> bool:
        """Write what was added to disk.

        Args:
            timeout_seconds: the longest wait for another thread that is writing; -1 waits until it has ended.

        Returns:
            Whether that could be done.

        Raises:
            OSError: the disk takes no more; what was added is still in memory.
        """
        if not self._lock.acquire(timeout=timeout_seconds):
            return False
        try:
            # As many as there are now: others may add while these are taken.
            facts = [self._waiting.popleft() for _ in range(len(self._waiting))]
            if facts:
                text = "".join(json.dumps(fact, ensure_ascii=False, default=_plain) + "\n" for fact in facts)
                try:
                    # Texts may hold lone surrogates, out of rows or file names; UTF-8 proper has none.
                    with (self.folder / _FACTS).open("a", encoding="utf-8", errors="surrogatepass") as file:
                        file.write(text)
                except OSError:
                    self._drop_half_line()
                    self._waiting.extendleft(reversed(facts))
                    raise
        finally:
            self._lock.release()
        return True

    def unsent(self) -> Iterator[Entry]:
        """Yield what is on disk and was not marked as sent."""
        path, start = self.folder / _FACTS, int(self.state["sent"])
        while path.exists():
            with path.open("rb") as file:
                file.seek(start)
                lines = file.readlines(_READ_BYTES)
            if not lines:
                return
            for line in lines:
                if not line.endswith(b"\n"):
                    return  # the rest of it is being written
                fact = json.loads(line.decode("utf-8", "surrogatepass"))
                yield Entry(fact, start, start + len(line))
                start += len(line)

    def mark_sent(self, end: int) -> None:
        """Note that everything before a byte is sent."""
        # A position, not a list of what was sent: facts are sent in order, and the file only grows.
        self.state["sent"] = end
        self.save_state()

    def set_aside(self, fact: Fact) -> None:
        """Keep a fact that the store does not take now, while others go on."""
        self.state.setdefault("aside", []).append(fact)
        self.save_state()

    def save_state(self) -> None:
        """Write ``state`` to disk."""
        with self._lock:
            write_text_atomic(self.folder / _STATE, json.dumps(self.state, ensure_ascii=False) + "\n")

    def drop_file(self, fact: FileFact) -> None:
        """Remove the copy of a file that is sent."""
        shutil.rmtree((self.folder / fact["path"]).parent, ignore_errors=True)

    def count(self) -> tuple[int, int]:
        """Return how many entries and files are left to send."""
        facts = [entry.fact for entry in self.unsent()] + list(self.state.get("aside", []))
        files = sum(fact["kind"] == "file" for fact in facts)
        return len(facts) - files, files

    def take_name(self, run_id: str) -> None:
        """Note which run the tracking store has made, for checkpoints that hold the stand-in as well."""
        with self._lock:
            self.state["run_id"] = run_id
            self.save_state()
            # A checkpoint keeps the id that it was written with, and this journal will be gone when it is resumed from.
            if self.state.get("is_stood_in_for"):
                known = self.folder.parent / _RUN_IDS / self.header["stand_in"]
                write_text_atomic(known, run_id + "\n")

    def stand_in(self) -> None:
        """Note that ``run_id`` may be handed out before the tracking store has made the run."""
        with self._lock:
            self.state["is_stood_in_for"] = True
            self.save_state()

    def hold(self) -> bool:
        """Claim the journal for this process; return False if another one sends from it."""
        if self._holding is None:
            self._holding = try_lock(self.folder / _LOCK)
        return self._holding is not None

    def let_go(self) -> None:
        """Give the journal back."""
        descriptor, self._holding = self._holding, None
        if descriptor is not None:
            os.close(descriptor)

    def remove(self) -> None:
        """Remove the journal, which was sent or is not wanted."""
        # In this order, so that no other process takes up a journal that is about to go.
        shutil.rmtree(self.folder, ignore_errors=True)
        self.let_go()

    def _drop_half_line(self) -> None:
        """Remove what a process that was killed has left of its last line."""
        path = self.folder / _FACTS
        if not path.exists():
            return
        # Only the end is read, since a long run's facts may be large. A fact longer than that is none of ours.
        with path.open("rb+") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(size - _READ_BYTES, 0)
            file.seek(start)
            end = file.read().rfind(b"\n")
            if start + end + 1 != size:
                file.truncate(start + end + 1)


def list_journals(root: Path) -> list[Path]:
    """Return the journals that are left, oldest first.

    Args:
        root: folder of the journals.
    """
    return sorted(path.parent for path in root.glob(f"*/{_HEADER}"))


def is_stand_in(run_id: str) -> bool:
    """Return whether an id stands in for a run that the tracking store had not made."""
    return run_id.startswith(STAND_IN_PREFIX)


def find_journal(root: Path, stand_in: str) -> Path | None:
    """Return the journal of a run whose id is a stand-in, if it is still there."""
    folder = root / stand_in.removeprefix(STAND_IN_PREFIX)
    return folder if (folder / _HEADER).exists() else None


def read_run_id(root: Path, stand_in: str) -> str | None:
    """Return the run that the tracking store has made for a stand-in, or None where it has not."""
    known = root / _RUN_IDS / stand_in
    return known.read_text(encoding="utf-8").strip() if known.exists() else None


def _plain(value: object) -> float | str:
    """Return a number of some library as Python's own, and anything else as text."""
    try:
        return float(value)  # type: ignore[arg-type]  # whether it is a number is found out here
    except (TypeError, ValueError):
        return str(value)


def describe_count(entries: int, files: int) -> str:
    """Describe in words how much there is.

    Args:
        entries: other than files.
        files: of which there are copies.
    """
    parts = [count_of(entries, "entry")] if entries else []
    parts += [count_of(files, "file")] if files else []
    return " and ".join(parts) or "nothing"


def describe_fact(fact: Fact) -> str:
    """Name a fact as a message does that says what a run lacks.

    Args:
        fact: as it was added.
    """
    if fact["kind"] == "metrics":
        return f"the metrics {', '.join(fact['values'])} of step {fact['step']}"
    if fact["kind"] == "tags":
        return f"the tags {', '.join(fact['values'])}"
    if fact["kind"] == "file":
        return fact["what"]
    return {"settings": "its settings", "end": "its end"}.get(fact["kind"], fact["kind"])


# A list to be filled and emptied, so that no function needs ``global``.
_journals: list[Journal] = []


def set_current(journal: Journal | None) -> None:
    """Set the journal that takes what is logged from now on.

    Args:
        journal: of the run, or None when it has ended.
    """
    _journals[:] = [] if journal is None else [journal]


def current_journal() -> Journal | None:
    """Return the journal of the run of now, or None where nothing is tracked."""
    return _journals[0] if _journals else None
