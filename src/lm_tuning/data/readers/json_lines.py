"""Stream the rows of a JSON Lines file."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from lm_tuning.data.check.findings import NumberedRow, RowProblem, too_long
from lm_tuning.data.readers.base import DEFAULT_SETTINGS, ReadSettings, beyond_row, peek_columns
from lm_tuning.data.readers.json_array import describe_lists, lists_in
from lm_tuning.data.readers.json_values import JsonRows, explain_error, parse_line
from lm_tuning.data.sources.opening import RawFile, skip_mark
from lm_tuning.wording import shorten

_CHUNK_BYTES = 1 << 20


class JsonLinesRows(JsonRows):
    r"""One JSON object (or list) a line. Only ``\n`` ends one, so other separators of Unicode may stand in strings."""

    def __init__(self, raw: RawFile, file_format: str, settings: ReadSettings = DEFAULT_SETTINGS) -> None:
        """Look at the first rows for the column names.

        Args:
            raw: a file in UTF-8, with or without a byte-order mark.
            file_format: ``jsonl`` or ``json``.
            settings: the limit of a row.

        Raises:
            UserError: no row is among the lines.
        """
        super().__init__(raw, file_format, settings)
        self.columns = peek_columns(self)

    def describe_inside(self) -> str:
        """Report that a file of one object may hold its rows in a list, see ``RowSource``."""
        first = list(islice(self._rows(), 2))
        row = first[0][1]
        names = lists_in(row) if self.format == "json" and len(first) == 1 and isinstance(row, dict) else []
        return describe_lists(names) or super().describe_inside()

    def _rows(self) -> Iterator[NumberedRow]:
        number = offset = 0
        limit = self.settings.max_row_bytes
        with self.raw.open() as file:
            try:
                # Bytes from the beginning of the file, for the message about what is no UTF-8; of packed files,
                # unpacked ones.
                offset = skip_mark(file)
                while line := file.readline(limit + 2):  # 2: a line break counts for nothing
                    number += 1
                    offset += len(line)
                    if len(line) > limit and len(line.rstrip(b"\r\n")) > limit:
                        num_bytes = len(line)
                        # The rest of the line goes by in chunks that are only counted: memory stays at the limit of a
                        # row.
                        while line[-1:] != b"\n" and (line := file.readline(_CHUNK_BYTES)):
                            num_bytes += len(line)
                            offset += len(line)
                        num_bytes -= len(line) - len(line.rstrip(b"\r\n"))
                        yield number, too_long(num_bytes, limit)
                        continue
                    try:
                        row = parse_line(line)
                    except RowProblem as problem:
                        yield number, problem
                        continue
                    except UnicodeDecodeError as error:
                        index = offset - len(line) + error.start
                        reason = f"byte {index:,} of the file is not UTF-8. Save the file as UTF-8."
                        yield number, RowProblem("not_utf8", reason)
                        continue
                    except (ValueError, RecursionError) as error:
                        # A blank line is no row and no mistake, though it has a number: numbers are those that an
                        # editor shows.
                        if line.strip():
                            yield number, _explain_bad_line(line, error)
                        continue
                    yield number, self._as_row(row)
            except OSError as error:
                raise beyond_row(self.path, number, error) from error


def _explain_bad_line(line: bytes, error: Exception) -> RowProblem:
    hint = " An array of rows belongs in a .json file." if line.strip() == b"[" else ""
    text = shorten(line.decode().strip())
    return RowProblem("not_json", f"is not JSON ({explain_error(error)}): {text!r}.{hint}")
