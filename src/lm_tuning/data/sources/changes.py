"""Find out whether the sources of rows have changed since something was made from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lm_tuning.data.records import SPLITS, NamedSource, RawExamples, SourceFile
from lm_tuning.data.sources.describe import HUB_SETTINGS, NUM_SHOWN, SPLIT_KEYS, Named, list_sources, storable_path
from lm_tuning.data.sources.paths import find_local, resolve_path
from lm_tuning.data.sources.remote import is_address
from lm_tuning.errors import UserError
from lm_tuning.storage.digests import digest_files
from lm_tuning.wording import name_first


def find_changed_sources(
    stored: RawExamples,
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
    for split, value in zip(SPLITS, (train, validation, test), strict=True):
        before = stored["named"].get(split)
        now = None if value is None else [source for _, source in list_sources(value, SPLIT_KEYS[split])]
        if _comparable(before) != _comparable(now):
            found.append(
                f"rows of {split}: the stored splits were made from {_written(before)}, "
                f"the parameters say {_written(now)}"
            )
            continue
        # Files stand in the order of their sources, each of which says how many are its own.
        files = iter(stored[split] or ())
        for source in before or ():
            part = [next(files) for _ in range(source["num_files"])]
            found += _changes(part, source, split, digest_cache)
    return found


def _changes(files: Sequence[SourceFile], source: NamedSource, split: str, cache: Path | None) -> list[str]:
    """Describe what has happened to the files of one source, as far as this machine alone can tell."""
    # Asking would need the network, which a training from stored splits does without.
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
                f"{where} {name_first(sorted(names), NUM_SHOWN)} of {source['path']} is {what} since the stored splits "
                "were made"
            )
    return changes


def _comparable(sources: Sequence[NamedSource] | None) -> list[list[str | float | None]] | None:
    """Return what tells sources apart; two ways to write the same path are one."""
    if sources is None:
        return None
    return [
        [_resolved(source), source["weight"], *(source[name] for name in HUB_SETTINGS), source.get("field")]
        for source in sources
    ]


def _resolved(source: NamedSource) -> str:
    path = source["path"]
    return storable_path(path) if is_address(path) else resolve_path(path).as_posix()


def _written(sources: Sequence[NamedSource] | None) -> str:
    if sources is None:
        return "None"
    texts = []
    for source in sources:
        given = [f"{name} {source[name]}" for name in HUB_SETTINGS if source[name] is not None]
        given += [f"field {source['field']}"] if source.get("field") is not None else []
        given += [f"weight {source['weight']}"] if source["weight"] != 1.0 else []
        texts.append(f"{_resolved(source)} ({', '.join(given)})" if given else _resolved(source))
    return name_first(texts, NUM_SHOWN)
