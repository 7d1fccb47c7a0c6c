"""What checked rows and splits depend on: parameters as plain values, the keys they are stored by, and what differs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lm_tuning.data.check.checked import ROWS_VERSION
from lm_tuning.data.example import example_settings, is_example
from lm_tuning.data.records import SPLITS, NamedSource, RawExamples, RowSources, SourceFile
from lm_tuning.data.sources.describe import HUB_SETTINGS, NUM_SHOWN, SPLIT_KEYS, Named, list_sources, storable_path
from lm_tuning.data.sources.paths import find_local, resolve_path
from lm_tuning.data.sources.remote import is_address
from lm_tuning.errors import UserError
from lm_tuning.json_types import JsonObject
from lm_tuning.parameters.data import ColumnParameters, DataParameters, SplitParameters
from lm_tuning.storage.digests import digest_files, digest_values
from lm_tuning.storage.folders import SCHEMA_VERSION, read_manifest
from lm_tuning.wording import name_first

_READING = ("format", "on_bad_row", "max_bad_fraction", "normalize", "max_rows")
# Settings that came later count only where they are set, so that rows which were read before them are found again.
_LATER = ("field", "explode", "delimiter", "max_row_bytes")


def as_read(data: DataParameters, split: SplitParameters) -> tuple[DataParameters, SplitParameters]:
    """Return the parameters that rows are read and divided by: those of the example where it is all that is named.

    Args:
        data: the ``data`` parameters.
        split: the ``split`` parameters.
    """
    if not is_example(data.path):
        return data, split
    columns, template, group = example_settings(data.columns.model_dump(), data.template, split.group)
    return (
        data.model_copy(update={"columns": ColumnParameters(**columns), "template": template}),
        split.model_copy(update={"group": group}),
    )


def check_settings(data: DataParameters, split: SplitParameters, *, task: str) -> JsonObject:
    """Collect what checked rows depend on beside the files.

    Args:
        data: the ``data`` parameters.
        split: the ``split`` parameters: the columns that rows are divided by are read as well.
        task: the ``task`` parameter.
    """
    data, split = as_read(data, split)
    later = {name for name in _LATER if getattr(data, name) != DataParameters.model_fields[name].default}
    return {
        **data.model_dump(include={*_READING, *later}),
        "columns": data.columns.model_dump(),
        "template": data.template,
        "group": split.group,
        "stratify": split.stratify,
        "key": split.key,
        "task": task,
    }


def division_settings(split: SplitParameters, *, seed: int) -> JsonObject:
    """Collect what a division depends on beside the rows.

    Args:
        split: what the rows are divided by, see ``as_read``.
        seed: fixes the division.
    """
    # Left out where it changes nothing: splits of earlier versions keep their key, and checkpoints their token set.
    left_out = {"duplicates_by"} if split.duplicates_by == "row" else set()
    return {**split.model_dump(exclude=left_out), "seed": seed}


def split_settings(data: DataParameters, split: SplitParameters, *, seed: int, task: str) -> JsonObject:
    """Collect everything that stored splits depend on beside the files.

    Args:
        data: the ``data`` parameters.
        split: the ``split`` parameters.
        seed: fixes the division.
        task: the ``task`` parameter.
    """
    _, read = as_read(data, split)
    return {**check_settings(data, split, task=task), **division_settings(read, seed=seed)}


def rows_key(sources: RowSources) -> str:
    """Return the key of checked rows.

    Args:
        sources: what they are made from.
    """
    return digest_values(
        {
            "schema_version": SCHEMA_VERSION,
            "rows_version": ROWS_VERSION,
            "raw_examples": sources["files"],
            "settings": sources["settings"],
        }
    )


def refuse_other_rows(checked_rows: Path, data: DataParameters, split: SplitParameters, *, task: str) -> None:
    """Refuse rows that an earlier run checked with other parameters, when only the later node is run.

    Args:
        checked_rows: the stored folder of checked rows.
        data: the ``data`` parameters.
        split: the ``split`` parameters.
        task: the ``task`` parameter.

    Raises:
        UserError: what differs, and how to check the rows again.
    """
    # Nodes can be run one by one, so the rows that lie here may be those of another run.
    stored, settings = read_manifest(checked_rows)["facts"]["settings"], check_settings(data, split, task=task)
    _refuse_differences(
        f"The checked rows in {checked_rows} do not belong to the present parameters:",
        _differences(stored, settings, made="the stored rows were checked"),
        fix="Run the whole split pipeline: kedro run --pipelines=split (the same --env and --params).",
    )


def refuse_other_splits(
    splits: Path, data: DataParameters, split: SplitParameters, *, seed: int, task: str, digest_cache: Path | None
) -> None:
    """Refuse splits that were made from other rows or with other parameters.

    Args:
        splits: the stored folder of splits.
        data: the ``data`` parameters.
        split: the ``split`` parameters.
        seed: fixes the division.
        task: the ``task`` parameter.
        digest_cache: see ``digest_file``.

    Raises:
        UserError: what differs, and how to make the splits again.
    """
    settings = split_settings(data, split, seed=seed, task=task)
    _refuse_differences(
        f"The stored splits in {splits} do not belong to the present rows and parameters, so nothing is trained on "
        "them:",
        find_staleness(read_manifest(splits)["facts"], data, settings, digest_cache=digest_cache),
        fix="Set these back, or make the splits again with kedro run --pipelines=split (the same --env and --params). "
        "A training goes on from its checkpoint (train.resume=true) with its own rows only: for that, set them back.",
    )


def _refuse_differences(what: str, differences: list[str], *, fix: str) -> None:
    if differences:
        raise UserError([what, *(f"  - {difference}" for difference in differences), fix])


def find_staleness(
    facts: RowSources, data: DataParameters, settings: JsonObject, *, digest_cache: Path | None
) -> list[str]:
    """Name what stored splits were made from and the present parameters or files do not say.

    Args:
        facts: of the splits' manifest.
        data: names the present files.
        settings: what the split pipeline would work with now.
        digest_cache: see ``digest_file``.

    Returns:
        One sentence a difference. A raw file that is gone since cannot have changed, so it is none.
    """
    changes = find_changed_sources(
        facts["files"], train=data.path, validation=data.validation_path, test=data.test_path, digest_cache=digest_cache
    )
    return [*_differences(facts["settings"], settings, made="the stored splits were made"), *changes]


def _differences(stored: JsonObject, present: JsonObject, *, made: str) -> list[str]:
    # A setting that one side lacks is None: settings which came later are left out where they change nothing.
    return [
        f"{name}: {made} with {stored.get(name)!r}, the parameters say {present.get(name)!r}"
        for name in dict.fromkeys([*stored, *present])
        if stored.get(name) != present.get(name)
    ]


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
