"""Find a data set on the Hugging Face hub, or in its cache, and load one split of it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_tuning.data.records import SourceFile
from lm_tuning.errors import Interrupted, UserError

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

HUB_SECONDS = 10.0
"""How long the hub may take to answer one question."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_WAYS_TO_CONNECT = (
    "Connect to it (HF_HUB_OFFLINE must not be 1, HF_ENDPOINT names a mirror), or name a local file or folder."
)


def describe_hub_split(name: str, *, key: str, config: str | None, split: str, revision: str | None) -> SourceFile:
    """Ask the hub for the commit of a data set; without an answer, look for the set in the cache.

    Args:
        name: ``owner/name`` or ``name``.
        key: the parameter that names it.
        config: its configuration; None for the only one.
        split: the split that is read.
        revision: commit, tag or branch; None for the newest.

    Returns:
        ``path``, ``format`` (``hub``), ``compression`` and ``num_bytes`` (None), ``digest`` (the commit), ``config``,
        ``split`` and ``revision``.

    Raises:
        UserError: there is no such set or revision, it is closed to this user, or neither hub nor cache has it.
    """
    file: SourceFile = {
        "path": name,
        "format": "hub",
        "compression": None,
        "num_bytes": None,
        "digest": "",
        "config": config,
        "split": split,
        "revision": revision,
    }
    if hub_answers():
        import huggingface_hub

        with _user_errors(name, key=key):
            info = huggingface_hub.HfApi().dataset_info(name, revision=revision, timeout=HUB_SECONDS)
        return {**file, "digest": str(info.sha)}
    return {**file, "digest": _content_of(load_hub_split(file, key=key))}


def load_hub_split(file: SourceFile, *, key: str | None = None) -> Dataset:
    """Load one split of a hub data set: from the hub at the commit that was described, or from the cache.

    Args:
        file: see ``describe_hub_split``; an empty ``digest`` takes what the revision stands for.
        key: the parameter that names the set, for messages; None where it is not known.

    Returns:
        A ``datasets.Dataset``, memory-mapped.

    Raises:
        UserError: see ``describe_hub_split``; also a configuration or split that the set does not have.
    """
    import datasets

    name, commit = file["path"], file["digest"] if _COMMIT.fullmatch(file["digest"]) else None
    is_online = hub_answers()
    logger.info("Loading the split %r of the data set %s from the %s", file["split"], name, _WHERE[is_online])
    with _user_errors(name, key=key, is_online=is_online), _datasets_calm(is_online=is_online):
        # The long form of the name is never taken for a local folder or a file format.
        # Pinned to the commit that was described, so that rows stay the same if the set changes between the two.
        dataset = datasets.load_dataset(
            f"hf://datasets/{name}", file["config"], split=file["split"], revision=commit or file["revision"]
        )
    # Offline, the library takes whatever commit lies in its cache and says nothing.
    wanted = commit or (None if is_online else _cached_commit(name, file["revision"]))
    found = _content_of(dataset)
    is_another = wanted is not None and _COMMIT.fullmatch(found) is not None and wanted != found
    if is_another or (wanted is None and file["revision"] and not is_online):
        raise UserError(
            f"{_begin(name, key)} at {commit or file['revision']}, which the hub does not give at "
            f"present; the cache has it at {found}. {_WAYS_TO_CONNECT}"
        )
    return dataset


def hub_answers() -> bool:
    """Ask the hub once, without retries; False in offline mode (``HF_HUB_OFFLINE=1``)."""
    import huggingface_hub
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        huggingface_hub.get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except Interrupted:
        raise
    except Exception as error:  # whatever the client raises means that there is no answer
        logger.info("The hub does not answer (%s); looking in the local cache only.", error)
        return False
    return True


def require_hub(what: str) -> None:
    """Refuse at once what only the hub can give, where it does not answer.

    Args:
        what: the beginning of the message, which names parameter and address.

    Raises:
        UserError: the hub does not answer.
    """
    if not hub_answers():
        raise UserError(f"{what}, which cannot be reached. {_WAYS_TO_CONNECT}")


_WHERE = {True: "hub", False: "local cache"}


def _content_of(dataset: Dataset) -> str:
    """Return the commit that a loaded set was made from, as the cache notes it; else its fingerprint."""
    # …/<commit>/<name>.arrow: the cache puts what was made from a commit into a folder of that name.
    for entry in dataset.cache_files:
        commit = Path(entry["filename"]).parent.name
        if _COMMIT.fullmatch(commit):
            return commit
    return str(dataset._fingerprint)


def _cached_commit(name: str, revision: str | None) -> str | None:
    """Return the commit that a branch or tag stood for when the hub was last asked, None where nobody knows."""
    from huggingface_hub import constants

    if revision is None or _COMMIT.fullmatch(revision):
        return revision
    note = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}" / "refs" / revision
    return note.read_text(encoding="ascii").strip() if note.is_file() else None


@contextmanager
def _datasets_calm(*, is_online: bool) -> Iterator[None]:
    """Keep the library's bars for reading out of ours, and keep it to the cache where the hub does not answer."""
    import datasets

    config: Any = datasets.config
    had_bars, was_offline = datasets.is_progress_bar_enabled(), config.HF_HUB_OFFLINE
    datasets.disable_progress_bars()
    # Without it the library tries the hub again and again before it looks into its cache.
    config.HF_HUB_OFFLINE = was_offline or not is_online
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = was_offline
        if had_bars:
            datasets.enable_progress_bars()


@contextmanager
def _user_errors(name: str, *, key: str | None, is_online: bool = True) -> Iterator[None]:
    """Turn what the hub's client and the `datasets` library raise into one problem that says how to fix it."""
    try:
        yield
    except (Interrupted, UserError):
        raise
    except Exception as error:  # the two libraries raise errors of a dozen classes, some of them plain ones
        raise UserError(_explain(name, key, error, is_online=is_online)) from error


def _explain(name: str, key: str | None, error: Exception, *, is_online: bool) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    what = _begin(name, key)
    causes = list(_causes(error))
    text = str(error).strip() or type(error).__name__
    line = " ".join(text.split())[:400].rstrip(".")
    if any(isinstance(cause, GatedRepoError) for cause in causes) or "gated" in text:
        return f"{what}, which is gated: accept its terms on the hub, then set HF_TOKEN or run `hf auth login`."
    if any(isinstance(cause, RevisionNotFoundError) for cause in causes):
        return (
            f"{what}, which has no such revision. Set the revision to a commit, tag or branch of it, or leave it out."
        )
    if "BuilderConfig" in text or "Config name is missing" in text:
        return f"{what}, of which one configuration has to be chosen: write {{path: {name}, config: …}}. {line}."
    if "Unknown split" in text:
        return f"{what}, which lacks the split that is asked for: write {{path: {name}, split: …}}. {line}."
    if "scripts are no longer supported" in text:
        return f"{what}, which consists of a program. No foreign program is run: take a set of data files, or its copy."
    if is_online and any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        return (
            f"{what}, which the hub does not have, or which is private. Check the name, and set HF_TOKEN for a private "
            "one. (There is no local file or folder of that name either.)"
        )
    if not is_online:
        return (
            f"{what}, which is not in the local cache, and the hub cannot be reached. {_WAYS_TO_CONNECT} (There is no "
            "local file or folder of that name.)"
        )
    return f"{what}, which cannot be loaded: {line}."


def _begin(name: str, key: str | None) -> str:
    return f"{key} names the hub data set {name}" if key else f"Rows are read from the hub data set {name}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
