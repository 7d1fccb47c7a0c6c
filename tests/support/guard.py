"""What no test may write: the user's own store, results and home folder. Standard library only.

A hook of the interpreter sees every file that Python code opens for writing, makes, renames or removes, here and in
the processes that tests start (``child/sitecustomize.py``). It stops the write before it happens and notes it, so that
the running test fails even where the code under test swallows the error. Writers in C++ and Rust pass unseen; they
write into folders that Python made.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

NOTES = "LM_TUNING_TEST_NOTES"
"""Variable that names the file where forbidden writes of one worker and its children are noted."""

REPOSITORY = Path(__file__).resolve().parents[2]

# What the tools that run the tests keep in the checkout; the interpreter says where its virtual environment is.
_OF_TOOLS = (".pytest_cache", ".hypothesis", ".coverage", "htmlcov", ".venv")
_CACHES_OF_HOME = (".cache", "Library/Caches", ".triton", ".nv")
_TEMPORARY = os.path.abspath(tempfile.gettempdir())  # now, since the first call writes a file to try it
_EVENTS = frozenset(
    "open os.mkdir os.remove os.rmdir os.rename os.link os.symlink os.truncate shutil.rmtree sqlite3.connect".split()
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class ForbiddenWrite(PermissionError):
    """A test, or the code that it runs, wanted to write into the user's own folders."""


def find_owner(path: str | bytes | os.PathLike[str]) -> str | None:
    """Return whose a path is: ``the checkout``, ``the home folder`` or, for what may be written, None.

    Args:
        path: relative ones are taken from the working directory.
    """
    full = os.path.abspath(os.fsdecode(path))
    checkout, home = str(REPOSITORY), os.path.expanduser("~")
    is_temporary = _is_below(full, _TEMPORARY)
    if "__pycache__" in full.split(os.sep) or _is_below(full, sys.prefix):
        return None
    if _is_below(full, checkout):
        # The checkout may lie in the temporary folder, or that folder in the checkout.
        is_temporary = is_temporary and _is_below(_TEMPORARY, checkout)
        is_of_tools = os.path.relpath(full, checkout).startswith(_OF_TOOLS)
        return None if is_temporary or is_of_tools else "the checkout"
    if home != os.sep and _is_below(full, home) and not is_temporary:
        is_cache = any(_is_below(full, os.path.join(home, cache)) for cache in _CACHES_OF_HOME)
        return None if is_cache else "the home folder"
    return None


def watch_writes() -> None:
    """Stop and note forbidden writes of this process while a test runs; such a hook cannot be taken away again."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _EVENTS or not _is_testing():
            return
        for path in _written(event, arguments):
            owner = find_owner(path)
            if owner is not None:
                what = f"{event} {os.path.abspath(os.fsdecode(path))}"
                _note(what)  # which opens a file itself, one that may be written
                raise ForbiddenWrite(f"Tests do not write into {owner} of the user: {what}")

    sys.addaudithook(hook)


def take_notes() -> list[str]:
    """Return what was noted since the last call: event, path, process and test of each forbidden write."""
    path = Path(os.environ[NOTES])
    if not path.exists():
        return []
    noted = path.read_text(encoding="utf-8").splitlines()
    path.unlink()
    return noted


def _written(event: str, arguments: tuple[Any, ...]) -> list[Any]:
    """Return the paths that an event of the interpreter writes."""
    paths: list[Any]
    if event == "open":
        path, _, flags = arguments
        paths = [path] if isinstance(flags, int) and flags & _WRITES else []
    elif event == "os.mkdir":
        paths = [] if _has_folder(arguments[2]) or os.path.lexists(arguments[0]) else [arguments[0]]
    elif event in {"os.remove", "os.rmdir"}:
        paths = [] if _has_folder(arguments[1]) else [arguments[0]]
    elif event == "os.rename":
        paths = [] if _has_folder(arguments[2]) or _has_folder(arguments[3]) else [arguments[0], arguments[1]]
    elif event in {"os.link", "os.symlink"}:
        paths = [] if _has_folder(arguments[-1]) else [arguments[1]]
    elif event in {"os.truncate", "shutil.rmtree"}:
        paths = [arguments[0]]
    else:  # sqlite3.connect
        name = os.fsdecode(arguments[0]) if isinstance(arguments[0], (str, bytes, os.PathLike)) else ""
        paths = [] if name in {"", ":memory:"} or name.startswith("file:") else [name]
    return [path for path in paths if isinstance(path, (str, bytes, os.PathLike))]


def _is_testing() -> bool:
    """Whether a test runs, or this process was started by one; what pytest itself writes is none of ours."""
    return NOTES in os.environ and "PYTEST_CURRENT_TEST" in os.environ


def _has_folder(descriptor: Any) -> bool:
    """Whether a path is relative to an open folder: only removal of a whole tree does so, which is an event itself."""
    return isinstance(descriptor, int) and descriptor >= 0


def _is_below(path: str, folder: str) -> bool:
    folder = os.path.abspath(folder)
    return path == folder or path.startswith(folder + os.sep)


def _note(what: str) -> None:
    test = os.environ.get("PYTEST_CURRENT_TEST", "no test")
    with open(os.environ[NOTES], "a", encoding="utf-8") as notes:
        notes.write(f"{what} (process {os.getpid()}, started in {test})\n")
