"""Stream the rows of an Arrow file, in the file or the stream form of Arrow's IPC format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lm_tuning.data.check.problems import RowProblem
from lm_tuning.data.readers.columnar import batch_rows, column_readers
from lm_tuning.data.readers.open import DEFAULT_SETTINGS, ReadSettings, Row, RowSource, beyond_row, check_columns
from lm_tuning.data.sources.opening import RawFile
from lm_tuning.errors import UserError

_FILE_MAGIC = b"ARROW1"


class ArrowRows(RowSource):
    """The rows of an Arrow or Feather file; values keep the types that the file declares, see ``column_readers``."""

    def __init__(self, raw: RawFile, file_format: str, settings: ReadSettings = DEFAULT_SETTINGS) -> None:
        """Read the schema.

        Args:
            raw: the file.
            file_format: ``arrow``.
            settings: the limit of a row.

        Raises:
            UserError: the file is no Arrow, has no rows, or names a column twice.
        """
        super().__init__(raw, file_format, settings)
        with self._open() as (schema, batches):
            self.columns = list(schema.names)
            check_columns(self.path, self.columns)
            if not any(batch.num_rows for batch in batches):
                raise UserError(f"{self.path} has no rows.")

    def _rows(self) -> Iterator[tuple[int, Row | RowProblem]]:
        names = self.selected
        number = 0
        with self._open() as (schema, batches):
            readers = column_readers(schema, names)
            for batch in batches:
                for row in batch_rows(batch, readers, max_row_bytes=self.settings.max_row_bytes):
                    number += 1
                    yield number, row

    @contextmanager
    def _open(self) -> Iterator[tuple[Any, Iterator[Any]]]:
        """Yield the schema and the batches of rows."""
        import pyarrow as pa

        with self.raw.open_stored() as file:
            try:
                is_file = file.peek(8)[:6] == _FILE_MAGIC  # type: ignore[attr-defined]
                reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
            except (OSError, pa.ArrowException) as error:
                raise UserError(f"{self.path} is no readable Arrow file: {error}") from error
            yield reader.schema, self._batches(reader, is_file=is_file)

    def _batches(self, reader: Any, *, is_file: bool) -> Iterator[Any]:
        import pyarrow as pa

        number = 0
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else iter(reader)
        try:
            for batch in batches:
                yield batch
                number += batch.num_rows
        except (OSError, pa.ArrowException) as error:
            raise beyond_row(self.path, number, error) from error
