"""Find the files that a run reads, and name their content by digests."""

from __future__ import annotations

from pathlib import Path, PureWindowsPath
from typing import Any

from lm_tuning.data.reading import FORMAT_OF_SUFFIX
from lm_tuning.errors import UserError
from lm_tuning.storage.digests import digest_file


def resolve_path(text: str) -> Path:
    """Read a path as it was typed; backslashes are slashes unless a file of that very name exists.

    Args:
        text: an absolute path, or one relative to the project.
    """
    path = Path(text).expanduser()
    if "\\" in text and not path.exists():
        return Path(PureWindowsPath(text).as_posix()).expanduser()
    return path


def describe_file(text: str, *, key: str, digest_cache: Path | None = None) -> dict[str, Any]:
    """Check that a file can be read and say what it is.

    Args:
        text: its path as typed.
        key: the parameter that names it, such as ``data.path``.
        digest_cache: see ``digest_file``.

    Returns:
        ``path``, ``format`` (of ``FORMAT_OF_SUFFIX``), ``num_bytes`` and ``digest`` (SHA-256).

    Raises:
        UserError: it is missing, a folder, empty, unreadable, or of a suffix that nothing here reads.
    """
    path = resolve_path(text)
    if path.is_dir():
        raise UserError(f"{key} names the folder '{path}'; name one file in it.")
    if not path.exists():
        raise UserError(f"{key} names the file '{path}', which does not exist (looked in '{Path.cwd()}').")
    file_format = FORMAT_OF_SUFFIX.get(path.suffix.lower())
    if file_format is None:
        known = ", ".join(FORMAT_OF_SUFFIX)
        raise UserError(f"{key} names '{path}', whose suffix tells no format. Files that are read end in {known}.")
    try:
        num_bytes = path.stat().st_size
        if not num_bytes:
            raise UserError(f"{key} names '{path}', which is empty.")
        digest = digest_file(path, digest_cache)
    except OSError as error:
        raise UserError(f"{key} names '{path}', which cannot be read: {error.strerror}.") from error
    return {"path": path.as_posix(), "format": file_format, "num_bytes": num_bytes, "digest": digest}


def describe_files(
    *, train: str, validation: str | None, test: str | None, digest_cache: Path | None = None
) -> dict[str, dict[str, Any] | None]:
    """Describe the files of a run, reporting everything that is wrong with them at once.

    Args:
        train: ``data.path``.
        validation: ``data.validation_path``; None to cut it from the rows of ``train``.
        test: ``data.test_path``; the same.
        digest_cache: see ``digest_file``.

    Returns:
        ``describe_file`` by split, None where no file was named.

    Raises:
        UserError: one problem a file.
    """
    files: dict[str, dict[str, Any] | None] = {}
    problems: list[str] = []
    named = {"train": ("data.path", train), "validation": ("data.validation_path", validation)}
    named["test"] = ("data.test_path", test)
    for split, (key, text) in named.items():
        try:
            files[split] = None if text is None else describe_file(text, key=key, digest_cache=digest_cache)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)
    return files
