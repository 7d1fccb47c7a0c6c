"""Stream the rows of a JSON Lines file."""

from __future__ import annotations

from collections.abc import Iterator

from lm_tuning.data.json_values import explain_error, parse_line
from lm_tuning.data.problems import RowProblem, shorten
from lm_tuning.data.raw_opening import RawFile
from lm_tuning.data.reading import Row, RowSource, beyond_row, not_an_object, peek_columns, skip_mark


class JsonLinesRows(RowSource):
    r"""One JSON object a line. Only ``\n`` ends a line, so the other separators of Unicode may stand in strings."""

    def __init__(self, raw: RawFile, file_format: str) -> None:
        """Look at the first rows for the column names.

        Args:
            raw: a file in UTF-8, with or without a byte-order mark.
            file_format: ``jsonl`` or ``json``.

        Raises:
            UserError: no object is among the first 1,000 rows.
        """
        super().__init__(raw, file_format)
        self.columns = peek_columns(self)

    def _rows(self) -> Iterator[tuple[int, Row | RowProblem]]:
        number = 0
        with self.raw.open() as file:
            offset = skip_mark(file)
            try:
                for number, line in enumerate(file, 1):
                    offset += len(line)
                    try:
                        row = parse_line(line)
                    except RowProblem as problem:
                        yield number, problem
                        continue
                    except UnicodeDecodeError as error:
                        place = offset - len(line) + error.start
                        yield (
                            number,
                            RowProblem("not_utf8", f"byte {place:,} of the file is not UTF-8. Save the file as UTF-8."),
                        )
                        continue
                    except (ValueError, RecursionError) as error:
                        if line.strip():
                            yield number, _explain_bad_line(line, error)
                        continue
                    yield number, row if row.__class__ is dict else not_an_object(row)
            except OSError as error:
                raise beyond_row(self.path, number, error) from error


def _explain_bad_line(line: bytes, error: Exception) -> RowProblem:
    hint = " An array of rows belongs in a .json file." if line.strip() == b"[" else ""
    text = shorten(line.decode().strip())
    return RowProblem("not_json", f"is not JSON ({explain_error(error)}): {text!r}.{hint}")
