"""Find and read what lies elsewhere: files at addresses, through the drivers of fsspec, and data sets on the hub."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lm_tuning.data.records import SourceFile
from lm_tuning.errors import Interrupted, UserError, causes_of
from lm_tuning.secrets import conceal_address, mask, reveal_address
from lm_tuning.storage.digests import digest_values

if TYPE_CHECKING:
    import aiohttp
    from _typeshed import WriteableBuffer
    from datasets import Dataset
    from fsspec import AbstractFileSystem

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
    where = "hub" if is_online else "local cache"
    logger.info("Loading the split %r of the data set %s from the %s", file["split"], name, where)
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
    causes = list(causes_of(error, with_context=True))
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


_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
# fsspec reads these itself, with a package of another name. Any other driver's class lies in the package to install.
_PACKAGE_OF_PROTOCOL = {"http": "aiohttp", "https": "aiohttp", "sftp": "paramiko", "ssh": "paramiko"}
# What file systems call the marks that change when a file does.
_CONTENT_MARKS = frozenset(
    "etag checksum md5hash crc32c content_md5 sha256 blob_id versionid generation lastmodified last_modified updated "
    "mtime created".split()
)
# Seconds until a server has to answer, and between two parts of what it sends.
_CONNECT_SECONDS = 15.0
_SILENCE_SECONDS = 120.0


def is_address(text: str) -> bool:
    """Return whether a path is an address with a protocol; ``file://`` is a way to write a local path and none.

    Args:
        text: a path as typed.
    """
    return _ADDRESS.match(text) is not None and not text.startswith("file://")


def list_remote(address: str, *, key: str) -> list[tuple[str, int | None, str]]:
    """Find the files that an address stands for.

    Args:
        address: one file, a folder or a glob pattern.
        key: the parameter that names it.

    Returns:
        By file, sorted: the full address, its secrets masked (``open_remote`` knows them), its size in bytes (None
        where the other side does not say), and a digest of its marks of change: size, etag, checksum, time.

    Raises:
        UserError: a driver is missing, or the address cannot be reached or holds nothing of that name.
    """
    protocol, _, rest = address.partition("://")
    system, path = _connect(address, f"{key} names '{address}'")
    # Names that a chained file system lists lack what they lie in, which opening them needs.
    chain = rest.partition("::")[2]
    try:
        # A file may have a bracket or an asterisk in its name; object stores allow any character.
        if _has_pattern(path) and not system.exists(path):
            names = sorted(system.glob(path))
        # Some stores keep an empty object for a folder, named with a slash at its end.
        elif not path.endswith("/") and system.isfile(path):
            names = [path]
        else:
            names = sorted(system.find(path)) if system.isdir(path) else [path]
        infos = [(name, dict(system.info(name))) for name in names]
    except FileNotFoundError as error:
        raise UserError(f"{key} names '{address}', which does not exist.") from error
    except Interrupted:
        raise
    except Exception as error:  # each driver has error classes of its own
        raise UserError(f"{key} names '{address}', which cannot be read: {_first_line(error)}") from error
    files = []
    for name, info in infos:
        if info.get("type") == "directory":
            continue
        full = conceal_address(f"{protocol}://{name}::{chain}" if chain else str(system.unstrip_protocol(name)))
        size = info.get("size")
        num_bytes = int(size) if size is not None else None
        # The content itself is not read for its digest: it would have to be downloaded twice. Which marks there are
        # depends on the driver.
        marks = {mark.lower(): str(value) for mark, value in info.items() if mark.lower() in _CONTENT_MARKS}
        files.append((full, num_bytes, digest_values([full, num_bytes, marks])))
    return files


def open_remote(address: str) -> io.RawIOBase:
    """Open one file at an address for reading bytes from its start.

    Args:
        address: as ``list_remote`` gives it; a process that did not list it must have been told the secrets in the
            parameters, see ``remember_settings``.

    Returns:
        An unbuffered stream. Reading raises ``OSError`` whatever the driver raises.

    Raises:
        UserError: it cannot be opened.
    """
    system, path = _connect(reveal_address(address), f"Rows are at '{address}'")
    try:
        return _Guarded(system.open(path, "rb"), system)
    except Interrupted:
        raise
    except Exception as error:  # each driver has error classes of its own
        raise UserError(f"{address} cannot be opened: {_first_line(error)}") from error


def _has_pattern(path: str) -> bool:
    """Return whether a path has a sign of a glob pattern, ``*``, ``?`` or ``[``; the ``?`` of a web address is none."""
    return any(mark in path for mark in ("*", "[")) or ("?" in path and not path.startswith(("http://", "https://")))


def _connect(address: str, problem: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of an address and the path in it; ``problem`` begins the messages."""
    import fsspec

    protocol = address.partition("://")[0]
    if protocol == "hf" and not hub_answers():  # at once, where its driver would try again and again
        raise UserError(f"{problem}, on the hub, which cannot be reached. {_WAYS_TO_CONNECT}")
    # The other drivers have patience settings of their own, by names of their own.
    options = {"client_kwargs": _patient_client()} if protocol in ("http", "https") else {}
    try:
        system, path = fsspec.core.url_to_fs(address, **options)
    except ImportError as error:
        package = _PACKAGE_OF_PROTOCOL.get(protocol) or _package_of_driver(protocol)
        fix = f"pip install {package}" if package else _first_line(error)
        raise UserError(f"{problem}; reading {protocol}:// needs another package: {fix}") from error
    except (Interrupted, UserError):
        raise
    except Exception as error:  # bad credentials, unknown protocols, malformed addresses
        raise UserError(f"{problem}, which cannot be read: {_first_line(error)}") from error
    return system, path


def _package_of_driver(protocol: str) -> str | None:
    """Return the package that a driver which fsspec knows of comes in; None for its own drivers and unknown ones."""
    from fsspec.registry import known_implementations

    package = str(known_implementations.get(protocol, {}).get("class", "")).partition(".")[0]
    return package if package not in ("", "fsspec") else None


def _patient_client() -> dict[str, aiohttp.ClientTimeout]:
    """Bound the wait for an answer, not the time that a large file takes."""
    try:
        import aiohttp
    except ImportError:
        return {}  # the driver's own message follows
    timeout = aiohttp.ClientTimeout(
        total=None, connect=_CONNECT_SECONDS, sock_connect=_CONNECT_SECONDS, sock_read=_SILENCE_SECONDS
    )
    return {"timeout": timeout}


class _Guarded(io.RawIOBase):
    """A driver's file whose errors are all ``OSError``."""

    def __init__(self, file: IO[bytes], system: AbstractFileSystem) -> None:
        self._file = file
        self._system = system  # an archive is closed with the last mention of its file system

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        try:
            # Drivers' files need not have readinto.
            data = self._file.read(len(view))
        except (OSError, Interrupted):
            raise
        except Exception as error:  # each driver has error classes of its own
            raise OSError(_first_line(error)) from error
        view[: len(data)] = data
        return len(data)


def _first_line(error: BaseException) -> str:
    return mask((str(error).strip() or type(error).__name__).splitlines()[0])
