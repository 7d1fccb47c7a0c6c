"""Find and open files at addresses such as s3://bucket/rows.jsonl, through whatever driver fsspec has for them."""

from __future__ import annotations

import io
import re
from typing import IO, TYPE_CHECKING, TypedDict

from lm_tuning.errors import Interrupted, UserError
from lm_tuning.secrets import conceal_address, mask, reveal_address
from lm_tuning.storage.digests import digest_values

if TYPE_CHECKING:
    import aiohttp
    from _typeshed import WriteableBuffer
    from fsspec import AbstractFileSystem

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


class RemoteFile(TypedDict):
    """A file at an address, see ``list_remote``."""

    path: str
    num_bytes: int | None
    digest: str


def is_address(text: str) -> bool:
    """Return whether a path is an address with a protocol; ``file://`` is a way to write a local path and none.

    Args:
        text: a path as typed.
    """
    return _ADDRESS.match(text) is not None and not text.startswith("file://")


def list_remote(address: str, *, key: str) -> list[RemoteFile]:
    """Find the files that an address stands for.

    Args:
        address: one file, a folder or a glob pattern.
        key: the parameter that names it.

    Returns:
        ``path`` (full address, its secrets masked; ``open_remote`` knows them), ``num_bytes`` (None where the other
        side does not say) and ``digest`` (of its marks of change: size, etag, checksum, time) by file, sorted by path.

    Raises:
        UserError: a driver is missing, or the address cannot be reached or holds nothing of that name.
    """
    protocol, _, rest = address.partition("://")
    system, path = _connect(address, f"{key} names '{address}'")
    # Names that a chained file system lists lack what they lie in, which opening them needs.
    chain = rest.partition("::")[2]
    try:
        # A file may have a bracket or an asterisk in its name; object stores allow any character.
        if has_pattern(path) and not system.exists(path):
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
    files: list[RemoteFile] = []
    for name, info in infos:
        if info.get("type") == "directory":
            continue
        full = conceal_address(f"{protocol}://{name}::{chain}" if chain else str(system.unstrip_protocol(name)))
        size = info.get("size")
        num_bytes = int(size) if size is not None else None
        # The content itself is not read for its digest: it would have to be downloaded twice. Which marks there are
        # depends on the driver.
        marks = {mark.lower(): str(value) for mark, value in info.items() if mark.lower() in _CONTENT_MARKS}
        files.append({"path": full, "num_bytes": num_bytes, "digest": digest_values([full, num_bytes, marks])})
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


def has_pattern(path: str) -> bool:
    """Return whether a path has one of the signs of a glob pattern: ``*``, ``?`` or ``[``.

    Args:
        path: a path or address; the question mark of a web address is no sign.
    """
    return any(mark in path for mark in ("*", "[")) or ("?" in path and not path.startswith(("http://", "https://")))


def _connect(address: str, problem: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of an address and the path in it; ``problem`` begins the messages."""
    import fsspec

    protocol = address.partition("://")[0]
    if protocol == "hf":
        from lm_tuning.data.sources.hub import require_hub

        require_hub(f"{problem}, on the hub")
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
