"""Open a file of rows wherever it lies, unpack it in chunks of bounded size, and know how much of it has been read."""

from __future__ import annotations

import codecs
import io
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lm_tuning.data.records import SourceFile
from lm_tuning.data.sources.remote import open_remote
from lm_tuning.errors import Interrupted, UserError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# Bytes given to an unpacker, and bytes that it may hand out at once: a few packed ones can hold gigabytes of the same
# character, so the output is what has to be bounded.
_PACKED_BYTES = 1 << 15
_UNPACKED_BYTES = 1 << 20
# Its package has no limit for the output; a block of 128 kB of one repeated byte is four bytes long.
_PACKED_BYTES_OF_ZSTD = 512


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
        # Here, so that a missing package is told before anything is read.
        _new_unpacker(compression)
        self._member: _Member | None = None
        self._packed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """Return True: it can be read."""
        return True

    def close(self) -> None:
        """Close the stream below as well."""
        self._stored.close()
        super().close()

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill a buffer as far as unpacked bytes are at hand; 0 at the end.

        Raises:
            OSError: the compressed data is damaged or breaks off.
        """
        # An unpacker may take input without giving anything yet; returning 0 would mean the end.
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
                # Between two members a file may end; inside one it broke off.
                if self._member is None:
                    return False
                raise OSError(f"the {self._compression} data breaks off before its end")
        if self._member is None:
            self._packed = self._packed.lstrip(b"\0")  # padding between members and behind the last
            if not self._packed:
                return True
            self._member = _Member(self._compression)
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


class _Member:
    """One of the compressed streams that a file may hold one after the other.

    Attributes:
        eof: its end was reached.
        needs_input: nothing more comes out before something goes in.
    """

    def __init__(self, compression: str) -> None:
        self._unpacker = _new_unpacker(compression)
        is_bounded = compression != "zstd"
        self._limit = (_UNPACKED_BYTES,) if is_bounded else ()
        self._max_packed = _PACKED_BYTES if is_bounded else _PACKED_BYTES_OF_ZSTD
        self.eof = False
        self.needs_input = True

    def unpack(self, packed: bytes) -> tuple[bytes, bytes]:
        """Return what came out, about 1 MB at most, and what of the input is still to be handed in."""
        taken, later = packed[: self._max_packed], packed[self._max_packed :]
        ready = self._unpacker.decompress(taken, *self._limit)
        self.eof = self._unpacker.eof
        # bz2 and xz keep what they were given until all of it is out; zlib hands back what it has not taken.
        self.needs_input = getattr(self._unpacker, "needs_input", True)
        rest = self._unpacker.unused_data if self.eof else getattr(self._unpacker, "unconsumed_tail", b"")
        return ready, rest + later


def _new_unpacker(compression: str) -> Any:
    """Return what unpacks one member; all of them have ``decompress``, ``eof`` and ``unused_data``."""
    # Not the files of gzip, bz2 and lzma: the last two pass over in silence what follows a stream and is none, so that
    # rows would be lost, and Python before 3.14 has no zstd.
    if compression == "gzip":
        import zlib

        return zlib.decompressobj(wbits=31)  # 16 + 15: the header of gzip and no other, and the largest window
    if compression == "bz2":
        import bz2

        return bz2.BZ2Decompressor()
    if compression == "xz":
        import lzma

        return lzma.LZMADecompressor(lzma.FORMAT_XZ)
    try:
        import zstandard
    except ImportError as error:
        raise UserError("Reading .zst files needs the package zstandard: pip install zstandard") from error
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


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

    def __init__(self, file: SourceFile) -> None:
        """Remember what was found out about the file.

        Args:
            file: see ``describe_files``.
        """
        self.path = file["path"]
        self.name = self.path.rstrip("/").rsplit("/", 1)[-1]
        self.compression = file.get("compression")
        self.num_bytes = file.get("num_bytes")
        self._stored: IO[bytes] | None = None

    def open(self) -> IO[bytes]:
        """Open for reading from the start, unpacked.

        Returns:
            A buffered stream of bytes, not always seekable; close it. Reading raises ``OSError`` for a position that
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
            # Larger than Python's own buffer of 8 kB, for drivers where each read costs.
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
        done = 0
        if self._stored is not None:
            # A closed file was read to its end, or nobody looks at its progress any more.
            done = total if self._stored.closed else self._stored.tell()
        # The file may have grown since it was described.
        total = max(total, done)
        return done // 1000, total // 1000 + 1, "kB"


def detect_compression(start: bytes) -> str | None:
    """Describe how a file is packed from its first bytes; no text begins like any of these.

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


_CHUNK_BYTES = 1 << 20


def skip_mark(file: IO[bytes]) -> int:
    """Move a file behind its UTF-8 byte-order mark.

    Args:
        file: a buffered stream at its start.

    Returns:
        Number of bytes skipped: 3 or 0.
    """
    has_mark = peek_bytes(file, 3) == codecs.BOM_UTF8
    return len(file.read(3)) if has_mark else 0


def peek_bytes(file: IO[bytes], num_bytes: int) -> bytes:
    """Look at the next bytes of a buffered stream without moving on.

    Args:
        file: a buffered stream.
        num_bytes: how many at most.
    """
    return bytes(file.peek(num_bytes)[:num_bytes])  # type: ignore[attr-defined]


def locate_undecodable(raw: RawFile) -> UserError:
    """Find the first byte that is not UTF-8 and say where it is.

    Args:
        raw: a file that failed to decode.
    """
    offset, line = 0, 1
    rest = b""
    with raw.open() as file:
        while True:
            # In chunks, since decoding broke off in a file of any size; a character that a chunk cuts in two waits for
            # the next one.
            chunk = file.read(_CHUNK_BYTES)
            data = rest + chunk
            try:
                num_decoded = codecs.utf_8_decode(data, "strict", not chunk)[1]
            except UnicodeDecodeError as error:
                line += data.count(b"\n", 0, error.start)
                return UserError(
                    f"{raw.path}, line {line}: byte {offset + error.start:,} of the file (0x{data[error.start]:02x}) "
                    "is not UTF-8. Save the file as UTF-8; spreadsheets often write a regional encoding such as cp949."
                )
            if not chunk:
                return UserError(f"{raw.path} is not UTF-8. Save the file as UTF-8.")
            line += data.count(b"\n", 0, num_decoded)
            offset += num_decoded
            rest = data[num_decoded:]
