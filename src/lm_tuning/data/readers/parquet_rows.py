"""Stream the rows of a Parquet file, reading only the columns that are used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lm_tuning.data.check.problems import RowProblem, too_long
from lm_tuning.data.readers.columnar import BATCH_BYTES, BATCH_ROWS, batch_rows, column_readers
from lm_tuning.data.readers.open import DEFAULT_SETTINGS, ReadSettings, Row, RowSource, beyond_row, check_columns
from lm_tuning.data.sources.opening import RawFile
from lm_tuning.errors import UserError


class ParquetRows(RowSource):
    """The rows of a Parquet file; values keep the types that the file declares, see ``column_readers``."""

    def __init__(self, raw: RawFile, file_format: str, settings: ReadSettings = DEFAULT_SETTINGS) -> None:
        """Read the schema.

        Args:
            raw: the file.
            file_format: ``parquet``.
            settings: the limit of a row.

        Raises:
            UserError: the file is no Parquet, has no rows, or names a column twice.
        """
        super().__init__(raw, file_format, settings)
        with self._open() as file:
            self.columns = list(file.schema_arrow.names)
            self._num_rows = int(file.metadata.num_rows)
        if not self._num_rows:
            raise UserError(f"{self.path} has no rows.")
        check_columns(self.path, self.columns)
        self._rows_done = 0

    def _rows(self) -> Iterator[tuple[int, Row | RowProblem]]:
        import pyarrow as pa

        names = self.selected
        limit = self.settings.max_row_bytes
        number = self._rows_done = 0
        with self._open() as file:
            readers = column_readers(file.schema_arrow, names)
            try:
                for group in range(file.metadata.num_row_groups):
                    num_rows, num_bytes = _size_of_group(file.metadata.row_group(group), names)
                    if num_rows == 1 and num_bytes > limit:  # known without reading it
                        number += 1
                        yield number, too_long(num_bytes, limit)
                        continue
                    # Arrow holds a batch as a whole, so long rows are read few at a time.
                    num_wanted = max(1, min(BATCH_ROWS, BATCH_BYTES * num_rows // max(num_bytes, 1)))
                    for batch in file.iter_batches(num_wanted, row_groups=[group], columns=names):
                        for row in batch_rows(batch, readers, max_row_bytes=limit):
                            number += 1
                            yield number, row
                        self._rows_done = number
            except (OSError, pa.ArrowException) as error:
                raise beyond_row(self.path, number, error) from error

    def _progress(self) -> tuple[int, int, str]:
        return self._rows_done, self._num_rows, "rows"

    @contextmanager
    def _open(self) -> Iterator[Any]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with self.raw.open_stored() as stored:
            try:
                file = pq.ParquetFile(stored)
            except (OSError, pa.ArrowException) as error:
                raise UserError(f"{self.path} is no readable Parquet file: {error}") from error
            yield file


def _size_of_group(group: Any, names: list[str]) -> tuple[int, int]:
    """Return the rows of a row group, and the bytes that the columns which are read take unpacked and encoded."""
    # The path of a value inside a column begins with the column's name, which may hold dots itself.
    roots = tuple(f"{name}." for name in names)
    columns = (group.column(index) for index in range(group.num_columns))
    num_bytes = sum(
        column.total_uncompressed_size for column in columns if f"{column.path_in_schema}.".startswith(roots)
    )
    return int(group.num_rows), int(num_bytes)
