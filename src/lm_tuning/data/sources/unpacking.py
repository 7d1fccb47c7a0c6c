"""Unpack compressed bytes in chunks of bounded size, however far a few packed bytes unpack."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import IO, Any, Protocol

from lm_tuning.errors import Interrupted, UserError

_PACKED_BYTES = 1 << 15
_UNPACKED_BYTES = 1 << 20
# Its package has no limit for the output; a block of 128 kB of one repeated byte is four bytes long.
_PACKED_BYTES_OF_ZSTD = 512


class _Member(Protocol):
    """One of the compressed streams that a file may hold one after the other.

    Attributes:
        eof: its end was reached.
        needs_input: nothing more comes out before something goes in.
    """

    eof: bool
    needs_input: bool

    def unpack(self, packed: bytes) -> tuple[bytes, bytes]:
        """Return what came out, about 1 MB at most, and what of the input is still to be handed in."""


class Unpacked(io.RawIOBase):
    """The unpacked bytes of a compressed stream, which may have several members one after the other.

    What was unpacked is always handed out before the error behind it is raised.
    """

    def __init__(self, stored: IO[bytes], compression: str) -> None:
        """Wrap a stream at its start.

        Args:
            stored: the compressed bytes; closed with this object.
            compression: ``gzip``, ``zstd``, ``bz2`` or ``xz``.

        Raises:
            UserError: a package is missing.
        """
        self._stored = stored
        self._compression = compression
        self._new_member = _member_class(compression)
        self._member: _Member | None = None
        self._packed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def close(self) -> None:
        """Close the stream below as well."""
        self._stored.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as unpacked bytes are at hand; 0 at the end.

        Raises:
            OSError: the compressed data is damaged or breaks off.
        """
        while not self._ready and self._unpack_more():
            pass
        view = memoryview(buffer).cast("B")
        num_bytes = min(len(view), len(self._ready))
        view[:num_bytes] = self._ready[:num_bytes]
        self._ready = self._ready[num_bytes:]
        return num_bytes

    def _unpack_more(self) -> bool:
        """Unpack the next chunk; return whether there was one."""
        if not self._packed and (self._member is None or self._member.needs_input):
            self._packed = self._stored.read(_PACKED_BYTES)
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
            ready, self._packed = self._member.unpack(self._packed)
        except Interrupted:
            raise
        except Exception as error:  # each of the four modules has an error class of its own
            raise OSError(f"the {self._compression} data is damaged ({error})") from error
        self._ready = memoryview(ready)
        if self._member.eof:
            self._member = None
        return True


class _Gzip:
    def __init__(self) -> None:
        import zlib

        self._unpacker = zlib.decompressobj(wbits=31)
        self.eof = False
        self.needs_input = True

    def unpack(self, packed: bytes) -> tuple[bytes, bytes]:
        ready = self._unpacker.decompress(packed, _UNPACKED_BYTES)
        self.eof = self._unpacker.eof
        return ready, self._unpacker.unused_data if self.eof else self._unpacker.unconsumed_tail


class _Buffering:
    """bz2 and xz: the unpacker keeps what it was given until it has handed out all of it."""

    def __init__(self, unpacker: Any) -> None:
        self._unpacker = unpacker
        self.eof = False
        self.needs_input = True

    def unpack(self, packed: bytes) -> tuple[bytes, bytes]:
        ready = self._unpacker.decompress(packed, _UNPACKED_BYTES)
        self.eof = self._unpacker.eof
        self.needs_input = self._unpacker.needs_input
        return ready, self._unpacker.unused_data if self.eof else b""


class _Zstd:
    def __init__(self) -> None:
        import zstandard

        self._unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        self.eof = False
        self.needs_input = True

    def unpack(self, packed: bytes) -> tuple[bytes, bytes]:
        ready = self._unpacker.decompress(packed[:_PACKED_BYTES_OF_ZSTD])
        self.eof = self._unpacker.eof
        return ready, (self._unpacker.unused_data if self.eof else b"") + packed[_PACKED_BYTES_OF_ZSTD:]


def _member_class(compression: str) -> Callable[[], _Member]:
    """Return a function that makes what unpacks one member."""
    if compression == "gzip":
        return _Gzip
    if compression == "bz2":
        import bz2

        return lambda: _Buffering(bz2.BZ2Decompressor())
    if compression == "xz":
        import lzma

        return lambda: _Buffering(lzma.LZMADecompressor(lzma.FORMAT_XZ))
    try:
        import zstandard  # noqa: F401
    except ImportError as error:
        raise UserError("Reading .zst files needs the package zstandard: pip install zstandard") from error
    return _Zstd
