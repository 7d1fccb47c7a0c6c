"""Let one process at a time write to an output."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lm_tuning.errors import UserError
from lm_tuning.secrets import mask


class OutputLock:
    """Hold an exclusive lock for as long as a run writes to an output.

    The operating system frees the lock when the process ends, however it ends, so a leftover file never blocks.

    Attributes:
        path: the lock file. It stays after release, since removing it would let two processes hold "the" lock.
        subject: what the lock protects, as the message names it.
    """

    def __init__(self, path: Path, subject: str | None = None) -> None:
        """Choose the lock file without taking the lock.

        Args:
            path: the lock file, or an existing folder, in which ``.lock`` is then used.
            subject: what is protected, for the message; the folder of ``path`` if None.
        """
        folder = path if path.is_dir() else path.parent
        self.path = path / ".lock" if path.is_dir() else path
        self.subject = subject or f"The folder '{folder}'"
        self._descriptor: int | None = None

    def acquire(self) -> OutputLock:
        """Acquire the lock at once or say who holds it.

        Raises:
            UserError: if another run holds it, naming the subject and the holder's process id and command.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = try_lock(self.path)
        if descriptor is None:
            raise UserError(
                f"{self.subject} is in use by {_describe_holder(self.path)}. Wait until it ends, or give this run a "
                "name of its own with --params output=another_name."
            )
        # Only whoever holds the lock writes, and others read without it: they may see nothing for a moment.
        os.ftruncate(descriptor, 0)
        holder = {"pid": os.getpid(), "command": mask(shlex.join(sys.argv))}
        os.write(descriptor, json.dumps(holder).encode("utf-8"))
        self._descriptor = descriptor
        return self

    def release(self) -> None:
        """Give the lock back; a lock that is not held is left alone."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # at once, even if a forked child still has the file open
            os.close(descriptor)

    def __enter__(self) -> OutputLock:
        """Acquire the lock."""
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        """Give the lock back."""
        self.release()


def try_lock(path: Path) -> int | None:
    """Lock a file for this process, without waiting.

    Args:
        path: made if it is not there; its folder is.

    Returns:
        A file descriptor, closing which gives the lock back; None where another process holds it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        # flock, not lockf: it belongs to the open file, so closing another one of the same path does not free it.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Wait for every other process that is in such a block with the same path, then enter.

    Args:
        path: the lock file.
    """
    # The file stays: removing it would let a third process lock a new one while a second still waits for the old.
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _describe_holder(path: Path) -> str:
    """Return the process id and command that the holder wrote into the lock file."""
    try:
        holder = json.loads(path.read_bytes())
        return f"process {holder['pid']} ({holder['command']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def is_alive(pid: int) -> bool:
    """Return whether a process with this id runs on this machine."""
    try:
        os.kill(pid, 0)  # signal 0 is not delivered, only checked
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True
