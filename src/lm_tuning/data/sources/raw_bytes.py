"""Look at the bytes of a text file: its byte-order mark, and what in it is not UTF-8."""

from __future__ import annotations

import codecs
from typing import IO

from lm_tuning.data.sources.opening import RawFile
from lm_tuning.errors import UserError

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
