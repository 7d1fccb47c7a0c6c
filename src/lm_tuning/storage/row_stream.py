"""Write one JSON object a line while results come, so that work which was stopped goes on where it ended.

A stream is known by a key, which holds everything that its rows depend on: the lines of another key are never mixed in.
"""

from __future__ import annotations

import json
import logging
import time
from array import array
from collections.abc import Container, Iterable, Iterator
from io import RawIOBase
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np

from lm_tuning.json_types import JsonObject
from lm_tuning.storage.atomic import replacing_file, sync_file
from lm_tuning.storage.write_failures import explain_full_disk

logger = logging.getLogger(__name__)

# A machine that loses power loses this much work; a process that is killed loses nothing that was appended.
SYNC_SECONDS: Final = 5.0
_KEY_DIGITS: Final = 16


class RowStream:
    """An append-only file of JSON lines, each with a row number of its own, that a later run can go on with.

    Rows may come in any order, each once. :meth:`finish` puts them in the order of their numbers. What has been written
    before that lies in a working file whose name holds the key, so nobody takes it for a whole result.

    Attributes:
        done: numbers of the rows that are written, those of an earlier run included.
        num_resumed: how many an earlier run had written.
    """

    def __init__(self, folder: Path, name: str, *, key: str, row_field: str = "row") -> None:
        """Open a stream, and find what an earlier run of the same key has written.

        A last line that was cut short is removed, with whatever follows a line that cannot be read.

        Args:
            folder: where the working file lies; made if it is absent.
            name: of the working file, without a suffix.
            key: digest of all that decides the rows: model, input file, settings.
            row_field: field of each object that holds its number, an integer from 0 or 1 that grows with the input.

        Raises:
            MachineFault: the disk is full or takes no files.
        """
        self._folder, self._name, self._row_field = Path(folder), name, row_field
        self.path = self._folder / f"{name}.{key[:_KEY_DIGITS]}.partial.jsonl"
        # In the order of the file: row number of each line, and the byte at which it begins. Eight bytes each.
        self._numbers, self._starts = array("q"), array("q")
        with explain_full_disk(self.path):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._size = self._read_lines()
            # Without a buffer: a process that is killed loses nothing, and a full disk is said where it is met.
            self._file: RawIOBase = self.path.open("r+b" if self.path.is_file() else "w+b", buffering=0)
            self._file.truncate(self._size)
            self._file.seek(self._size)
        self._done = set(self._numbers)
        self.num_resumed = len(self._done)
        self._synced = time.monotonic()

    @property
    def done(self) -> Container[int]:
        """Numbers of the rows that are written."""
        return self._done

    @property
    def others(self) -> list[Path]:
        """Working files of other keys: work that was stopped, and that this stream cannot go on with."""
        files = sorted(self._folder.glob(f"{self._name}.{'?' * _KEY_DIGITS}.partial.jsonl"))
        return [path for path in files if path != self.path]

    def __len__(self) -> int:
        """Return how many rows are written."""
        return len(self._done)

    def __enter__(self) -> Self:
        """Return the stream itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file, with every whole line in it on disk."""
        self.close()

    def append(self, rows: Iterable[JsonObject]) -> None:
        """Write rows at the end, whole lines at a time.

        Args:
            rows: what ``json.dumps`` takes; numbers that are no finite ones are refused.

        Raises:
            MachineFault: the disk is full. What was appended before stays, and another run goes on from it.
            ValueError: a number is NaN or infinite, for which JSON has no word.
        """
        lines = {}
        for row in rows:
            number = row[self._row_field]
            assert isinstance(number, int), "rows are known by a number"
            assert number not in self._done and number not in lines, f"row {number} comes once"
            lines[number] = _write_line(row)
        with explain_full_disk(self.path, go_on=self._say_how_to_go_on):
            self._write(b"".join(lines.values()))
            for number, line in lines.items():
                self._numbers.append(number)
                self._starts.append(self._size)
                self._size += len(line)
            self._done.update(lines)
            if time.monotonic() - self._synced > SYNC_SECONDS:
                self._sync()

    def rows(self) -> Iterator[JsonObject]:
        """Yield all rows that are written, by their numbers, one at a time."""
        for line in self._lines():
            yield json.loads(line)

    def finish(self) -> Path:
        """Close the stream and return its file, with the rows in the order of their numbers.

        Working files of other keys are removed: there is a whole result now.

        Returns:
            The finished file, to be moved to where it belongs. Until then another run finds all rows done.

        Raises:
            MachineFault: the disk is full.
        """
        with explain_full_disk(self.path, go_on=self._say_how_to_go_on):
            if (np.diff(self._numbers) < 0).any():
                with replacing_file(self.path) as aside, aside.open("wb") as file:
                    file.writelines(self._lines())
            else:
                self._sync()
        self.close()
        for other in self.others:
            logger.info("Removed %s: unfinished work of other settings.", other)
            other.unlink(missing_ok=True)
        return self.path

    def close(self) -> None:
        """Close the file; what was appended stays for a later run."""
        if not self._file.closed:
            with explain_full_disk(self.path, go_on=self._say_how_to_go_on):
                self._sync()
            self._file.close()

    def _lines(self) -> Iterator[bytes]:
        """Yield the lines by row number, each read when it is wanted."""
        ends = np.append(self._starts[1:], self._size)  # (rows,)
        with self.path.open("rb") as file:
            for index in np.argsort(self._numbers, kind="stable"):
                file.seek(self._starts[index])
                yield file.read(int(ends[index]) - self._starts[index])

    def _read_lines(self) -> int:
        """Find the whole lines of an earlier run, and return the bytes that they take together."""
        size = 0
        if not self.path.is_file():
            return size
        seen: set[int] = set()
        with self.path.open("rb") as file:
            for line in file:
                number = self._number_of(line)
                if number is None or number in seen:
                    logger.warning("%s: the lines from byte %d on are incomplete and are made again.", self.path, size)
                    break
                seen.add(number)
                self._numbers.append(number)
                self._starts.append(size)
                size += len(line)
        return size

    def _number_of(self, line: bytes) -> int | None:
        """Return the row number of a line, ``None`` for one that is not whole."""
        if not line.endswith(b"\n"):
            return None
        try:
            row = json.loads(line)
        except ValueError:
            return None
        number = row.get(self._row_field) if isinstance(row, dict) else None
        return number if isinstance(number, int) else None

    def _write(self, content: bytes) -> None:
        """Write all of the bytes at the end of the file, or none of them."""
        rest = memoryview(content)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except BaseException:  # also KeyboardInterrupt: half a line would hide the lines after it
            self._file.truncate(self._size)
            self._file.seek(self._size)
            raise

    def _sync(self) -> None:
        sync_file(self.path)
        self._synced = time.monotonic()

    def _say_how_to_go_on(self) -> str:
        return f"{len(self._done):,} rows are kept in {self.path}; the same command goes on from there."


def _write_line(row: JsonObject) -> bytes:
    """Write a row in readable letters; half a pair of surrogates, which UTF-8 cannot hold, as JSON escapes it."""
    try:
        return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")
    except UnicodeEncodeError:
        return (json.dumps(row, allow_nan=False) + "\n").encode("ascii")
