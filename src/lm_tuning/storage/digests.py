"""Name content by its digest: files by their bytes, settings by their canonical JSON."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from lm_tuning.storage.atomic import write_json_atomic

#: Size in bytes, time of the last change in nanoseconds, and digest of a file.
CacheEntry: TypeAlias = list[int | str]

#: A file changed less than this many seconds ago may change again within the same time stamp, so it is not cached.
SETTLED_SECONDS = 2.0


def digest_file(path: Path, cache: Path | None = None) -> str:
    """Return the SHA-256 of a file's bytes.

    Args:
        path: the file to read.
        cache: a JSON file that remembers digests by path, size and modification time, so that a large file is read
            once. A damaged cache is ignored and rewritten. None reads the file each time.

    Returns:
        64 hexadecimal digits.

    Raises:
        FileNotFoundError: if there is no such file.
    """
    return digest_files([path], cache)[0]


def digest_files(paths: Iterable[Path], cache: Path | None = None) -> list[str]:
    """Return the SHA-256 of each file's bytes, reading and writing the cache once for all of them.

    Args:
        paths: the files to read.
        cache: see ``digest_file``.

    Returns:
        64 hexadecimal digits a file, in the order of the paths.

    Raises:
        FileNotFoundError: if one of them is missing.
    """
    known = _read_cache(cache) if cache is not None else {}
    new: dict[str, CacheEntry] = {}
    digests: list[str] = []
    for path in (Path(path).resolve() for path in paths):
        stat = path.stat()
        mark: CacheEntry = [stat.st_size, stat.st_mtime_ns]
        # By size and time, as git does: a file that keeps both while its bytes change is taken for the same.
        entry = known.get(str(path))
        if isinstance(entry, list) and entry[:2] == mark:
            digests.append(str(entry[2]))
            continue
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        # Read while it was being written, the digest would be that of no version of the file.
        after = path.stat()
        unchanged = [after.st_size, after.st_mtime_ns] == mark
        if unchanged and time.time() - stat.st_mtime > SETTLED_SECONDS:
            new[str(path)] = [*mark, digests[-1]]
    if cache is not None and new:
        # Read again, since another process may have added to it meanwhile. What is gone from disk is dropped here.
        kept = {name: entry for name, entry in _read_cache(cache).items() if os.path.exists(name)}
        write_json_atomic(cache, kept | new)
    return digests


def digest_values(value: object) -> str:
    """Return a short digest of settings: the same for equal values, whatever the order of their keys.

    Args:
        value: dicts with string keys, lists, tuples, strings, finite numbers, booleans and None, nested at will. ``1``
            and ``1.0`` differ, as do ``1`` and ``True``.

    Returns:
        16 hexadecimal digits, fit for a folder name.

    Raises:
        TypeError: for any other type, such as a path or a set, and for a key that is no string.
        ValueError: for NaN and infinities.
    """
    _check_keys(value)
    # No spaces, sorted keys, ASCII: the one spelling of a value, whatever the version of Python.
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def _check_keys(value: object) -> None:
    """Refuse keys that JSON would turn into strings without a word, so that ``{1: x}`` and ``{"1": x}`` never agree."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"The key {key!r} is no string, so the digest would not be unique.")
            _check_keys(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_keys(inner)


def _read_cache(cache: Path) -> dict[str, CacheEntry]:
    """Return the remembered digests, or nothing when the file is missing or damaged."""
    try:
        entries = json.loads(Path(cache).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}
