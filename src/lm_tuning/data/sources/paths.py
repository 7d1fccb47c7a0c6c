"""Find the local files that a path stands for, and tell from their names how they are written and packed.

A path is one file, a folder, a pattern, or what `datasets` saved to disk.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from urllib.parse import unquote, urlparse

from lm_tuning.errors import UserError
from lm_tuning.wording import count_of

# File formats by the suffix that names them.
_FORMAT_OF_SUFFIX: Mapping[str, str] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}

TEXT_FORMATS = ("jsonl", "json", "csv", "tsv")
"""Formats that are read packed as well."""

# How a file is packed, by the suffix that follows the one of its format.
_COMPRESSION_OF_SUFFIX: Mapping[str, str] = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}

KNOWN_SUFFIXES = f"{', '.join(_FORMAT_OF_SUFFIX)}; behind the first five may stand {', '.join(_COMPRESSION_OF_SUFFIX)}"
"""The suffixes that are read, for messages."""


def suffix_format(path: str) -> tuple[str | None, str | None]:
    """Return format and compression that the name of a file tells, None where it tells none.

    Args:
        path: a path or address; what follows the question mark of a web address does not count.
    """
    # fsspec chains addresses: zip://rows.csv::s3://bucket/archive.zip is a .csv file.
    name = path.partition("::")[0]
    if name.startswith(("http://", "https://")):
        name = name.partition("?")[0].partition("#")[0]
    name = name.replace("\\", "/").rsplit("/", 1)[-1].lower()
    compression = None
    for suffix, packed in _COMPRESSION_OF_SUFFIX.items():
        if name.endswith(suffix):
            name, compression = name.removesuffix(suffix), packed
    stem, dot, suffix = name.rpartition(".")
    return (_FORMAT_OF_SUFFIX.get(dot + suffix) if stem or dot else None), compression


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
# Names that end like this mean a file, so that a missing one is not looked for on the hub.
_OTHER_SUFFIXES = frozenset(
    ".7z .avro .bin .db .doc .docx .h5 .html .md .npy .npz .ods .orc .pdf .pickle .pkl .pt .py .sqlite .tar .tgz .txt "
    ".xls .xlsx .xml .yaml .yml .zip".split()
)
# What the `datasets` library writes beside the rows.
_STATE, _SPLITS = "state.json", "dataset_dict.json"
_SIDE_FILES = frozenset({_STATE, _SPLITS, "dataset_info.json", "dataset_infos.json"})


@dataclass(frozen=True)
class LocalFiles:
    """What a path stands for.

    Attributes:
        paths: the files, in the order of reading.
        is_single: the path names one file.
        has_splits: it is a folder of several splits, of which one was chosen.
        num_others: files beside them that are of no known format.
        empty: files beside them that hold nothing.
    """

    paths: list[Path]
    is_single: bool = False
    has_splits: bool = False
    num_others: int = 0
    empty: list[Path] = field(default_factory=list)


def resolve_path(text: str) -> Path:
    """Read a path as it was typed; backslashes are slashes unless a file of that very name exists.

    Args:
        text: an absolute path, or one relative to the project; ``file://`` may stand before it.
    """
    if text.startswith("file://"):
        parsed = urlparse(text)
        return Path(unquote(parsed.netloc + parsed.path))
    path = Path(text).expanduser()
    if "\\" in text and not path.exists():
        return Path(PureWindowsPath(text).as_posix()).expanduser()
    return path


def find_local(text: str, *, key: str, split: str) -> LocalFiles | None:
    """Find the files that a path stands for.

    Args:
        text: the path as typed.
        key: the parameter that names it.
        split: the split to take of a folder that holds several, as `datasets` saves them.

    Returns:
        The files; None where nothing of that name is here and it can be the name of a data set on the hub.

    Raises:
        UserError: there is no such file, or no file of rows in the folder or pattern.
    """
    path = resolve_path(text)
    # What is there comes first: a file may have a bracket in its name, or the form of a name on the hub.
    if path.is_file():
        return LocalFiles([path], is_single=True)
    if path.is_dir():
        return _files_of_folder(path, key=key, split=split)
    if any(mark in str(path) for mark in "*?["):
        matches = sorted(map(Path, glob.glob(str(path), recursive=True)), key=Path.as_posix)
        return _files_of_rows((match for match in matches if match.is_file()), f"{key} names the pattern '{path}'")
    if not path.exists() and _can_be_on_hub(text):
        return None
    raise UserError(f"{key} names the file '{path}', which does not exist (looked in '{Path.cwd()}').")


def _can_be_on_hub(text: str) -> bool:
    """Return whether a text has the form of ``owner/name`` or ``name`` and is no file name."""
    is_file_name = suffix_format(text) != (None, None) or Path(text).suffix.lower() in _OTHER_SUFFIXES
    return _HUB_NAME.fullmatch(text) is not None and not is_file_name


def _files_of_folder(folder: Path, *, key: str, split: str) -> LocalFiles:
    if (folder / _SPLITS).is_file():
        part = folder / split
        if not (part / _STATE).is_file():
            there = ", ".join(sorted(path.parent.name for path in folder.glob(f"*/{_STATE}")))
            raise UserError(
                f"{key} names the folder '{folder}', which has no split {split!r}; it has: {there or 'none'}. Choose "
                f"one: write {{path: {folder}, split: …}}."
            )
        return LocalFiles(_saved_files(part, key=key), has_splits=True)
    if (folder / _STATE).is_file():
        return LocalFiles(_saved_files(folder, key=key))
    return _files_of_rows(_walk(folder), f"{key} names the folder '{folder}'")


def _saved_files(folder: Path, *, key: str) -> list[Path]:
    """Return the Arrow files of one saved data set, in the order of its rows."""
    problem = f"{key} names the folder '{folder}', which a data set was saved to and which is damaged"
    try:
        state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        paths = [folder / entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{problem}: {_STATE} cannot be read ({error}).") from error
    missing = [path.name for path in paths if not path.is_file()]
    if missing or not paths:
        raise UserError(f"{problem}: {missing[0] if missing else 'all its files'} missing.")
    return paths


def _walk(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder, sorted by path, but what is hidden; links to folders are followed once."""
    found: list[Path] = []
    seen: set[str] = set()
    # Path.rglob follows links to folders in some versions of Python only; fsspec's find never does, and lists hidden
    # files.
    for root, folders, names in os.walk(folder, followlinks=True):
        seen.add(os.path.realpath(root))
        # In place, which is how os.walk is told where not to go.
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and os.path.realpath(os.path.join(root, name)) not in seen
        ]
        found += [Path(root, name) for name in names if not name.startswith(".")]
    yield from sorted(found, key=Path.as_posix)


def _files_of_rows(candidates: Iterable[Path], problem: str) -> LocalFiles:
    paths: list[Path] = []
    empty: list[Path] = []
    num_others = 0
    for path in candidates:
        # Notes beside the rows are .json files as well, and no rows.
        if suffix_format(path.name)[0] is None or path.name in _SIDE_FILES:
            num_others += 1
        elif path.is_file() and path.stat().st_size:
            paths.append(path)
        else:
            empty.append(path)
    if not paths:
        num_there = num_others + len(empty)
        are = "is" if num_there == 1 else "are"
        there = f"{count_of(num_there, 'file')} {are} there, none with rows" if num_there else "no file is there"
        raise UserError(f"{problem}: {there}. Files that are read end in {KNOWN_SUFFIXES}.")
    return LocalFiles(paths, num_others=num_others, empty=empty)
