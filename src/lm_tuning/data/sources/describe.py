"""Find the files that a run reads, and name their content by digests."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from lm_tuning.data.records import SPLITS, NamedSource, RawExamples, SourceFile
from lm_tuning.data.sources.opening import MAGIC_BYTES, RawFile, detect_compression
from lm_tuning.data.sources.paths import (
    KNOWN_SUFFIXES,
    TEXT_FORMATS,
    LocalFiles,
    find_local,
    resolve_path,
    suffix_format,
)
from lm_tuning.data.sources.remote import describe_hub_split, is_address, list_remote
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import SourceParameters
from lm_tuning.secrets import conceal_address
from lm_tuning.storage.digests import digest_file, digest_files
from lm_tuning.wording import count_of, name_first

__all__ = ["describe_file", "describe_files", "resolve_path"]

logger = logging.getLogger(__name__)

TypedSource: TypeAlias = str | SourceParameters | Mapping[str, str | float | None]
Named: TypeAlias = TypedSource | Sequence[TypedSource]
"""How parameters name the rows of a split: one source or a list of them, each a path or a mapping with ``path``."""

SPLIT_KEYS: Mapping[str, str] = {"train": "data.path", "validation": "data.validation_path", "test": "data.test_path"}
"""Parameter that names the rows of a split."""

HubSetting: TypeAlias = Literal["config", "split", "revision"]
HUB_SETTINGS: tuple[HubSetting, ...] = ("config", "split", "revision")
_HELD_OUT_WORDS = frozenset({"dev", "eval", "test", "val", "valid", "validation"})
NUM_SHOWN = 3
"""Sources or files that a message names before it counts the rest."""


def describe_files(
    *, train: Named, validation: Named | None = None, test: Named | None = None, digest_cache: Path | None = None
) -> RawExamples:
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
    files: dict[str, list[SourceFile] | None] = dict.fromkeys(SPLITS)
    named: dict[str, list[NamedSource] | None] = dict.fromkeys(SPLITS)
    problems: list[str] = []
    for split, value in zip(SPLITS, (train, validation, test), strict=True):
        if value is None:
            continue
        try:
            files[split], named[split] = describe_named(
                value, SPLIT_KEYS[split], split=split, digest_cache=digest_cache
            )
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)
    return {
        "train": files["train"],
        "validation": files["validation"],
        "test": files["test"],
        "sources": [
            {"path": source["path"], "weight": source["weight"], "num_files": source["num_files"]}
            for source in named["train"] or ()
        ],
        "named": named,
    }


def describe_named(
    value: Named, key: str, *, split: str, digest_cache: Path | None = None
) -> tuple[list[SourceFile], list[NamedSource]]:
    """Describe the files that one parameter names, reporting everything that is wrong with them at once.

    Args:
        value: how the parameter names them.
        key: the parameter, for messages.
        split: what the rows are for: of a data set that has splits, the one that is read where none is named.
        digest_cache: see ``digest_file``.

    Returns:
        The files in the order of reading, and the sources as they were typed, addresses without secrets.

    Raises:
        UserError: all that is missing, empty, unreadable, of unknown format, or named twice.
    """
    problems: list[str] = []
    found: list[SourceFile] = []
    sources = list_sources(value, key)
    for index, (source_key, source) in enumerate(sources):
        try:
            _check_weight(source, source_key, split)
            described = _describe_source(source, key=source_key, split=split, digest_cache=digest_cache)
            part = _with_field(described, source, source_key)
            _refuse_repeated(part, found, source_key)
        except UserError as error:
            problems += error.problems
            continue
        source["num_files"] = len(part)
        source["path"] = storable_path(source["path"])
        found += [{**file, "source": index if split == "train" else -1} for file in part]
    if not sources:
        problems.append(f"{key} is an empty list; name at least one source of rows.")
    if problems:
        raise UserError(problems)
    return found, [source for _, source in sources]


def describe_file(path: Path | str, *, key: str, digest_cache: Path | None = None) -> SourceFile:
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
    name = path.as_posix()
    return _completed(
        {"path": name, "format": file_format, "compression": None, "num_bytes": num_bytes, "digest": digest}, key
    )


def list_sources(value: Named, key: str) -> list[tuple[str, NamedSource]]:
    """Return key and settings of each source, whatever the way in which they were written.

    Args:
        value: how parameters name the rows of a split.
        key: the parameter.
    """
    if isinstance(value, str | SourceParameters | Mapping):
        return [(key, _source(value))]
    return [(f"{key}[{index}]", _source(item)) for index, item in enumerate(value)]


def _source(value: TypedSource) -> NamedSource:
    # Not validated again: a path was read with its slashes once, and a file may bear a backslash in its name.
    given = SourceParameters.model_construct(**({"path": value} if isinstance(value, str) else dict(value)))
    source: NamedSource = {
        "path": given.path,
        "weight": float(given.weight),
        "config": given.config,
        "split": given.split,
        "revision": given.revision,
    }
    if given.field:  # only where it is set: sources that were described before there was such a setting stay the same
        source["field"] = given.field
    return source


def storable_path(path: str) -> str:
    """Return a path as descriptions of files keep it: an address without its secrets.

    Args:
        path: as typed.
    """
    return conceal_address(path) if is_address(path) else path


def _check_weight(source: NamedSource, key: str, split: str) -> None:
    if split != "train" and source["weight"] != 1.0:
        raise UserError(
            f"{key}.weight = {source['weight']:g}: a weight says how often training rows come up, and rows of "
            f"{split} come up once. Leave it out."
        )


def _describe_source(source: NamedSource, *, key: str, split: str, digest_cache: Path | None) -> list[SourceFile]:
    """Describe the files of one source, in the order of reading."""
    text = source["path"]
    if is_address(text):
        _refuse_hub_settings(source, key, HUB_SETTINGS)
        return [_completed(file, key) for file in _files_at(text, key)]
    found = find_local(text, key=key, split=source["split"] or split)
    if found is None:
        wanted = source["split"] or split
        return [describe_hub_split(text, key=key, config=source["config"], split=wanted, revision=source["revision"])]
    # A stored DatasetDict has splits to choose from, as a data set on the hub has.
    _refuse_hub_settings(source, key, ("config", "revision") if found.has_splits else HUB_SETTINGS)
    if not found.is_single:
        _log_choice(found, text, key=key, split=split)
        # All before each is described by itself, so that the cache is written once; from there on it answers.
        readable = [path for path in found.paths if os.access(path, os.R_OK)]  # of the others, the last line tells
        digest_files(readable, digest_cache)
    return [describe_file(path, key=key, digest_cache=digest_cache) for path in found.paths]


def _files_at(address: str, key: str) -> list[SourceFile]:
    """Return the files at an address with their format; of several, those of unknown suffix are left out."""
    files = list_remote(address, key=key)
    if len(files) == 1:
        _format_of(files[0][0], f"{key} names '{address}'")  # raises where the suffix tells none
    known: list[SourceFile] = [
        {"path": path, "format": file_format, "compression": None, "num_bytes": num_bytes, "digest": digest}
        for path, num_bytes, digest in files
        if (file_format := suffix_format(path)[0]) and (num_bytes != 0 or len(files) == 1)
    ]
    if not known:
        raise UserError(
            f"{key} names '{address}', where no file of rows is. Files that are read end in {KNOWN_SUFFIXES}."
        )
    if len(files) > 1:
        left_out = f", {len(files) - len(known):,} of other formats left out" if len(files) > len(known) else ""
        logger.info("%s: %s stands for %s%s", key, address, count_of(len(known), "file"), left_out)
    return known


def _log_choice(found: LocalFiles, text: str, *, key: str, split: str) -> None:
    others = f", {found.num_others} of other formats left out" if found.num_others else ""
    logger.info("%s: %s stands for %s%s", key, text, count_of(len(found.paths), "file"), others)
    if found.empty:
        what = "1 empty file is" if len(found.empty) == 1 else f"{len(found.empty):,} empty files are"
        logger.warning("%s: %s left out: %s", key, what, name_first(found.empty, NUM_SHOWN))
    held_out = [path for path in found.paths if not _HELD_OUT_WORDS.isdisjoint(re.split(r"[\W_]+", path.stem.lower()))]
    if split == "train" and held_out and len(held_out) < len(found.paths):
        logger.warning(
            "%s: files named like held-out rows will be trained on (%d of %d): %s. If they are held-out rows, name the "
            "training files by a pattern, and these by data.validation_path and data.test_path.",
            key,
            len(held_out),
            len(found.paths),
            name_first(held_out, NUM_SHOWN),
        )


def _completed(file: SourceFile, key: str) -> SourceFile:
    """Look into a file for the way in which it is packed."""
    path, file_format = file["path"], file["format"]
    with RawFile(file).open_stored() as stored:
        try:
            start = stored.read(MAGIC_BYTES)
        except OSError as error:
            raise UserError(f"{key} names '{path}', which cannot be read: {error}.") from error
    if not start:
        raise UserError(f"{key} names '{path}', which is empty.")
    # By its first bytes, whatever the name says: .gz is lost, or left, when files are renamed.
    packed = detect_compression(start)
    if packed and file_format not in TEXT_FORMATS:
        raise UserError(f"{key} names '{path}', a {file_format} file that is compressed ({packed}). Unpack it first.")
    if packed != suffix_format(path)[1]:
        logger.info("%s is %s, whatever its name says", path, f"compressed ({packed})" if packed else "not compressed")
    return {**file, "compression": packed}


def _format_of(name: str, problem: str) -> str:
    file_format, _ = suffix_format(name)
    if file_format is None:
        raise UserError(f"{problem}, whose suffix tells no format. Files that are read end in {KNOWN_SUFFIXES}.")
    return file_format


def _with_field(files: list[SourceFile], source: NamedSource, key: str) -> list[SourceFile]:
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


def _refuse_hub_settings(source: NamedSource, key: str, names: Sequence[HubSetting]) -> None:
    problems = [
        f"{key}.{name} = {source[name]!r}: '{source['path']}' is no data set on the hub, so this has no use. Leave it "
        "out."
        for name in names
        if source[name] is not None
    ]
    if problems:
        raise UserError(problems)


def _refuse_repeated(part: Sequence[SourceFile], before: Sequence[SourceFile], key: str) -> None:
    def identity(file: SourceFile) -> tuple[str | None, ...]:
        return file["path"], file.get("field"), file.get("config"), file.get("split")

    known = set(map(identity, before))
    repeated = [file["path"] for file in part if identity(file) in known]
    if repeated:
        raise UserError(
            f"{key} reads {name_first(repeated, NUM_SHOWN)} a second time. Name a file once; a weight lets its rows "
            "come up more often."
        )
