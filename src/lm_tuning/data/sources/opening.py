"""Open a file of rows wherever it lies, unpack it on the way, and know how much of it has been read."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from lm_tuning.data.sources.unpacking import Unpacked
from lm_tuning.errors import UserError

MAGIC_BYTES = 10
"""Bytes at the beginning of a file that ``detect_compression`` looks at."""

_BUFFER_BYTES = 1 << 17


class RawFile:
    """One file of rows: how to open it, and how far it has been read.

    Attributes:
        path: local path or address, as the description of the file names it.
        name: its last part, for progress.
        compression: ``gzip``, ``zstd``, ``bz2``, ``xz`` or None.
        num_bytes: size as it lies there, packed; None where nobody knows.
    """

    def __init__(self, file: Mapping[str, Any]) -> None:
        """Remember what was found out about the file.

        Args:
            file: see ``describe_files``.
        """
        self.path: str = file["path"]
        self.name: str = self.path.rstrip("/").rsplit("/", 1)[-1]
        self.compression: str | None = file.get("compression")
        self.num_bytes: int | None = file.get("num_bytes")
        self._stored: IO[bytes] | None = None

    def open(self) -> IO[bytes]:
        """Open for reading from the start, unpacked.

        Returns:
            A buffered stream of bytes, not always seekable; close it. Reading raises ``OSError`` for a place that
            cannot be read or unpacked.

        Raises:
            UserError: the file is gone or cannot be reached.
        """
        stored = self.open_stored()
        if self.compression is None:
            return stored
        return io.BufferedReader(Unpacked(stored, self.compression), _BUFFER_BYTES)

    def open_stored(self) -> IO[bytes]:
        """Open for reading as it lies there, packed or not; see ``open``."""
        if "://" in self.path:
            from lm_tuning.data.sources.remote import open_remote

            self._stored = io.BufferedReader(open_remote(self.path), _BUFFER_BYTES)
            return self._stored
        try:
            self._stored = Path(self.path).open("rb", buffering=_BUFFER_BYTES)
        except FileNotFoundError as error:
            raise UserError(
                f"{self.path} is gone since it was looked at. Put it back, or run the example_data pipeline again."
            ) from error
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}.") from error
        return self._stored

    def forget(self) -> None:
        """Count from nothing again, after a look at the first rows."""
        self._stored = None

    def progress(self) -> tuple[int, int, str]:
        """Return how much of the file as it lies there has been read, how much there is, and the unit of both."""
        total = self.num_bytes or 0
        if self._stored is None:
            done = 0
        else:
            done = total if self._stored.closed else self._stored.tell()
        total = max(total, done)
        return done // 1000, total // 1000 + 1, "kB"


def detect_compression(start: bytes) -> str | None:
    """Tell how a file is packed from its first bytes; no text begins like any of these.

    Args:
        start: the first ``MAGIC_BYTES`` bytes.

    Returns:
        ``gzip``, ``zstd``, ``bz2``, ``xz``, or None for a file that is not packed.
    """
    if start.startswith(b"\x1f\x8b"):
        return "gzip"
    # The second form is a frame to be skipped, which parallel packers put first.
    if start.startswith(b"\x28\xb5\x2f\xfd") or start[1:4] == b"\x2a\x4d\x18":
        return "zstd"
    if start.startswith(b"BZh") and start[4:10] in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90"):
        return "bz2"
    return "xz" if start.startswith(b"\xfd7zXZ\x00") else None
