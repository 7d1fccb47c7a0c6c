"""Check catalog entries of our dataset classes before anything runs: what a class does not take, it refuses here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_tuning.datasets import CLASSES
from lm_tuning.datasets.entry import Marks
from lm_tuning.errors import UserError
from lm_tuning.json_types import JsonObject

if TYPE_CHECKING:
    from kedro.config import AbstractConfigLoader

PREFIX = "lm_tuning.datasets."

# From a table and not from the classes, since importing them would cost pandas. A test compares the two.
OPTIONS = {name: frozenset(options.split()) for name, (_, options) in CLASSES.items()}
#: Keys of ``metadata.lm_tuning``.
MARKS = frozenset(Marks.__annotations__)

_KEPT_BY_KEDRO = {"type", "metadata", "launch"}
# Of 0 to 1, as difflib counts; below it the suggestions are another word.
_CLOSE_ENOUGH = 0.75
_VERSIONED = (
    "versioned is not supported: a result is kept whole or not at all, and MLflow keeps that of every run. Take the "
    "line away; for results side by side set another output"
)
_REMOTE = (
    "results are written aside and renamed, which only a local disk can. Write a local path, and copy the result "
    "afterwards"
)


def check_entries(config_loader: AbstractConfigLoader) -> None:
    """Refuse entries that would fail, or go elsewhere than they say, after a training.

    Args:
        config_loader: the session's.

    Raises:
        UserError: with every problem, each naming the entry, the key and what is allowed.
    """
    from kedro.config import MissingConfigException
    from omegaconf.errors import OmegaConfBaseException

    # The configuration, before Kedro makes datasets of it: it makes them as they are needed, the last ones after hours.
    try:
        catalog = dict(config_loader["catalog"])
    except MissingConfigException:
        return  # Kedro goes on with an empty catalog
    except OmegaConfBaseException as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"The catalog cannot be put together: {reason}. An entry of an overlay is read without the file that it "
            "replaces: keys that start with _ have to be written there too."
        ) from error
    # All of them before the first node, since what is wrong with a report shows only when it is saved.
    problems = [problem for name, entry in catalog.items() for problem in _problems_of(str(name), entry)]
    problems += [*_unused(catalog), *_foreign_folders(catalog)]
    if problems:
        raise UserError(problems)


def _problems_of(name: str, entry: Any) -> Iterator[str]:
    kind = str(entry.get("type", "")) if isinstance(entry, Mapping) else ""
    if name.startswith("_") or not kind.startswith(PREFIX):
        return
    where, known = f"Catalog entry '{name}'", OPTIONS.get(kind.rpartition(".")[2])
    if known is None:
        nearest = get_close_matches(kind.rpartition(".")[2], OPTIONS, n=1)
        hint = f"Did you mean {PREFIX}{nearest[0]}?" if nearest else f"Classes: {', '.join(sorted(OPTIONS))}."
        yield f"{where}: there is no dataset class {kind}. {hint}"
        return
    # The class would refuse it too, but only when Kedro makes it: for a report, that is after the training.
    for key in entry:
        if key == "versioned" and entry[key]:
            yield f"{where}: versioned = {str(entry[key]).lower()}: {_VERSIONED}."
        elif key not in known | _KEPT_BY_KEDRO | {"versioned"}:
            allowed = ", ".join(sorted(known | {"type", "metadata"}))
            yield f"{where}: {kind.rpartition('.')[2]} has no option {key}. Options: {allowed}."
    path = str(entry.get("filepath", ""))
    # file:// is the local disk too.
    protocol = path.partition("://")[0] if "://" in path else ""
    if protocol and protocol != "file":
        yield f"{where}: filepath = {path}: {_REMOTE}."
    marks = (entry.get("metadata") or {}).get("lm_tuning") if isinstance(entry.get("metadata"), Mapping) else None
    for mark in marks or ():
        if mark not in MARKS:
            nearest = get_close_matches(str(mark), MARKS, n=1)
            hint = f"Did you mean {nearest[0]}?" if nearest else f"Keys: {', '.join(sorted(MARKS))}."
            yield f"{where}: metadata.lm_tuning has no key {mark}. {hint}"


def _foreign_folders(catalog: JsonObject) -> Iterator[str]:
    """Report model entries whose folder holds something else, which saving the model would replace."""
    for name, entry in catalog.items():
        if not isinstance(entry, Mapping) or str(entry.get("type")) != f"{PREFIX}ModelFolderDataset":
            continue
        folder = Path(str(entry.get("filepath", "")))
        # Every tuned model has the first of these files, every export the other: see models/tuned.py and export/run.py.
        is_ours = any((folder / marker).is_file() for marker in ("tuning.json", "export.json"))
        if folder.is_dir() and any(folder.iterdir()) and not is_ours:
            yield (
                f"Catalog entry '{name}': filepath = {folder} holds files that are no tuned model, and saving one "
                "would replace them. Name a folder of its own."
            )


def _unused(catalog: JsonObject) -> Iterator[str]:
    """Report entries that no pipeline uses and whose name comes near one that does: the setting would be left out."""
    from kedro.framework.project import pipelines

    datasets = {name for pipeline in dict(pipelines).values() for name in pipeline.datasets()}
    used = {name for name in datasets if not name.startswith(("params:", "parameters"))}
    # Entries that begin with _ are templates, those with braces patterns; any other unknown name may be a user's own.
    for name in map(str, catalog):
        if name in used or name.startswith("_") or "{" in name:
            continue
        # First among what no entry bears yet: of two entries with similar names, one is likely meant as it is.
        nearest = get_close_matches(name, used - set(catalog), n=1, cutoff=_CLOSE_ENOUGH) or get_close_matches(
            name, used, n=1, cutoff=_CLOSE_ENOUGH
        )
        if nearest:
            yield f"Catalog entry '{name}' is used by no pipeline. Did you mean {nearest[0]}?"
