"""Describe why something could not be written: a full disk, a quota, a size limit, a folder that takes no files."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lm_tuning.errors import MachineFault, UserError

# PyTorch's and safetensors' writers of zip files and streams keep the system's error number to themselves.
_SAID_BY_WRITERS = re.compile(r"unexpected pos \d+ vs|PytorchStreamWriter failed|iostream (?:stream )?error")
_PROBE_BYTES = 1 << 20


@dataclass(frozen=True)
class WriteFailure:
    """Why a system takes no more.

    Attributes:
        reason: half a sentence.
        fix: what a user can do, an imperative without its full stop.
        is_about_space: whether more free space would help.
    """

    reason: str
    fix: str
    is_about_space: bool = False


_FULL = WriteFailure("the disk is full", "Free some space there", is_about_space=True)
_SPACE = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: WriteFailure("the disk quota is used up", "Free some of your space there, or have the quota raised"),
    errno.EFBIG: WriteFailure("the file would pass the size limit", "Raise the limit (ulimit -f)"),
}
_READ_ONLY = WriteFailure("the file system is read-only", "Have it mounted for writing")
_NO_RIGHT = WriteFailure("permission is denied", "Give your user the right to write there")
_CUT_SHORT = WriteFailure(
    "the system took a part of the file only (a full disk, a quota, or a drive that was away)",
    "Look at the space there",
    is_about_space=True,
)


@contextmanager
def explain_full_disk(
    target: Path,
    *,
    wanted_bytes: Callable[[], int] | None = None,
    what: str = "",
    go_on: Callable[[], str] | None = None,
) -> Iterator[None]:
    """Turn a full disk, and what else keeps files from being written, into a message that names what was written.

    Writers in other languages report it as their own error, with the system's words inside or without; both count.

    Args:
        target: the file or folder that the user knows, not the temporary one.
        wanted_bytes: returns about how much was to be written; asked for after a failure only.
        what: was written, for the message, such as ``the checkpoint of step 6``.
        go_on: returns what is kept, and how to go on once the cause is gone, as whole sentences. Asked for after a
            failure only. Without it the previous output is kept, and the run is to be repeated.

    Raises:
        MachineFault: if the block fails to write for one of these reasons. Other errors pass through.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        failure = find_write_failure(error, target, wanted_bytes=wanted_bytes)
        if failure is None:
            raise
        wanted = wanted_bytes() if wanted_bytes is not None else 0
        subject = f"{what} to '{target}'" if what else f"'{target}'"
        space = f" {_describe_space(target, wanted)}" if failure.is_about_space and wanted else ""
        problem = f"Could not write {subject}: {failure.reason}.{space}"
        if go_on is None:
            raise MachineFault(f"{problem} The previous output is kept. {failure.fix} and run again.") from error
        raise MachineFault(f"{problem} {failure.fix}. {go_on()}") from error


def find_write_failure(
    error: BaseException, target: Path, *, wanted_bytes: Callable[[], int] | None = None
) -> WriteFailure | None:
    """Return why a file could not be written, or ``None`` when the error has another cause.

    Args:
        error: what a writer raised.
        target: the file or folder that was written.
        wanted_bytes: returns about how much was to be written; asked for where the writer gives no reason.
    """
    if isinstance(error, OSError) and error.errno in _SPACE:
        return _SPACE[error.errno]
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return _READ_ONLY
    if isinstance(error, PermissionError):  # a file that may not be read is another matter
        return _NO_RIGHT if _lies_beside(error.filename, target) else None
    # Arrow, safetensors and torch raise errors of their own that hold the system's words, in whatever its language is.
    text = str(error)
    for number, failure in {**_SPACE, errno.EROFS: _READ_ONLY}.items():
        if os.strerror(number) in text:
            return failure
    if _SAID_BY_WRITERS.search(text):
        return _probe(target, wanted_bytes() if wanted_bytes is not None else _PROBE_BYTES)
    return None


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below a folder, in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def close_files_of(error: BaseException) -> None:
    """Let go of what the functions that failed still hold: an open file keeps its space when its folder is removed.

    Args:
        error: what they raised, in an ``except`` block outside of them.
    """
    # Frames of the traceback keep their local variables alive, open files among them.
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__context__


def _lies_beside(filename: object, target: Path) -> bool:
    """Return whether a file belongs to what was written: the target itself, or anything in its parent folder."""
    if not isinstance(filename, str | bytes):
        return False
    # Not resolve(): a link that cannot be read would raise in the middle of an explanation.
    target = Path(os.path.abspath(target))
    path = Path(os.path.abspath(os.fsdecode(filename)))
    return path in target.parents or target.parent in path.parents


def _probe(target: Path, num_bytes: int) -> WriteFailure:
    """Ask the system itself why it does not take so many bytes, for a writer that does not say."""
    folder = _existing_parent(target)
    if shutil.disk_usage(folder).free < num_bytes:
        return _FULL
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and limit < num_bytes:
        return _SPACE[errno.EFBIG]
    # A quota and a limit of the drive show only when space is asked for; reserving it is how to ask.
    if hasattr(os, "posix_fallocate"):
        path = folder / f".probe-{os.getpid()}"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, num_bytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            if (failure := find_write_failure(error, path)) is not None:
                return failure
        finally:
            with suppress(OSError):
                path.unlink()
    return _CUT_SHORT


def _existing_parent(target: Path) -> Path:
    return next(folder for folder in Path(os.path.abspath(target)).parents if folder.is_dir())


def _describe_space(target: Path, wanted: int) -> str:
    free = shutil.disk_usage(_existing_parent(target)).free
    return f"It takes about {_size(wanted)}, and {_size(free)} is free there, with the half-written part removed."


def _size(num_bytes: int) -> str:
    """Write a size in the unit that suits it, as ``df -h`` does."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 2**10:.0f} KiB"
