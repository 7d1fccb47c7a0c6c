"""Open a file of rows wherever it lies, unpack it on the way, and know how much of it has been read."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from lm_tuning.errors import Interrupted, UserError

MAGIC_BYTES = 10
"""Bytes at the beginning of a file that ``detect_compression`` looks at."""

# Small enough that a file of one repeated character does not unpack to gigabytes at a time.
_PACKED_BYTES = 1 << 15
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
        return io.BufferedReader(_Unpacked(stored, self.compression), _BUFFER_BYTES)

    def open_stored(self) -> IO[bytes]:
        """Open for reading as it lies there, packed or not; see ``open``."""
        if "://" in self.path:
            from lm_tuning.data.remote_files import open_remote

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


def _unpacker(compression: str) -> Callable[[], Any]:
    """Return a function that makes an object with ``decompress``, ``eof`` and ``unused_data``, for one member."""
    if compression == "gzip":
        import zlib

        return lambda: zlib.decompressobj(wbits=31)
    if compression == "bz2":
        import bz2

        return bz2.BZ2Decompressor
    if compression == "xz":
        import lzma

        return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ)
    try:
        import zstandard
    except ImportError as error:
        raise UserError("Reading .zst files needs the package zstandard: pip install zstandard") from error
    return lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


class _Unpacked(io.RawIOBase):
    """The unpacked bytes of a packed stream, which may have several members one after the other.

    What was unpacked is always handed out before the error behind it is raised.
    """

    def __init__(self, stored: IO[bytes], compression: str) -> None:
        self._stored = stored
        self._compression = compression
        self._new_member = _unpacker(compression)
        self._member: Any = None
        self._packed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._stored.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._ready and self._unpack_more():
            pass
        view = memoryview(buffer).cast("B")
        num_bytes = min(len(view), len(self._ready))
        view[:num_bytes] = self._ready[:num_bytes]
        self._ready = self._ready[num_bytes:]
        return num_bytes

    def _unpack_more(self) -> bool:
        """Unpack the next piece; return whether there was one."""
        self._packed = self._packed or self._stored.read(_PACKED_BYTES)
        if not self._packed:
            if self._member is None:
                return False
            raise OSError(f"the {self._compression} data breaks off before its end")
        if self._member is None:
            self._packed = self._packed.lstrip(b"\0")  # padding between members and behind the last
            if not self._packed:
                return True
            self._member = self._new_member()
        try:
            self._ready = memoryview(self._member.decompress(self._packed))
        except Interrupted:
            raise
        except Exception as error:  # each of the four modules has an error class of its own
            raise OSError(f"the {self._compression} data is damaged ({error})") from error
        self._packed = self._member.unused_data if self._member.eof else b""
        if self._member.eof:
            self._member = None
        return True
