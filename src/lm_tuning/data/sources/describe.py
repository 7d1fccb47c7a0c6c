"""Find the files that a run reads, and name their content by digests."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_tuning.data.sources.opening import MAGIC_BYTES, RawFile, detect_compression
from lm_tuning.data.sources.paths import (
    KNOWN_SUFFIXES,
    TEXT_FORMATS,
    LocalFiles,
    find_local,
    resolve_path,
    suffix_format,
)
from lm_tuning.data.sources.remote import is_address, list_remote
from lm_tuning.errors import UserError
from lm_tuning.secrets import conceal_address
from lm_tuning.storage.digests import digest_file, digest_files
from lm_tuning.wording import count_of

__all__ = ["describe_file", "describe_files", "find_changed_sources", "resolve_path"]

logger = logging.getLogger(__name__)

Named = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]
"""How parameters name the rows of a split: one source or a list of them, each a path or a mapping with ``path``."""

SPLIT_KEYS: Mapping[str, str] = {
    "train": "data.path",
    "validation": "data.validation_path",
    "test": "data.test_path",
}
"""Parameter that names the rows of a split."""

HELD_OUT = -1
"""Source number of files that are not read for training."""

_HUB_SETTINGS = ("config", "split", "revision")
_HELD_OUT_WORDS = frozenset({"dev", "eval", "test", "val", "valid", "validation"})
_NUM_SHOWN = 3


def describe_files(
    *, train: Named, validation: Named | None = None, test: Named | None = None, digest_cache: Path | None = None
) -> dict[str, Any]:
    """Describe the files of a run, reporting everything that is wrong with them at once.

    A path is one of: a file; a folder, for all files below it whose suffix is known; a pattern with ``*``, ``?``,
    ``[…]`` or ``**``; an address such as ``s3://bucket/rows.jsonl``; the name of a data set on the hub.

    Args:
        train: ``data.path``.
        validation: ``data.validation_path``; None to cut it from the rows of ``train``.
        test: ``data.test_path``; the same.
        digest_cache: see ``digest_file``.

    Returns:
        By split a list of files, None where none was named: ``path``, ``format``, ``compression``, ``num_bytes``,
        ``digest`` and ``source``, for hub data sets ``config``, ``split`` and ``revision`` as well, and ``field`` where
        the source has one. ``sources``: the training sources in order, with ``path`` as typed, ``weight`` and
        ``num_files``; ``source`` counts them.
        ``named``: by split what was typed, for ``find_changed_sources``. Addresses are without secrets everywhere.

    Raises:
        UserError: all that is missing, empty, unreadable, of unknown format, or named twice.
    """
    found: dict[str, Any] = {}
    named: dict[str, list[dict[str, Any]] | None] = {}
    problems: list[str] = []
    for split, value in (("train", train), ("validation", validation), ("test", test)):
        if value is None:
            found[split] = named[split] = None
            continue
        files: list[dict[str, Any]] = []
        sources = _sources(value, SPLIT_KEYS[split])
        for index, (key, source) in enumerate(sources):
            try:
                _check_weight(source, key, split)
                part = _describe_source(source, key=key, split=split, digest_cache=digest_cache)
                part = _with_field(part, source, key)
                _refuse_repeated(part, files, key)
            except UserError as error:
                problems += error.problems
                continue
            source["num_files"] = len(part)
            source["path"] = _storable(source["path"])
            files += [{**file, "source": index if split == "train" else HELD_OUT} for file in part]
        if not sources:
            problems.append(f"{SPLIT_KEYS[split]} is an empty list; name at least one source of rows.")
        found[split] = files
        named[split] = [source for _, source in sources]
    if problems:
        raise UserError(problems)
    assert named["train"] is not None, "training rows are always named"
    sources_of_train = [
        {"path": source["path"], "weight": source["weight"], "num_files": source["num_files"]}
        for source in named["train"]
    ]
    return {**found, "sources": sources_of_train, "named": named}


def describe_file(path: Path | str, *, key: str, digest_cache: Path | None = None) -> dict[str, Any]:
    """Check that a local file can be read and say what it is.

    Args:
        path: the file.
        key: the parameter that names it, such as ``data.path``.
        digest_cache: see ``digest_file``.

    Returns:
        ``path``, ``format``, ``compression``, ``num_bytes`` and ``digest`` (SHA-256).

    Raises:
        UserError: it is missing, empty, unreadable, or of a suffix that nothing here reads.
    """
    path = Path(path)
    file_format = _format_of(path.name, f"{key} names '{path}'")
    try:
        num_bytes = path.stat().st_size
        if not num_bytes:
            raise UserError(f"{key} names '{path}', which is empty.")
        digest = digest_file(path, digest_cache)
    except OSError as error:
        raise UserError(f"{key} names '{path}', which cannot be read: {error.strerror}.") from error
    return _completed({"path": path.as_posix(), "format": file_format, "num_bytes": num_bytes, "digest": digest}, key)


def find_changed_sources(
    stored: Mapping[str, Any],
    *,
    train: Named,
    validation: Named | None = None,
    test: Named | None = None,
    digest_cache: Path | None = None,
) -> list[str]:
    """Name how the sources of rows differ from those that something was made from.

    Addresses and hub data sets are compared by name and revision only, since asking for more needs the network.

    Args:
        stored: the result of ``describe_files`` at that time.
        train: ``data.path`` now.
        validation: ``data.validation_path`` now.
        test: ``data.test_path`` now.
        digest_cache: see ``digest_file``.

    Returns:
        One sentence a difference. A source of which nothing is left here cannot have changed, so it is none.
    """
    if "named" not in stored:
        return ["the stored rows were made by an earlier version, which noted their sources in another way"]
    found: list[str] = []
    for split, value in (("train", train), ("validation", validation), ("test", test)):
        before = stored["named"].get(split)
        now = None if value is None else [source for _, source in _sources(value, SPLIT_KEYS[split])]
        if _comparable(before) != _comparable(now):
            found.append(
                f"rows of {split}: the stored splits were made from {_written(before)}, "
                f"the parameters say {_written(now)}"
            )
            continue
        files = iter(stored[split] or ())
        for source in before or ():
            part = [next(files) for _ in range(source["num_files"])]
            found += _changes(part, source, split, digest_cache)
    return found


def _sources(value: Named, key: str) -> list[tuple[str, dict[str, Any]]]:
    """Return key and settings of each source, whatever the way in which they were written."""
    if isinstance(value, str | Mapping):
        return [(key, _source(value))]
    return [(f"{key}[{index}]", _source(item)) for index, item in enumerate(value)]


def _source(value: str | Mapping[str, Any]) -> dict[str, Any]:
    given = {"path": value} if isinstance(value, str) else dict(value)
    source: dict[str, Any] = {"path": given["path"], "weight": float(given.get("weight", 1.0))}
    source |= {name: given.get(name) for name in _HUB_SETTINGS}
    # Only where it is set: sources that were described before there was such a setting stay the same.
    return source | ({"field": given["field"]} if given.get("field") else {})


def _storable(path: str) -> str:
    """Return a path as descriptions of files keep it: an address without its secrets."""
    return conceal_address(path) if is_address(path) else path


def _check_weight(source: Mapping[str, Any], key: str, split: str) -> None:
    if split != "train" and source["weight"] != 1.0:
        raise UserError(
            f"{key}.weight = {source['weight']:g}: a weight says how often training rows come up, and rows of "
            f"{split} come up once. Leave it out."
        )


def _describe_source(
    source: Mapping[str, Any], *, key: str, split: str, digest_cache: Path | None
) -> list[dict[str, Any]]:
    """Describe the files of one source, in the order of reading."""
    text = source["path"]
    if is_address(text):
        _refuse_hub_settings(source, key, _HUB_SETTINGS)
        return [_completed(file, key) for file in _files_at(text, key)]
    found = find_local(text, key=key, split=source["split"] or split)
    if found is None:
        from lm_tuning.data.sources.hub import describe_hub_split

        wanted = {"config": source["config"], "revision": source["revision"]}
        return [describe_hub_split(text, key=key, split=source["split"] or split, **wanted)]
    # A stored DatasetDict has splits to choose from, as a data set on the hub has.
    _refuse_hub_settings(source, key, ("config", "revision") if found.has_splits else _HUB_SETTINGS)
    if not found.is_single:
        _log_choice(found, text, key=key, split=split)
        readable = [path for path in found.paths if os.access(path, os.R_OK)]  # of the others, the next line tells
        digest_files(readable, digest_cache)
    return [describe_file(path, key=key, digest_cache=digest_cache) for path in found.paths]


def _files_at(address: str, key: str) -> list[dict[str, Any]]:
    """Return the files at an address with their format; of several, those of unknown suffix are left out."""
    files = list_remote(address, key=key)
    if len(files) == 1:
        return [{**files[0], "format": _format_of(files[0]["path"], f"{key} names '{address}'")}]
    known = [{**file, "format": suffix_format(file["path"])[0]} for file in files if file["num_bytes"] != 0]
    known = [file for file in known if file["format"]]
    if not known:
        raise UserError(
            f"{key} names '{address}', where no file of rows is. Files that are read end in {KNOWN_SUFFIXES}."
        )
    left_out = f", {len(files) - len(known):,} of other formats left out" if len(files) > len(known) else ""
    logger.info("%s: %s stands for %s%s", key, address, count_of(len(known), "file"), left_out)
    return known


def _log_choice(found: LocalFiles, text: str, *, key: str, split: str) -> None:
    others = f", {found.num_others} of other formats left out" if found.num_others else ""
    logger.info("%s: %s stands for %s%s", key, text, count_of(len(found.paths), "file"), others)
    if found.empty:
        what = "1 empty file is" if len(found.empty) == 1 else f"{len(found.empty):,} empty files are"
        logger.warning("%s: %s left out: %s", key, what, _some(found.empty))
    held_out = [path for path in found.paths if not _HELD_OUT_WORDS.isdisjoint(re.split(r"[\W_]+", path.stem.lower()))]
    if split == "train" and held_out and len(held_out) < len(found.paths):
        logger.warning(
            "%s: files named like held-out rows will be trained on (%d of %d): %s. If they are held-out rows, name the "
            "training files by a pattern, and these by data.validation_path and data.test_path.",
            key,
            len(held_out),
            len(found.paths),
            _some(held_out),
        )


def _completed(file: dict[str, Any], key: str) -> dict[str, Any]:
    """Look into a file for the way in which it is packed."""
    path, file_format = file["path"], file["format"]
    with RawFile(file).open_stored() as stored:
        try:
            start = stored.read(MAGIC_BYTES)
        except OSError as error:
            raise UserError(f"{key} names '{path}', which cannot be read: {error}.") from error
    if not start:
        raise UserError(f"{key} names '{path}', which is empty.")
    packed = detect_compression(start)
    if packed and file_format not in TEXT_FORMATS:
        raise UserError(f"{key} names '{path}', a {file_format} file that is compressed ({packed}). Unpack it first.")
    if packed != suffix_format(path)[1]:
        logger.info("%s is %s, whatever its name says", path, f"compressed ({packed})" if packed else "not compressed")
    return {
        "path": path,
        "format": file_format,
        "compression": packed,
        "num_bytes": file["num_bytes"],
        "digest": file["digest"],
    }


def _format_of(name: str, problem: str) -> str:
    file_format, _ = suffix_format(name)
    if file_format is None:
        raise UserError(f"{problem}, whose suffix tells no format. Files that are read end in {KNOWN_SUFFIXES}.")
    return file_format


def _with_field(files: list[dict[str, Any]], source: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Note which list in the files holds the rows."""
    field = source.get("field")
    if field is None:
        return files
    other = next((file for file in files if file["format"] != "json"), None)
    if other:
        raise UserError(
            f"{key}.field = {field!r}: {other['path']} is no .json file, and only these hold rows in an object. Leave "
            "it out."
        )
    return [{**file, "field": field} for file in files]


def _refuse_hub_settings(source: Mapping[str, Any], key: str, names: Sequence[str]) -> None:
    problems = [
        f"{key}.{name} = {source[name]!r}: '{source['path']}' is no data set on the hub, so this has no use. Leave it "
        "out."
        for name in names
        if source[name] is not None
    ]
    if problems:
        raise UserError(problems)


def _refuse_repeated(part: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]], key: str) -> None:
    identity = ("path", "field", *_HUB_SETTINGS[:2])
    known = {tuple(file.get(name) for name in identity) for file in before}
    repeated = [file["path"] for file in part if tuple(file.get(name) for name in identity) in known]
    if repeated:
        raise UserError(
            f"{key} reads {_some(repeated)} a second time. Name a file once; a weight lets its rows come up more often."
        )


def _changes(
    files: Sequence[Mapping[str, Any]], source: Mapping[str, Any], split: str, cache: Path | None
) -> list[str]:
    """Describe what has happened to the files of one source, as far as this machine alone can tell."""
    if is_address(source["path"]) or files[0]["format"] == "hub":
        return []
    try:
        found = find_local(source["path"], key=SPLIT_KEYS[split], split=source["split"] or split)
    except UserError:
        found = None
    if found is None:
        return []  # gone
    before, now = {file["path"]: file["digest"] for file in files}, {path.as_posix(): path for path in found.paths}
    known = [path for name, path in now.items() if name in before]
    digests = dict(zip(known, digest_files(known, cache), strict=True))
    where = f"rows of {split}:"
    changes = [
        f"{where} {name} has changed since the stored splits were made from it"
        for name, path in now.items()
        if path in digests and digests[path] != before[name]
    ]
    for names, what in (([name for name in now if name not in before], "new"), ([*(before.keys() - now)], "gone")):
        if names:
            changes.append(
                f"{where} {_some(sorted(names))} of {source['path']} is {what} since the stored splits were made"
            )
    return changes


def _comparable(sources: Sequence[Mapping[str, Any]] | None) -> list[list[Any]] | None:
    """Return what tells sources apart; two ways to write the same path are one."""
    if sources is None:
        return None
    return [
        [
            _storable(source["path"]) if is_address(source["path"]) else resolve_path(source["path"]).as_posix(),
            source["weight"],
            *(source[name] for name in _HUB_SETTINGS),
            source.get("field"),
        ]
        for source in sources
    ]


def _written(sources: Sequence[Mapping[str, Any]] | None) -> str:
    if sources is None:
        return "None"
    texts = []
    for source in sources:
        text = _storable(source["path"]) if is_address(source["path"]) else str(resolve_path(source["path"]))
        given = {name: source[name] for name in (*_HUB_SETTINGS, "field") if source.get(name) is not None}
        if source["weight"] != 1.0:
            given["weight"] = source["weight"]
        settings = ", ".join(f"{name} {value}" for name, value in given.items())
        texts.append(f"{text} ({settings})" if settings else text)
    return _some(texts)


def _some(names: Sequence[object]) -> str:
    """Write the first few names."""
    shown = ", ".join(map(str, names[:_NUM_SHOWN]))
    return f"{shown} and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else shown
